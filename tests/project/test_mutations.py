"""Each mutation still applies to the code as it is; `make mutations` tries them."""

import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "mutations"


def test_each_can_be_applied():
    command = [sys.executable, FOLDER, "--list"]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
