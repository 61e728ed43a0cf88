"""Run by `test_gpu_failures.py` in each of two processes: in step 3 something happens to the last rank.

    python gpu_failures_runner.py DEVICE BACKEND WHAT

The process group has a timeout of half an hour: a rank that waits for it counts as hanging.
"""

import os
import signal
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from driver import SHAPES, Params, backward, full_rank_gradients
from torch.nn.parallel import DistributedDataParallel

import lightning_commhooks as lc
from lightning_commhooks.testing.model import use_device
from lightning_commhooks.testing.processes import take_gpu

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
WHAT = sys.argv[3]


class Failing(lc.CommHook):
    """Averages, until the hook or the process of the last rank fails."""

    name = "failing"

    def bind(self, group):
        return _BoundFailing(group)


class _BoundFailing(lc.BoundHook):
    def reduce(self, bucket, ranks):
        if bucket.step == 3 and RANK == WORLD - 1 and "second" in bucket.names:
            if WHAT == "raises":
                raise ArithmeticError("out of numbers")
            if WHAT == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
        yield from ranks.all_reduce_mean_(bucket.flat)


def main():
    if sys.argv[1] == "cuda":
        use_device(take_gpu(RANK, WORLD))
    dist.init_process_group(sys.argv[2], timeout=timedelta(minutes=30))
    ddp = DistributedDataParallel(Params(SHAPES), bucket_cap_mb=4e-3)
    attachment = lc.attach(ddp, Failing())
    for step in range(5):
        if step == 3:
            print("step 3", flush=True)
        backward(ddp, full_rank_gradients(RANK, step, SHAPES))
        if sys.argv[1] == "cuda":
            torch.cuda.synchronize()
    attachment.close()
    print("trained", flush=True)


main()
