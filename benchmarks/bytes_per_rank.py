"""Bytes that each rank sends in a step, for numbers of ranks that are not at hand.

PyTorch's fake process group pretends to be 2 to 64 ranks; each hook reduces the gradients of 8 x Linear(1024, 1024),
8.4 M parameters, in one bucket for each layer, and its payload is counted as always (`metrics()["bytes_sent"]`, which
`wire_bytes.py` compares with network interfaces). Printed as a fraction of what a ring all-reduce of float32 sends.

    python benchmarks/bytes_per_rank.py
"""

from __future__ import annotations

import argparse
import datetime
import shlex
import sys
import warnings

import torch
import torch.distributed as dist

# Private, and used nowhere else.
from torch.testing._internal.distributed.fake_pg import FakeStore

import lightning_commhooks as lc
from lightning_commhooks.collectives.group import Backend, Group
from lightning_commhooks.interface.bucket import Bucket, Slot

WORLDS = (2, 4, 8, 16, 64)
HOOKS: dict[str, lc.CommHook] = {
    "allreduce": lc.AllReduce(),
    "allgather": lc.AllGather(),
    "bf16": lc.BF16(),
    "int8": lc.Int8(),
    "fp8": lc.FP8(),
    "int4": lc.Int4(),
    "quantize_per_tensor": lc.QuantizePerTensor(),
    "quantize_per_channel": lc.QuantizePerChannel(),
    "quantize_per_tensor, all_gather": lc.QuantizePerTensor(protocol="all_gather"),
    "powersgd, rank 4": lc.PowerSGD(matrix_approximation_rank=4, start_powerSGD_iter=0),
    "powersgd, rank 4, int8 factors": lc.Cast(lc.PowerSGD(matrix_approximation_rank=4, start_powerSGD_iter=0), "int8"),
}


def fraction_sent(hook: lc.CommHook, world: int) -> float:
    """Bytes that a rank sends in a step, over those of a float32 ring."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        group = Group(Backend(dist.group.WORLD), process_group=dist.group.WORLD)
        bound = hook.bind(group)
        dense = 0.0
        for layer in range(8):
            slots = (Slot(f"{layer}.bias", (1024,), 0), Slot(f"{layer}.weight", (1024, 1024), 1024))
            flat = torch.randn(1024 + 1024 * 1024)
            dense += group.ring_bytes(flat)
            group.finish(bound.reduce(Bucket(flat, layer, layer == 7, 0, slots), group))
        return group.counters.bytes_sent / dense
    finally:
        dist.destroy_process_group()


def main() -> None:
    """Print the table."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    warnings.simplefilter("ignore")
    torch._dynamo.config.disable = True  # only bytes count
    print(f"$ python {shlex.join(sys.argv)}")
    print(f"# torch {torch.__version__}, {datetime.date.today()}, of a float32 ring all-reduce\n")
    print(f"{'ranks':<32}{''.join(f'{world:>9}' for world in WORLDS)}")
    for name, hook in HOOKS.items():
        print(f"{name:<32}{''.join(f'{fraction_sent(hook, world):>9.4f}' for world in WORLDS)}", flush=True)


if __name__ == "__main__":
    main()
