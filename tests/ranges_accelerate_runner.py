"""Accelerate's `ProfileKwargs` with `CommHookKwargs`; run by `test_ranges_hosts.py` in each of two processes."""

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import ProfileKwargs

from accelerate_integration import CommHookKwargs
from lightning_commhooks import Int8

STEPS = 3


def main(folder):
    torch.distributed.init_process_group("gloo")
    handler = CommHookKwargs(hook=Int8(min_bytes=0, block_size=16))
    profile = ProfileKwargs(activities=["cpu"], output_trace_dir=folder)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[handler, profile])
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def step():
        accelerator.backward(model(torch.randn(4, 64)).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    step()
    with accelerator.profile():
        for _ in range(STEPS):
            step()
    handler.attachments[0].close()
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1])
