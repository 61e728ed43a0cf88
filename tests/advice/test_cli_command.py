"""`python -m lightning_commhooks`, in processes of its own."""

import json
import re
import subprocess
import sys
from argparse import ArgumentTypeError

import pytest
import torch
from forks import FORKS, alone, run_ranks

import lightning_commhooks as lc
from lightning_commhooks import wrappers
from lightning_commhooks.advice import launch
from lightning_commhooks.advice.cli import main, parse_bandwidth, parse_latency

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


@pytest.fixture
def in_process(capsys):
    """The same, where no other process is needed."""

    def of(*arguments):
        code = 0
        try:
            main(arguments)
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()

    return of


def test_list_has_every_hook_and_wrapper(in_process):
    code, output, _ = in_process("list", "--json")
    assert code == 0
    found = {hook["name"]: hook for hook in json.loads(output)}
    assert set(lc.available_hooks()) <= set(found)
    assert {hook["class_name"] for hook in found.values() if hook["is_wrapper"]} == set(wrappers.__all__)
    assert "matrix_approximation_rank: int = 1" in found["powersgd"]["options"]
    assert all(hook["doc"] for hook in found.values())


def test_list_one(in_process):
    code, output, _ = in_process("list", "power_sgd")
    assert code == 0
    assert output.startswith("powersgd, also power_sgd: PowerSGD(matrix_approximation_rank: int = 1,")
    assert re.search(r"^ +start_powerSGD_iter: \w", output, re.MULTILINE)
    assert "int8" not in output
    assert "hooks: Mapping" in in_process("list", "Schedule")[1]
    assert in_process("list", "schedule")[1].startswith("schedule: Schedule(")


def test_advise_in_processes_of_its_own(folder):
    hooks = "bf16,powersgd:matrix_approximation_rank=2,post_localsgd:post_local_gradient_allreduce=False"
    code, output, errors = command(folder, "advise", "my_models:small", "--hooks", hooks, "--rounds", "1", "--json")
    assert code == 0, errors
    assert "a factory may print what it likes" in errors
    found = json.loads(output)
    assert found["world_size"] == 2
    assert not found["is_what_if"]
    rows = {row["label"]: row for row in found["hooks"]}
    assert next(iter(rows)) == "noop"
    assert set(rows) == {"dense", "noop", "bf16", *hooks.split(",")[1:]}
    for row in rows.values():
        assert row["step_ms"] > 0
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


def test_bench_under_torchrun(folder):
    options = ["--hooks", "int8:min_bytes=0", "--hooks", "fp16", "--rounds", "1"]
    output = under_torchrun(folder, "bench", "my_models:small", *options)
    first, *_ = output.splitlines()
    assert first.startswith("2 ranks, each on CPU")
    for label in ("dense (no hook)", "noop (sends nothing)", "int8:min_bytes=0", "fp16"):
        assert output.count(label) == 1, label
    assert "predicted" not in output


def test_headroom_of_a_model_with_collectives_of_its_own(folder):
    """Ranks that run it a different number of times wait for each other for ever."""
    code, output, errors = command(folder, "headroom", "my_models.py:gathers", "--rounds", "1", timeout=60)
    assert code == 0, errors
    assert "Communication costs" in output
    assert "codec" not in output


def test_what_if_under_torchrun(folder):
    what_if = ["--latency", "1ms", "--rounds", "1", "--hooks", "bf16", "--json"]
    found = json.loads(under_torchrun(folder, "advise", "my_models:small", *what_if))
    assert found["is_what_if"]
    assert (found["link"]["latency"], found["link"]["world_size"]) == (0.001, 2)
    assert found["link"]["bandwidth"] > 0
    bf16 = next(row for row in found["hooks"] if row["label"] == "bf16")
    assert 0 < bf16["error"] < 0.01


def test_what_if_on_one_process(folder):
    what_if = ["--bandwidth", "4mbit", "--latency", "0.05ms", "--world-size", "32", "--rounds", "1"]
    hooks = ["--hooks", "bf16,int8:min_bytes=0,int4:min_bytes=0,my_models:TERNARY"]
    code, output, errors = command(folder, "advise", "my_models:small", *what_if, *hooks, "--json")
    assert code == 0, errors
    found = json.loads(output)
    assert found["is_what_if"]
    assert found["world_size"] == 32
    rows = {row["label"]: row for row in found["hooks"]}
    assert rows["dense"]["bytes_sent"] == pytest.approx(2 * 31 / 32 * found["gradient_bytes"])
    # 2 * 31 / 32 of 33,792 bytes at 4 megabits per second.
    assert rows["dense"]["step_ms"] >= 125
    assert 0 < rows["bf16"]["error"] < 0.02
    assert 0 < rows["int8:min_bytes=0"]["error"] < 0.05
    assert 0.05 < rows["int4:min_bytes=0"]["error"] < 0.3
    assert 0.3 < rows["my_models:TERNARY"]["error"] < 1
    assert rows["dense"]["error"] == 0
    assert found["verdict"]["choice"] == "int4:min_bytes=0"
    assert found["verdict"]["line"] == "CompressedDDPStrategy(hook=Int4(min_bytes=0))"
    processors, ranks = found["notes"]
    assert "Predictions exclude the processor time of sending" in processors
    assert ranks == "Errors are measured with an average over 16 of the 32 ranks."


@pytest.mark.parametrize(
    ("factory", "code", "message"),
    [
        ("gathers_or_fails", 2, "error on rank 1: my_models:gathers_or_fails() failed, RuntimeError: no data here"),
        ("dies", 1, "error on rank 1: RuntimeError: out of something"),
        ("vanishes", 7, "error on rank 0: the connection to another rank broke"),
    ],
)
def test_a_failure_on_one_rank_ends_all(folder, factory, code, message):
    exit_code, output, errors = command(folder, "headroom", f"my_models:{factory}", "--rounds", "1", timeout=60)
    assert exit_code == code, errors
    assert output == ""
    assert message in errors
    assert "Traceback" not in errors
    assert errors.count("error: ") + errors.count("error on rank") <= 1


@pytest.mark.parametrize("arguments", [["bench", "m:f", "--hooks", "bf17"], ["bench", "m:f", "--hoks", "bf16"]])
def test_other_ranks_do_not_repeat_what_is_wrong(monkeypatch, capsys, arguments):
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert capsys.readouterr() == ("", "")


def test_ranks_that_do_not_find_each_other(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(SystemExit, match="1"), launch.joined(torch.device("cpu")):
        pass
    assert "error on rank 0: the ranks did not find each other: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["list", "bf17"], "error: unknown hook 'bf17'; did you mean 'bf16'? available hooks: all"),
        (["bench", "m:f", "--hooks", "bf17"], "error: --hooks bf17: unknown hook 'bf17'; did you mean 'bf16'"),
        (["bench", "m:f", "--hooks", "mine"], "quantize_per_tensor; write your own hook as my_module:MY_HOOK"),
        (["bench", "m:f", "--hooks", " , "], "error: --hooks ' , ' names no hook: write --hooks int8,powersgd"),
        (["headroom", "m:f", "--hooks", "bf16"], "unrecognized arguments: --hooks bf16"),
        (["headroom", "m:f", "--rounds", "0"], "argument --rounds: must be an integer of at least 1, got '0'"),
        (["advise", "m:f", "--bandwidth", "fast"], "argument --bandwidth: must be like 1gbit, 100mbit or 1.2GB/s"),
        (["advise", "m:f", "--latency", "3"], "argument --latency: must be like 0.1ms or 50us, got '3'"),
        (["advise", "m:f", "--world-size", "1"], "argument --world-size: must be an integer of at least 2, got '1'"),
        (["advise", "m:f", "--world-size", "8"], "one process has no network to measure: give --bandwidth"),
        (["advise", "m:f", "--max-error", "-1"], "argument --max-error: must be at least 0, got '-1'"),
        (
            ["advise", "m:f", "--nproc", "1"],
            "one process sends nothing: use --nproc or torchrun, or predict with `advise --bandw",
        ),
        (["bench", "m:f", "--nproc", "1"], "one process sends nothing"),
        (["advise", "m:f", "--bandwidth", "1gbit", "--device", "cuda"], "error: --device cuda: 1 processes on this"),
    ],
)
def test_wrong_arguments(in_process, arguments, message):
    code, output, errors = in_process(*arguments)
    assert code == 2
    assert output == ""
    assert message in errors


def test_a_model_that_is_not_there(tmp_path):
    code, _, errors = command(tmp_path, "advise", "m:f", "--bandwidth", "1gbit")
    assert code == 2
    assert errors == "error: m:f: importing it failed, ModuleNotFoundError: No module named 'm'\n"


def test_nproc_and_a_launcher(monkeypatch, in_process):
    monkeypatch.setenv("WORLD_SIZE", "4")
    code, _, errors = in_process("headroom", "m:f", "--nproc", "2")
    assert code == 2
    assert "error: --nproc 2: a launcher has started 4 processes already; omit --nproc\n" in errors


def test_needs_nothing_that_is_not_installed():
    code = """
import sys
sys.modules.update(dict.fromkeys(("typer", "rich", "matplotlib", "lightning", "accelerate")))  # None: import fails
from lightning_commhooks.advice.cli import main
main(["list", "noop"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.startswith("noop: Noop()\n")


@pytest.mark.parametrize(
    ("text", "value"),
    [
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
    with pytest.raises(ArgumentTypeError, match=f"'1{unit}' is ambiguous: write 1Gbit/s for bits, 1GB/s for bytes"):
        parse_bandwidth(f"1{unit}")


@pytest.mark.parametrize("text", ["fast", "0gbit", "1.2.3gbit", ".gbit", "1gbyte", "-1gbit", "1", "9" * 400 + "gbit"])
def test_bandwidth_that_is_none(text):
    with pytest.raises(ArgumentTypeError, match=f"must be like 1gbit, 100mbit or 1.2GB/s, got '{text}'"):
        parse_bandwidth(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [("0.1ms", 1e-4), ("50us", 5e-5), ("1s", 1.0), ("2 MS", 2e-3)],
)
def test_latency(text, value):
    assert parse_latency(text) == pytest.approx(value)
