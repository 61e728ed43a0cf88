"""Accelerate's own test scripts with our handler in place of its own, in two real processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("accelerate")

RUNNER = Path(__file__).parent / "accelerate_scripts_runner.py"
LAUNCH = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def lines_of(script):
    env = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(RUNNER.parents[1])}
    command = [*LAUNCH, str(RUNNER), script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, env=env)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith("ran ")]


def test_ddp_comm_hook():
    hooks = ["fp16", "bf16", "powersgd", "cast", "cast", "powersgd", "batched_powersgd", "cast", "cast"]
    assert sorted(lines_of("comm_hook")) == sorted(f"ran {hook} 1" for hook in hooks * 2)


def test_sync():
    hooks = ["allreduce", "fp16", "bf16", "powersgd", "powersgd", "batched_powersgd"]
    assert sorted(lines_of("sync")) == sorted(f"ran {hook} 3" for hook in hooks * 2), "3 models each, on 2 ranks"
