"""Cast and Schedule: same type in, same type out."""

import pytest
import torch
from driver import (
    SHAPES,
    attached,
    backward,
    closing_texts,
    distance,
    full_rank_gradients,
    low_rank_gradients,
    mean_gradients,
    norm,
    outputs,
    same,
)

import lightning_commhooks as lc

POWERSGD = lc.PowerSGD(start_powerSGD_iter=0)


def test_wrappers_take_names_and_nest():
    cast = lc.Cast("power_sgd", "fp16")
    assert cast.hook == lc.PowerSGD(start_powerSGD_iter="auto")
    assert lc.Cast("allreduce").dtype == "bf16"
    schedule = lc.Schedule({10: lc.Cast(lc.Schedule({0: "fp16"})), 0: "allreduce"})
    assert list(schedule.hooks) == [0, 10]
    assert isinstance(schedule, lc.CommHook)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: lc.Cast("allreduce", "fp8"), r"dtype must be one of \['bf16', 'fp16', 'int8'\], got 'fp8'"),
        (lambda: lc.Cast("powersdg"), "did you mean 'powersgd'"),
        (lambda: lc.Schedule({}), "no hook for step 0"),
        (lambda: lc.Schedule({5: "bf16"}), r"no hook for step 0, only for \[5\]"),
        (lambda: lc.Schedule({0: "bf16", -1: "fp16"}), "at least 0, got -1"),
        (lambda: lc.Schedule({0: "bf16", "0": "fp16"}), "hooks must have each step once"),
        (lambda: lc.Schedule({0: "bf16", "5.5": "fp16"}), "integers.*'5.5'"),
        (lambda: lc.Schedule({0: "bf16", 10: "nothing"}), "hooks: for step 10: unknown hook 'nothing'"),
        (lambda: lc.Schedule("bf16"), "hooks must be a dict of hooks by step, such as {0: 'bf16'}, got 'bf16'"),
    ],
)
def test_bad_options(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(("dtype", "plain"), [("fp16", lc.FP16()), ("bf16", lc.BF16())])
def test_cast_allreduce_is_16_bit_averaging(run, dtype, plain):
    expected = mean_gradients(full_rank_gradients, 2, 0, SHAPES)
    cast, half = (run(outputs, hook, full_rank_gradients, 2)[0] for hook in (lc.Cast("allreduce", dtype), plain))
    assert cast[2]["bytes_sent"] == half[2]["bytes_sent"]
    assert distance(cast[0][0], expected) <= 2**-7 * norm(expected)


def test_cast_leaves_16_bit_gradients_alone(run):
    arguments = (full_rank_gradients, 2, SHAPES, torch.float16)
    cast, plain = (run(outputs, hook, *arguments)[0][0] for hook in (lc.Cast("allreduce", "bf16"), "allreduce"))
    assert all(same(a, b) for a, b in zip(cast, plain, strict=True))


def unused_on_one_rank(rank, world):
    with attached(lc.Cast("allreduce", "fp16"), find_unused_parameters=True) as (ddp, _):
        gradients = full_rank_gradients(rank, 0, SHAPES)
        if rank == 1:
            del gradients["first"]
        return backward(ddp, gradients)["first"].dtype


def test_cast_keeps_dtype_of_parameters_unused_on_one_rank(run):
    assert run(unused_on_one_rank) == [torch.float32] * 2


def test_schedule_runs_each_hook_in_its_phase(run):
    schedule = lc.Schedule({0: "bf16", 2: "allreduce", 4: "noop"})
    means, _, _ = run(outputs, schedule, low_rank_gradients, 6)[0]
    half = run(outputs, "bf16", low_rank_gradients, 2)[0][0]
    dense = run(outputs, "allreduce", low_rank_gradients, 4)[0][0]
    assert all(same(a, b) for a, b in zip(means[:2], half, strict=True))
    assert all(same(a, b) for a, b in zip(means[2:4], dense[2:], strict=True))
    assert all(same(mean, low_rank_gradients(0, step, SHAPES)) for step, mean in enumerate(means[4:], 4))


def test_schedule_pays_what_the_last_hook_owes(run):
    schedule = lc.Schedule({0: POWERSGD, 3: "allreduce"})
    means, _, _ = run(outputs, schedule, full_rank_gradients, 5, SHAPES, torch.float64)[0]
    expected = [mean_gradients(full_rank_gradients, 2, t, SHAPES, torch.float64) for t in range(5)]
    paid, total = ({name: sum(m[name] for m in ms[:4]) for name in SHAPES} for ms in (means, expected))
    assert distance(means[3], expected[3]) > 0.1 * norm(expected[3])
    assert distance(paid, total) <= 1e-12 * norm(total)
    assert distance(means[4], expected[4]) <= 1e-12 * norm(expected[4])


def close_before_last_phase(rank, world):
    with attached(lc.Schedule({0: "allreduce", 15: "bf16"})) as (ddp, attachment):
        for step in range(10):
            backward(ddp, full_rank_gradients(rank, step, SHAPES))
        return closing_texts(attachment)


def test_schedule_warns_of_phases_not_reached(run):
    (text,), others = run(close_before_last_phase)
    assert "after 10 steps, and the phases of hook=Schedule at [15] have not begun" in text
    assert not others
