"""Attaching and closing."""

import contextlib
import dataclasses
import gc
import re
import warnings
import weakref

import pool
import pytest
import torch
import torch.distributed as dist
from driver import (
    SHAPES,
    Params,
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
from lightning_commhooks.collectives.gloo_abort import Connections


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


def test_attach_to_a_new_ddp_of_the_same_model(run):
    expected = mean_gradients(full_rank_gradients, 2, 0, SHAPES)
    for means, steps in run(attach_again):
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


def test_pool_reports_tracebacks_and_does_not_hang(run, monkeypatch):
    monkeypatch.setattr(pool, "PATIENCE", 0.5)
    with pytest.raises(pool.WorkerError, match=r"rank 1:\n(.|\n)*ZeroDivisionError"):
        run(divide_by_zero_on_one_rank)
    with pytest.raises(pool.WorkerError, match="no answer"):
        run(sleep_on_one_rank, timeout=0.5)
    with pytest.raises(pool.WorkerError, match="leaked threads"):
        run(leak_a_thread)
    assert run(ranks) == [0, 1]


def divide_by_zero_on_one_rank(rank, world):
    return 1 / (1 - rank)


def sleep_on_one_rank(rank, world):
    torch.futures.Future().wait() if rank else None


_leaked = []


def leak_a_thread(rank, world):
    from lightning_commhooks.collectives.counters import Timing
    from lightning_commhooks.runtime.engine import ThreadEngine

    _leaked.append(ThreadEngine(torch.device("cpu"), Connections(), Timing()))
    _leaked[0].call(lambda: None)


def ranks(rank, world):
    return rank


class NotADataclass(lc.CommHook):
    """Printed with its address, which differs between processes."""

    name = "not_a_dataclass"

    def bind(self, group):
        return lc.Noop().bind(group)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WithASet(NotADataclass):
    """Strings in a set have another order in each process."""

    layers: frozenset


def attach_what_may_differ(rank, world, kind):
    """What `attach` says, or what it makes of gradients."""
    options = {}
    hook = {
        "names": ["bf16", "fp16"][rank],
        "options": lc.PowerSGD(matrix_approximation_rank=1 + rank),
        "starts": ["powersgd", lc.PowerSGD()][rank],
        "inside": lc.PerParameter({"*.bias": "allreduce", "*": ["int8", "int4"][rank]}),
        "exact_state": "powersgd",
        "scaler": "powersgd",
        "accumulation": "powersgd",
        "not_a_dataclass": NotADataclass(),
        "set": WithASet(layers=frozenset("abcdefghijklmnop")),
    }[kind]
    if kind == "exact_state":
        options["exact_state"] = bool(rank)
    if kind == "scaler":
        options["grad_scaler"] = torch.amp.GradScaler("cpu", enabled=bool(rank))
    if kind == "accumulation":
        options["accumulation"] = ["mean", "sum"][rank]
    ddp = DistributedDataParallel(Params(SHAPES))
    try:
        lc.attach(ddp, hook, **options)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "first", "second"),
    [
        ("names", r"BF16\(.*\)", r"FP16\(.*\)"),
        ("options", r"PowerSGD\(matrix_approximation_rank=1, .*\)", r"PowerSGD\(matrix_approximation_rank=2, .*\)"),
        ("starts", r"PowerSGD\(.*start_powerSGD_iter='auto', .*\)", r"PowerSGD\(.*start_powerSGD_iter=1000, .*\)"),
        ("inside", r".*Int8\(.*", r".*Int4\(.*"),
        ("exact_state", "False", "True"),
        ("scaler", "False", "True"),
        ("accumulation", ".*'mean'.*", ".*'sum'.*"),
    ],
)
def test_ranks_that_were_given_different_hooks_or_options_are_told_both(run, kind, first, second):
    said = run(attach_what_may_differ, kind)
    assert said[0] == said[1]
    assert re.search(rf"must be the same on all ranks, is {first} on rank 0 and {second} on rank 1\. Compare", said[0])


@pytest.mark.parametrize("kind", ["not_a_dataclass", "set"])
def test_hooks_that_print_otherwise_in_each_process_are_the_same(run, kind):
    assert run(attach_what_may_differ, kind) == ["", ""]


def keeps_an_attachment(rank, world):
    with attached("bf16") as (ddp, attachment):
        backward(ddp, full_rank_gradients(rank, 0, SHAPES))
        parameter = weakref.ref(next(ddp.parameters()))
    del ddp
    gc.collect()
    return parameter() is None, attachment.metrics()["steps"]


def test_a_closed_attachment_keeps_no_parameters(run):
    assert run(keeps_an_attachment) == [(True, 1)] * 2


def closed_by_its_own_thread(rank, world):
    """Whether the hook's threads end if the garbage collector finds the model in one of them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ddp = DistributedDataParallel(Params(SHAPES))
        attachment = lc.attach(ddp, "bf16")
        backward(ddp, full_rank_gradients(rank, 0, SHAPES))
        engine = attachment.runtime._engine
        with contextlib.suppress(lc.HookError):
            engine.call(attachment.close)
        engine._thread.join(10)
    return attachment.is_closed, engine._thread.is_alive(), engine._watch.is_alive()


def test_an_engine_may_be_closed_in_its_own_thread(run):
    assert run(closed_by_its_own_thread) == [(True, False, False)] * 2
