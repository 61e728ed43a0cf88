"""Fresh launches in a row: every hook trains, ranks agree, and every process exits cleanly.

    python benchmarks/stress_launches.py --launches 20 --steps 200

Each launch starts 2 or 4 processes over gloo, trains a model of several buckets with every hook name, with and
without `find_unused_parameters`, and compares the parameters of all ranks bit by bit. A launch fails when a
rank exits with another code than 0, takes too long, or prints "terminate called".
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector

import lightning_commhooks as lc
from lightning_commhooks.collectives.steps import Steps

# All compress and average models within ten steps.
LOCAL: dict[str, Any] = {"start_localSGD_iter": 3, "post_local_gradient_allreduce": False}
OPTIONS: dict[str, dict[str, Any]] = {
    "powersgd": {"start_powerSGD_iter": 3},
    "batched_powersgd": {"start_powerSGD_iter": 3},
    "int8": {"min_bytes": 0},
    "int4": {"min_bytes": 0},
    "fp8": {"min_bytes": 0},
    "post_localsgd": {**LOCAL, "period": 2},
    "hierarchical_localsgd": {**LOCAL, "period_group_size_dict": {2: 2, 6: None}},
    "diloco": {**LOCAL, "period": 6, "fragments": 3},
}
MIN_BUCKETS = 6


class Model(nn.Module):
    """Six layers, one of which only every other batch uses when `skips` is set."""

    def __init__(self, skips: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))
        self.skips = skips

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            if not (self.skips and i == 3 and step % 2):
                x = torch.tanh(layer(x))
        return x


def train(hook: lc.CommHook, find_unused: bool, steps: int) -> tuple[bool, int]:
    """Return whether all ranks have the same parameters at the end, and the number of buckets."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Model(find_unused), bucket_cap_mb=4e-3, find_unused_parameters=find_unused)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    attachment = lc.attach(ddp, hook, optimizers=[optimizer])
    buckets = count_buckets(attachment)
    torch.manual_seed(dist.get_rank())
    for step in range(steps):
        x = torch.randn(4, 32)
        # Ranks differ in what they use.
        F.mse_loss(ddp(x, step + dist.get_rank() * (step % 3)), x).backward()
        optimizer.step()
        optimizer.zero_grad()
    attachment.average_weights()
    attachment.close()
    mine = parameters_to_vector(ddp.module.parameters()).detach()
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return all(torch.equal(mine, other) for other in everyone) and bool(mine.isfinite().all()), len(buckets)


def count_buckets(attachment: lc.Attachment) -> set[tuple[str, ...]]:
    """Return a set that will have the buckets of the last steps in it."""
    bound = attachment.bound
    assert bound is not None
    seen: dict[int, tuple[str, ...]] = {}
    reduce, buckets = bound.reduce, set()

    def counting(bucket: lc.Bucket, ranks: lc.Group) -> Steps[torch.Tensor | None]:
        if bucket.step > 0:
            seen[bucket.index] = bucket.names
            buckets.update(seen.values())
        return reduce(bucket, ranks)

    bound.reduce = counting  # type: ignore[method-assign]
    return buckets


def work(rank: int, world: int, store: str, steps: int) -> None:
    """One process of one launch: exits with an error when ranks disagree."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="hook='noop' does not average")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    for name in lc.available_hooks():
        for find_unused in (False, True):
            hook = lc.get_hook(name, **OPTIONS.get(name, {}))
            agree, num_buckets = train(hook, find_unused, steps)
            if num_buckets < MIN_BUCKETS:
                raise SystemExit(f"{name}: only {num_buckets} buckets")
            if agree == (name == "noop"):
                raise SystemExit(f"{name}, find_unused_parameters={find_unused}: ranks agree: {agree}")
    dist.destroy_process_group()


def launch(world: int, steps: int, timeout: float) -> list[str]:
    """Start `world` processes and return what went wrong, nothing at best."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--steps", str(steps), "--world", str(world), "--store", f"{folder}/store"]
        processes = [
            subprocess.Popen(
                [*command, "--rank", str(rank)],
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            for rank in range(world)
        ]
        problems, deadline = [], time.monotonic() + timeout
        for rank, process in enumerate(processes):
            try:
                _, errors = process.communicate(timeout=max(1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                _, errors = process.communicate()
                problems.append(f"rank {rank}: no end after {timeout:.0f} s")
            if process.returncode or "terminate called" in errors:
                problems.append(f"rank {rank}: exit code {process.returncode}: {errors[-2000:]}")
    return problems


def main() -> int:
    """Launch, print a table, return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launches", type=int, default=20, help="launches for each number of ranks")
    parser.add_argument("--steps", type=int, default=200, help="steps for each hook")
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4], help="numbers of ranks")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one launch")
    for argument in ("--rank", "--world"):
        parser.add_argument(argument, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        work(args.rank, args.world, args.store, args.steps)
        return 0

    print(f"torch {torch.__version__}, {args.steps} steps, hooks: {', '.join(lc.available_hooks())}")
    print("each with find_unused_parameters off and on; at least 6 buckets\n")
    print("ranks  launches  clean  seconds per launch")
    failed = False
    for world in args.worlds:
        begin, problems = time.monotonic(), []
        for number in range(args.launches):
            problems.append(launch(world, args.steps, args.timeout))
            for problem in problems[-1]:
                print(f"launch {number}, {world} ranks, {problem}", file=sys.stderr, flush=True)
        clean = problems.count([])
        failed |= clean < args.launches
        seconds = (time.monotonic() - begin) / args.launches
        print(f"{world:5d}  {args.launches:8d}  {clean:5d}  {seconds:18.1f}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
