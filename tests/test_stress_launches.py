"""A short run of benchmarks/stress_launches.py, which does the same on 4 ranks and again and again."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "stress_launches.py"


def test_one_launch_is_clean():
    command = [sys.executable, str(SCRIPT), "--launches", "1", "--steps", "20", "--worlds", "2"]
    done = subprocess.run([*command, "--timeout", "100"], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].split()[:3] == ["2", "1", "1"]
