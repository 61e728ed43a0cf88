"""A model whose gradients a test chooses, and the hooks that the contract tests go through."""

import contextlib
import warnings

import torch
from pool import ignoring
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lightning_commhooks as lc

# Options with which a hook shows what it does within a few steps. A hook that is not here has its defaults.
OPTIONS = {
    "powersgd": {"start_powerSGD_iter": 0, "matrix_approximation_rank": 2},
    "batched_powersgd": {"start_powerSGD_iter": 0, "matrix_approximation_rank": 2},
    "int8": {"min_bytes": 0, "block_size": 128},
    "int4": {"min_bytes": 0, "compress_1d": True},
    # Averages gradients; test_local_sgd*.py are about what comes later.
    "post_localsgd": {"start_localSGD_iter": 1000, "post_local_gradient_allreduce": False},
}
INT8 = OPTIONS["int8"]
POWERSGD = lc.PowerSGD(**OPTIONS["powersgd"])
# These do with gradients what post_localsgd does, or int8 with another codec, by the same code; or what others do.
ALIKE = {"hierarchical_localsgd", "diloco", "fp8", "auto"}
HOOKS = {name: lc.get_hook(name, **OPTIONS.get(name, {})) for name in lc.available_hooks() if name not in ALIKE} | {
    "fp16+float32": lc.FP16(accumulate_dtype="float32"),
    "bf16+float32": lc.BF16(accumulate_dtype="float32"),
    "powersgd+batch": lc.PowerSGD(**OPTIONS["powersgd"], batch_tensors_with_same_shape=True),
    "cast": lc.Cast(POWERSGD, "bf16"),
    "schedule": lc.Schedule({0: "bf16", 2: POWERSGD, 4: "allreduce"}),
    "per_parameter": lc.PerParameter({"*ir*": "bf16", "second": POWERSGD, "*": lc.Int8(**INT8)}),
}

# What these round depends on each rank's own residual, so that the mean of them continues a run in another way.
ROUNDING = {"cast", "int8", "int4", "per_parameter"}
# Their result depends on where DDP's buckets begin and end.
BY_BUCKET = {"batched_powersgd", "quantize_per_tensor", "quantize_per_channel"}

SHAPES = {
    "first": (24, 40),
    "bias": (40,),
    "scalar": (),
    "second": (40, 24),
    "conv": (16, 8, 3, 3),
    "one": (1,),
    "third": (24, 40),
    "small": (3, 2),
    "row": (1, 50),
}
SMALL_BUCKETS = 4e-3  # MB

NOT_AVERAGING = "hook='noop' does not average"
NOTHING_COMPRESSED = "hook='.*' compressed nothing"
TOO_EARLY = "training ended after .* before"
WEIGHTS_ALIAS = "Grad strides do not match bucket view strides"


class Params(nn.Module):
    """Parameters of given shapes whose gradients are the arguments of `forward`, exactly."""

    def __init__(self, shapes, dtype=torch.float32):
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=dtype)))

    def forward(self, gradients):
        return sum((self.get_parameter(name) * g).sum().double() for name, g in gradients.items())


def low_rank_gradients(rank, step, shapes, dtype=torch.float32, rows=2):
    """Gradients of one rank and step: matrices span the same `rows` dimensions, always and on all ranks."""
    shared = torch.Generator().manual_seed(0)
    own = torch.Generator().manual_seed(1000 + 100 * step + rank)
    gradients = {}
    for name, shape in shapes.items():
        if len(shape) < 2:
            gradients[name] = torch.randn(shape, generator=own, dtype=torch.float64).to(dtype)
            continue
        left = torch.randn(shape[0], rows, generator=shared, dtype=torch.float64)
        right = torch.randn(rows, torch.Size(shape[1:]).numel(), generator=shared, dtype=torch.float64)
        weights = torch.randn(rows, 1, generator=own, dtype=torch.float64)
        gradients[name] = (left @ (weights * right)).view(shape).to(dtype)
    return gradients


def full_rank_gradients(rank, step, shapes, dtype=torch.float32):
    """Gradients of one rank and step: independent numbers around a mean that all ranks share."""
    own = torch.Generator().manual_seed(100 * step + rank)
    shared = torch.Generator().manual_seed(-1 - step)
    return {
        name: (torch.randn(shape, generator=own) + torch.randn(shape, generator=shared)).to(dtype)
        for name, shape in shapes.items()
    }


def mean_gradients(make, world, step, shapes, dtype=torch.float32):
    """The mean over ranks in float64."""
    ranks = [make(rank, step, shapes, dtype) for rank in range(world)]
    return {name: sum(g[name].double() for g in ranks) / world for name in shapes}


def backward(ddp, gradients):
    """One backward; what DDP leaves in `.grad`, by name."""
    ddp.zero_grad(set_to_none=True)
    ddp(gradients).backward()
    return {name: p.grad.clone() for name, p in ddp.module.named_parameters() if p.grad is not None}


@contextlib.contextmanager
def attached(hook, shapes=SHAPES, dtype=torch.float32, exact_state=False, grad_scaler=None, **ddp_options):
    """`(ddp, attachment)` of a `Params` model, closed at the end."""
    ddp = DistributedDataParallel(Params(shapes, dtype), **{"bucket_cap_mb": SMALL_BUCKETS, **ddp_options})
    attachment = lc.attach(ddp, hook, exact_state=exact_state, grad_scaler=grad_scaler)
    with ignoring(NOT_AVERAGING, NOTHING_COMPRESSED, TOO_EARLY):
        yield ddp, attachment
        attachment.close()


def outputs(rank, world, hook, make, steps, shapes=SHAPES, dtype=torch.float32, options=None):
    """Averaged gradients of every step, final state and metrics."""
    with attached(hook, shapes, dtype, **(options or {})) as (ddp, attachment):
        means = [backward(ddp, make(rank, step, shapes, dtype)) for step in range(steps)]
        metrics = attachment.metrics()  # first: what a state_dict() sends is counted too
        return means, attachment.state_dict(), metrics


def owes(hook):
    """Whether a hook has error feedback: its own field or that of a hook inside says so."""
    return getattr(hook, "use_error_feedback", False) or any(owes(inner) for inner in hook.inner_hooks)


def mean_residuals(state, shapes):
    """Mean residual by name, wherever it is in a state; zero where there is none."""
    if state["per_rank"] == "exact":
        ranks = [{**_of_rank(state, rank), "per_rank": "mean"} for rank in range(state["world_size"])]
        parts = [mean_residuals(rank, shapes) for rank in ranks]
        return {name: sum(part[name] for part in parts) / len(parts) for name in shapes}
    total = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}

    def visit(part):
        for key, value in part.items():
            if key == "entries":
                for name, entry in value.items():
                    if "residual" in entry:
                        total[name] += entry["residual"].view(shapes[name])
                    if "carried" in entry:  # of all ranks together
                        total[name] += entry["carried"].view(shapes[name])
            elif isinstance(value, dict):
                visit(value)

    visit(state["hook"])
    return total


def _of_rank(part, rank):
    """One rank's part of an exact state, settled."""
    if not isinstance(part, dict):
        return part
    own = {key: _of_rank(value, rank) for key, value in part.items()}
    if "residual" in part:
        own["residual"] = part["residual"][rank]
        if "sent_p" in part:
            flat = own["residual"].reshape(own["residual"].shape[0], -1)
            own["residual"] = flat - part["sent_p"].t() @ part["sent_q"]
    return own


def residuals_of(attachment):
    """Mean residuals of a low-rank hook by name."""
    entries = attachment.state_dict()["hook"]["state"]["entries"]
    return {name: entry["residual"] for name, entry in entries.items() if "residual" in entry}


def closing_texts(attachment):
    """Close, and return the warnings given: rank 0's, the others have none."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        attachment.close()
    return [str(warning.message) for warning in caught]


def norm(gradients):
    """Frobenius norm over all parameters, in float64."""
    return torch.cat([g.double().reshape(-1) for g in gradients.values()]).norm().item()


def distance(a, b):
    """Norm of the difference."""
    assert a.keys() == b.keys()
    return norm({name: a[name].double() - b[name].double() for name in a})


def same(a, b):
    """Whether two sets of gradients are equal bit by bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
