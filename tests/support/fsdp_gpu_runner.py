"""Run by `test_fsdp_gpu.py` in each of two processes, with a CUDA device each; rank 0 prints a line of JSON."""

import json

import torch
import torch.distributed as dist
from fsdp_driver import WAYS1, WAYS2, errors, measured, reduced, shard1
from torch.distributed.algorithms._comm_hooks import default_hooks


def main():
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    world = dist.get_world_size()
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


main()
