"""What tests on CUDA devices share: ranks that are started again after a failure, and steps that may not wait."""

import contextlib
import os
import time

import pytest
import torch
import torch.distributed as dist
from driver import SHAPES, attached, full_rank_gradients
from forks import FOLDER, FOLDERS, FORKS, PATIENCE, ROOT, NewProcess, alone

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
        self.backend, self._size, self.device = backend, size, device
        self._processes = None

    def __call__(self, function, *args, world):
        if self._processes is None:
            self._processes = Processes(self._size, 30, self.device, self.backend).__enter__()
        try:
            return self._processes(function, *args, world=world)
        except Exception:
            self.close()
            raise

    def close(self):
        if self._processes is not None:
            self._processes.__exit__()
            self._processes = None


def launch(script, device, *arguments, world=2, timeout=100, **environment):
    """Run a script of this folder, each rank as if it were alone on a node of its own.

    On CUDA the ranks are new processes: it does not work in a fork of a process that has looked for devices, as
    frameworks do when they are imported.

    Args:
        script: name of the script.
        device: `"cpu"` or `"cuda"`; part of its command line.
        arguments: the rest of it.
        world: number of processes.
        timeout: seconds that they may take, or `PATIENCE` times as long without a GPU.
        environment: further variables.

    Returns:
        exit code of each rank, what it printed on standard output and on standard error, and when it ended, by
        `time.monotonic`; of a rank that took too long, code and time are `None`.
    """
    start = FORKS.start if device == "cpu" else NewProcess
    path = os.pathsep.join([str(ROOT), *FOLDERS])
    shared = alone(PYTHONPATH=path, MASTER_ADDR="127.0.0.1", WORLD_SIZE=str(world), LOCAL_RANK="0")
    shared |= {"LOCAL_WORLD_SIZE": "1", **environment}
    with contextlib.ExitStack() as stack:
        processes, ended = [], [(None, None)] * world
        for rank in map(str, range(world)):
            own = {**shared, "RANK": rank, "NODE_RANK": rank}
            processes.append(stack.enter_context(start(FOLDER / script, device, *arguments, environment=own)))
            stack.callback(processes[-1].kill)
        deadline = time.monotonic() + timeout * (PATIENCE if device == "cpu" else 1)
        while (None, None) in ended and time.monotonic() < deadline:
            for rank, process in enumerate(processes):
                if ended[rank][1] is None and process.poll() is not None:
                    ended[rank] = process.returncode, time.monotonic()
            time.sleep(0.02)
        for process in processes:
            process.kill()
        return [(code, *process.printed(), at) for (code, at), process in zip(ended, processes, strict=True)]


def launch_well(script, device, *arguments, **options):
    """Standard output of each rank of `launch`; all of them have to end well."""
    ranks = launch(script, device, *arguments, **options)
    texts = "\n".join(f"rank {number}: {errors[-3000:]}" for number, (_, _, errors, _) in enumerate(ranks))
    assert all(code == 0 for code, *_ in ranks), f"{script} {device} {arguments}: {ranks}\n{texts}"
    return [output for _, output, *_ in ranks]


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
