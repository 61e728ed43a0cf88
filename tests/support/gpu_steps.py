"""What tests on CUDA devices share: ranks that begin anew after a failure, and steps that may not wait."""

import pytest
import torch
from driver import SHAPES, attached, full_rank_gradients

from lightning_commhooks.testing import model
from lightning_commhooks.testing.processes import Processes

needs_one = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
needs_two = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="needs two CUDA devices: NCCL has one for each rank"
)
# Schedules of `hooks_under_test` have all of their phases behind them.
WARM_UP, STEPS = 9, 4


class Ranks:
    """`Processes` on CUDA devices, started when they are first needed, and again after a call that failed.

    Args:
        backend: of their process groups.
        size: number of ranks.
    """

    def __init__(self, backend, size=2):
        self._backend, self._size = backend, size
        self._processes = None

    def __call__(self, function, *args, world):
        if self._processes is None:
            self._processes = Processes(self._size, 30, "cuda", self._backend).__enter__()
        try:
            return self._processes(function, *args, world=world)
        except Exception:
            self.close()
            raise

    def close(self):
        if self._processes is not None:
            self._processes.__exit__()
            self._processes = None


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
