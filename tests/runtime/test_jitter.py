"""Random delays on every rank: no hang, and bit for bit the same result as without."""

import inspect
import random
import time
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from driver import NOT_AVERAGING, Params
from pool import ignoring
from torch.nn.parallel import DistributedDataParallel

import lightning_commhooks as lc

# 4 ranks on 2 cores take about 10 ms a bucket and step.
WITHOUT = 12
STEPS = {"find_unused": 20, "skip_all_reduce_unused": 50}
NUM_PARAMETERS = {"find_unused": 8, "skip_all_reduce_unused": 4}
MODES = {
    "find_unused": {"find_unused_parameters": True},
    "skip_all_reduce_unused": {"find_unused_parameters": True, "skip_all_reduce_unused_params": True},
}


@dataclass(frozen=True)
class Delayed(lc.CommHook):
    """A hook that sleeps up to `seconds` before it begins with a bucket."""

    name = "delayed"
    hook: lc.CommHook
    seconds: float

    def bind(self, group):
        return _BoundDelayed(self.hook.bind(group), self.seconds)


class _BoundDelayed(lc.BoundHook):
    def __init__(self, inner, seconds):
        super().__init__(inner.group)
        self.inner, self.seconds, self.buckets = inner, seconds, set()
        self.random = random.Random(inner.group.global_rank)

    def reduce(self, bucket, ranks):
        self.buckets.add(bucket.names)
        time.sleep(self.random.uniform(0, self.seconds))
        return (yield from self.inner.reduce(bucket, ranks))


def unused_names(mode, rank, step):
    # With skip_all_reduce_unused_params the same on all ranks and always: here the last bucket of a backward.
    return {"p0", "p2"} if mode == "skip_all_reduce_unused" else {f"p{(step + rank) % 9}", f"p{step % 8}"}


def train(rank, world, mode, seconds, steps):
    """Parameters after `WITHOUT` steps and at the end; what was reduced beside, the hook's steps and buckets."""
    torch.manual_seed(rank)
    delay = random.Random(rank - 100)
    shapes = {f"p{i}": (24, 24) for i in range(NUM_PARAMETERS[mode])}
    ddp = DistributedDataParallel(Params(shapes), bucket_cap_mb=1e-3, **MODES[mode])
    hook = Delayed(lc.PowerSGD(start_powerSGD_iter=5, matrix_approximation_rank=1), seconds)
    attachment = lc.attach(ddp, hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    metrics, parameters = [], []
    for step in range(steps):
        gradients = {name: torch.randn(shape) for name, shape in shapes.items()}
        for name in unused_names(mode, rank, step):
            gradients.pop(name, None)
        time.sleep(delay.uniform(0, seconds))
        loss = ddp(gradients)
        metric = torch.tensor([float(rank + step)])
        work = dist.all_reduce(metric, async_op=True)
        loss.backward()
        work.wait()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        metrics.append((metric.item(), mean.item()))
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 in (WITHOUT, steps):
            parameters.append(torch.nn.utils.parameters_to_vector(ddp.module.parameters()).detach())
    attachment.close()
    return parameters, metrics, attachment.metrics()["steps"], len(attachment.bound.buckets)


@pytest.mark.parametrize("mode", MODES)
def test_delays_change_nothing(run, mode):
    arguments = inspect.signature(DistributedDataParallel.__init__).parameters
    if not MODES[mode].keys() <= arguments.keys():
        pytest.skip("this DDP has no such argument")
    with ignoring(NOT_AVERAGING):
        without = run(train, mode, 0, WITHOUT, world=4, timeout=200)
        delayed = run(train, mode, 1e-3, STEPS[mode], world=4, timeout=200)
    for parameters, metrics, _, num_buckets in (*without, *delayed):
        assert torch.equal(parameters[0], without[0][0][0])
        assert metrics[:WITHOUT] == without[0][1]
        assert num_buckets >= NUM_PARAMETERS[mode] - (2 if mode == "skip_all_reduce_unused" else 0)
    for parameters, metrics, steps, _ in delayed:
        assert torch.equal(parameters[-1], delayed[0][0][-1])
        assert metrics == delayed[0][1]
        assert steps == STEPS[mode]
