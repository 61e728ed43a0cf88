"""What tests on CUDA devices share: ranks that are started again after a failure, and steps that may not wait."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from driver import SHAPES, attached, full_rank_gradients
from forks import FOLDER, FOLDERS, PATIENCE, ROOT, alone

from lightning_commhooks.testing import model
from lightning_commhooks.testing.processes import Processes

needs_one = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
# Schedules of `hooks_under_test` have all of their phases behind them.
WARM_UP, STEPS = 9, 4
# PyTorch's engines for NCCL. Where "nccl" is the new one, the old one has this name.
NCCL = [name for name in ("nccl", "nccl-legacy") if name == "nccl" or name in dist.Backend.backend_list]
ON_GPUS = [pytest.param("cuda", name, marks=[pytest.mark.gpu, needs_one], id=name) for name in NCCL]
ON_GPUS.append(pytest.param("cuda", "gloo", marks=[pytest.mark.gpu, needs_one], id="cuda-gloo"))
# Devices and backends of tests that need no GPU, but run on one too.
PLACES = [pytest.param("cpu", "gloo", id="cpu"), *ON_GPUS]


class Ranks:
    """`Processes`, started when they are first needed, and again after a call that failed.

    Args:
        backend: of their process groups.
        size: number of ranks.
        device: of their models.
    """

    def __init__(self, backend, size=2, device="cuda"):
        self._backend, self._size, self.device = backend, size, device
        self._processes = None

    def __call__(self, function, *args, world):
        if self._processes is None:
            self._processes = Processes(self._size, 30, self.device, self._backend).__enter__()
        try:
            return self._processes(function, *args, world=world)
        except Exception:
            self.close()
            raise

    def close(self):
        if self._processes is not None:
            self._processes.__exit__()
            self._processes = None


@dataclass
class Ended:
    """How a rank of `launch` ended.

    Attributes:
        code: its exit code, negative for a signal; `None` if it took too long and was killed.
        output: what it printed on standard output.
        errors: the same on standard error.
        at: when it ended, by `time.monotonic`.
    """

    code: int | None
    output: str
    errors: str
    at: float


def launch(script, *arguments, world=2, timeout=100, **environment):
    """Run a script of this folder in new processes, each as if it were alone on a node of its own.

    Not as forks: CUDA does not work in a fork of a process that has looked for devices, as frameworks do when they
    are imported.

    Args:
        script: name of the script.
        arguments: its command line.
        world: number of processes.
        timeout: seconds that they may take, or `PATIENCE` times as long without a GPU.
        environment: further variables.

    Returns:
        how each rank ended.
    """
    timeout *= 1 if torch.cuda.is_available() else PATIENCE
    path = os.pathsep.join([str(ROOT), *FOLDERS])
    shared = {**alone(PYTHONPATH=path), "MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(world), "LOCAL_RANK": "0"}
    with contextlib.ExitStack() as stack:
        processes, files = [], []
        for rank in range(world):
            files.append([stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2)])
            own = {"RANK": str(rank), "NODE_RANK": str(rank), "LOCAL_WORLD_SIZE": "1", **environment}
            processes.append(
                subprocess.Popen(
                    [sys.executable, str(FOLDER / script), *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=files[-1][0],
                    stderr=files[-1][1],
                    env={**shared, **own},
                    start_new_session=True,
                )
            )
            stack.callback(_kill, processes[-1])
        ended = {}
        deadline = time.monotonic() + timeout
        while len(ended) < world and time.monotonic() < deadline:
            for rank, process in enumerate(processes):
                if rank not in ended and process.poll() is not None:
                    ended[rank] = process.returncode, time.monotonic()
            time.sleep(0.02)
        for process in processes:
            _kill(process)
        found = []
        for rank, (output, errors) in enumerate(files):
            output.seek(0)
            errors.seek(0)
            code, at = ended.get(rank, (None, time.monotonic()))
            found.append(Ended(code, output.read(), errors.read(), at))
        return found


def _kill(process):
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def launch_well(script, *arguments, **options):
    """Standard output of each rank of `launch`; all of them have to end well."""
    ranks = launch(script, *arguments, **options)
    codes = [rank.code for rank in ranks]
    texts = "\n".join(f"rank {number}: {rank.errors[-3000:]}" for number, rank in enumerate(ranks))
    assert not any(code != 0 for code in codes), f"{script} {' '.join(arguments)}: exit codes {codes}\n{texts}"
    return [rank.output for rank in ranks]


def step_without_waiting(rank, world, hook):
    """Train for some steps, the last ones of which fail where they wait for the device; their number."""
    device = model.model_device()
    with attached(hook) as (ddp, attachment):
        gradients = {name: g.to(device) for name, g in full_rank_gradients(rank, 0, SHAPES).items()}
        optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
        for step in range(WARM_UP + STEPS):
            torch.cuda.set_sync_debug_mode("error" if step >= WARM_UP else "default")
            try:
                optimizer.zero_grad()
                ddp(gradients).backward()
                optimizer.step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        return attachment.num_steps
