"""What a `Trainer` says of its run after the first steps, in two processes; see forecast_lightning_runner.py."""

import functools

import pytest

pytest.importorskip("lightning")

from forks import FOLDER
from test_lightning import launch as launch_runner

launch = functools.partial(launch_runner, runner=FOLDER / "forecast_lightning_runner.py")
POWERSGD = "Forecast for communication hook PowerSGD(matrix_approximation_rank=2, start_powerSGD_iter=4): "


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return launch(tmp_path_factory.mktemp("forecast"), "good", "steps", "shorter", "trials", "bar", "fabric")


def said(results, label):
    """The lines; what was warned of."""
    other = results(f"{label}-said", 1)
    assert other["lines"] == other["warned"] == [], "rank 0 speaks"
    result = results(f"{label}-said")
    (after, _), *_ = result["lines"]
    assert 3 <= after <= 4
    lines = [line.partition("; relative error")[0] for _, line in result["lines"]]
    return lines, [text for text in result["warned"] if "Error feedback" not in text]


@pytest.mark.parametrize(
    ("label", "when"),
    [
        ("good", "from step 4 of 8 on; 4.12x fewer bytes then, 1.61x over the run"),
        ("max_steps", "from step 4 of 6 on"),
        ("accumulated", "from step 4 of 8 on; 4.12x fewer bytes then, 1.61x over the run"),
        ("unknown", "from step 4 on; 4.12x fewer bytes"),
    ],
)
def test_one_line_and_one_when_it_compresses(results, label, when):
    (first, *others), warned = said(results, label)
    begins, ratio, _ = when.partition(";")
    assert first == f"{POWERSGD}as many bytes as plain DDP until step 4; it compresses {begins}"
    assert bool(others) == bool(ratio)
    for line in others:
        assert line.startswith(POWERSGD)
        assert line.endswith(f"% of the gradients are compressed {when}")
    assert warned == []


def test_start_by_the_length_of_the_run(results):
    lines, warned = said(results, "name")
    assert lines[-1].startswith("Forecast for communication hook PowerSGD(start_powerSGD_iter=4): ")
    assert "compressed from step 4 of 40 on; " in lines[-1] or "it compresses from step 4 of 40 on" in lines[-1]
    assert warned == []


def test_the_line_is_true(results):
    for label in ("good", "accumulated"):
        assert results(f"{label}-said")["metrics"]["compression_ratio"] == pytest.approx(1.61, abs=0.005)


def test_several_fits_and_a_resumed_one(results):
    again, warned = said(results, "again")
    assert again == said(results, "good")[0], "a hook begins anew in each fit"
    assert warned == []
    (resumed,), warned = said(results, "resumed")
    assert resumed.endswith("compressed from step 8 of 20 on; 4.12x fewer bytes")
    assert warned == []


def test_manual_optimization_is_told_without_an_end(results):
    (first, second), warned = said(results, "two-optimizers")
    assert first.endswith("until step 4; it compresses from step 4 on")
    assert "compressed from step 4 on; " in second
    assert warned == []


def test_shorter_than_told(results):
    (line,), (warned,) = said(results, "shorter")
    assert line.endswith("it compresses from step 20 of 80 on")
    assert warned.startswith(
        "training ended after 12 steps, and hook='powersgd' compresses from start_powerSGD_iter=20"
    )


@pytest.mark.parametrize("label", ["fast", "broken"])
def test_no_advice_where_training_was_a_trial_or_broke_off(results, label):
    assert results(f"{label}-said")["warned"] == []


def test_above_a_progress_bar(results):
    lines, (closing,) = results("shown")["shown"], results("shown")["closing"]
    assert len(lines) == 2
    assert closing.startswith("Communication hook 'powersgd': ")
    assert all(line.startswith(POWERSGD) for line in lines)
    assert results("bar-said")["lines"] == results("shown", 1)["shown"] == results("shown", 1)["closing"] == []


def test_fabric_warns(results):
    texts = results("fabric")["texts"]
    assert [len(each) for each in texts] == [0, 0, 0, 1, 0]
    assert texts[3][0].startswith("hook='int8' compresses nothing")
    assert results("fabric")["closing"] == []
    assert results("fabric", 1)["texts"] == [[]] * 5
