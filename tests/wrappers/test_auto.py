"""`hook="auto"`: what it chooses, that all ranks choose the same, and that nothing is lost on the way."""

import contextlib
import io
import itertools
import logging
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from driver import (
    SHAPES,
    attached,
    backward,
    closing_texts,
    distance,
    full_rank_gradients,
    mean_gradients,
    mean_residuals,
    norm,
    same,
)
from pool import WorkerError
from torch.nn.parallel import DistributedDataParallel

import lightning_commhooks as lc
from lightning_commhooks.collectives.counters import Timing

INT8 = lc.Int8(min_bytes=0, block_size=128)
INT4 = lc.Int4(min_bytes=0, compress_1d=True)
POWERSGD = lc.PowerSGD(start_powerSGD_iter=0, matrix_approximation_rank=2)
# 5 + 3 + 2 * (3 + 3) steps.
QUICK = {"warmup_steps": 2, "timed_steps": 3}
CANDIDATES = ["bf16", INT8, INT4]
NUM_STEPS = 2 + 3 + 3 * (3 + 3)


class Link(Timing):
    """A clock by which steps take 10 ms and what they send takes its time, and nothing else does."""

    def __init__(self, counters, ms_per_kb):
        super().__init__()
        self._counters = counters
        self._seconds_per_byte = ms_per_kb * 1e-6

    def now(self):
        return self._counters.steps * 0.01 + self._counters.bytes_sent * self._seconds_per_byte


def set_link(attachment, ms_per_kb):
    counters = attachment.bound.group.counters
    counters.timing = Link(counters, ms_per_kb)


def choose(rank, world, hook, ms_per_kb, steps=NUM_STEPS + 2, saved=None, bad_step=None):
    """What happens in training: `(chosen, means of all steps, state, what was said, metrics)`."""
    said = io.StringIO()
    with attached(hook, exact_state=True) as (ddp, attachment), contextlib.redirect_stderr(said):
        set_link(attachment, ms_per_kb if isinstance(ms_per_kb, float) else ms_per_kb[rank])
        if saved is not None:
            attachment.load_state_dict(saved)
        means = []
        for step in range(steps):
            gradients = full_rank_gradients(rank, step, SHAPES)
            if step == bad_step and rank == 0:
                gradients["first"][0, 0] = float("inf")
            means.append(backward(ddp, gradients))
        state = attachment.state_dict()
        return getattr(attachment.bound, "chosen", None), means, state, said.getvalue(), attachment.metrics()


@pytest.mark.parametrize(
    ("ms_per_kb", "options", "expected"),
    [
        (1.0, {}, INT4),
        (1.0, {"max_error": 0.05}, INT8),
        (1.0, {"max_error": 1e-6}, lc.AllReduce()),
        (0.0, {}, lc.AllReduce()),
        # The gain is 4% of a step.
        (0.4 / 38, {}, lc.AllReduce()),
        (0.4 / 38, {"min_gain": 0.01}, INT4),
    ],
)
def test_chooses_by_time_and_error(run, ms_per_kb, options, expected):
    hook = lc.Auto(candidates=CANDIDATES, **QUICK, **options)
    for rank, (chosen, _, _, said, _) in enumerate(run(choose, hook, ms_per_kb)):
        assert chosen == expected
        assert bool(said) == (rank == 0)
        if rank == 0:
            assert said.startswith(f"hook='auto' chose {type(expected).__name__}".replace("AllReduce", "allreduce"))
            assert all(name in said for name in ("allreduce", "bf16", "Int8(min_bytes=0", "Int4("))
            assert ("does not pay here" in said) == (expected == lc.AllReduce())


def test_ranks_with_other_clocks_choose_the_same(run):
    hook = lc.Auto(candidates=CANDIDATES, **QUICK)
    chosen = {result[0] for result in run(choose, hook, [0.0, 1.0])}
    assert chosen == {INT4}


def test_afterwards_it_is_the_chosen_hook(run):
    hook = lc.Auto(candidates=["fp16", "bf16"], **QUICK, max_error=0.0012)
    steps = 2 + 3 + 2 * (3 + 3) + 2
    chosen, means, _, _, metrics = run(choose, hook, 1.0, steps)[0]
    assert chosen == lc.FP16()
    _, expected, _, _, _ = run(choose, "fp16", 1.0, steps)[0]
    assert all(same(a, b) for a, b in zip(means[-2:], expected[-2:], strict=True))
    assert metrics["numel_uncompressed"] == 5 * sum(torch.Size(shape).numel() for shape in SHAPES.values())


def total(steps):
    return {name: sum(step[name].double() for step in steps) for name in SHAPES}


@pytest.mark.parametrize(("hook", "world"), [(INT8, 4), (POWERSGD, 2)], ids=["int8", "powersgd"])
@pytest.mark.parametrize("ms_per_kb", [0.0, 1.0])
def test_nothing_is_lost_on_the_way(run, world, hook, ms_per_kb):
    """Averaged gradients of all steps and what is owed are the sum of the exact means."""
    auto = lc.Auto(candidates=[hook, INT4, "allreduce"], **QUICK, max_error=10.0)
    results = run(choose, auto, ms_per_kb, world=world)
    exact = total([mean_gradients(full_rank_gradients, world, step, SHAPES) for step in range(NUM_STEPS + 2)])
    chosen, means, state, _, _ = results[0]
    paid, owed = total(means), mean_residuals(state, SHAPES)
    assert distance({name: paid[name] + owed[name] for name in SHAPES}, exact) < 1e-4 * norm(exact)
    assert (norm(owed) > 0) == (chosen != lc.AllReduce())
    assert all(same(a, b) for a, b in zip(means, results[1][1], strict=True))
    saved = state["hook"]["state"]["hooks"]
    for key, phase in saved.items():
        is_chosen = phase["name"] == chosen.name and key != "0"
        assert bool(phase["state"].get("entries")) == (is_chosen and chosen != lc.AllReduce()), (
            "memory of others is freed"
        )


def test_a_resumed_run_keeps_to_the_choice(run):
    hook = lc.Auto(candidates=CANDIDATES, **QUICK)
    _, _, state, _, _ = run(choose, hook, 1.0)[0]
    # The link is fast now: measuring again would choose otherwise.
    for chosen, _, _, said, _ in run(choose, hook, 0.0, NUM_STEPS + 2, state):
        assert chosen == INT4
        assert said == ""


def test_a_run_that_is_resumed_while_measuring_measures_again(run):
    hook = lc.Auto(candidates=CANDIDATES, **QUICK)
    chosen, _, state, said, _ = run(choose, hook, 1.0, NUM_STEPS - 4)[0]
    assert chosen is None
    assert said == ""
    chosen, _, _, _, _ = run(choose, hook, 1.0, NUM_STEPS - 1, state)[0]
    assert chosen is None
    chosen, _, _, _, _ = run(choose, hook, 1.0, NUM_STEPS + 1, state)[0]
    assert chosen == INT4


def test_a_choice_that_is_no_candidate_any_more(run):
    _, _, state, _, _ = run(choose, lc.Auto(candidates=CANDIDATES, **QUICK), 1.0)[0]
    with pytest.raises(WorkerError, match=r"has chosen .*int4.* not a candidate now"):
        run(choose, lc.Auto(candidates=["bf16", INT8], **QUICK), 1.0, 1, state)


@pytest.mark.parametrize("bad_step", [0, 3, 7, 13, NUM_STEPS])
def test_a_step_with_inf_while_measuring(run, bad_step):
    hook = lc.Auto(candidates=[INT8, INT4], **QUICK)
    for chosen, means, _, _, _ in run(choose, hook, 1.0, NUM_STEPS + 2, None, bad_step):
        assert chosen == INT4
        assert means[bad_step]["first"].isnan().all()
        assert not any(mean["first"].isnan().any() for step, mean in enumerate(means) if step != bad_step)


def scaled(rank, world):
    with attached(lc.ScaleByGradAccumulation(lc.Auto(candidates=["bf16"], **QUICK), 4)) as (ddp, attachment):
        set_link(attachment, 1.0)
        with contextlib.redirect_stderr(io.StringIO()):
            means = [backward(ddp, full_rank_gradients(rank, step, SHAPES)) for step in range(12)]
        return attachment.bound.chosen, means[-1]


def test_with_accumulation(run):
    exact = {name: g / 4 for name, g in mean_gradients(full_rank_gradients, 2, 11, SHAPES).items()}
    for chosen, means in run(scaled):
        assert chosen == lc.BF16()
        assert distance(means, exact) < 5e-3 * norm(exact)


def said_to_loggers(rank, world):
    logger, records = logging.getLogger("lightning_commhooks"), []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage().split(":")[0])
    logger.addHandler(handler)
    texts = []
    try:
        for level in (logging.INFO, logging.WARNING):
            logger.setLevel(level)
            texts.append(choose(rank, world, lc.Auto(candidates=["bf16"], **QUICK), 1.0, 12)[3])
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    return records, texts


def test_what_is_said_goes_to_the_log_if_there_is_one(run):
    (records, texts), (others, _) = run(said_to_loggers)
    assert [record for record in records if "chose" in record] == ["hook='auto' chose bf16"], "not at level WARNING"
    assert texts == ["", ""]
    assert not any("chose" in record for record in others)


def warned_early(rank, world):
    ddp = DistributedDataParallel(torch.nn.Linear(4, 4))
    attachment = lc.attach(ddp, "auto")
    for _ in range(10):
        ddp(torch.ones(1, 4)).sum().backward()
    return closing_texts(attachment)


def test_ending_before_the_choice_is_said(run):
    (text,), others = run(warned_early)
    assert "ended after 10 steps, and hook='auto' has not chosen: measuring takes 47 steps; use" in text
    assert others == []


@dataclass(frozen=True)
class TheirLocalSGD(lc.CommHook):
    name = "their_local_sgd"

    def bind(self, group):
        return lc.PostLocalSGD(start_localSGD_iter=0).bind(group)


def averages(rank, world):
    hook = lc.Auto(candidates=[TheirLocalSGD()])
    refused = pytest.raises(ValueError, match="candidate 'their_local_sgd' averages models instead of gradients")
    with refused, attached(hook):
        pass


def test_candidates_that_average_models_are_refused(run):
    run(averages)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"candidates": []}, r"candidates must be a list of at least one hook, got \[\]"),
        ({"candidates": "bf16"}, "candidates must be a list of at least one hook, got 'bf16'"),
        ({"candidates": [lc.Int8]}, r"candidates: .* did you mean Int8\(\)"),
        ({"candidates": ["diloco"]}, "candidates: 'diloco' averages models instead of gradients"),
        ({"candidates": [lc.Cast(lc.PostLocalSGD())]}, "candidates: 'cast' averages models instead of gradients"),
        ({"candidates": ["bf61"]}, "candidates: unknown hook 'bf61'; did you mean 'bf16'"),
        ({"candidates": 5}, "candidates must be a list of at least one hook, got 5"),
        ({"candidates": ["bf16", lc.BF16()]}, "'bf16' is listed twice"),
        ({"candidates": ["noop"]}, "'noop' does not average, so the models of the ranks would diverge"),
        ({"candidates": [lc.PerParameter({"*": lc.Cast("powersgd", "bf16")})]}, "compresses from start_powerSGD_iter"),
        ({"candidates": ["auto"]}, "Auto cannot be inside another hook"),
        ({"candidates": [lc.PowerSGD()]}, "'powersgd' compresses from start_powerSGD_iter=1000 on only.* set start_"),
        ({"candidates": [lc.Cast("powersgd", "bf16")]}, "compresses from start_powerSGD_iter='auto' on only"),
        ({"max_error": 0}, "max_error must be above 0, got 0"),
        ({"min_gain": 1.0}, r"min_gain must be in \[0, 1\), got 1.0"),
        ({"warmup_steps": -1}, "warmup_steps must be an integer of at least 0, got -1"),
        ({"timed_steps": 0}, "timed_steps must be an integer of at least 1, got 0"),
    ],
)
def test_wrong_options(options, match):
    with pytest.raises(ValueError, match=match):
        lc.Auto(**options)


def test_names_of_candidates_begin_at_once():
    assert lc.Auto(candidates=["powersgd"]).candidates == (lc.PowerSGD(start_powerSGD_iter=0),)
    assert lc.get_hook("auto") == lc.Auto()
    assert hash(lc.Auto()) == hash(lc.Auto())


def one_is_never_used(rank, world):
    with attached(lc.Auto(candidates=[INT8, INT4], **QUICK), find_unused_parameters=True) as (ddp, attachment):
        set_link(attachment, 1.0)
        collectives = []
        with contextlib.redirect_stderr(io.StringIO()):
            for step in range(2 + 3 + 2 * (3 + 3) + 3):
                gradients = full_rank_gradients(rank, step, SHAPES)
                del gradients["third"]
                if step < 8 or step % 2:  # used again when another hook has its turn
                    del gradients["conv"]
                backward(ddp, gradients)
                collectives.append(attachment.metrics()["collectives"])
        owed = {key: list(phase.residuals()) for key, phase in attachment.bound._phases.items()}
        return attachment.bound.chosen, [b - a for a, b in itertools.pairwise(collectives)], owed


def test_a_parameter_that_is_never_used_is_not_waited_for(run):
    for chosen, collectives, owed in run(one_is_never_used):
        assert chosen == INT4
        assert collectives[-1] == collectives[-2]
        assert {key for key, tensors in owed.items() if tensors} == {2}, "memory of others is freed"


def alone(rank, world):
    own = dist.new_group([rank], use_local_synchronization=True)
    with attached("auto", process_group=own) as (ddp, attachment):
        backward(ddp, full_rank_gradients(rank, 0, SHAPES))
        chosen = attachment.bound.chosen
    dist.destroy_process_group(own)
    return chosen


def test_one_rank_has_nothing_to_choose(run):
    assert run(alone) == [lc.AllReduce()] * 2


def no_inf_elsewhere(rank, world):
    """Of plain averaging, chosen or not, one inf leaves the rest of the step as it is."""
    with attached(lc.Auto(candidates=[INT8], **QUICK)) as (ddp, attachment), contextlib.redirect_stderr(io.StringIO()):
        set_link(attachment, 0.0)
        for step in range(16):
            gradients = full_rank_gradients(rank, step, SHAPES)
            if step == 15 and rank == 0:
                gradients["first"][0, 0] = float("inf")
            means = backward(ddp, gradients)
        return sum(int(mean.isfinite().logical_not().sum()) for mean in means.values())


def test_a_chosen_hook_without_memory_costs_no_more_than_by_itself(run):
    assert run(no_inf_elsewhere) == [1, 1]
