"""What Accelerate and a `transformers.Trainer` say of a run after its first steps; see the runner."""

import json

import pytest
from torchrun import run_twice

pytest.importorskip("transformers")

POWERSGD = "Forecast for communication hook PowerSGD(start_powerSGD_iter=4, min_compression_rate=1): "


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("forecast")
    run_twice("forecast_accelerate_runner.py", folder, PYTHONWARNINGS="ignore")
    mine, other = (json.loads((folder / f"{rank}.json").read_text()) for rank in range(2))
    for result in other.values():
        assert isinstance(result, str) or (result["lines"], result["warned"]) == ([], []), "rank 0 speaks"
    return mine


@pytest.mark.parametrize(
    ("label", "when"),
    [
        ("trainer", "from step 4 of 12 on"),
        ("resumed", "from step 6 of 16 on"),
        ("epochs", "from step 4 of 19 on"),
        ("tracker", "from step 4 of 8 on"),
        ("accumulated", "from step 4 of 8 on"),
        ("unknown", "from step 4 on"),
    ],
)
def test_one_line_and_one_when_it_compresses(results, label, when):
    *before, line = results[label]["lines"]
    if label == "resumed":
        assert before == []
    else:
        assert before == [f"{POWERSGD}as many bytes as plain DDP until step 4; it compresses {when}"]
    line = line.partition("; relative error")[0]
    assert line.startswith(POWERSGD)
    assert f"% of the gradients are compressed {when}; " in line
    assert [text for text in results[label]["warned"] if "Error feedback" not in text] == []
    if label not in ("resumed", "unknown"):
        ratio = results[label]["metrics"]["compression_ratio"]
        assert line.endswith(f"x fewer bytes then, {ratio:.3g}x over the run")


@pytest.mark.parametrize(
    ("label", "hook", "when"),
    [
        ("name", "PowerSGD(start_powerSGD_iter=4)", "it compresses from step 4 of 40 on"),
        ("fraction", "PowerSGD(start_powerSGD_iter=4, min_compression_rate=1)", "it compresses from step 4 of 12 on"),
        ("told", "PowerSGD(start_powerSGD_iter=4, min_compression_rate=1)", "it compresses from step 4 of 12 on"),
    ],
)
def test_start_by_the_length_of_the_run(results, label, hook, when):
    line = results[label]["lines"][0]
    assert line.startswith(f"Forecast for communication hook {hook}: ")
    assert when in line
    assert [text for text in results[label]["warned"] if "Error feedback" not in text] == []


def test_a_fraction_of_an_unknown_run(results):
    text = "PowerSGD(start_powerSGD_iter=0.34) is a fraction of the run, and the number of training steps is unknown"
    assert text in results["not_told"]


def test_warnings_in_time_and_not_again_at_the_end(results):
    for label in ("beyond", "tracker_beyond"):
        assert results[label]["warned"] == [
            "training ends after 20 steps, and hook='powersgd' compresses from start_powerSGD_iter=1000 on; let it "
            "begin after about a tenth of training, 2: hook=PowerSGD(start_powerSGD_iter=2)"
        ]
        assert len(results[label]["lines"]) == 1
    (text,) = results["int8"]["warned"]
    assert text.startswith("hook='int8' compresses nothing")
    assert results["int8"]["lines"] == [], "without a tracker only what is wrong is said"


def test_the_end_of_a_trainer(results):
    """By its own rule, as early stopping; and by an error, as where the batch does not fit into memory."""
    (text,) = results["stopped"]["warned"]
    assert text.startswith("training ended after 12 steps, and hook='powersgd' compresses from start_powerSGD_iter=20")
    assert results["broken"]["warned"] == []


def test_refusal(results):
    assert results["refused"] == "num_steps must be an integer of at least 1, got -1"
