"""Run by `test_fsdp_gpu.py` in each of two processes; rank 0 prints a line of JSON.

python fsdp_gpu_runner.py DEVICE BACKEND
"""

import json
import os
import sys

import torch.distributed as dist
from fsdp_driver import WAYS1, WAYS2, errors, measured, reduced, shard1
from torch.distributed.algorithms._comm_hooks import default_hooks

from lightning_commhooks.testing.processes import take_gpu


def main():
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = take_gpu(rank, world)
    dist.init_process_group(sys.argv[2])
    found = {}
    for name in ("fp16", "bf16"):
        model = shard1("FULL_SHARD", "cuda")
        state = default_hooks.LowPrecisionState(dist.group.WORLD)
        model.register_comm_hook(state, getattr(default_hooks, f"{name}_compress_hook"))
        found[f"stock {name}"] = {"errors": errors(reduced(model, rank), world)}
    results = measured(rank, world, (*WAYS1, *WAYS2), "cuda")
    found.update({" ".join(key): value for key, value in results.items()})
    if rank == 0:
        print(json.dumps(found), flush=True)
    if dist.is_initialized():
        dist.barrier(device_ids=[device.index])
        dist.destroy_process_group()


main()
