"""A script of this folder in two real processes."""

import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent


def run_twice(script, *arguments, timeout=240, num_processes=2, **environment):
    """Standard output of `script`, run by torchrun in two processes, or more, which must end well."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(FOLDER.parent), **environment}
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_processes}"]
    command = [sys.executable, *launch, FOLDER / script, *arguments]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=timeout, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout
