"""Cost of a PowerSGD step above `noop`: ours against PyTorch's hook, side by side, in three runs.

Two ranks over gloo on the loopback, each pinned to one core, 8 x Linear(1024, 1024): 8.4 M parameters. The
variants take turns, so that a busy machine hurts all of them alike; reported is the median over rounds.
PyTorch's hook waits inside the hook, because it aborts on gloo otherwise as soon as there are two buckets.

`whole` is `num_iters_per_step=2`, `half` is 1. `floor` only moves what any low-rank hook must that has error feedback
and can forget a bad step: memory plus gradient into a second memory, one read of that for the second factor, one write
of the result, two all-reduces of the factors' size; no products. `half_floor` has one all-reduce and reads nothing
again; `in_place_floor` moreover adds the gradient to the only memory: no bad step can be forgotten.

    python benchmarks/powersgd_step.py > benchmarks/results/powersgd_step.txt

With one thread for each rank and a core of its own, the thread of our engine and the thread of the backward share a
core and its caches. Options show other settings; `stock`, `whole` and `noop` take a third of the time:

    python benchmarks/powersgd_step.py --batch 8 --kinds stock whole
    python benchmarks/powersgd_step.py --batch 8 --kinds stock whole --not-pinned
    python benchmarks/powersgd_step.py --batch 8 --kinds stock whole --not-pinned --threads 2
    python benchmarks/powersgd_step.py --batch 8 --kinds stock whole --optimizer
    python benchmarks/powersgd_step.py --batch 8 --kinds stock whole --block 65536

With `--parts`, it also prints the milliseconds of a step in which the training thread waited, in which the hook
computed, and in which a collective was in flight, from `Attachment.metrics()`.
"""

import argparse
import os
import socket
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import stock
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from netns import pin
from records import command
from torch.nn.parallel import DistributedDataParallel

from lightning_commhooks import Attachment, Bucket, CommHook, PowerSGD, attach
from lightning_commhooks.collectives.group import Group
from lightning_commhooks.collectives.steps import Steps
from lightning_commhooks.hooks import powersgd
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


def make(variant: str) -> tuple[DistributedDataParallel, Attachment | None]:
    """Return a wrapped model with the hook of that name: `noop`, `allreduce`, or one of KINDS and `-<rank>`."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(8)])
    ddp = DistributedDataParallel(model)
    kind, _, rank = variant.partition("-")
    if kind == "stock":
        stock.register(ddp, f"powersgd-{rank}")
        return ddp, None
    if kind in ("whole", "half"):
        num_iters = 1 if kind == "half" else 2
        hook = PowerSGD(matrix_approximation_rank=int(rank), start_powerSGD_iter=2, num_iters_per_step=num_iters)
        return ddp, attach(ddp, hook)
    if kind.endswith("floor"):
        return ddp, attach(ddp, Floor(int(rank), is_half=kind != "floor", in_place=kind == "in_place_floor"))
    return ddp, attach(ddp, kind)


def step(model: DistributedDataParallel, data: torch.Tensor, optimizer: torch.optim.Optimizer | None) -> None:
    """Run forward and backward, and the optimizer if there is one."""
    model.zero_grad(set_to_none=True)
    model(data).square().mean().backward()
    if optimizer is not None:
        optimizer.step()


def worker(rank: int, port: int, args: argparse.Namespace) -> None:
    """Time the variants in turn; rank 0 prints."""
    if not args.not_pinned:
        pin(rank)
    torch.set_num_threads(args.threads)
    powersgd.BLOCK_NUMEL = args.block
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    warnings.filterwarnings("ignore", "hook=.noop. does not average")  # that is what it is for
    variants = ["noop", "allreduce", *(f"{kind}-{r}" for r in LIMITS for kind in args.kinds)]
    models = {variant: make(variant) for variant in variants}
    optimizers = {
        variant: torch.optim.SGD(model.parameters(), 1e-9) if args.optimizer else None
        for variant, (model, _) in models.items()
    }
    data = torch.randn(args.batch, 1024, generator=torch.Generator().manual_seed(rank))
    for variant, (model, _) in models.items():
        for _ in range(5):
            step(model, data, optimizers[variant])
    times: dict[str, list[float]] = {variant: [] for variant in variants}
    for _ in range(args.rounds):
        for variant, (model, _) in models.items():
            step(model, data, optimizers[variant])
            dist.barrier()
            start = time.perf_counter()
            for _ in range(args.steps):
                step(model, data, optimizers[variant])
            times[variant].append((time.perf_counter() - start) / args.steps * 1e3)
    ok = True
    if rank == 0:
        ok = report({variant: statistics.median(t) for variant, t in times.items()}, args.kinds)
        for variant, (_, attachment) in models.items() if args.parts else ():
            if attachment is not None:
                metrics = attachment.metrics()
                parts = (
                    f"{k} {metrics[k] / metrics['timed_steps']:.2f}" for k in ("exposed_ms", "codec_ms", "comm_ms")
                )
                print(f"{variant:<18}{', '.join(parts)} a step")
    dist.destroy_process_group()
    sys.exit(0 if ok else 1)


def report(ms: dict[str, float], kinds: Sequence[str]) -> bool:
    """Print the table; return whether all limits hold."""
    print(
        f"torch {torch.__version__}, median ms per step, {torch.get_num_threads()} threads per rank, 8.4 M parameters"
    )
    for variant, t in ms.items():
        print(f"{variant:<18}{t:8.1f} ms{t - ms['noop']:+9.1f} ms above noop")
    ok = True
    for rank, limits in LIMITS.items() if "stock" in kinds else ():
        above = {kind: ms[f"{kind}-{rank}"] - ms["noop"] for kind in kinds}
        ok &= all(above[kind] <= limit * above["stock"] for kind, limit in limits.items() if kind in kinds)
        ratios = ", ".join(f"{kind} {above[kind] / above['stock']:.2f}" for kind in kinds if kind != "stock")
        asked = ", ".join(f"{kind} {limit}" for kind, limit in limits.items())
        print(f"rank {rank}, of stock: {ratios}; asked: {asked}")
    return ok


def main() -> None:
    """Parse arguments and start two ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--steps", type=int, default=4, help="steps per variant and round")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1, help="threads of PyTorch in each rank")
    parser.add_argument("--not-pinned", action="store_true", help="do not pin each rank to one core")
    parser.add_argument("--optimizer", action="store_true", help="step an optimizer, as in training")
    parser.add_argument("--block", type=int, default=powersgd.BLOCK_NUMEL, help="elements of a block of rows")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--parts", action="store_true", help="print the parts of our steps")
    args = parser.parse_args()
    print(f"$ {command()}", flush=True)
    ok = True
    for _ in range(args.runs):
        print(flush=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        try:
            mp.spawn(worker, (port, args), nprocs=2)
        except mp.ProcessExitedException as ended:
            if ended.exit_code != 1:
                raise
            ok = False
    sys.exit(not ok)


if __name__ == "__main__":
    main()
