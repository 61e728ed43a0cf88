"""Post-local SGD, hierarchical local SGD and DiLoCo against a simulation in one process, and against PyTorch's."""

import contextlib

import pytest
import torch
from local_sgd_driver import ALONE, OUTER, SENDS_MORE, TOO_EARLY
from local_sgd_reference import Simulation
from pool import ignoring
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lightning_commhooks as lc


class TwoNets(nn.Module):
    """Two networks, one optimizer each; `forward(x, part)` uses one of them or both."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.second = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))

    def forward(self, x, part):
        nets = {"first": [self.first], "second": [self.second], "both": [self.first, self.second]}[part]
        return sum(net(x) for net in nets)


def make_model():
    torch.manual_seed(7)
    return TwoNets().double()


def make_optimizers(model, kind="sgd"):
    make = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
        "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.02),
    }[kind]
    return [make(model.first.parameters()), make(model.second.parameters())]


def batch(rank, step, part):
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + len(part))
    return torch.randn(4, 6, generator=generator, dtype=torch.float64)


def loss(model, x, part):
    return (model(x, part) - x[:, :3].sin() * 2).square().mean()


def schedule(steps, accumulation):
    """`(part, optimizer, micro-batch numbers)` of each step; the second network steps in two of three only."""
    for step in range(steps):
        numbers = [100 * step + i for i in range(accumulation)]
        yield "first", 0, numbers
        if step % 3:
            yield "second", 1, numbers


def parameters(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def train(rank, world, hook, steps, accumulation=1, kind="sgd", report=False):
    """Parameters after each optimizer step, of this rank."""
    model = make_model()
    ddp = DistributedDataParallel(model, find_unused_parameters=True, bucket_cap_mb=0.0005)
    optimizers = make_optimizers(model, kind)
    with ignoring(SENDS_MORE):
        attachment = lc.attach(ddp, hook, optimizers=[] if report else optimizers)
    storage = [p.data_ptr() for p in model.parameters()]
    trajectory = []
    for part, k, numbers in schedule(steps, accumulation):
        ddp.zero_grad()
        for number in numbers:
            with ddp.no_sync() if number != numbers[-1] else contextlib.nullcontext():
                (loss(ddp, batch(rank, number, part), part) / accumulation).backward()
        optimizers[k].step()
        if report:
            attachment.after_optimizer_step(optimizers[k])
        trajectory.append(parameters(model))
    assert storage == [p.data_ptr() for p in model.parameters()]
    metrics = attachment.metrics()
    attachment.average_weights()
    trajectory.append(parameters(model))
    with ignoring(TOO_EARLY):
        attachment.close()
    return trajectory, metrics


def simulate(world, steps, accumulation=1, kind="sgd", **options):
    """Parameters of all ranks after each optimizer step, and their mean at the end."""
    simulation = Simulation(make_model(), world, lambda m: make_optimizers(m, kind), loss, **options)
    trajectory = []
    for part, k, numbers in schedule(steps, accumulation):
        micro_batches = [[batch(rank, number, part) for number in numbers] for rank in range(world)]
        simulation.backward(micro_batches, part)
        simulation.step(k)
        trajectory.append([parameters(model) for model in simulation.models])
    mean = {n: sum(m[n] for m in trajectory[-1]) / world for n in trajectory[-1][0]}
    return [*trajectory, [mean] * world]


def assert_same_trajectory(results, expected, tolerance=1e-12):
    for rank, (trajectory, _) in enumerate(results):
        for step, (mine, theirs) in enumerate(zip(trajectory, expected, strict=True)):
            for name, value in mine.items():
                torch.testing.assert_close(
                    value, theirs[rank][name], rtol=0, atol=tolerance, msg=f"{name}, step {step}, rank {rank}"
                )


METHODS = {
    "post_localsgd": (lc.PostLocalSGD(period=4, **ALONE), {"periods": {4: 4}}),
    "post_localsgd_warmup": (
        lc.PostLocalSGD(period=3, start_localSGD_iter=5, post_local_gradient_allreduce=False),
        {"periods": {3: 4}, "warmup": 5},
    ),
    "post_localsgd_subgroup": (
        lc.PostLocalSGD(period=3, start_localSGD_iter=2, subgroup_size=2),
        {"periods": {3: 4}, "warmup": 2, "subgroup": 2},
    ),
    "post_localsgd_uneven": (
        lc.PostLocalSGD(period=3, start_localSGD_iter=2, subgroup_size=3),
        {"periods": {3: 4}, "warmup": 2, "subgroup": 3},
    ),
    "hierarchical": (
        lc.HierarchicalLocalSGD(period_group_size_dict={6: 4, 2: 2}, **ALONE),
        {"periods": {2: 2, 6: 4}},
    ),
    "hierarchical_uneven": (
        lc.HierarchicalLocalSGD(period_group_size_dict={2: 3, 6: None}, **ALONE),
        {"periods": {2: 3, 6: 4}},
    ),
    "diloco": (lc.DiLoCo(period=4, post_local_gradient_allreduce=False), {"periods": {4: 4}, "outer": OUTER}),
    "diloco_warmup_subgroup": (
        lc.DiLoCo(period=3, outer_lr=0.5, nesterov=False, start_localSGD_iter=4, subgroup_size=2),
        {"periods": {3: 4}, "outer": {"lr": 0.5, "momentum": 0.9}, "warmup": 4, "subgroup": 2},
    ),
    "diloco_fragments": (
        lc.DiLoCo(period=5, fragments=3, post_local_gradient_allreduce=False),
        {"periods": {5: 4}, "outer": OUTER, "fragments": 3},
    ),
    "diloco_is_averaging": (
        lc.DiLoCo(period=4, outer_lr=1, outer_momentum=0, post_local_gradient_allreduce=False, nesterov=False),
        {"periods": {4: 4}},
    ),
}


@pytest.mark.parametrize(
    ("accumulation", "kind", "method"),
    [(1, "momentum", "post_localsgd_subgroup"), *((3, "adamw", method) for method in METHODS)],
)
def test_trajectory_is_that_of_the_simulation(run, method, accumulation, kind):
    hook, options = METHODS[method]
    expected = simulate(4, 14, accumulation, kind, **options)
    results = run(train, hook, 14, accumulation, kind, world=4)
    assert_same_trajectory(results, expected)
    differ = [any(not torch.equal(state[0][n], state[3][n]) for n in state[0]) for state in expected[:-1]]
    assert any(differ), "ranks never stepped alone"


def dense(rank, world, steps, accumulation):
    return train(rank, world, "allreduce", steps, accumulation)


@pytest.mark.parametrize(("report", "world"), [(False, 4), (True, 2)], ids=["step_hook", "reported"])
def test_period_of_one_is_dense_averaging_with_sgd(run, world, report):
    hook = lc.PostLocalSGD(period=1, **ALONE)
    expected = run(dense, 6, 3, world=world)
    results = run(train, hook, 6, 3, "sgd", report, world=world)
    assert_same_trajectory(results, list(zip(*(trajectory for trajectory, _ in expected), strict=True)), 1e-6)
