"""`python -m lightning_commhooks`, in processes of its own."""

import json
import re
import subprocess
import sys

import pytest

import lightning_commhooks as lc
from lightning_commhooks import wrappers

pytest.importorskip("typer")
pytest.importorskip("rich")

from forks import FORKS, alone, run_ranks
from typer.testing import CliRunner

from lightning_commhooks.advice.cli import app, parse_bandwidth, parse_latency

MODELS = """
import dataclasses
import os
import sys
import time
import torch
from torch import nn
import lightning_commhooks as lc

print("a factory may print what it likes")
os.write(1, b"and so may a library that is written in another language\\n")

def small():
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64))
    return model, (torch.randn(4, 64), torch.randn(4, 64)), nn.MSELoss()

@dataclasses.dataclass(frozen=True, kw_only=True)
class Ternary(lc.CommHook):
    name = "ternary"

    def bind(self, group):
        return BoundTernary(group)

class BoundTernary(lc.BoundHook):
    def reduce(self, bucket, ranks):
        flat = bucket.flat
        padded = flat.new_zeros(-(-flat.numel() // ranks.size) * ranks.size)
        padded[: flat.numel()] = flat.sign() * flat.abs().mean() * (flat.abs() > flat.abs().mean() / 2)
        share = (yield from ranks.all_to_all(padded.view(ranks.size, -1))).mean(dim=0)
        flat.copy_((yield from ranks.all_gather(share)).view(-1)[: flat.numel()])

TERNARY = Ternary()

def fails():
    if os.environ["RANK"] == "1":
        raise RuntimeError("no data here")
    return small()

class Dies(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.linear, self.how, self.steps = nn.Linear(8, 8), how, 0

    def forward(self, x):
        self.steps += 1
        if self.steps > 5 and os.environ["RANK"] == "1":
            self.how()
        return self.linear(x).sum()

def raise_error():
    raise RuntimeError("out of something")

def dies():
    return Dies(raise_error), torch.randn(2, 8)

def vanishes():
    return Dies(lambda: os._exit(7)), torch.randn(2, 8)

class Gathers(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        outputs = self.linear(x)
        torch.distributed.all_reduce(outputs.detach().mean(dim=0))
        # What one rank decides by its clock before this, the other decides after it.
        if os.environ["RANK"] == "1":
            time.sleep(0.02)
        return outputs.sum()

def gathers():
    return Gathers(), torch.randn(2, 8)

def gathers_or_fails():
    if os.environ["RANK"] == "1":
        raise RuntimeError("no data here")
    return gathers()
"""


@pytest.fixture
def folder(tmp_path):
    """A folder with a module of factories."""
    (tmp_path / "my_models.py").write_text(MODELS)
    return tmp_path


def command(folder, *arguments, timeout=120):
    """Exit code, standard output and standard error."""
    with FORKS.start("lightning_commhooks", *arguments, environment=alone(**FORKS.launching()), cwd=folder) as process:
        stdout, stderr = process.finish(timeout)
        return process.returncode, without_gloo(stdout), without_gloo(stderr)


def without_gloo(text):
    """Without the lines that gloo of some versions prints when it connects."""
    return re.sub(r"^\[Gloo\] Rank \d+ is connected to .*\n", "", text, flags=re.MULTILINE)


def under_torchrun(folder, *arguments):
    """What rank 0 of two prints."""
    return run_ranks("lightning_commhooks", *arguments, cwd=folder)[0][0]


def in_process(*arguments):
    """The same, where no other process is needed."""
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.stdout, result.stderr


def test_list_has_every_hook_and_wrapper():
    code, output, _ = in_process("list", "--json")
    assert code == 0
    found = {hook["name"]: hook for hook in json.loads(output)}
    assert set(lc.available_hooks()) <= set(found)
    assert {hook["class_name"] for hook in found.values() if hook["is_wrapper"]} == set(wrappers.__all__)
    assert found["int8"]["sends"] == pytest.approx({"2": 0.253, "8": 0.253}, abs=0.01)
    assert found["allgather"]["sends"] == pytest.approx({"2": 1.0, "8": 4.0})
    assert found["diloco"]["sends"] == pytest.approx({"2": 0.01, "8": 0.01}, rel=0.01)
    assert found["noop"]["sends"] == {"2": 0.0, "8": 0.0}
    options = {option["name"]: option for option in found["powersgd"]["options"]}
    assert options["matrix_approximation_rank"]["default"] == "1"
    assert options["matrix_approximation_rank"]["type"] == "int"
    for hook in found.values():
        assert hook["summary"]
        assert all(option["doc"] for option in hook["options"]), hook["name"]


def test_list_one():
    code, output, _ = in_process("list", "power_sgd")
    assert code == 0
    assert output.startswith("powersgd  PowerSGD")
    assert "start_powerSGD_iter: int = 1000" in output
    assert "int8" not in output
    assert "schedule" in in_process("list", "Schedule")[1]
    assert "hooks: Mapping" in in_process("list", "schedule")[1]


def test_advise_in_processes_of_its_own(folder):
    hooks = "bf16,powersgd:matrix_approximation_rank=2,post_localsgd:post_local_gradient_allreduce=False"
    options = ["--hooks", hooks, "--rounds", "1", "--json", "--plot", "out.png"]
    code, output, errors = command(folder, "advise", "my_models:small", *options)
    assert code == 0, errors
    assert "a factory may print what it likes" in errors
    found = json.loads(output)
    assert found["world_size"] == 2
    rows = {row["label"]: row for row in found["hooks"]}
    assert next(iter(rows)) == "noop"
    assert set(rows) == {"dense", "noop", "bf16", *hooks.split(",")[1:]}
    for row in rows.values():
        assert row["predicted_ms"] > 0
        assert row["measured_ms"] > 0
        assert row["bytes_dense"] == rows["dense"]["bytes_sent"] == found["gradient_bytes"]
    assert rows["bf16"]["ratio"] == pytest.approx(2)
    assert 0 < rows["bf16"]["error"] < 0.01
    assert rows["dense"]["error"] == 0
    local = rows["post_localsgd:post_local_gradient_allreduce=False"]
    assert local["averages_models"]
    assert local["error"] is None
    assert local["ratio"] == pytest.approx(8, rel=0.05)  # buffers are averaged, too
    assert found["verdict"]["apart"].keys() >= {local["label"]}
    assert found["link"]["bandwidth"] > 0
    assert (folder / "out.png").read_bytes().startswith(b"\x89PNG")


def test_bench_under_torchrun(folder):
    options = ["--hooks", "int8:min_bytes=0", "--hooks", "fp16", "--rounds", "1"]
    output = under_torchrun(folder, "bench", "my_models:small", *options)
    first, *_ = output.splitlines()
    assert first.startswith("2 ranks, each on CPU")
    for label in ("dense (no hook)", "noop (sends nothing)", "int8:min_bytes=0", "fp16"):
        assert output.count(label) == 1, label
    assert "predicted" not in output


def test_headroom(folder):
    code, output, errors = command(folder, "headroom", "my_models.py:small", "--rounds", "1")
    assert code == 0, errors
    assert "Communication costs" in output
    assert "codec" not in output


def test_a_model_with_collectives_of_its_own(folder):
    """Ranks that run it a different number of times wait for each other for ever."""
    code, output, errors = command(folder, "headroom", "my_models:gathers", "--rounds", "1", "--nproc", "2", timeout=60)
    assert code == 0, errors
    assert "Communication costs" in output


def test_what_if_under_torchrun(folder):
    what_if = ["--bandwidth", "1gbit", "--rounds", "1", "--hooks", "bf16", "--json"]
    found = json.loads(under_torchrun(folder, "advise", "my_models:small", *what_if))
    assert found["is_what_if"]
    assert found["world_size"] == 2
    assert found["link"]["curves"]["all_reduce"][-1]["cpu_seconds"] > 0
    assert found["notes"] == []


def test_what_if_on_one_process(folder):
    what_if = ["--bandwidth", "4mbit", "--latency", "0.05ms", "--world-size", "32", "--rounds", "1"]
    hooks = ["--hooks", "bf16,int8:min_bytes=0,int4:min_bytes=0,my_models:TERNARY"]
    code, output, errors = command(folder, "advise", "my_models:small", *what_if, *hooks, "--json")
    assert code == 0, errors
    found = json.loads(output)
    assert found["is_what_if"]
    assert found["world_size"] == 32
    rows = {row["label"]: row for row in found["hooks"]}
    assert rows["dense"]["measured_ms"] is None
    assert rows["dense"]["bytes_sent"] == pytest.approx(2 * 31 / 32 * found["gradient_bytes"])
    # 2 * 31 / 32 of 33,792 bytes at 4 megabits per second.
    assert rows["dense"]["predicted_ms"] >= 125
    assert 0 < rows["bf16"]["error"] < 0.02
    assert 0 < rows["int8:min_bytes=0"]["error"] < 0.05
    assert 0.05 < rows["int4:min_bytes=0"]["error"] < 0.3
    assert 0.3 < rows["my_models:TERNARY"]["error"] < 1
    assert rows["dense"]["error"] == 0
    assert found["verdict"]["choice"] == "int4:min_bytes=0"
    assert found["verdict"]["line"] == "CompressedDDPStrategy(hook=Int4(min_bytes=0))"
    processors, ranks = found["notes"]
    assert "Processor time of gloo and the network stack is left out" in processors
    assert ranks == "Errors are those of an average over 16 of the 32 ranks."


@pytest.mark.parametrize(
    ("factory", "code", "message"),
    [
        ("fails", 2, "error: my_models:fails() failed: RuntimeError: no data here (on rank 1)"),
        ("gathers_or_fails", 2, "error: my_models:gathers_or_fails() failed: RuntimeError: no data here (on rank 1)"),
        ("dies", 1, "error on rank 1: RuntimeError: out of something"),
        ("vanishes", None, "error on rank 0: the connection to another rank broke"),
    ],
)
def test_a_failure_on_one_rank_ends_all(folder, factory, code, message):
    exit_code, output, errors = command(folder, "headroom", f"my_models:{factory}", "--rounds", "1", timeout=60)
    assert exit_code == code or (code is None and exit_code in (1, 7)), errors
    assert output == ""
    assert message in errors
    assert "Traceback" not in errors
    assert errors.count("error: ") + errors.count("error on rank") <= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["list", "bf17"], "error: unknown hook 'bf17'; did you mean 'bf16'? available hooks: all"),
        (["bench", "m:f", "--hooks", "bf17"], "error: --hooks bf17: unknown hook 'bf17'; did you mean 'bf16'"),
        (["headroom", "m:f", "--nproc", "1"], "error: m:f: there is no module 'm' in"),
        (["headroom", "m", "--nproc", "1"], "error: the model is given as module:factory"),
        (
            ["advise", "m:f", "--bandwidth", "fast"],
            "error: --bandwidth must be like 1gbit, 100mbit or 1.2GB/s, is 'fast'",
        ),
        (["advise", "m:f", "--latency", "3"], "error: --latency must be like 0.1ms or 50us, is '3'"),
        (["headroom", "m:f", "--nproc", "1", "--device", "cuda"], "error: --device cuda: 1 processes on this machine"),
    ],
)
def test_wrong_arguments(tmp_path, arguments, message):
    if "m:f" in arguments or "m" in arguments:
        code, output, errors = command(tmp_path, *arguments) if "--nproc" in arguments else in_process(*arguments)
    else:
        code, output, errors = in_process(*arguments)
    assert code == 2
    assert output == ""
    assert errors.startswith(message)
    assert len(errors.splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("advise", "error: one process has no link to measure: use --nproc, torchrun, or --bandwidth"),
        ("bench", "error: one process sends nothing: use --nproc or torchrun"),
    ],
)
def test_one_process_is_too_few(folder, name, message):
    code, _, errors = command(folder, name, "my_models:small", "--nproc", "1")
    assert code == 2
    assert message in errors


def test_hook_that_does_not_fit(folder):
    code, _, errors = command(
        folder, "bench", "my_models:small", "--hooks", "hierarchical_localsgd:period_group_size_dict=None"
    )
    assert code == 2
    assert "error: --hooks hierarchical" in errors


def test_nproc_and_a_launcher(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "x", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    code, _, errors = in_process("headroom", "m:f", "--nproc", "2")
    assert code == 2
    assert errors == "error: --nproc 2: a launcher has started 4 processes already; leave it out\n"
    monkeypatch.delenv("MASTER_PORT")
    assert "MASTER_PORT is not set" in in_process("headroom", "m:f")[2]


def test_needs_typer_only_for_the_command():
    code = """
import sys
sys.modules.update(dict.fromkeys(("typer", "rich", "matplotlib")))  # None: import fails
import lightning_commhooks
from lightning_commhooks.__main__ import main
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name: None if name in ("typer", "rich") else find(name)
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert done.stderr == "the command line needs typer and rich: pip install 'lightning-commhooks[cli]'\n"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (None, None),
        ("1gbit", 1.25e8),
        ("1GBIT", 1.25e8),
        ("100 Mbit/s", 1.25e7),
        ("10Gbps", 1.25e9),
        ("10gbps", 1.25e9),
        ("10Gb/s", 1.25e9),
        (" .5e3 kb/s ", 62_500),
        ("1GBps", 1e9),
        ("1gBps", 1e9),
        ("1.2GB/s", 1.2e9),
        ("800bps", 100),
        ("800Bps", 800),
    ],
)
def test_bandwidth(text, value):
    assert parse_bandwidth(text) == value


@pytest.mark.parametrize("unit", ["GBPS", "GB/S", "Gb", "GB"])
def test_bandwidth_that_may_be_bits_or_bytes(unit):
    with pytest.raises(ValueError, match=f"'1{unit}' is ambiguous: write 1Gbit/s for bits, 1GB/s for bytes"):
        parse_bandwidth(f"1{unit}")


@pytest.mark.parametrize("text", ["fast", "0gbit", "1.2.3gbit", ".gbit", "1gbyte", "-1gbit", "1"])
def test_bandwidth_that_is_none(text):
    with pytest.raises(ValueError, match=f"--bandwidth must be like 1gbit, 100mbit or 1.2GB/s, is '{text}'"):
        parse_bandwidth(text)


@pytest.mark.parametrize(
    ("text", "value"), [("0.1ms", 1e-4), ("50us", 5e-5), ("1s", 1.0), ("2 MS", 2e-3), (None, None)]
)
def test_latency(text, value):
    assert parse_latency(text) == (value if value is None else pytest.approx(value))
