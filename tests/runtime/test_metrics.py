"""What an attachment tells about its work: errors, what is owed, time, and steps that were not compressed."""

import contextlib
import math
import threading
import time

import pytest
import torch
from driver import SHAPES, attached, backward, distance, full_rank_gradients, mean_gradients, norm
from local_sgd_driver import ALONE, local

import lightning_commhooks as lc
from lightning_commhooks.collectives.counters import Timing
from lightning_commhooks.interface.error_sample import DEFAULT_NUMEL

POWERSGD = lc.PowerSGD(start_powerSGD_iter=0, matrix_approximation_rank=2)
INT8 = lc.Int8(min_bytes=0, block_size=128)


def errors(rank, world, hook, numel, every, steps):
    """The error after each step, and the averaged gradients."""
    results = []
    with attached(hook) as (ddp, attachment):
        attachment.sample_error(every, numel)
        for step in range(steps):
            means = backward(ddp, full_rank_gradients(rank, step, SHAPES))
            results.append((attachment.metrics().get("relative_error"), means))
        return results, attachment.metrics()


@pytest.mark.parametrize(
    "hook",
    [
        "bf16",
        INT8,
        POWERSGD,
        "noop",
        lc.ScaleByGradAccumulation(INT8, 4),
        lc.ScaleByGradAccumulation("quantize_per_tensor", 4),
        lc.PerParameter({"*ir*": "bf16", "*": POWERSGD}),
    ],
    ids=str,
)
def test_relative_error_is_that_of_all_gradients(run, hook):
    scale = 0.25 if isinstance(hook, lc.ScaleByGradAccumulation) else 1.0
    for rank, (results, _) in enumerate(run(errors, hook, None, 1, 2)):
        for step, (error, means) in enumerate(results):
            exact = {name: g * scale for name, g in mean_gradients(full_rank_gradients, 2, step, SHAPES).items()}
            expected = distance(means, exact) / norm(exact)
            assert error == pytest.approx(expected, rel=1e-3), (rank, step)
            assert error > 1e-4


def test_relative_error_of_a_sample_is_near_that_of_all(run):
    every_step = [run(errors, INT8, numel, 1, 3) for numel in (None, 1500)]
    for (exact, _), (sampled, _) in zip(*every_step, strict=True):
        for (all_of_it, _), (some_of_it, _) in zip(exact, sampled, strict=True):
            assert some_of_it == pytest.approx(all_of_it, rel=0.3)
            assert some_of_it != all_of_it
    one, other = ([error for error, _ in results] for results, _ in every_step[1])
    assert one == other, "equal on all ranks"


def test_errors_are_sampled_now_and_then_and_not_counted(run):
    (results, metrics), _ = run(errors, "bf16", DEFAULT_NUMEL, 2, 4)
    values = [error for error, _ in results]
    assert values[0] == values[1] != values[2] == values[3]
    (_, unsampled), _ = run(errors, "bf16", DEFAULT_NUMEL, 0, 4)
    assert "relative_error" not in unsampled
    for key in ("bytes_sent", "collectives", "compression_ratio"):
        assert metrics[key] == unsampled[key]


def unequal(rank, world):
    refused = pytest.raises(ValueError, match=r"every must be the same on all ranks, is 10 on rank 0 and 11")
    with attached("bf16") as (_, attachment), refused:
        attachment.sample_error(every=10 + rank)


def test_ranks_that_would_sample_other_steps_are_refused(run):
    run(unequal)


def wrong_options(rank, world):
    texts = []
    with attached("bf16") as (_, attachment):
        for options in ({"every": -1}, {"every": 1.5}, {"numel": True}):
            try:
                attachment.sample_error(**options)
            except ValueError as error:
                texts.append(str(error))
    return texts


def test_wrong_options_of_sampling(run):
    first, *_ = run(wrong_options)
    assert first == [
        "every must be an integer of at least 0, got -1",
        "every must be an integer of at least 0, got 1.5",
        "numel must be an integer of at least 1, got True",
    ]


def no_error_alone(rank, world):
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with local(model, lc.PostLocalSGD(**{**ALONE, "start_localSGD_iter": 2}, period=2), [optimizer]) as (
        ddp,
        attachment,
    ):
        attachment.sample_error(1, None)
        values = []
        for _ in range(4):
            optimizer.zero_grad()
            ddp(torch.full((2, 4), float(rank))).square().mean().backward()
            optimizer.step()
            values.append(attachment.metrics()["relative_error"])
        return values, attachment.steps_not_compressed(), attachment.metrics()


def test_steps_that_ranks_take_alone_have_no_error(run):
    for values, not_compressed, metrics in run(no_error_alone):
        assert values[1] < 1e-6
        assert values[2] == values[3] == values[1], "of the last step that was sampled"
        assert not_compressed == {
            "hook='post_localsgd' averages gradients over all ranks until start_localSGD_iter=2": 2
        }
        assert metrics["averagings"] == 1
        assert metrics["exposed_ms"] > 0


def residuals(rank, world, hook, steps, scale=1.0):
    """The norm of the residual after steps whose gradients are the same on all ranks: reported, and expected."""
    missing = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    with attached(hook) as (ddp, attachment):
        for step in range(steps):
            gradients = {name: scale * g for name, g in full_rank_gradients(0, step, SHAPES).items()}
            means = backward(ddp, gradients)
            missing = {name: missing[name] + gradients[name] - means[name] for name in SHAPES}
        return attachment.residual_norm(), math.hypot(*(m.double().norm().item() for m in missing.values()))


@pytest.mark.parametrize(
    "hook",
    [
        POWERSGD,
        lc.BatchedPowerSGD(start_powerSGD_iter=0),
        INT8,
        lc.Cast(POWERSGD, "bf16"),
        lc.PerParameter({"first": INT8, "*": POWERSGD}),
        lc.Schedule({0: POWERSGD, 2: INT8}),
    ],
    ids=str,
)
def test_residual_norm_is_that_of_what_was_not_sent(run, hook):
    for told, expected in run(residuals, hook, 3):
        assert told == pytest.approx(expected, rel=2e-3)
        assert told > 0


@pytest.mark.parametrize("scale", [1e25, 1e-25])
def test_residual_norm_of_any_magnitude(run, scale):
    for told, expected in run(residuals, INT8, 3, scale):
        assert told == pytest.approx(expected, rel=2e-3)


def test_hooks_without_error_feedback_owe_nothing(run):
    assert [told for told, _ in run(residuals, "bf16", 1)] == [0, 0]


def not_compressed(rank, world, hook):
    with attached(hook) as (ddp, attachment):
        for step in range(3):
            backward(ddp, full_rank_gradients(rank, step, SHAPES))
        return attachment.steps_not_compressed(), attachment.steps_not_compressed()


TOO_SMALL = (
    "hook='int8' compresses nothing, no bucket has min_bytes=131072 bytes of gradients with block_size=512 elements or "
    "more in two dimensions (compress_1d=False)"
)


@pytest.mark.parametrize(
    ("hook", "expected"),
    [
        ("bf16", {}),
        ("noop", {}),
        ("allreduce", {"gradients are sent as they are": 3}),
        (lc.PowerSGD(start_powerSGD_iter=2), {"hook='powersgd' compresses from start_powerSGD_iter=2 on": 2}),
        ("int8", {TOO_SMALL: 3}),
        (lc.Schedule({0: "allreduce", 1: "bf16"}), {"the phases of hook=Schedule at [1] have not begun": 1}),
        (lc.Cast(lc.PowerSGD(start_powerSGD_iter=2), "bf16"), {}),
    ],
    ids=str,
)
def test_steps_not_compressed_and_why(run, hook, expected):
    assert run(not_compressed, hook) == [(expected, expected)] * 2


class Clock(Timing):
    """Moments that the test sets."""

    moment = 0.0

    def now(self):
        return self.moment

    def at(self, seconds, what):
        self.moment = seconds
        return what()

    @contextlib.contextmanager
    def during(self, timed, begin, end):
        self.moment = begin
        with timed():
            yield
            self.moment = end


def test_times_of_a_step():
    clock = Clock()
    clock.at(1.0, lambda: clock.begin_step(0))
    with clock.during(clock.work, 1.0, 2.0), clock.during(clock.comm, 1.25, 1.75):
        pass
    clock.at(3.0, clock.backward_done)
    with clock.during(clock.work, 2.5, 4.5), clock.during(clock.comm, 3.0, 4.0):
        pass
    # The optimizer's step, and an average of models after it.
    with clock.during(clock.wait, 6.0, 8.5), clock.during(clock.work, 6.5, 8.25), clock.during(clock.comm, 7.0, 8.0):
        pass
    totals = clock.totals()
    assert totals["timed_steps"] == 1
    assert totals["exposed_ms"] == pytest.approx(1500 + 2500)
    assert totals["comm_ms"] == pytest.approx(500 + 1000 + 1000)
    assert totals["codec_ms"] == pytest.approx(500 + 1000 + 750)
    assert totals["overlap_ms"] == pytest.approx(2000)


def test_collectives_of_several_buckets_at_once():
    clock = Clock()
    clock.at(1.0, lambda: clock.begin_step(0))
    with clock.during(clock.work, 1.0, 2.0), clock.during(clock.comm, 1.25, 1.75):
        pass
    with clock.during(clock.work, 1.5, 3.0), clock.during(clock.comm, 1.6, 2.8):
        pass
    clock.at(2.5, clock.backward_done)
    totals = clock.totals()
    assert totals["comm_ms"] == pytest.approx(1550)
    assert totals["codec_ms"] == pytest.approx(500 + 300)
    assert totals["exposed_ms"] == pytest.approx(500)


def test_a_backward_that_broke_off_is_not_timed():
    clock = Clock()
    clock.begin_step(0)
    with clock.during(clock.work, 0.0, 1.0):
        pass
    clock.begin_step(1)
    clock.backward_done()
    assert clock.totals() == {"timed_steps": 1, "exposed_ms": 0, "codec_ms": 0, "comm_ms": 0, "overlap_ms": 0}


def test_collectives_of_measurements_are_not_timed():
    clock = Clock()
    clock.begin_step(0)
    with clock.paused(), clock.during(clock.comm, 0.0, 1.0):
        pass
    clock.backward_done()
    assert clock.totals()["comm_ms"] == 0


def test_collectives_of_other_threads_are_timed_in_a_pause():
    clock = Clock()
    clock.begin_step(0)

    def work():
        with clock.during(clock.comm, 0.0, 1.0):
            pass

    with clock.paused(), clock.paused():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    clock.backward_done()
    assert clock.totals()["comm_ms"] == 1000


def waits(rank, world, hook):
    """Times of steps in which a rank is late."""
    model = torch.nn.Linear(64, 64)
    with local(model, hook, []) as (ddp, attachment):
        for _ in range(3):
            loss = ddp(torch.ones(2, 64)).sum()
            if rank == 1:
                time.sleep(0.05)
            loss.backward()
        return attachment.metrics()


@pytest.mark.parametrize("hook", ["allreduce", POWERSGD, INT8], ids=str)
def test_waiting_is_exposed(run, hook):
    early, late = run(waits, hook)
    assert early["timed_steps"] == late["timed_steps"] == early["steps"] == 3
    # Sleeping takes no less than it says.
    assert early["exposed_ms"] > 100
    assert early["comm_ms"] > 100
    assert late["exposed_ms"] < early["exposed_ms"]
