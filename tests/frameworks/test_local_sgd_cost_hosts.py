"""What Lightning, Accelerate and transformers' `Trainer` send to evaluate and to save while ranks step alone."""

import functools
import itertools

import pytest
import torch
from forks import FOLDER
from torchrun import run_twice

ADAM = 2  # moments of each parameter


def ring(numel):
    return 8 * numel  # of two ranks, double precision


# Lightning --------------------------------------------------------------------------------------------------

STEPS, PERIOD = 12, 4
LIGHTNING = 6 * 8 + 8 + 2 * 8 + 8 * 3 + 3
STATISTICS = 2 * 8
NAMES = ("post", "averaged")


@functools.cache
def lightning(folder):
    pytest.importorskip("lightning")
    from test_lightning import launch

    return launch(folder, "costs", runner=FOLDER / "local_sgd_lightning_runner.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("costs")


def by_step(rows):
    """Bytes of training, of evaluation and given to PyTorch's collectives, by step; after the last one apart."""
    sums = {step: [0.0, 0.0, 0.0] for step in (*range(STEPS + 1), "end")}
    for (place, _, *before), (_, later, *after) in itertools.pairwise(rows):
        key = "end" if place == "end" else later
        sums[key] = [total + b - a for total, a, b in zip(sums[key], before, after, strict=True)]
    return sums


@pytest.mark.parametrize("resync", [False, True], ids=["back", "resync"])
@pytest.mark.parametrize("every", [3, 4])
@pytest.mark.parametrize("name", NAMES)
def test_what_lightning_sends_to_save_and_to_validate(folder, name, every, resync):
    costs = by_step(lightning(folder)(f"{name}-{every}-{resync}-costs")["costs"])
    whole = ring(LIGHTNING + STATISTICS)
    state = ring(ADAM * LIGHTNING)
    agreed = 500
    for step in range(1, STEPS + 1):
        training, evaluation, measured = costs[step]
        is_period = step % PERIOD == 0
        assert training == ((whole + (state if name == "averaged" else 0)) if is_period else 0), step
        # Saved; validated, and saved within that. What the method has just averaged is not sent.
        of_model = 0 if is_period else whole
        of_state = 0 if is_period and name == "averaged" else state
        times = 1 if resync else 2
        at_the_end = of_state if step == STEPS and not resync else 0
        assert evaluation == (times * (of_model + of_state) if step % every == 0 else 0) + at_the_end, step
        # Besides, ranks agree on a few numbers, and Lightning on when to stop.
        assert training + evaluation <= measured <= training + evaluation + agreed, step
    assert costs["end"][:2] == [0, 0]
    assert costs["end"][2] <= agreed


def test_lightning_is_counted_alike_on_all_ranks(folder):
    results = lightning(folder)
    for label in (f"{name}-{every}-False" for name in NAMES for every in (3, 4)):
        assert results(f"{label}-costs")["costs"] == results(f"{label}-costs", 1)["costs"]
        assert results(label)["params"] == results(label, 1)["params"]


# Accelerate and transformers --------------------------------------------------------------------------------


@functools.cache
def runs(part, folder):
    own = folder / part
    own.mkdir()
    run_twice("local_sgd_accelerate_runner.py", own, part)
    return [torch.load(own / f"{part}.{rank}.pt") for rank in range(2)]


MODEL = 6 * 8 + 8 + 8 * 3 + 3


@pytest.mark.parametrize("resync", [False, True], ids=["back", "resync"])
@pytest.mark.parametrize("steps", [6, 8], ids=["between", "period"])
@pytest.mark.parametrize("name", ["post_localsgd", "averaged"])
def test_what_accelerate_sends_to_save_and_to_evaluate(folder, name, steps, resync):
    state = ring(ADAM * MODEL)
    is_period = steps % PERIOD == 0
    of_model = 0 if is_period else ring(MODEL)
    of_state = 0 if is_period and name == "averaged" else state
    for rank in runs("accelerator", folder):
        result = rank[name, steps, resync]
        (_, *trained), *costs = result["costs"]
        assert trained[1] == 0
        assert all(training == 0 for _, training, _ in costs)
        both = of_model + of_state
        expected = [("evaluate", of_model), ("save", both), ("save", both), ("barrier", of_model)]
        expected += [("evaluate", of_model), ("save", both), ("save", both), ("evaluate", of_model), ("end", of_model)]
        if resync:
            expected = [(what, {0: of_model, 1: of_state}.get(i, 0)) for i, (what, _) in enumerate(expected)]
        assert [(what, evaluation) for what, _, evaluation in costs] == expected
        assert result["back"] == (is_period or not resync)


@pytest.mark.parametrize("every", [3, 4])
@pytest.mark.parametrize("name", ["post_localsgd", "averaged"])
def test_what_transformers_trainer_sends_to_evaluate_and_to_save(folder, name, every):
    pytest.importorskip("transformers")
    results = [rank["trainer", name, every] for rank in runs("trainer", folder)]
    assert all(torch.equal(p, results[1]["parameters"][n]) for n, p in results[0]["parameters"].items())
    for result in results:
        size, costs = result["size"], {what: sent for what, *sent in result["costs"]}
        model = ring(size + result["buffers"])
        state = ring(ADAM * size)
        for step in range(1, STEPS + 1):
            training, evaluation = costs[f"train {step}"]
            assert evaluation == 0
            assert training == (model + (state if name == "averaged" else 0) if step % PERIOD == 0 else 0)
            if step % every == 0:
                of_model = 0 if step % PERIOD == 0 else model
                of_state = 0 if step % PERIOD == 0 and name == "averaged" else state
                assert costs[f"evaluate and save {step}"] == [0, of_model + of_state]
        assert costs["end 12"] == [0, 0]
