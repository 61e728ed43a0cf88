"""Every hook under every mode of DDP and with every kind of model, against plain DDP."""

import contextlib
import inspect

import pytest
import torch
from driver import HOOKS, NOT_AVERAGING, SMALL_BUCKETS, TOO_EARLY
from pool import ignoring
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import lightning_commhooks as lc

STEPS = 4
# Largest difference to plain DDP's update, as a fraction of it. Not stated: rounding only.
DIFFERENCE = {"fp16": 0.02, "post_localsgd": 2e-4, "int8": 0.02, "quantize_per_channel": 0.05}
# Averaging models after every step of plain SGD is averaging gradients.
LOCAL = {"post_localsgd": lc.PostLocalSGD(period=1, start_localSGD_iter=0, post_local_gradient_allreduce=False)}
# Those that send in the same way as another one have the contract tests.
VARIANTS = {"quantize_per_tensor", "bf16", "int4", "int2", *(label for label in HOOKS if "+" in label)}
LABELS = {label: hook for label, hook in HOOKS.items() if label not in VARIANTS} | LOCAL
LOSSY = {"powersgd", "batched_powersgd", "cast", "schedule", "noop", "chunked_topk", "per_parameter"}


def mlp():
    return nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(24, 24), nn.Tanh())])


def frozen():
    model = mlp()
    model[0].requires_grad_(False)
    model[4].weight.requires_grad_(False)
    return model


class Branches(nn.Module):
    """One branch for even ranks, one for odd ranks, one for nobody."""

    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(24, 24) for _ in range(3))
        self.head = nn.Linear(24, 24)

    def forward(self, x, rank, step):
        # In the last step nobody uses the second branch either.
        return self.head(torch.tanh(self.branches[rank % 2 if step < STEPS - 1 else 0](x)))


class OddShapes(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.nothing = nn.Parameter(torch.empty(0))
        self.no_rows = nn.Parameter(torch.empty(0, 3))
        self.one = nn.Parameter(torch.ones(1, 1))
        self.vector = nn.Parameter(torch.ones(24))
        self.matrix = nn.Parameter(torch.eye(24))

    def forward(self, x):
        return (x @ self.matrix) * self.vector * self.scale * self.one + self.nothing.sum() + self.no_rows.sum()


class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 24, sparse=True)
        self.head = nn.Linear(24, 24)

    def forward(self, x):
        return self.head(self.embedding((x[:, :3] * 10).long().abs() % 50).mean(1))


def channels_last():
    layers = [nn.Conv2d(4, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.Conv2d(32, 8, 1)]
    return nn.Sequential(nn.Unflatten(1, (4, 2, 3)), *layers, nn.Flatten(), nn.Linear(48, 24)).to(
        memory_format=torch.channels_last
    )


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(24, 24, dtype=dtype) for dtype in (torch.float64, torch.float32, torch.bfloat16)
        )

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return x.float()


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(24, 24), nn.Linear(24, 24)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


MODES = {
    "plain": (mlp, {}),
    "find_unused": (mlp, {"find_unused_parameters": True}),
    "unused_on_some_or_all_ranks": (Branches, {"find_unused_parameters": True}),
    "static_graph": (mlp, {"static_graph": True}),
    "bucket_view": (mlp, {"gradient_as_bucket_view": True}),
    "join": (mlp, {}),
    "no_sync": (mlp, {}),
    "frozen": (frozen, {}),
    "sparse": (Embedding, {}),
    "odd_shapes": (OddShapes, {}),
    "channels_last": (channels_last, {}),
    "mixed_dtypes": (Mixed, {}),
    "shared": (Shared, {}),
}
# Options of newer versions of PyTorch.
MODES |= {
    name: (mlp, {name: True})
    for name in ("batched_grad_copy", "lazy_bucket_allocation")
    if name in inspect.signature(DistributedDataParallel).parameters
}


# From PyTorch 2.15 on: the user says when gradients are waited for.
if hasattr(DistributedDataParallel, "finalize_backward"):
    MODES["manual_finalization"] = (mlp, {})


# Modes in which ranks differ, on four ranks as well; and modes that hooks that average models refuse, or round in.
OF_FOUR = ["unused_on_some_or_all_ranks", "join", "sparse"]
REFUSED = {"join", "mixed_dtypes"}


def modes(label, world):
    """What a hook is trained in, on so many ranks."""
    return [mode for mode in (MODES if world == 2 else OF_FOUR) if label not in LOCAL or mode not in REFUSED]


# By those that send in different ways.
ON_FOUR = ("allreduce", "int8", "powersgd", "schedule", "per_parameter", "post_localsgd")
RUNS = [
    (label, mode, world)
    for label in LABELS
    for world in ((2, 4) if label in ON_FOUR else (2,))
    for mode in modes(label, world)
]


def flatten(model):
    return torch.cat([p.detach().double().reshape(-1) for p in model.parameters()])


def num_batches(mode, rank):
    return STEPS + (rank if mode == "join" else 0)


def train(rank, world, hook, mode):
    """Update of all parameters after a few steps, and the steps that the hook counted."""
    build, options = MODES[mode]
    model = build()
    ddp = DistributedDataParallel(model, bucket_cap_mb=SMALL_BUCKETS, **options)
    if mode == "manual_finalization":
        ddp.require_manual_backward_finalization = True
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with ignoring("PerParameter: the pattern .* (matches no|comes after)"):
        attachment = lc.attach(ddp, hook, optimizers=[optimizer]) if hook is not None else None
    before = flatten(model)
    with ignoring(NOT_AVERAGING, TOO_EARLY), ddp.join() if mode == "join" else _nothing():
        for step in range(num_batches(mode, rank)):
            x = torch.randn(4, 24, generator=torch.Generator().manual_seed(10 * step + rank))
            extra = (rank, step) if mode.startswith("unused") else ()
            with ddp.no_sync() if mode == "no_sync" and step % 2 == 0 else _nothing():
                F.mse_loss(ddp(x, *extra), torch.roll(x, 1, 1)).backward()
            if mode == "manual_finalization":
                ddp.finalize_backward()
            if mode != "no_sync" or step % 2:
                optimizer.step()
                optimizer.zero_grad()
    steps = attachment.metrics()["steps"] if attachment else None
    with ignoring(TOO_EARLY):
        if attachment:
            attachment.close()
    return flatten(model) - before, steps


def train_each(rank, world, hook, modes):
    """All of `modes` in one call of the workers, which costs more than training."""
    results = {}
    for mode in modes:
        torch.manual_seed(0)
        results[mode] = train(rank, world, hook, mode)
    return results


_nothing = contextlib.nullcontext
_results = {}


def results_of(run, world, label):
    """What `train` returns in each mode, by rank; computed once."""
    if (label, world) not in _results:
        _results[label, world] = run(train_each, LABELS.get(label), modes(label, world), world=world)
    return _results[label, world]


@pytest.mark.parametrize(("label", "mode", "world"), RUNS)
def test_mode(run, label, mode, world):
    plain, _ = results_of(run, world, None)[0][mode]
    results = [rank[mode] for rank in results_of(run, world, label)]
    updates = [update for update, _ in results]
    assert all(update.isfinite().all() for update in updates)
    expected_steps = STEPS // 2 if mode == "no_sync" else num_batches(mode, world - 1)
    assert all(steps == expected_steps for _, steps in results)
    if label == "noop":
        assert mode == "join" or not torch.equal(updates[0], updates[1])
        return
    assert all(torch.equal(updates[0], update) for update in updates[1:])
    if label in LOSSY:
        assert torch.cosine_similarity(updates[0], plain, dim=0) > 0.4
    else:
        # 16-bit weights are rounded once more.
        tolerance = DIFFERENCE.get(label, 1e-5) + (0.01 if mode == "mixed_dtypes" else 0)
        assert (updates[0] - plain).norm() <= tolerance * plain.norm()


def refusals(rank, world):
    """What `attach` says of models that DDP averages in a way of its own."""
    from torch.distributed._composable.replicate import replicate
    from torch.distributed.optim import _apply_optimizer_in_backward

    with_optimizer = mlp()
    _apply_optimizer_in_backward(torch.optim.SGD, with_optimizer.parameters(), {"lr": 0.1})
    texts = []
    delayed = mlp()
    options = {
        "delay_all_reduce_named_params": [("0.weight", delayed[0].weight)],
        "param_to_hook_all_reduce": delayed[2].weight,
    }
    delaying = DistributedDataParallel(delayed, **options)
    mixed = DistributedDataParallel(mlp())
    mixed.mixed_precision = object()  # as DDP(mixed_precision=...), which works on CUDA only
    for model in (replicate(mlp()), DistributedDataParallel(with_optimizer), delaying, mixed):
        with pytest.raises(ValueError, match=r"Use an|attach\(|Leave the option out") as refused:
            lc.attach(model, "bf16")
        texts.append(str(refused.value))
    return texts


def test_models_that_are_averaged_otherwise_are_refused_with_what_to_do(run):
    for composable, in_backward, delaying, mixed in run(refusals):
        assert "mixed_precision=" in mixed
        assert "delay_all_reduce_named_params=" in delaying
        assert "attach(DistributedDataParallel(module), hook)" in composable
        assert "Use an optimizer that steps after the backward" in in_backward


class TwoParts(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.zeros(16, 16)) for _ in range(2))

    def forward(self, x, uses_second):
        total = (self.first * x).sum()
        return total + (self.second * x).sum() if uses_second else total


def gradients_that_stay(rank, world, hook, options):
    """The gradient of a parameter in steps in which no rank uses it, and the error of all that it got in the end."""
    model = TwoParts()
    ddp = DistributedDataParallel(model, find_unused_parameters=True, **options)
    attachment = lc.attach(ddp, lc.Schedule({0: hook, 8: "allreduce"}))
    unused, total, expected = [], torch.zeros(16, 16), torch.zeros(16, 16)
    for step in range(9):
        ddp.zero_grad(set_to_none=False)
        xs = [torch.randn(16, 16, generator=torch.Generator().manual_seed(10 * step + r)) for r in range(world)]
        uses_second = step % 4 < 2
        ddp(xs[rank], uses_second).backward()
        expected += sum(xs) / world * uses_second
        total += 0 if model.second.grad is None else model.second.grad
        if not uses_second:
            unused.append(model.second.grad.abs().max().item())
    attachment.close()
    return unused, (total - expected).norm().item() / expected.norm().item()


@pytest.mark.parametrize("is_view", [False, True])
@pytest.mark.parametrize(
    "hook",
    [
        lc.Int4(min_bytes=0, block_size=8),
        lc.PowerSGD(start_powerSGD_iter=0, min_compression_rate=1),
        lc.ChunkedTopK(k=8, chunk_size=64, decay=1.0),
    ],
    ids=lambda hook: hook.name,
)
def test_a_parameter_that_no_rank_uses_keeps_its_gradient_and_what_is_left_to_send(run, hook, is_view):
    for unused, error in run(gradients_that_stay, hook, {"gradient_as_bucket_view": is_view}):
        assert unused == [0.0] * 4
        assert error < 1e-5
