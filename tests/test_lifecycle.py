"""Attaching, failing and closing."""

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from driver import (
    SHAPES,
    attached,
    backward,
    distance,
    full_rank_gradients,
    mean_gradients,
    norm,
    same,
)
from torch.nn.parallel import DistributedDataParallel

import lightning_commhooks as lc


def attach_again(rank, world):
    with attached("bf16") as (ddp, attachment):
        backward(ddp, full_rank_gradients(rank, 0, SHAPES))
        module = ddp.module
    attachment.close()
    assert attachment.metrics()["steps"] == 1
    second = DistributedDataParallel(module)
    again = lc.attach(second, "allreduce")
    return backward(second, full_rank_gradients(rank, 0, SHAPES)), again.metrics()["steps"]
    # Not closed: that happens with the end of the model.


def test_attach_to_a_new_ddp_of_the_same_model(run, world):
    expected = mean_gradients(full_rank_gradients, world, 0, SHAPES)
    for means, steps in run(attach_again, world=world):
        assert distance(means, expected) <= 1e-6 * norm(expected)
        assert steps == 1


def two_models(rank, world):
    with attached("powersgd") as (a, _), attached("allgather") as (b, other):
        means = []
        for step in range(3):
            means.append((a(full_rank_gradients(rank, step, SHAPES)), b(full_rank_gradients(rank, step, SHAPES))))
            sum(means.pop()).backward()
        assert other.metrics()["steps"] == 3
        return [{name: p.grad.clone() for name, p in ddp.module.named_parameters()} for ddp in (a, b)]


def test_two_models_in_one_backward(run):
    expected = dict.fromkeys(SHAPES, 0)
    for step in range(3):
        mean = mean_gradients(full_rank_gradients, 2, step, SHAPES)
        expected = {name: expected[name] + mean[name] for name in SHAPES}
    for a, b in run(two_models):
        assert distance(a, expected) <= 1e-6 * norm(expected)
        assert distance(b, expected) <= 1e-6 * norm(expected)


def on_subgroups(rank, world):
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    with attached("powersgd", process_group=groups[rank % 2]) as (ddp, _):
        means = [backward(ddp, full_rank_gradients(rank, step, SHAPES)) for step in range(3)]
    for group in groups:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
    return means


def test_process_groups_that_are_part_of_the_world(run):
    results = run(on_subgroups, world=4)
    for members in ((0, 2), (1, 3)):
        gradients = [full_rank_gradients(rank, 2, SHAPES) for rank in members]
        expected = {name: (gradients[0][name] + gradients[1][name]).double() / 2 for name in SHAPES}
        assert distance(results[members[0]][2], expected) <= 1e-6 * norm(expected)
        assert same(results[members[0]][2], results[members[1]][2])


def backward_after_close(rank, world):
    with attached("allreduce") as (ddp, attachment):
        backward(ddp, full_rank_gradients(rank, 0, SHAPES))
        attachment.close()
        attachment.close()
        with pytest.raises(lc.HookError, match="was closed"):
            backward(ddp, full_rank_gradients(rank, 1, SHAPES))
        with pytest.raises(lc.HookError, match="was closed"):
            attachment.state_dict()
    return attachment.metrics()["steps"] >= 1


def test_close_twice_and_backward_after_close(run):
    assert all(run(backward_after_close))


class Broken(lc.CommHook):
    name = "broken"

    def bind(self, group):
        return _BoundBroken(group)


class _BoundBroken(lc.BoundHook):
    def reduce(self, flat, bucket):
        if bucket.step == 2 and "second" in bucket.names and self.group.global_rank == self.group.size - 1:
            raise ArithmeticError("out of numbers")
        self.group.all_reduce_mean_(flat)


def fail(rank, world):
    with attached(Broken()) as (ddp, attachment):
        for step in range(2):
            backward(ddp, full_rank_gradients(rank, step, SHAPES))
        with pytest.raises(lc.HookError) as first:
            backward(ddp, full_rank_gradients(rank, 2, SHAPES))
        with pytest.raises(lc.HookError) as later:
            attachment.state_dict()
    return str(first.value), repr(first.value.__cause__), str(later.value)


def test_failure_names_hook_step_and_bucket(run):
    (message, cause, later), *_ = run(fail, world=1)
    for part in ("'broken'", "rank 0", "step 2", "bucket", "second", "out of numbers"):
        assert part in message
    assert "ArithmeticError('out of numbers')" in cause
    assert "step 2" in later


RANK = """
import sys, torch, torch.distributed as dist
sys.path.insert(0, sys.argv[4])
from driver import Params
from test_lifecycle import *
rank, world = int(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo", init_method="file://" + sys.argv[3], rank=rank, world_size=world)
ddp = DistributedDataParallel(Params(SHAPES), bucket_cap_mb=4e-3)
lc.attach(ddp, Broken())
for step in range(5):
    backward(ddp, full_rank_gradients(rank, step, SHAPES))
print("not reached")
"""


def test_failure_on_one_rank_ends_all_ranks(tmp_path, request):
    arguments = ["2", str(tmp_path / "store"), str(request.path.parent)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        results = [process.communicate(timeout=60) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [1, 1]
    for out, err in results:
        assert "not reached" not in out
        assert "lightning_commhooks.core.engine.HookError" in err
        assert "at step 2, bucket" in err
        assert "terminate called" not in err
    assert "out of numbers" in results[1][1]


def test_pool_reports_tracebacks_and_does_not_hang(run):
    from pool import WorkerError

    with pytest.raises(WorkerError, match=r"rank 1:\n(.|\n)*ZeroDivisionError"):
        run(divide_by_zero_on_one_rank)
    with pytest.raises(WorkerError, match="no answer"):
        run(sleep_on_one_rank, timeout=3)
    with pytest.raises(WorkerError, match="leaked threads"):
        run(leak_a_thread)
    assert run(ranks) == [0, 1]


def divide_by_zero_on_one_rank(rank, world):
    return 1 / (1 - rank)


def sleep_on_one_rank(rank, world):
    torch.futures.Future().wait() if rank else None


_leaked = []


def leak_a_thread(rank, world):
    from lightning_commhooks.core.engine import ThreadEngine

    _leaked.append(ThreadEngine())
    _leaked[0].call(lambda: None)


def ranks(rank, world):
    return rank
