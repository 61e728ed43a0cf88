"""Cost of a PowerSGD step above `noop`: ours against PyTorch's hook, side by side, in three runs.

Two ranks over gloo on the loopback, each pinned to one core, 8 x Linear(1024, 1024): 8.4 M parameters. The
variants take turns, so that a busy machine hurts all of them alike; reported is the median over rounds.
PyTorch's hook waits inside the hook, because it aborts on gloo otherwise as soon as there are two buckets.

`whole` is `num_iters_per_step=2`, `half` is 1. `floor` only moves what any low-rank hook must that has error feedback
and can forget a bad step: memory plus gradient into a second memory, one read of that for the second factor, one write
of the result, two all-reduces of the factors' size; no products. `half_floor` has one all-reduce and reads nothing
again; `in_place_floor` moreover adds the gradient to the only memory: no bad step can be forgotten.

    python benchmarks/powersgd_step.py > benchmarks/results/powersgd_step.txt
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
from records import command
from torch.nn.parallel import DistributedDataParallel

from lightning_commhooks import Bucket, CommHook, PowerSGD, attach
from lightning_commhooks.collectives.group import Group
from lightning_commhooks.collectives.steps import Steps
from lightning_commhooks.interface.hook import BoundHook

# Ours over stock, of the cost above noop: what is asked for, by matrix rank.
LIMITS = {1: {"whole": 0.5, "half": 0.35}, 4: {"whole": 0.42, "half": 0.3}}
KINDS = ("stock", "whole", "half", "floor", "half_floor", "in_place_floor")


@dataclass(frozen=True)
class Floor(CommHook):
    """Moves the bytes of a low-rank hook and computes nothing."""

    name: ClassVar[str] = "floor"
    rank: int
    is_half: bool = False
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

    def reduce(self, bucket: Bucket, ranks: Group) -> Steps[None]:
        """See `BoundHook.reduce`."""
        flat = bucket.flat
        if bucket.names not in self._memory:
            self._memory[bucket.names] = [torch.zeros_like(flat), torch.zeros_like(flat)]
        old, spare = self._memory[bucket.names]
        memory = torch.add(old, flat, out=old if self._config.in_place else spare)
        self._memory[bucket.names] = [memory, old if memory is spare else spare]
        factor = flat.new_zeros(self._config.rank * flat.numel() // 1024)
        yield from ranks.all_reduce_(factor)
        if not self._config.is_half:
            memory.sum()
            yield from ranks.all_reduce_(factor)
        flat.fill_(0.0)


def make(variant: str) -> DistributedDataParallel:
    """A wrapped model with the hook of that name: `noop`, `allreduce`, or one of KINDS and `-<rank>`."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(8)])
    ddp = DistributedDataParallel(model)
    kind, _, rank = variant.partition("-")
    if kind == "stock":
        stock.register(ddp, f"powersgd-{rank}")
    elif kind in ("whole", "half"):
        num_iters = 1 if kind == "half" else 2
        attach(ddp, PowerSGD(matrix_approximation_rank=int(rank), start_powerSGD_iter=2, num_iters_per_step=num_iters))
    elif kind.endswith("floor"):
        attach(ddp, Floor(int(rank), is_half=kind != "floor", in_place=kind == "in_place_floor"))
    else:
        attach(ddp, kind)
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
    for rank, limits in LIMITS.items():
        above = {kind: ms[f"{kind}-{rank}"] - ms["noop"] for kind in KINDS}
        ok &= all(above[kind] <= limit * above["stock"] for kind, limit in limits.items())
        ratios = ", ".join(f"{kind} {above[kind] / above['stock']:.2f}" for kind in KINDS[1:])
        asked = ", ".join(f"{kind} {limit}" for kind, limit in limits.items())
        print(f"rank {rank}, of stock: {ratios}; asked: {asked}")
    return ok


def main() -> None:
    """Parse arguments and start two ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--steps", type=int, default=4, help="steps per variant and round")
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    print(f"$ {command()}", flush=True)
    ok = True
    for _ in range(args.runs):
        print(flush=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        try:
            mp.spawn(worker, (port, args.rounds, args.steps), nprocs=2)
        except mp.ProcessExitedException as ended:
            if ended.exit_code != 1:
                raise
            ok = False
    sys.exit(not ok)


if __name__ == "__main__":
    main()
