"""Gradients of accumulated micro-batches, scaled by what there was, on plain DDP in real processes."""

import contextlib
import copy

import pytest
import torch
from driver import SHAPES, Params, full_rank_gradients
from pool import ignoring
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import lightning_commhooks as lc

SMALL = {name: SHAPES[name] for name in ("first", "bias", "scalar", "conv")}
FULL_RANK = lc.PowerSGD(matrix_approximation_rank=64, start_powerSGD_iter=0, min_compression_rate=0.01)
INT8 = lc.Int8(min_bytes=0, block_size=32, use_error_feedback=False)
# With the relative error that they have.
HOOKS = {
    "allreduce": ("allreduce", 1e-6),
    "fp16": ("fp16", 2e-3),
    "cast": (lc.Cast("allreduce", "fp16"), 2e-3),
    "powersgd": (FULL_RANK, 1e-5),
    "int8": (INT8, 2e-2),
    "schedule": (lc.Schedule({0: "allreduce", 1: FULL_RANK}), 1e-5),
    "per_parameter": (lc.PerParameter({"first": FULL_RANK, "*": "allreduce"}), 1e-5),
}


def micro(rank, i):
    """Gradients of one rank's micro-batch."""
    return full_rank_gradients(rank, i, SMALL)


def exact_mean(world, window, divisor):
    """In float64: over ranks, of the sum over a window divided by `divisor(rank)`."""
    total = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SMALL.items()}
    for rank in range(world):
        for i in window:
            for name, gradient in micro(rank, i).items():
                total[name] += gradient.double() / divisor(rank) / world
    return total


@contextlib.contextmanager
def attached(hook, model=None, ddp_options=None, **options):
    ddp = DistributedDataParallel(model or Params(SMALL), **{"bucket_cap_mb": 4e-3, **(ddp_options or {})})
    attachment = lc.attach(ddp, hook, **options)
    with ignoring("training ended after"):
        yield ddp, attachment
        attachment.close()


def backward(ddp, i, rank, sync=True, scale=1.0):
    with contextlib.nullcontext() if sync else ddp.no_sync():
        (ddp(micro(rank, i)) * scale).backward()


def grads(ddp):
    return {name: p.grad.double().clone() for name, p in ddp.module.named_parameters()}


def error(found, expected):
    distance = sum((found[name] - expected[name]).norm() ** 2 for name in expected).sqrt()
    return float(distance / sum(expected[name].norm() ** 2 for name in expected).sqrt())


def train(rank, world, hook, accumulation, divisor=len, clear="none", divided_by=1.0, ddp_options=None):
    """Errors of each window's gradient against the exact mean over ranks of the sum divided by `divisor(window)`."""
    options = {"accumulation": accumulation, "loss_divided_by": lambda: divided_by}
    with attached(hook, ddp_options=ddp_options, **options) as (ddp, _):
        errors = []
        for window in SHORT_LAST:
            for i in window:
                backward(ddp, i, rank, i == window[-1], 1 / divided_by)
            by = divisor(window)
            errors.append(error(grads(ddp), exact_mean(world, window, lambda _, by=by: by)))
            ddp.zero_grad(set_to_none=clear == "none")
        return errors


SHORT_LAST = (range(4), range(4, 8), range(8, 10), range(10, 14))


@pytest.mark.parametrize(("name", "world"), [*((name, 2) for name in HOOKS), ("int8", 4)])
def test_mean_over_the_micro_batches_that_there_were(run, name, world):
    hook, bound = HOOKS[name]
    for errors in run(train, hook, "mean", len, "none", 4.0, world=world):
        assert max(errors) <= bound


def test_what_a_framework_leaves_is_something_else(run):
    assert run(train, "allreduce", "framework", len, "none", 4.0)[0][2] > 0.4


@pytest.mark.parametrize(
    ("clear", "options"),
    [("none", {"find_unused_parameters": True}), ("zeros", {}), ("zeros", {"gradient_as_bucket_view": True})],
)
def test_ways_to_clear_and_to_wrap(run, clear, options):
    for errors in run(train, "allreduce", "mean", len, clear, 1.0, options):
        assert max(errors) <= 1e-6


def one(window):
    return 1.0


def three(window):
    return 3.0


@pytest.mark.parametrize(("accumulation", "divisor", "divided_by"), [("sum", one, 4.0), (3, three, 1.0)])
def test_sum_and_integers(run, accumulation, divisor, divided_by):
    for errors in run(train, "allreduce", accumulation, divisor, "none", divided_by):
        assert max(errors) <= 1e-6


def weights_of(rank, i):
    return 1.0 + (rank * 7 + i * 3) % 11


@pytest.mark.parametrize(("as_tensor", "world"), [(False, 2), (True, 4)])
def test_weighted_is_the_mean_over_all_tokens(run, as_tensor, world):
    for errors, num_collectives in run(_weighted, as_tensor, world=world):
        assert max(errors) <= 1e-6
        assert num_collectives == 1  # a bucket


def _weighted(rank, world, as_tensor):
    with attached("allreduce", accumulation="weighted") as (ddp, attachment):
        errors = []
        for window in SHORT_LAST:
            total = sum(weights_of(r, i) for r in range(world) for i in window)
            for i in window:
                weight = weights_of(rank, i)
                attachment.add_weight(torch.tensor(weight) if as_tensor else weight)
                backward(ddp, i, rank, i == window[-1])
            expected = exact_mean(world, window, lambda _, total=total: total / world)
            errors.append(error(grads(ddp), expected))
            ddp.zero_grad()
        steps = attachment.metrics()["steps"]
        with_weights = attachment.metrics()["collectives"]
    with attached("allreduce") as (ddp, plain):
        for i in range(int(steps)):
            backward(ddp, i, rank)
            ddp.zero_grad()
        without = plain.metrics()["collectives"]
        return errors, (with_weights - without) / without


class Checkpointed(nn.Module):
    """Layers whose activations are computed again; with a static graph, one of them twice."""

    def __init__(self, use_reentrant, static_graph):
        super().__init__()
        self.use_reentrant, self.static_graph = use_reentrant, static_graph
        self.first, self.second, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x):
        for layer in (self.first, self.second, *([self.first] if self.static_graph else [])):
            x = checkpoint(lambda y, layer=layer: layer(y).tanh(), x, use_reentrant=self.use_reentrant)
        return self.last(x).square().sum()


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("static_graph", [False, True])
def test_activation_checkpointing_counts_each_micro_batch_once(run, static_graph, use_reentrant):
    for errors in run(_checkpointed, use_reentrant, static_graph):
        assert max(errors) <= 1e-5


def _checkpointed(rank, world, use_reentrant, static_graph):
    torch.manual_seed(0)
    model = Checkpointed(use_reentrant, static_graph)
    reference = copy.deepcopy(model)
    data = torch.randn(2, 10, 3, 6, generator=torch.Generator().manual_seed(1))
    with attached("allreduce", model, {"static_graph": static_graph}, accumulation="mean") as (ddp, _):
        errors = []
        # DDP has no no_sync() in the first backward of a static graph.
        for window in (range(1), *SHORT_LAST[:3]) if static_graph else SHORT_LAST[:3]:
            for i in window:
                with contextlib.nullcontext() if i == window[-1] else ddp.no_sync():
                    ddp(data[rank, i].clone().requires_grad_()).backward()
            for x in data[:, list(window)].flatten(0, 1):
                (reference(x.clone().requires_grad_()) / len(window) / world).backward()
            expected = {name: p.grad.double() for name, p in reference.named_parameters()}
            errors.append(error(grads(ddp), expected))
            ddp.zero_grad()
            reference.zero_grad()
        return errors
