"""A short run of benchmarks/stress_launches.py."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "stress_launches.py"


@pytest.mark.parametrize("ranks", [2, 4])
def test_one_launch_is_clean(ranks):
    command = [sys.executable, str(SCRIPT), "--launches", "1", "--steps", "20", "--worlds", str(ranks)]
    done = subprocess.run([*command, "--timeout", "100"], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].split()[:3] == [str(ranks), "1", "1"]
