"""Named ranges in real traces of PyTorch's profiler, from two ranks."""

import tempfile
import threading
from pathlib import Path

import fsdp_driver
import pytest
import torch
from driver import SHAPES, Params, attached, backward, full_rank_gradients
from local_sgd_driver import ALONE, local
from pool import compiling
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from traces import named, only_cpu, waits, written

import lightning_commhooks as lc
from lightning_commhooks.basics import ranges as ours

INT8 = lc.Int8(min_bytes=0, block_size=16)
STEPS = 3


def train(ddp, rank, steps=STEPS, shapes=SHAPES):
    for step in range(steps):
        backward(ddp, full_rank_gradients(rank, step, shapes))


def num_buckets(ddp):
    return len(ddp._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(","))


def traced(profiler, work):
    """Our ranges in the trace of some work, and the names of all that is in it."""
    with profiler:
        work()
    with tempfile.TemporaryDirectory() as folder:
        return written(profiler, Path(folder))


def of_gradients(rank, world, hook, options, shapes=SHAPES):
    """Ranges and all names of three steps, buckets in a step, collectives counted in them, and the main thread."""
    with attached(hook, shapes) as (ddp, attachment):
        train(ddp, rank, STEPS, shapes)
        before = attachment.metrics()["collectives"]
        found, names = traced(only_cpu(**options), lambda: train(ddp, rank, STEPS, shapes))
        collectives = attachment.metrics()["collectives"] - before
        train(ddp, rank, 1, shapes)  # nobody records this
        return found, names, num_buckets(ddp), collectives, threading.get_native_id()


def check_nested(inner, outer):
    """Each of the first is in one of the others, and each of the others has one."""
    assert inner
    assert all(any(each.within(other) for other in outer) for each in inner)
    assert all(any(each.within(other) for each in inner) for other in outer)


@pytest.mark.parametrize("options", [{}, {"with_stack": True, "record_shapes": True}], ids=["plain", "with_stack"])
def test_a_plain_profiler_has_all_ranges(run, options):
    for found, names, buckets, collectives, main in run(of_gradients, INT8, options):
        assert buckets > 1
        # One from each wait to the next.
        reductions = named(found, "int8", "reduce")
        assert len(reductions) > STEPS * buckets
        encoded, decoded = named(found, "int8", "encode"), named(found, "int8", "decode")
        # Some buckets have nothing but what is not encoded; those of two ranks are encoded and decoded once.
        assert STEPS <= len(encoded) == len(decoded) <= len(reductions)
        for inner in (encoded, decoded):
            check_nested(inner, [each for each in reductions if any(one.within(each) for one in inner)])
        gathered = named(found, "all_gather")
        assert gathered
        assert not any(each.within(other) for each in gathered for other in reductions), "waiting is no work"
        assert len(waits(found)) == collectives
        assert len(named(found, "all_gather", "begin")) == len(named(found, "all_gather"))
        assert len({each.thread for each in reductions}) == 1, "one thread computes"
        assert main not in {each.thread for each in found}
        assert {"aten::mul", "DistributedDataParallel.forward"} <= names, "of the training thread, too"


def test_steps_that_nobody_profiles_are_not_there(run):
    """The profiler starts and stops between steps, as by a schedule."""
    for found in run(of_a_schedule):
        assert [len(named(ranges, "bf16", "reduce")) for ranges in found] == [4, 4], "before the wait and after"


def of_a_schedule(rank, world):
    found = []
    with attached("bf16", bucket_cap_mb=25) as (ddp, _), tempfile.TemporaryDirectory() as folder:
        train(ddp, rank)
        schedule = torch.profiler.schedule(wait=1, warmup=1, active=2)
        ready = lambda profiler: found.append(written(profiler, Path(folder))[0])  # noqa: E731
        with only_cpu(schedule=schedule, on_trace_ready=ready, acc_events=True) as profiler:
            for _ in range(8):
                train(ddp, rank, 1)
                profiler.step()
    return found


def of_compiled(rank, world):
    # Or gradients would be too small to be given to what is compiled.
    with compiling():
        return of_gradients(rank, world, lc.Int8(min_bytes=0), {}, {"weight": (500, 600), "other": (600, 500)})


def test_compiled_codecs_have_ranges_around_them(run):
    for found, names, *_ in run(of_compiled, timeout=150):
        for inner in (named(found, "int8", "encode"), named(found, "int8", "decode")):
            check_nested(inner, [r for r in named(found, "int8", "reduce") if any(each.within(r) for each in inner)])
        assert any(name.startswith("Torch-Compiled Region") for name in names)


def test_two_shots(run):
    """With four ranks blocks go to their owners, who encode their mean: twice encoded, twice decoded."""
    for found, *_ in run(of_gradients, INT8, {}, world=4):
        encoded, decoded = named(found, "int8", "encode"), named(found, "int8", "decode")
        arrived, gathered = named(found, "all_to_all"), named(found, "all_gather")
        assert len(encoded) == len(decoded) == 2 * len(arrived) == 2 * len(gathered) > 0


@pytest.mark.parametrize(
    ("hook", "name"),
    [
        (lc.PowerSGD(start_powerSGD_iter=0), "powersgd"),
        (lc.Cast(lc.PowerSGD(start_powerSGD_iter=0), "bf16"), "cast"),
        ("allreduce", "allreduce"),
    ],
    ids=["powersgd", "cast", "allreduce"],
)
def test_any_hook_has_its_reductions(run, hook, name):
    for found, _, buckets, collectives, _ in run(of_gradients, hook, {}):
        reductions = named(found, name, "reduce")
        assert len(waits(found)) == collectives >= STEPS
        assert len(reductions) == STEPS * buckets + collectives


def of_models(rank, world, hook, period):
    torch.manual_seed(rank)
    model = Params(SHAPES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with local(model, hook, [optimizer]) as (ddp, attachment):

        def steps(num):
            for step in range(num):
                backward(ddp, full_rank_gradients(rank, step, SHAPES))
                optimizer.step()

        steps(2 * period)
        before = attachment.metrics()["averagings"]
        found, _ = traced(only_cpu(), lambda: steps(2 * period + 1))
        averagings = attachment.metrics()["averagings"] - before
        evaluated, _ = traced(only_cpu(), attachment.average_weights)
        return found, averagings, evaluated, threading.get_native_id()


@pytest.mark.parametrize(
    ("hook", "name"),
    [
        (lc.PostLocalSGD(period=2, **ALONE), "post_localsgd"),
        (lc.DiLoCo(period=2, pseudo_gradient="fp32", average_buffers=False, **ALONE), "diloco"),
    ],
    ids=["post_localsgd", "diloco"],
)
def test_averagings_of_models(run, hook, name):
    for found, averagings, evaluated, main in run(of_models, hook, 2):
        averages = named(found, name, "average")
        assert len(averages) == averagings > 1
        check_nested(named(found, "all_reduce"), averages)
        assert {each.thread for each in averages}.isdisjoint({main})
        assert named(evaluated, name, "average"), "an averaging because somebody looks at the model"


def of_shards(rank, world):
    with fsdp_driver.leaving_no_groups():
        model = fsdp_driver.shard2("full")
        attachment = lc.attach(model, fsdp_driver.INT8)
        fsdp_driver.reduced(model, rank)
        before = attachment.metrics()["collectives"]
        found, _ = traced(only_cpu(), lambda: fsdp_driver.reduced(model, rank))
        collectives = attachment.metrics()["collectives"] - before
        attachment.close()
    return found, collectives, threading.get_native_id()


def test_shards(run):
    """FSDP asks for reductions in the training thread."""
    for found, collectives, main in run(of_shards):
        reductions = named(found, "int8", "reduce")
        assert len(reductions) == 2, "of two units"
        check_nested(named(found, "int8", "encode"), reductions)
        assert len(waits(found)) == collectives
        assert {each.thread for each in found} == {main}


def of_a_function(rank, world):
    with attached(default_hooks.allreduce_hook) as (ddp, _):
        train(ddp, rank)
        return traced(only_cpu(), lambda: train(ddp, rank))[0], num_buckets(ddp)


def test_a_hook_function_of_the_user_has_a_range(run):
    for found, buckets in run(of_a_function):
        assert {each.name for each in found} == {
            "commhooks::torch.distributed.algorithms.ddp_comm_hooks.default_hooks.allreduce_hook::reduce"
        }
        assert len(found) == STEPS * buckets


def test_nothing_is_made_when_no_profiler_runs():
    assert ours.named("int8", "reduce") is ours.named("all_reduce")
    with only_cpu():
        assert isinstance(ours.named("int8", "reduce"), torch.profiler.record_function)
