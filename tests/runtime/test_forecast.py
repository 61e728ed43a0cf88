"""`Attachment.forecast`: bytes of a whole run against those of a real one; what is said, and when there is nothing."""

import contextlib
import dataclasses
import io
import warnings

import pytest
import torch
import torch.distributed as dist
from driver import SHAPES, Params, attached, backward, closing_texts, full_rank_gradients
from local_sgd_driver import ALONE, zero_lr
from pool import ignoring
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import lightning_commhooks as lc
from lightning_commhooks.interface.start import late_starts
from lightning_commhooks.runtime.forecast import FEWEST_STEPS

NUM_STEPS = 40
FIRST_STEPS = 3
RANK_2 = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 11}
POST = lc.PostLocalSGD(period=4, start_localSGD_iter=6, post_local_gradient_allreduce=False)
HOOKS = {
    "bf16": lc.get_hook("bf16"),
    "noop": lc.get_hook("noop"),
    "auto": lc.Auto(candidates=["bf16"], warmup_steps=1, timed_steps=1),
    "late powersgd": lc.PowerSGD(**RANK_2),
    "late powersgd, half": lc.PowerSGD(**RANK_2, num_iters_per_step=1),
    "int8 factors": lc.Cast(lc.PowerSGD(**RANK_2), "int8"),
    "schedule": lc.Schedule({0: "bf16", 7: lc.PowerSGD(**RANK_2), 15: POST, 30: "int8"}),
    "policy": lc.PerParameter({"*ir*": lc.PowerSGD(**RANK_2), "*": lc.Int8(min_bytes=0, block_size=8)}),
    "weighted": lc.ScaleByGradAccumulation("int8", "weighted"),
    "post_localsgd": POST,
    "hierarchical": lc.HierarchicalLocalSGD(period_group_size_dict={2: 2, 6: None}, **ALONE),
    "diloco": lc.DiLoCo(period=7, fragments=3, **ALONE),
}
# What hooks say that are attached to a few ranks of one machine, for a few steps.
SAID = ("hook=", "training ended after", "hook='.*' ended while")


def whole_run(rank, world, hook, num_steps):
    """Forecasts before each step, made on rank 0 alone, and the metrics at the end; whether asking changes metrics."""
    ddp = DistributedDataParallel(Params(SHAPES), bucket_cap_mb=4e-3)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=1e-3)
    forecasts = []
    with ignoring(*SAID):
        attachment = lc.attach(ddp, hook, optimizers=[optimizer])
        for step in range(num_steps):
            before = attachment.metrics()
            forecasts.append(attachment.forecast(num_steps) if rank == 0 else None)
            assert attachment.metrics() == before
            if getattr(hook, "accumulation", None) == "weighted":
                attachment.add_weight(1.0)
            backward(ddp, full_rank_gradients(rank, step, SHAPES))
            optimizer.step()
        metrics = attachment.metrics()
        attachment.close()
    return forecasts, metrics


def averages(hook):
    return hasattr(hook, "start_localSGD_iter") or any(averages(inner) for inner in hook.inner_hooks)


@pytest.mark.parametrize(("label", "world"), [*((label, 2) for label in HOOKS), ("hierarchical", 4), ("diloco", 4)])
def test_a_whole_run_is_as_forecast(run, label, world):
    hook = HOOKS[label]
    forecasts, metrics = run(whole_run, hook, NUM_STEPS, world=world)[0]
    last_change = max((step for step in hook.changes_at() if step < NUM_STEPS), default=0)
    assert forecasts[:FIRST_STEPS] == [None] * FIRST_STEPS
    for step, forecast in enumerate(forecasts):
        if forecast is None or forecast.bytes_sent is None:
            continue
        assert step > last_change, "what comes after a change is not known before"
        assert forecast.bytes_sent == pytest.approx(metrics["bytes_sent"], rel=0.01)
        assert forecast.compression_ratio == pytest.approx(metrics["compression_ratio"], rel=0.01)
    has_total = forecasts[-1] is not None and forecasts[-1].bytes_sent is not None
    assert has_total is not averages(hook)


def local_steps(rank, world, hook, takes_turns, num_steps, backwards=1):
    """Lines that are told, and after how many steps; bytes sent and those of plain DDP until each step."""
    ddp = DistributedDataParallel(Params(SHAPES), bucket_cap_mb=4e-3, find_unused_parameters=True)
    names = [list(SHAPES)[:4], list(SHAPES)[4:]] if takes_turns else [list(SHAPES)]
    optimizers = [torch.optim.SGD([ddp.module.get_parameter(name) for name in own], lr=0.1) for own in names]
    lines, counted = [], []
    with ignoring(*SAID):
        attachment = lc.attach(ddp, hook, optimizers=optimizers)
        for step in range(num_steps):
            attachment.runtime._ranks.background.drain()  # on a busy machine an average may begin late
            metrics = attachment.metrics()
            counted.append((metrics["bytes_sent"], metrics["bytes_dense"], metrics["averagings"]))
            gradients = full_rank_gradients(rank, step, SHAPES)
            backward(ddp, {name: gradients[name] for name in names[step % len(names)]})
            if step % backwards == backwards - 1:
                optimizers[step % len(names)].step()
            attachment.tell_forecast(lambda line, step=step: lines.append((step + 1, line)), num_steps - step - 1)
        attachment.close()
    return lines, counted


@pytest.mark.parametrize(
    ("hook", "start", "takes_turns"),
    [
        (lc.PostLocalSGD(period=4, **ALONE), 8, False),
        (lc.PostLocalSGD(period=4, **ALONE), 0, True),  # two optimizers that take turns, as in a GAN
        (lc.DiLoCo(period=7, fragments=3, **ALONE), 0, False),
        (lc.DiLoCo(period=7, fragments=3, **ALONE), 8, True),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_averages_of_models_are_measured_over_whole_periods(run, hook, start, takes_turns):
    hook = dataclasses.replace(hook, start_localSGD_iter=start)
    lines, counted = run(local_steps, hook, takes_turns, 60)[0]
    *before, (after, line) = lines
    assert len(before) == bool(start)
    period = hook.repeats_after() * (1 + takes_turns)
    # Each optimizer has taken so many steps by then.
    begin = start * (1 + takes_turns) + 1
    end = begin + period
    assert after == end + 1
    for before_line in before:
        assert before_line[0] == 4
        # Each of several optimizers counts its own steps.
        at = f"{'about ' if takes_turns else ''}step {start} of 60 on"
        expected = f": as many bytes as plain DDP until step {start}; from {at}, ranks step alone"
        assert before_line[1].endswith(expected)
    (sent, dense, num), (sent_before, dense_before, num_before) = counted[end], counted[begin]
    ratio = f"{(dense - dense_before) / (sent - sent_before):.3g}x fewer bytes in steps {begin} to {end - 1}"
    often = "every" if num - num_before == 1 else f"{num - num_before} times in"
    assert line.endswith(
        f": from step {begin - 1} of 60 on, ranks step alone, and models are averaged {often} {period} steps; {ratio}"
    )
    # The same in every other period.
    for other in range(begin, 60 - period):
        assert counted[other + period][0] - counted[other][0] == pytest.approx(sent - sent_before)


ONE_NODE = {
    "post_localsgd": (
        lc.PostLocalSGD(period=4, start_localSGD_iter=6),
        ["all 2 ranks average gradients from step 0 of 40 on; as many bytes as plain DDP"],
        "",
    ),
    "late diloco": (
        lc.DiLoCo(period=4, start_localSGD_iter=6, pseudo_gradient="bf16"),
        [
            "as many bytes as plain DDP until step 6; from step 6 of 40 on, models are averaged too",
            "from step 6 of 40 on, all 2 ranks average gradients, and models are averaged every 4 steps; {} in steps 7 "
            "to 10",
        ],
        "1.12x",
    ),
}


def attach_texts(rank, world, hook):
    ddp = DistributedDataParallel(Params(SHAPES))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        attachment = lc.attach(ddp, hook, optimizers=[])
        for step in range(5):
            backward(ddp, full_rank_gradients(rank, step, SHAPES))
            attachment.tell_forecast(lambda _: None)
    attachment.close()
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("label", ONE_NODE)
def test_local_sgd_on_one_node(run, label):
    """Gradients go on being averaged over all ranks; what is told is what is sent, at every time of the run."""
    hook, expected, costs = ONE_NODE[label]
    lines, counted = run(local_steps, hook, False, 40)[0]
    (sent, dense, _), (sent_before, dense_before, _) = counted[-1], counted[-13]
    more = (sent - sent_before) / (dense - dense_before)
    assert [line.partition(": ")[2] for _, line in lines] == [
        text.format(f"{more:.3g}x as many bytes as plain DDP") for text in expected
    ]
    (text,), nothing = run(attach_texts, hook)  # once, also if the number of steps is unknown
    assert nothing == []
    assert "because all are on one node" in text
    assert "post_local_gradient_allreduce=False" in text
    assert ("and models besides, which sends about" in text) is bool(costs)
    assert f"{costs} as many bytes as plain DDP" in text or not costs


@pytest.mark.parametrize(
    "hook",
    [
        lc.DiLoCo(period=6, fragments=2, delay=2, pseudo_gradient="int4", **ALONE),
        lc.DiLoCo(period=6, eager=True, **ALONE),
    ],
    ids=["delay", "eager"],
)
def test_what_is_under_way_is_counted_once(run, hook):
    ((_, line),), counted = run(local_steps, hook, False, 40)[0]
    (sent, dense, _), (sent_before, dense_before, _) = counted[39], counted[15]
    assert f"; {(dense - dense_before) / (sent - sent_before):.3g}x fewer bytes in steps" in line


def test_bytes_of_averages_beside_those_of_gradients():
    assert lc.PostLocalSGD(period=4).bytes_of_averages(2) == 1 / 4
    hook = lc.HierarchicalLocalSGD(period_group_size_dict={2: 2, 8: None})
    assert hook.bytes_of_averages(4) == pytest.approx(3 / 8 * (1 / 2) / (3 / 4) + 1 / 8)
    assert lc.DiLoCo(period=10, pseudo_gradient="int8").bytes_of_averages(8) == 1 / 40


def test_subgroups_that_send_more_than_plain_ddp(run):
    hook = lc.PostLocalSGD(period=1, start_localSGD_iter=0, subgroup_size=2)
    (text,), *_ = run(attach_texts, hook, world=4)
    assert text.startswith("hook='post_localsgd' sends about 1.67x as many bytes as plain DDP: gradients are averaged")
    assert run(attach_texts, dataclasses.replace(hook, period=8), world=4)[0] == []


def test_local_steps_that_send_more_than_plain_ddp(run):
    """Every second step averages the model and both moments of Adam."""
    forecasts, _ = run(whole_run, lc.PostLocalSGD(period=2, optimizer_state="average", **ALONE), NUM_STEPS)[0]
    text = "training ends after 40 steps, and hook='post_localsgd' sends 1.5x as many bytes as plain DDP; average"
    assert forecasts[-1].warnings == (f"{text} models more seldom",)


def test_a_period_without_an_average_is_not_told_of(run):
    """An optimizer that steps after every third synchronized backward."""
    ((after, line),), counted = run(local_steps, lc.PostLocalSGD(period=4, **ALONE), False, 40, 3)[0]
    assert after == 14
    ratio = (counted[13][1] - counted[1][1]) / (counted[13][0] - counted[1][0])
    assert line.endswith(f"{ratio:.3g}x fewer bytes in steps 1 to 12")


WIDE = {"wide": (300, 500), "bias": (500,)}
NARROW = {"narrow": (3, 200), "square": (6, 6), "bias": (1000,)}
START = "start_powerSGD_iter"
AT_ONCE = {START: 0}


def told(rank, world, hook, num_steps, shapes, resumed_at=0, steps=5):
    """What is said after how many steps, what is warned of, and what when the hook is closed."""
    said = []
    with attached(hook, shapes) as (ddp, attachment):
        optimizer = zero_lr(ddp)
        attachment.add_optimizer(optimizer)
        if resumed_at:
            attachment.load_state_dict({**attachment.state_dict(), "steps": resumed_at})
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(resumed_at + 1, resumed_at + steps + 1):
                backward(ddp, full_rank_gradients(rank, step, shapes))
                optimizer.step()
                num_left = None if num_steps is None else num_steps - step
                attachment.tell_forecast(lambda line, step=step: said.append((step, line)), num_left)
        texts = [str(warning.message) for warning in caught]
        return said, texts, closing_texts(attachment)


POWERSGD = lc.PowerSGD(matrix_approximation_rank=4, start_powerSGD_iter=1000)
RANK_4 = "PowerSGD(matrix_approximation_rank=4): "
FROM_6 = "PowerSGD(matrix_approximation_rank=4, start_powerSGD_iter=6): "
PHASES = lc.Schedule({0: "allreduce", 6: "bf16", 12: dataclasses.replace(POWERSGD, **AT_ONCE)})
AGAIN = {0: "bf16", 6: "allreduce", 99: "bf16"}
NAME_OF_AGAIN = f"Schedule(hooks={AGAIN})"
GOOD = {
    "late": (
        (POWERSGD, 1200, WIDE),
        {3: f"{RANK_4}as many bytes as plain DDP until step 1,000; it compresses from step 1,000 of 1,200 on"},
    ),
    "resumed": (
        (POWERSGD, 1100, WIDE, 990, 15),
        {
            993: f"{RANK_4}as many bytes as plain DDP until step 1,000; it compresses from step 1,000 of 1,100 on",
            1003: f"{RANK_4}99.7% of the gradients are compressed from step 1,000 of 1,100 on; 40.7x fewer bytes then, "
            "8.83x over the rest of the run",
        },
    ),
    # (6 + 594 / 40.7) / 600 of the bytes of plain DDP.
    "early": (
        (dataclasses.replace(POWERSGD, start_powerSGD_iter=6), 600, WIDE, 0, 9),
        {
            3: f"{FROM_6}as many bytes as plain DDP until step 6; it compresses from step 6 of 600 on",
            9: f"{FROM_6}99.7% of the gradients are compressed from step 6 of 600 on; 40.7x fewer bytes then, "
            "29.1x over the run",
        },
    ),
    "no total": (
        (POWERSGD, None, WIDE, 990, 15),
        {
            993: f"{RANK_4}as many bytes as plain DDP until step 1,000; it compresses from step 1,000 on",
            1003: f"{RANK_4}99.7% of the gradients are compressed from step 1,000 on; 40.7x fewer bytes",
        },
    ),
    "at once": (
        ("bf16", 100, WIDE),
        {3: "'bf16': 100% of the gradients are compressed from step 0 of 100 on; 2x fewer bytes"},
    ),
    "alone": (
        (lc.PostLocalSGD(post_local_gradient_allreduce=False), 1000, WIDE),
        {
            4: "PostLocalSGD(post_local_gradient_allreduce=False): as many bytes as plain DDP until step 100; from "
            "step 100 of 1,000 on, ranks step alone"
        },
    ),
    "phases": (
        (PHASES, 20, WIDE, 0, 17),
        {
            3: "'schedule': as many bytes as plain DDP until step 6; it sends otherwise from step 6 of 20 on",
            9: "'schedule': 2x fewer bytes until step 12; it sends otherwise from step 12 of 20 on",
            15: "'schedule': 99.7% of the gradients are compressed from step 12 of 20 on; 40.7x fewer bytes then, "
            "2.17x over the run",
        },
    ),
    "last phase, not the first that compresses": (
        (lc.Schedule(AGAIN), 100, WIDE, 0, 10),
        {
            3: f"{NAME_OF_AGAIN}: 2x fewer bytes until step 6; it sends otherwise from step 6 of 100 on",
            9: f"{NAME_OF_AGAIN}: as many bytes as plain DDP until step 99; it sends otherwise from step 99 of 100 on",
        },
    ),
}


@pytest.mark.parametrize("label", GOOD)
def test_one_line_in_each_phase(run, label):
    arguments, expected = GOOD[label]
    (said, warned, _), others = run(told, *arguments)
    lines = {step: line.partition("; relative error")[0] for step, line in said}
    assert lines == {step: f"Forecast for communication hook {line}" for step, line in expected.items()}
    assert len(said) == len(expected)
    assert [text for text in warned if "Error feedback" not in text] == []
    assert others[:2] == ([], [])


NOTHING = {
    "beyond the end": (
        (lc.PowerSGD(), 200, WIDE),
        "training ends after 200 steps, and hook='powersgd' compresses from start_powerSGD_iter=1000 on; let it "
        "begin after about a tenth of training, 20: hook=PowerSGD(start_powerSGD_iter=20)",
    ),
    "just before the end": (
        (lc.PowerSGD(start_powerSGD_iter=195), 200, WIDE),
        "training ends after 200 steps, and hook='powersgd' compresses from start_powerSGD_iter=195 on; let it begin "
        "after about a tenth of training, 19: hook=PowerSGD(start_powerSGD_iter=19)",
    ),
    "last phase": (
        (lc.Schedule({0: "allreduce", 396: "bf16"}), 400, WIDE),
        "training ends after 400 steps, and hook='schedule' sends as many bytes as plain DDP until step 396; let its "
        "phases begin earlier",
    ),
    "min_bytes": (
        ("int8", None, {"first": (100, 100), "second": (100, 100)}),
        "hook='int8' compresses nothing, no bucket has min_bytes=131072 bytes of gradients with block_size=512 "
        "elements or more in two dimensions (compress_1d=False); the largest has 40000: lower min_bytes to that, or "
        "use hook='bf16'",
    ),
    "no matrix": (
        (lc.PowerSGD(start_powerSGD_iter=0, matrix_approximation_rank=8), None, NARROW),
        "hook='powersgd' compresses nothing, no gradient is a matrix that shrinks enough at "
        "matrix_approximation_rank=8; lower it to 1, or use hook='bf16'",
    ),
    "few matrices": (
        (lc.PowerSGD(start_powerSGD_iter=0), None, {"some": (30, 30), "bias": (100_000,)}),
        "hook='powersgd' compresses only 0.89%, few gradients are matrices that shrink enough at "
        "matrix_approximation_rank=1; lower min_compression_rate, or use hook='bf16'",
    ),
    "alone too late": (
        (lc.PostLocalSGD(post_local_gradient_allreduce=False), 50, WIDE),
        "training ends after 50 steps, and hook='post_localsgd' averages gradients over all ranks until "
        "start_localSGD_iter=100; let it begin after about a tenth of training, 5: "
        "hook=PostLocalSGD(start_localSGD_iter=5, post_local_gradient_allreduce=False)",
    ),
}


@pytest.mark.parametrize("label", NOTHING)
def test_a_warning_in_time_and_once(run, label):
    arguments, expected = NOTHING[label]
    (_, warned, closing), others = run(told, *arguments)
    assert warned == [expected]
    assert [text for text in closing if "ended while" not in text] == []
    assert others[:2] == ([], [])


def why_inactive(rank, world):
    shapes = {"first": (10, 10), "second": (1000,)}
    with attached("int8", shapes) as (ddp, attachment):
        backward(ddp, full_rank_gradients(rank, 0, shapes))
        return attachment.bound.inactive_reason(1)


def test_gradients_smaller_than_a_block(run):
    reason = (
        "hook='int8' compresses nothing, no bucket has min_bytes=131072 bytes of gradients with block_size=512 "
        "elements or more in two dimensions (compress_1d=False); lower block_size, or use hook='bf16'"
    )
    assert run(why_inactive) == [reason] * 2


def test_a_warning_is_not_repeated_after_a_change(run):
    late = lc.PowerSGD(start_powerSGD_iter=995, matrix_approximation_rank=8)  # and compresses nothing then
    (said, warned, closing), _ = run(told, late, 1000, NARROW, 990, 10)
    assert [step for step, _ in said] == [993, 998]
    assert len(warned) == 1
    assert "compresses from start_powerSGD_iter=995 on" in warned[0]
    assert closing == []


def test_a_hook_that_compresses_in_the_first_step_alone(run):
    """DDP has one bucket of both parameters then, and two buckets that are too small later."""
    (_, (text,), _), _ = run(told, lc.Int8(min_bytes=60_000), None, {"first": (100, 100), "second": (100, 100)})
    assert text == (
        "hook='int8' compresses nothing, no bucket has min_bytes=60000 bytes of gradients with block_size=512 elements "
        "or more in two dimensions (compress_1d=False); the largest has 40000: lower min_bytes to that, "
        "or use hook='bf16'"
    )


def low_rank(rank, world, hook, num_steps, steps, shapes):
    """The line and what is warned of, by the length of the run, of gradients of rank 3."""
    generator = torch.Generator().manual_seed(rank)
    said = []
    with attached(hook, shapes) as (ddp, attachment), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(steps):
            factors = {name: [torch.randn(size, 3, generator=generator) for size in shapes[name]] for name in shapes}
            backward(ddp, {name: left @ right.T for name, (left, right) in factors.items()})
            attachment.tell_forecast(said.append, None if num_steps is None else num_steps - step - 1)
        error = attachment.forecast(num_steps).relative_error
        sent = attachment.metrics()["bytes_sent"], attachment.metrics()["collectives"]
    return "".join(said[-1:]), [str(warning.message) for warning in caught], error, sent


RANK_4_FIX = "PowerSGD(matrix_approximation_rank=4, start_powerSGD_iter=4)"
SHORT = (
    (lc.PowerSGD(start_powerSGD_iter=4), " at rank 1", f", or at a higher rank: hook={RANK_4_FIX}"),
    (lc.Cast(lc.PowerSGD(start_powerSGD_iter=4)), " at rank 1", f", or at a higher rank: hook=Cast(hook={RANK_4_FIX})"),
    (lc.ChunkedTopK(k=8), "", ""),
)


@pytest.mark.parametrize(("hook", "at_rank", "higher"), SHORT, ids=["powersgd", "cast", "chunked_topk"])
def test_a_run_that_is_too_short_for_error_feedback(run, hook, at_rank, higher):
    shapes = {"wide": (64, 128)}
    mine, (_, nothing, *_) = run(low_rank, hook, 40, 9, shapes)
    line, (text,), error, _ = mine
    assert 0.5 < error < 1.1
    assert line.endswith(f"; relative error of a step{at_rank}: {error:.2g}, the rest is sent later")
    assert text.startswith(f"training ends after 40 steps, and hook={hook.name!r}{at_rank} averages gradients with a")
    assert text.endswith(f"is too short for that: it learns more with hook=Int8(min_bytes=0){higher}")
    assert nothing == []
    for num_steps in (1000, None):
        long_line, texts, *_ = run(low_rank, hook, num_steps, 9, shapes)[0]
        assert texts == [], "error feedback has time"
        assert "relative error of a step" in long_line


def test_no_error_is_told_of_where_there_is_next_to_none(run):
    for hook in (lc.PowerSGD(start_powerSGD_iter=4, matrix_approximation_rank=6), lc.Int8(min_bytes=0), "bf16"):
        line, texts, error, _ = run(low_rank, hook, 40, 9, {"wide": (64, 128)})[0]
        assert "relative error" not in line
        assert texts == []
        assert (error is None) is (hook == "bf16")


def test_the_sample_is_not_counted(run):
    """All steps send the same, but for the first ones, which a forecast samples."""
    once, more = (run(low_rank, lc.ChunkedTopK(k=8), 40, steps, {"wide": (64, 128)})[0][-1] for steps in (4, 8))
    assert more == tuple(2 * number for number in once)


def reset(rank, world):
    said = []
    with attached("bf16") as (ddp, attachment):
        for step in range(10):
            if step == 5:
                attachment.reset_state()
            backward(ddp, full_rank_gradients(rank, step, SHAPES))
            attachment.tell_forecast(lambda line, step=step: said.append((step + 1, line)), 9 - step)
    return said


def test_a_hook_that_begins_anew_is_told_of_anew(run):
    said, _ = run(reset)
    assert [(step, line.partition("compressed ")[2]) for step, line in said] == [
        (3, "from step 0 of 10 on; 2x fewer bytes"),
        (8, "from step 0 of 5 on; 2x fewer bytes"),
    ]


def test_what_a_late_hook_does_is_warned_of_when_it_was_measured(run):
    late = lc.PowerSGD(start_powerSGD_iter=5, matrix_approximation_rank=8)
    (said, (text,), closing), _ = run(told, late, 100, NARROW, 0, 9)
    assert [step for step, _ in said] == [3, 8]
    assert text.startswith("training ends after 100 steps, and hook='powersgd' compresses nothing, no gradient")
    assert closing == []


@pytest.mark.parametrize(
    ("hook", "why"),
    [
        (lc.PowerSGD(start_powerSGD_iter=20), "compresses from start_powerSGD_iter=20 on; let it begin"),
        (lc.PostLocalSGD(period=64, **ALONE), "has never averaged models, the first period of steps has not ended"),
    ],
)
def test_what_never_began_is_warned_of_at_the_end_of_a_run_of_unknown_length(run, hook, why):
    (_, warned, texts), _ = run(told, hook, None, WIDE, 0, FEWEST_STEPS)
    assert warned == []
    assert any(text.startswith(f"training ended after 10 steps, and hook={hook.name!r} {why}") for text in texts)
    (_, _, texts), _ = run(told, hook, None, WIDE, 0, FEWEST_STEPS - 1)
    assert not any("training ended after" in text for text in texts), "a trial"
    (_, _, texts), _ = run(told, hook, 12, WIDE, 0, FEWEST_STEPS)
    assert not any("training ended after" in text for text in texts), "fewer steps than were told"


def closed_after_a_resume(rank, world, resumes_at):
    """What is said at the end of a run of 21 steps, which resumed in another process."""
    state, texts = None, []
    for steps in (range(resumes_at), range(resumes_at, 21)):
        with attached(lc.PostLocalSGD(period=16, **ALONE), WIDE) as (ddp, attachment):
            optimizer = zero_lr(ddp)
            attachment.add_optimizer(optimizer)
            if state is not None:
                attachment.load_state_dict(state)
            for step in steps:
                backward(ddp, full_rank_gradients(rank, step, WIDE))
                optimizer.step()
            state = attachment.state_dict()
            texts = closing_texts(attachment)
    return [text for text in texts if "has never averaged" in text]


def test_averages_before_a_resume_count(run):
    assert run(closed_after_a_resume, 17)[0] == []


def test_moves_of_models_that_are_sent_as_they_are(run):
    hook = lc.DiLoCo(period=2, pseudo_gradient=lc.Int8(block_size=2**20), **ALONE)
    (_, (text,), _), _ = run(told, hook, 1000, WIDE, 0, 9)
    why = "hook='diloco' sends pseudo-gradients as they are: hook='int8' compresses nothing, no bucket has min_bytes"
    assert text.startswith(f"training ends after 1,000 steps, and {why}")


def test_nothing_is_said_of_less_than_a_period(run):
    (said, warned, _), _ = run(told, lc.PostLocalSGD(period=8, **ALONE), 1000, WIDE, 0, 9)
    assert (said, warned) == ([], [])


def no_forecast(rank, world):
    results = []
    for hook in (default_hooks.allreduce_hook, lc.Auto()):
        with attached(hook) as (ddp, attachment):
            for step in range(4):
                backward(ddp, full_rank_gradients(rank, step, SHAPES))
                attachment.tell_forecast(results.append, 10)
            results.append(attachment.forecast(10))
            backward(ddp, full_rank_gradients(rank, 4, SHAPES))
    alone = [dist.new_group([each]) for each in range(world)][rank]
    with attached("bf16", process_group=alone) as (ddp, attachment):
        for step in range(4):
            backward(ddp, full_rank_gradients(rank, step, SHAPES))
        results.append(attachment.forecast(10))
    dist.destroy_process_group(alone)
    return results


def test_no_forecast_is_no_error(run):
    assert run(no_forecast) == [[None] * 3] * 2


def refused(rank, world):
    with attached("bf16") as (_, attachment), pytest.raises(ValueError, match="num_steps must be an integer of at"):
        attachment.forecast(0)


def test_number_of_steps_is_checked(run):
    run(refused)


@contextlib.contextmanager
def begun(hook, num_steps):
    ddp = DistributedDataParallel(Params(WIDE))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of training that ends early
        attachment = lc.attach(ddp, hook, num_steps=num_steps, optimizers=[])
        yield ddp, attachment
        attachment.close()


def starts(rank, world):
    """The step at which a hook begins, by the length that was told, in a run that goes on, and as one is refused."""
    found = {}
    for label, hook, num_steps in (
        ("name", "powersgd", 40),
        ("long", "powersgd", 40_000),
        ("auto", lc.PowerSGD(start_powerSGD_iter="auto"), 40),
        ("class", lc.PowerSGD(), 40),
        ("local", "post_localsgd", 40 + 20 * rank),
        ("fraction", lc.Cast(lc.PowerSGD(start_powerSGD_iter=0.25), "bf16"), 12),
        ("schedule", lc.Schedule({0: "bf16", 1: "powersgd"}), 30),
        ("unknown", "powersgd", None),
    ):
        with begun(hook, num_steps) as (ddp, attachment):
            backward(ddp, full_rank_gradients(rank, 0, WIDE))
            found[label] = [start for *_, start in late_starts(attachment.hook)]
    fraction = lc.PowerSGD(start_powerSGD_iter=0.25)
    with begun(fraction, 12) as (ddp, attachment):
        for step in range(2):
            backward(ddp, full_rank_gradients(rank, step, WIDE))
        state = attachment.state_dict()
    for label, hook, num_steps in (("goes on", fraction, 400), ("by name", "powersgd", None)):
        with begun(hook, num_steps) as (ddp, attachment):
            attachment.load_state_dict(state)
            numel = []
            for step in range(2, 5):
                backward(ddp, full_rank_gradients(rank, step, WIDE))
                numel.append(attachment.metrics()["numel_compressed"])
            found[label] = [start for *_, start in late_starts(attachment.hook)], [one > 0 for one in numel]
    message = r"PowerSGD\(start_powerSGD_iter=0.25\) is a fraction of the run, and .*num_steps=1000 next to hook="
    with begun(fraction, None) as (ddp, _), pytest.raises(lc.HookError, match=message):
        backward(ddp, full_rank_gradients(rank, 0, WIDE))
    return found


def saved_by_name(rank, world):
    with begun("powersgd", None) as (ddp, attachment):
        backward(ddp, full_rank_gradients(rank, 0, WIDE))
        file = io.BytesIO()
        torch.save(attachment.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)["hook"]["options"][START]


def test_the_state_of_a_hook_by_name_is_of_primitives(run):
    assert run(saved_by_name) == ["auto", "auto"]


def test_start_by_the_length_of_the_run(run):
    for found in run(starts):
        assert found == {
            "name": [4],
            "long": [1000],
            "auto": [4],
            "class": [1000],
            "local": [4],
            "fraction": [3],
            "schedule": [3],
            "unknown": ["auto"],
            "goes on": ([3], [False, True, True]),
            "by name": ([1], [True, True, True]),
        }


@pytest.mark.parametrize("start", [0.0, 1.0, 1.5, -0.1, -1, True, "0.1"])
def test_bad_starts(start):
    with pytest.raises(ValueError, match="start_powerSGD_iter must be"):
        lc.PowerSGD(start_powerSGD_iter=start)


def two_models(rank, world):
    said = []
    with begun("bf16", None) as (first, one), begun("int8", None) as (second, other):
        for step in range(5):
            for ddp, attachment in ((first, one), (second, other)):
                attachment.tell_forecast(said.append)
                backward(ddp, full_rank_gradients(rank, step, WIDE))
    with begun("bf16", None) as (ddp, attachment):
        for step in range(5):
            attachment.tell_forecast(said.append)
            backward(ddp, full_rank_gradients(rank, step, WIDE))
    return [line.partition(":")[0] for line in said]


def test_of_two_models_it_says_which(run):
    said, _ = run(two_models)
    told = "Forecast for communication hook"
    assert said == [f"{told} 'bf16' of Params", f"{told} 'int8' of Params", f"{told} 'bf16'"]


def rewound(rank, world):
    with attached(lc.PowerSGD(), WIDE) as (ddp, attachment):
        state = attachment.state_dict()
        for step in range(9):
            backward(ddp, full_rank_gradients(rank, step, WIDE))
        attachment.load_state_dict(state)
        backward(ddp, full_rank_gradients(rank, 2, WIDE))
        return closing_texts(attachment), sum(attachment.steps_not_compressed().values())


def test_steps_after_a_state_was_loaded_are_told_apart(run):
    ((text,), not_compressed), _ = run(rewound)
    assert text.startswith("training ended after 1 step (10 in this process), and hook='powersgd' compresses")
    assert not_compressed == 10


COMPRESSING = {
    "int8": lc.Int8(min_bytes=0, block_size=64),
    "powersgd": lc.PowerSGD(start_powerSGD_iter=8),
    "schedule": lc.Schedule({0: "allreduce", 8: lc.Int8(min_bytes=0, block_size=64)}),
    "diloco": lc.DiLoCo(period=4, pseudo_gradient=lc.Int8(min_bytes=0, block_size=64), **ALONE),
}


def loaded_at_the_end(rank, world, hook):
    """What is said at the end where an earlier state was loaded after training: the best model's, say."""
    shapes = {"wide": (64, 128), "bias": (500,)}
    with attached(hook, shapes) as (ddp, attachment):
        optimizer = zero_lr(ddp)
        attachment.add_optimizer(optimizer)
        for step in range(12):
            backward(ddp, full_rank_gradients(rank, step, shapes))
            optimizer.step()
            if step == 1:
                state = attachment.state_dict()
        attachment.load_state_dict(state)
        texts = closing_texts(attachment)
        return [text for text in texts if "ended while" not in text], attachment.metrics()["compression_ratio"]


@pytest.mark.parametrize("label", COMPRESSING)
def test_a_state_that_is_loaded_at_the_end_says_nothing_of_what_was_sent(run, label):
    for texts, ratio in run(loaded_at_the_end, COMPRESSING[label]):
        assert ratio > 1.2
        assert texts == []


def ends(rank, world, how):
    """What is said of a late hook at the end of 12 steps that ended in one way or another."""
    num_steps = {"as many as told": 12, "a few less": 13, "many less": 40, "stopped by a rule": 40}.get(how)
    with attached(POWERSGD, WIDE) as (ddp, attachment):
        if num_steps is not None:
            attachment.tell_forecast(num_left=num_steps)
        for step in range(12):
            backward(ddp, full_rank_gradients(rank, step, WIDE))
        if how == "stopped by a rule":
            attachment.note_end(as_planned=True)
        if how == "a trial":
            attachment.note_end(as_planned=False)
        try:
            if how in ("error", "interrupt"):
                raise ValueError if how == "error" else KeyboardInterrupt
        except (ValueError, KeyboardInterrupt):
            return closing_texts(attachment)
        return closing_texts(attachment)


@pytest.mark.parametrize("how", ["unknown", "as many as told", "a few less", "stopped by a rule"])
def test_the_end_of_training_gives_advice(run, how):
    (text,), others = run(ends, how)
    assert text.startswith(
        "training ended after 12 steps, and hook='powersgd' compresses from start_powerSGD_iter=1000"
    )
    assert others == []


@pytest.mark.parametrize("how", ["many less", "a trial", "error", "interrupt"])
def test_training_that_broke_off_gives_none(run, how):
    assert run(ends, how) == [[], []]


def test_a_trial_is_warned_of_what_does_not_depend_on_its_length_alone(run):
    (_, warned, closing), _ = run(told, lc.PowerSGD(), 5, WIDE)
    assert (warned, closing) == ([], [])
    (_, (text,), closing), _ = run(told, "int8", 5, {"first": (100, 100)})
    assert text.startswith("training ends after 5 steps, and hook='int8' compresses nothing, no bucket")
    assert closing == []
