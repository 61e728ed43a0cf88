"""From which size on a bucket is averaged faster in 8 or 4 bit than in float32: what `min_bytes` is by default.

Two hosts (network namespaces), one process on each, pinned to one core. One bucket with a single gradient is averaged
again and again, by the hook alone, without a model.

    python benchmarks/min_bytes.py
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import statistics
import sys
import time

import torch
import torch.distributed as dist
from netns import hosts, pin

import lightning_commhooks as lc
from lightning_commhooks.collectives.group import Backend, Group
from lightning_commhooks.interface.bucket import Bucket, Slot

HOOKS = {"float32": lc.AllReduce(), "int8": lc.Int8(min_bytes=0), "int4": lc.Int4(min_bytes=0)}
SIZES = [2**k for k in range(12, 23)]  # bytes
RATES = ("10gbit", "1gbit")


def work(rounds: int) -> None:
    """Time all hooks and sizes in turn; rank 0 prints JSON."""
    rank = int(os.environ["RANK"])
    pin(rank)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group = Group(Backend(dist.group.WORLD), process_group=dist.group.WORLD)
    rows = []
    for num_bytes in SIZES:
        n = num_bytes // 4
        slot = Slot("weight", (n // 32, 32), 0)
        flat = torch.randn(n, generator=torch.Generator().manual_seed(rank))
        bound = {name: hook.bind(group) for name, hook in HOOKS.items()}
        times: dict[str, list[float]] = {name: [] for name in HOOKS}
        for step in range(rounds):
            for name, hook in bound.items():
                bucket = Bucket(flat.clone(), 0, True, step, (slot,))
                dist.barrier()
                start = time.perf_counter()
                group.finish(hook.reduce(bucket, group))
                times[name].append(time.perf_counter() - start)
                hook.end_step(torch.tensor(True))
        rows.append((num_bytes, {name: statistics.median(t[2:]) * 1e3 for name, t in times.items()}))
    if rank == 0:
        print(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Print a table for each rate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args.rounds)
        return
    print(f"$ python {shlex.join(sys.argv)}")
    print(f"# torch {torch.__version__}, {datetime.date.today()}, 2 hosts, one core each, ms to average a bucket")
    for rate in RATES:
        with hosts(2, rate=rate) as network:
            output = network.launch([__file__, "--worker", "--rounds", str(args.rounds)], timeout=600)[0]
        print(f"\n{rate:<12}{''.join(f'{name:>10}' for name in HOOKS)}")
        for num_bytes, ms in json.loads(output.splitlines()[-1]):
            print(f"{num_bytes:>9} B {''.join(f'{t:>10.2f}' for t in ms.values())}")


if __name__ == "__main__":
    main()
