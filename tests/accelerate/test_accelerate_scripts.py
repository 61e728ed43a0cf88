"""Accelerate's own test scripts with our handler in place of its own, in two real processes."""

import pytest
from torchrun import run_twice

pytest.importorskip("accelerate")


def lines_of(script):
    output = run_twice("accelerate_scripts_runner.py", script, ACCELERATE_USE_CPU="true")
    return [line for line in output.splitlines() if line.startswith("ran ")]


def test_ddp_comm_hook():
    hooks = ["fp16", "bf16", "powersgd", "cast", "cast", "powersgd", "batched_powersgd", "cast", "cast"]
    assert sorted(lines_of("comm_hook")) == sorted(f"ran {hook} 1" for hook in hooks * 2)


def test_sync():
    hooks = ["allreduce", "fp16", "bf16", "powersgd", "powersgd", "batched_powersgd"]
    expected = [*(f"ran {hook} 3" for hook in hooks), "ran pickle"]
    assert sorted(lines_of("sync")) == sorted(expected * 2), "3 models each, on 2 ranks"
