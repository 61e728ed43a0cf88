"""`CommHookTracker` and `use_comm_hook(monitor=...)`, two real processes; what they do is in the runner."""

import json

import pytest
from forks import FOLDER, run_ranks

pytest.importorskip("transformers")
from accelerate import Accelerator

from accelerate_integration import CommHookKwargs, CommHookTracker, use_comm_hook
from lightning_commhooks.monitoring import NAMES, NAMES_OF_NODES

ALL = [f"comm/{name}" for name in NAMES if name not in (*NAMES_OF_NODES, "averagings")]
# Those that grow with the steps.
TOTALS = ("bytes_sent", "nonfinite_steps")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("monitor")


@pytest.fixture(scope="module")
def errors(folder):
    return [text for _, text in run_ranks(FOLDER / "monitor_accelerate_runner.py", folder, PYTHONWARNINGS="ignore")]


@pytest.fixture(scope="module")
def results(errors, folder):
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def check_last(values, metrics):
    assert {name: values[f"comm/{name}"] for name in TOTALS} == {name: metrics[name] for name in TOTALS}
    assert values["comm/compression_ratio"] > 2


def test_accelerator_log(results):
    rows = results[0]["accelerate"]["rows"]
    # 7 steps of two batches: after 3, 6, and at the end.
    assert [step for step, _ in rows] == [5, 11, 13]
    assert [list(values) for _, values in rows] == [ALL] * 3
    assert results[0]["before_the_end"] == 2
    check_last(rows[-1][1], results[0]["accelerate"]["metrics"])
    assert results[1]["accelerate"]["rows"] == []


def test_each_of_two_models_has_a_number(results):
    ((step, values),) = results[0]["two_models"]["rows"]
    assert step == 1
    assert {name.rsplit("/", 1)[0] for name in values} == {"comm/0", "comm/1"}
    for index, metrics in enumerate(results[0]["two_models"]["metrics"]):
        assert values[f"comm/{index}/bytes_sent"] == metrics["bytes_sent"] > 0


def test_a_tracker_does_not_keep_an_accelerator(results):
    assert all(rank["is_collected"] for rank in results)


def test_trainer_log(results):
    for rank in results:
        log, metrics = rank["trainer"]["log"], rank["trainer"]["metrics"]
        training = [entry for entry in log if "loss" in entry]
        assert [entry["step"] for entry in training] == [2, 4]
        assert all(set(ALL) <= entry.keys() for entry in training)
        evaluations = [entry for entry in log if "eval_loss" in entry]
        assert evaluations
        assert not [name for entry in evaluations for name in entry if "comm" in name]
        (end,) = [entry for entry in log if "train_runtime" in entry]
        assert end["step"] == 5
        check_last(end, metrics)
        assert training[0]["comm/bytes_sent"] < training[1]["comm/bytes_sent"] < end["comm/bytes_sent"]
        assert not [name for entry in rank["off"]["log"] for name in entry if "comm" in name]


def test_closing_lines_once(errors):
    lines = [line for text in errors for line in text.splitlines() if line.startswith("Communication hook")]
    with_seconds = [line for line in lines if "against plain DDP" in line]
    assert len(lines) == 3, "of rank 0, of two trainers and the accelerator"
    assert len(with_seconds) == 2, "of one of the trainers and the accelerator"
    assert "sent in 5 steps" in with_seconds[0]
    assert "sent in 7 steps" in with_seconds[1]
    for line in with_seconds:
        assert (
            "against plain DDP; 2 steps not compressed (hook='powersgd' compresses from start_powerSGD_iter=2 on)"
            in line
        )


def test_refusals(results):
    assert "logging_steps" in results[0]["refused"]
    assert "after accelerator.prepare(...)" in results[0]["too_early"]


@pytest.mark.parametrize(
    ("monitor", "message"),
    [
        ("yes", "monitor must be True or a dict with some of error_every_n_steps, error_numel.*, got 'yes'"),
        ({"error_every": 3}, "monitor must be True or a dict .*, got {'error_every': 3}"),
        ({"error_numel": -1}, "error_numel must be an integer of at least 1"),
    ],
)
def test_wrong_options_of_a_trainer(monitor, message):
    with pytest.raises(ValueError, match=message):
        use_comm_hook(None, "bf16", monitor=monitor)


def test_one_process(tmp_path, capsys):
    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=tmp_path)
    with pytest.raises(ValueError, match=r"monitor is for a transformers.Trainer: CommHookTracker\(accelerator"):
        use_comm_hook(accelerator, "bf16", monitor=True)
    with pytest.raises(ValueError, match="every_n_steps must be an integer of at least 1, got 0"):
        CommHookTracker(accelerator, CommHookKwargs(hook="bf16"), every_n_steps=0)
    tracker = CommHookTracker(accelerator, CommHookKwargs(hook="bf16"))
    tracker.log(0)
    accelerator.end_training()
    assert tracker.summary() == []
    assert capsys.readouterr().out == ""
