"""Run by `test_accelerate_scripts.py` in each of two processes: Accelerate's own test scripts, with our handler."""

import functools
import os
import sys
from unittest import mock

import torch
from accelerate import Accelerator, DDPCommunicationHookType, PartialState
from accelerate.test_utils import RegressionDataset
from accelerate.test_utils.scripts import test_ddp_comm_hook, test_distributed_data_loop, test_sync
from accelerate.utils import DistributedDataParallelKwargs

from accelerate_integration import CommHookKwargs
from lightning_commhooks import PowerSGD

SEED = 1
ROUNDING = {"fp16": 2**-10, "bf16": 2**-7}
HOOKS = ("allreduce", "fp16", "bf16", "powersgd", "batched_powersgd", PowerSGD(start_powerSGD_iter=0))


class DistributedDataParallel(torch.nn.parallel.DistributedDataParallel):
    """On CPU the script's device_ids are an error."""

    def __init__(self, module, device_ids=None, output_device=None):
        super().__init__(module)


def tell(line):
    """One write: both processes have the same standard output."""
    os.write(1, f"{line}\n".encode())


def comm_hook():
    """Every hook of Accelerate, with the fields of its own handler."""
    prepared = []

    def handler(**fields):
        if fields["comm_hook"] == DDPCommunicationHookType.NO:
            return DistributedDataParallelKwargs(**fields)
        prepared.append(CommHookKwargs(**fields))
        return prepared[-1]

    test_ddp_comm_hook.DistributedDataParallelKwargs = handler
    torch.nn.parallel.DistributedDataParallel = DistributedDataParallel
    test_ddp_comm_hook.main()
    for each in prepared:
        tell(f"ran {each.attachments[0].name} {each.attachments[0].metrics()['steps']}")


class RoundedTorch:
    """`torch` with an `allclose` for 16-bit gradients."""

    def __init__(self, rtol):
        self.rtol = rtol

    def allclose(self, a, b, rtol=0.0):
        # Accelerate 1.4 asks for 1e-3, later versions for 1e-2.
        return torch.allclose(a, b, rtol=max(rtol, self.rtol))

    def __getattr__(self, name):
        return getattr(torch, name)


def run_script(script, hook, function=None):
    """Run `main`, or a function, of one of Accelerate's scripts.

    Its every `Accelerator` gets a handler with `hook`; `None`: none. The process group and Accelerate's state are there
    for the next one. Returns the attachments.
    """
    handlers = []

    def accelerator(**options):
        if hook is None:
            return Accelerator(**options)
        handlers.append(CommHookKwargs(hook=hook))
        return Accelerator(kwargs_handlers=[handlers[-1]], **options)

    keep_group = mock.patch.object(PartialState, "destroy_process_group")
    with keep_group, mock.patch.object(script, "Accelerator", accelerator):
        (function or script.main)()
    return [attachment for handler in handlers for attachment in handler.attachments]


def sync():
    """`no_sync`, `accumulate` and schedulers, with every hook that has a counterpart in PyTorch."""
    # Other random numbers in each run: with 16 bits some gradients of "not in sync" ones are too near to others.
    test_sync.RegressionDataset = functools.partial(RegressionDataset, seed=SEED)
    for hook in HOOKS:
        test_sync.torch = RoundedTorch(ROUNDING[hook]) if hook in ("fp16", "bf16") else torch
        attachments = run_script(test_sync, hook)
        tell(f"ran {attachments[0].name} {len(attachments)}")
    run_script(test_distributed_data_loop, HOOKS[-1], test_distributed_data_loop.test_pickle_accelerator)
    tell("ran pickle")
    PartialState().destroy_process_group()


if __name__ == "__main__":
    assert os.environ["ACCELERATE_USE_CPU"]
    {"comm_hook": comm_hook, "sync": sync}[sys.argv[1]]()
