"""A short run of benchmarks/stress_launches.py."""

import os
import subprocess
import sys
from pathlib import Path

from forks import PATIENCE

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "stress_launches.py"


def test_one_launch_is_clean():
    command = [sys.executable, str(SCRIPT), "--launches", "1", "--steps", "10", "--worlds", "4"]
    # Compiling codecs for each of the launches takes most of a minute, and is no part of how processes end.
    environment = {**os.environ, "TORCH_COMPILE_DISABLE": "1"}
    command += ["--timeout", str(100 * PATIENCE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].split()[:3] == ["4", "1", "1"]
