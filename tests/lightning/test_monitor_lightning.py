"""`CommHookMonitor` with the real `Trainer` on CPU, two processes; scenarios in monitor_lightning_runner.py."""

import csv
import functools
import pickle
import re
import sys

import pytest

pytest.importorskip("lightning")

from forks import FOLDER
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel
from test_lightning import Results, finish, start
from test_lightning import launch as launch_runner

import lightning_commhooks as lc
from lightning_commhooks.monitoring import NAMES, NAMES_OF_NODES

RUNNER = FOLDER / "monitor_lightning_runner.py"
launch = functools.partial(launch_runner, runner=RUNNER)
ALL = [f"comm/{name}" for name in NAMES if name not in (*NAMES_OF_NODES, "averagings")]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    scenarios = ("every_logger", "bars", "what_a_step_is", "hooks", "again", "closing_line")
    return launch(tmp_path_factory.mktemp("monitor"), *scenarios)


def rows_of(result):
    """Steps and values of rows that the monitor logged, which has nothing else in them."""
    found = [(step, values) for step, values in result["rows"] if any(name in ALL for name in values)]
    assert all(name in (*ALL, "comm/averagings") for _, values in found for name in values)
    return [step for step, _ in found], [values for _, values in found]


def losses(result):
    return [step for step, values in result["rows"] if "loss" in values]


def check_rows(result):
    # 8 steps, counted from 0: after 3, 6, and at the end.
    steps, rows = rows_of(result)
    assert steps == [2, 5, 7]
    assert set(losses(result)) == set(range(8))
    assert [list(values) for values in rows] == [ALL] * 3
    metrics, last = result["metrics"], rows[-1]
    for name in ("bytes_sent", "relative_error", "nonfinite_steps"):
        assert last[f"comm/{name}"] == metrics[name]
    assert last["comm/residual_norm"] == result["residual_norm"]
    for name in ("exposed_ms", "codec_ms"):
        counts = (3, 3, 2)
        total = sum(values[f"comm/{name}_per_step"] * count for values, count in zip(rows, counts, strict=True))
        assert total == pytest.approx(metrics[name])
    ratios = [values["comm/compression_ratio"] for values in rows]
    assert ratios[0] < ratios[1] == ratios[2] > 2, "PowerSGD begins after a step"


def test_values_of_the_attachment_at_the_steps_of_the_users_own(results):
    check_rows(results("loggers"))
    assert rows_of(results("loggers", 1)) == ([], []), "rank 0 logs"
    assert results("loggers")["callback_metrics"] == results("loggers", 1)["callback_metrics"]
    assert not [name for name in results("loggers")["callback_metrics"] if "comm" in name]


def test_csv(results):
    expected = rows_of(results("loggers"))
    text = (results.out / "csv/lightning_logs/version_0/metrics.csv").read_text().splitlines()
    found = [row for row in csv.DictReader(text) if row["comm/bytes_sent"]]
    assert [int(row["step"]) for row in found] == expected[0]
    for row, values in zip(found, expected[1], strict=True):
        assert {name: float(row[name]) for name in ALL} == values


def test_tensorboard(results):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    read = events.EventAccumulator(str(results.out / "tensorboard/lightning_logs/version_0")).Reload()
    steps, rows = rows_of(results("loggers"))
    for name in ALL:
        scalars = read.Scalars(name)
        assert [scalar.step for scalar in scalars] == steps
        assert [scalar.value for scalar in scalars] == pytest.approx([values[name] for values in rows])


@pytest.mark.parametrize("bar", ["TQDMProgressBar", "RichProgressBar"])
def test_progress_bar(results, bar):
    result = results(bar)
    steps, rows = rows_of(result)
    assert steps == [2, 5, 7]
    shown = {name: rows[1][f"comm/{name}"] for name in ("compression_ratio", "residual_norm")}
    assert {name: result["progress_bar"][name] for name in shown} == shown
    assert {name: float(result["shown"][name]) for name in shown} == shown
    assert set(result["shown"]) == {"loss", "v_num", *shown}
    # Rich would draw over what is logged.
    assert results(f"{bar}-line")["line"].startswith("Communication hook 'powersgd'")


def test_below_a_progress_bar_that_has_ended(results):
    assert results("ended-line")["lines"][-1].startswith("Communication hook 'powersgd'")


@pytest.mark.parametrize(
    ("label", "logged_at", "steps"),
    [("accumulated", [2, 3], 4), ("two-optimizers", [1, 3, 5, 7], 16), ("fast", [2], 2)],
)
def test_a_step_is_a_synchronized_backward(results, label, logged_at, steps):
    result = results(label)
    assert result["metrics"]["steps"] == steps
    if label != "fast":  # Lightning takes the loggers away
        assert rows_of(result)[0] == logged_at


def test_local_sgd(results):
    result = results("local")
    _, rows = rows_of(result)
    assert [values["comm/averagings"] for values in rows] == [1, 3, 4]
    assert not [values for values in rows if "comm/relative_error" in values]


def test_what_is_unknown_is_left_out(results):
    assert rows_of(results("function")) == ([], [])
    steps, rows = rows_of(results("fsdp"))
    assert steps == [2, 5, 7]
    assert [sorted(values) for values in rows] == [["comm/bytes_sent", "comm/compression_ratio"]] * 3
    assert rows[0]["comm/compression_ratio"] == 2


def test_second_fit_and_resume(results):
    check_rows(results("first"))
    steps, rows = rows_of(results("second"))
    assert steps == [10, 13, 15]
    assert rows[0]["comm/bytes_sent"] < rows_of(results("first"))[1][-1]["comm/bytes_sent"], "since fit began"
    steps, rows = rows_of(results("resumed"))
    assert steps == [10, 11]
    assert rows[0]["comm/compression_ratio"] > 2, "the hook's state was there before the first value"


def test_closing_line_by_default_once(results):
    lines = [line for line in results.stderr.splitlines() if line.startswith("Communication hook 'powersgd'")]
    (line,) = [line for line in lines if "against plain DDP" in line]
    assert "kB sent in 8 steps instead of" in line
    assert re.search(r"; 1 step not compressed \(hook='powersgd' compresses from start_powerSGD_iter=1 on\)", line)
    assert "Communication hook 'bf16': 4" not in results.stderr, "closing_line=False"


def test_standalone_package(tmp_path):
    pytest.importorskip("pytorch_lightning")
    check_rows(launch(tmp_path, "every_logger", package="pytorch_lightning")("loggers"))


def test_one_process_and_an_exception(tmp_path):
    process = start(tmp_path, "alone_and_crash", runner=RUNNER)
    stderr = finish(process)
    assert process.returncode != 0
    steps, rows = rows_of(Results(tmp_path, stderr)("alone"))
    assert steps == [2, 5, 8, 11, 14, 15]
    assert rows[-1]["comm/bytes_sent"] == 0
    assert "comm/compression_ratio" not in rows[-1]
    assert "Communication hook 'powersgd': nothing to send in 16 steps" in stderr
    assert "crash in training_step" in stderr
    assert "Communication hook 'bf16': nothing to send in 2 steps" in stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every_n_steps": 0}, "every_n_steps must be an integer of at least 1, got 0"),
        ({"error_every_n_steps": 1.5}, "error_every_n_steps must be an integer of at least 0, got 1.5"),
        ({"progress_bar": "exposed_ms"}, "progress_bar must be a list of names, got 'exposed_ms'"),
        ({"progress_bar": ["comm/exposed_ms"]}, "progress_bar has 'comm/exposed_ms'; there are bytes_sent, compr"),
        ({"every_n_step": 10}, "has no option 'every_n_step'; did you mean 'every_n_steps'"),
        ({"closing_line": 1}, "closing_line must be True or False, got 1"),
    ],
)
def test_constructor_refuses(options, message):
    for callback in (lc.CommHookMonitor, lc.CommHookMonitorPL):
        with pytest.raises(Exception, match=message) as caught:
            callback(**options)
        assert str(caught.value).startswith(callback.__name__)
        assert type(caught.value).__name__ == "MisconfigurationException"


def test_needs_a_strategy_with_a_hook(tmp_path):
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, callbacks=[lc.CommHookMonitor()], max_steps=1)
    message = r"SingleDeviceStrategy has none: use Trainer\(strategy=CompressedDDPStrategy\(hook='powersgd'\)\)"
    with pytest.raises(MisconfigurationException, match=message):
        trainer.fit(BoringModel())


def test_pickles():
    assert pickle.loads(pickle.dumps(lc.CommHookMonitor(every_n_steps=7)))._options.every_n_steps == 7


YAML = """
trainer:
  accelerator: cpu
  devices: 2
  logger: false
  strategy: {class_path: lightning_commhooks.CompressedDDPStrategy, init_args: {hook: int8}}
  callbacks:
  - class_path: lightning_commhooks.CommHookMonitor
    init_args: {every_n_steps: 10, error_numel: null, progress_bar: [bytes_sent]}
"""


def cli(monkeypatch, *args):
    monkeypatch.setattr(sys, "argv", ["main.py"])
    return LightningCLI(BoringModel, run=False, save_config_callback=None, seed_everything_default=False, args=args)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_yaml(tmp_path, monkeypatch, capsys):
    path = tmp_path / "config.yaml"
    path.write_text(YAML)
    callbacks = cli(monkeypatch, f"--config={path}").trainer.callbacks
    (monitor,) = [callback for callback in callbacks if isinstance(callback, lc.CommHookMonitor)]
    assert (monitor._options.every_n_steps, monitor._options.error_numel) == (10, None)
    assert monitor._progress_bar == ("bytes_sent",)
    path.write_text(YAML.replace("[bytes_sent]", "[bytes]"))
    with pytest.raises(SystemExit):
        cli(monkeypatch, f"--config={path}")
    assert "nonfinite_steps" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli(monkeypatch, "--trainer.callbacks.help=lightning_commhooks.CommHookMonitor")
    text = " ".join(capsys.readouterr().out.split())
    assert "log so often, and once more when training ends" in text
    assert "(type: int, default: 50)" in text
