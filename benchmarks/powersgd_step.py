"""Cost of a PowerSGD step above `noop`: ours against PyTorch's hook, side by side in one run.

Two ranks over gloo on the loopback, each pinned to one core, 8 x Linear(1024, 1024): 8.4 M parameters. The
variants take turns, so that a busy machine hurts all of them alike; reported is the median over rounds.
PyTorch's hook waits inside the hook, because it aborts on gloo otherwise as soon as there are two buckets.
`floor` only moves what any low-rank hook must that has error feedback and can forget a bad step: memory plus gradient
into a second memory, one read of that for the second factor, one write of the result, two all-reduces of the factors'
size; no products. `floor_in_place` adds the gradient to the only memory: no bad step can be forgotten.

    python benchmarks/powersgd_step.py
"""

import argparse
import os
import socket
import statistics
import sys
import time
import warnings
from dataclasses import dataclass
from typing import ClassVar

import stock
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from netns import pin
from torch.nn.parallel import DistributedDataParallel

from lightning_commhooks import Bucket, CommHook, PowerSGD, attach
from lightning_commhooks.collectives.group import Group
from lightning_commhooks.interface.hook import BoundHook

# Ours over stock, of the cost above noop: what the project promises, by matrix rank.
LIMITS = {1: 0.5, 4: 0.35}
KINDS = ("stock", "ours", "floor", "floor_in_place")


@dataclass(frozen=True)
class Floor(CommHook):
    """Moves the bytes of a low-rank hook and computes nothing."""

    name: ClassVar[str] = "floor"
    rank: int
    in_place: bool = False

    def bind(self, group: Group) -> BoundHook:
        """See `CommHook.bind`."""
        return BoundFloor(group, self)


class BoundFloor(BoundHook):
    """See `Floor`."""

    def __init__(self, group: Group, config: Floor) -> None:
        super().__init__(group)
        self._config = config
        self._memory: dict[tuple[str, ...], list[torch.Tensor]] = {}

    def reduce(self, flat: torch.Tensor, bucket: Bucket) -> None:
        """See `BoundHook.reduce`."""
        if bucket.names not in self._memory:
            self._memory[bucket.names] = [torch.zeros_like(flat), torch.zeros_like(flat)]
        old, spare = self._memory[bucket.names]
        memory = torch.add(old, flat, out=old if self._config.in_place else spare)
        self._memory[bucket.names] = [memory, old if memory is spare else spare]
        factor = flat.new_zeros(self._config.rank * flat.numel() // 1024)
        self.group.all_reduce_(factor)
        memory.sum()
        self.group.all_reduce_(factor)
        flat.fill_(0.0)


def make(variant: str) -> DistributedDataParallel:
    """A wrapped model with the hook of that name: `noop`, `allreduce`, or one of KINDS and `-<rank>`."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(8)])
    ddp = DistributedDataParallel(model)
    kind, _, rank = variant.partition("-")
    if kind == "stock":
        stock.register(ddp, f"powersgd-{rank}")
    elif kind == "ours":
        attach(ddp, PowerSGD(matrix_approximation_rank=int(rank), start_powerSGD_iter=2))
    else:
        attach(ddp, Floor(int(rank), in_place=kind == "floor_in_place") if kind.startswith("floor") else kind)
    return ddp


def step(model: DistributedDataParallel, data: torch.Tensor) -> None:
    """Forward and backward, no optimizer."""
    model.zero_grad(set_to_none=True)
    model(data).square().mean().backward()


def worker(rank: int, port: int, rounds: int, steps: int) -> None:
    """Time the variants in turn; rank 0 prints."""
    pin(rank)
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    warnings.filterwarnings("ignore", "hook=.noop. does not average")  # that is what it is for
    variants = ["noop", "allreduce", *(f"{kind}-{r}" for r in LIMITS for kind in KINDS)]
    models = {variant: make(variant) for variant in variants}
    data = torch.randn(4, 1024, generator=torch.Generator().manual_seed(rank))
    for model in models.values():
        for _ in range(5):
            step(model, data)
    times: dict[str, list[float]] = {variant: [] for variant in variants}
    for _ in range(rounds):
        for variant, model in models.items():
            step(model, data)
            dist.barrier()
            start = time.perf_counter()
            for _ in range(steps):
                step(model, data)
            times[variant].append((time.perf_counter() - start) / steps * 1e3)
    ok = report({variant: statistics.median(t) for variant, t in times.items()}) if rank == 0 else True
    dist.destroy_process_group()
    sys.exit(0 if ok else 1)


def report(ms: dict[str, float]) -> bool:
    """Print the table; whether all limits hold."""
    print(f"torch {torch.__version__}, median ms per step on one core per rank, 8.4 M parameters, 2 ranks")
    for variant, t in ms.items():
        print(f"{variant:<18}{t:8.1f} ms{t - ms['noop']:+9.1f} ms above noop")
    ok = True
    for rank, limit in LIMITS.items():
        above = {kind: ms[f"{kind}-{rank}"] - ms["noop"] for kind in KINDS}
        ok &= above["ours"] <= limit * above["stock"]
        ratios = ", ".join(f"{kind} / stock = {above[kind] / above['stock']:.2f}" for kind in KINDS[1:])
        print(f"rank {rank}: {ratios}; limit {limit}")
    return ok


def main() -> None:
    """Parse arguments and start two ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=4, help="steps per variant and round")
    args = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(worker, (port, args.rounds, args.steps), nprocs=2)


if __name__ == "__main__":
    main()
