"""What the named ranges cost while no profiler runs, and while one does.

Two ranks on one machine, over gloo. In one run, steps of the same model take turns: with ranges, and with a function
in place of `named` that gives an empty `with`, without a look whether a profiler runs: `ratio`, which is noise. What
ranges cost all users all the time is `expected`: the time of one range by itself, the call and the `with` included,
times their number in a step. `profiled ms` is a step that a profiler records.

    python benchmarks/profiler_overhead.py > benchmarks/results/profiler_overhead.txt
"""

from __future__ import annotations

import argparse
import datetime
import os
import shlex
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

import lightning_commhooks as lc
from lightning_commhooks.basics import ranges
from lightning_commhooks.codecs import codec
from lightning_commhooks.collectives import group
from lightning_commhooks.interface import models
from lightning_commhooks.runtime import runtime

USERS: tuple[ModuleType, ...] = (codec, group, runtime, models)
HOOKS: dict[str, lc.CommHook] = {
    "bf16": lc.BF16(),
    "int8": lc.Int8(),
    "powersgd": lc.PowerSGD(start_powerSGD_iter=2),
    "post_localsgd": lc.PostLocalSGD(start_localSGD_iter=2, post_local_gradient_allreduce=False, period=1),
}
_NOTHING = nullcontext()
_CALLS = 100_000


def nothing(*names: str) -> nullcontext[None]:
    """In place of `named`."""
    return _NOTHING


def use(function: Callable[..., object]) -> None:
    """Have the library make its ranges by this."""
    for module in USERS:
        module.named = function  # type: ignore[attr-defined]


def ns_per_range(function: Callable[..., object]) -> float:
    """Nanoseconds of one range: the least of some series."""
    series = []
    for _ in range(7):
        begin = time.perf_counter()
        for _ in range(_CALLS):
            with function("int8", "encode"):  # type: ignore[attr-defined]
                pass
        series.append((time.perf_counter() - begin) / _CALLS * 1e9)
    return min(series)


def ns_per_loop() -> float:
    """Nanoseconds of the loop around it."""
    series = []
    for _ in range(7):
        begin = time.perf_counter()
        for _ in range(_CALLS):
            pass
        series.append((time.perf_counter() - begin) / _CALLS * 1e9)
    return min(series)


class Run:
    """A model with a hook, and how to take a step."""

    def __init__(self, hook: lc.CommHook, rank: int) -> None:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(256, 256) for _ in range(16)]
        self._ddp = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.5)
        self._optimizer = torch.optim.SGD(self._ddp.parameters(), lr=1e-3)
        self._data = torch.randn(4, 256, generator=torch.Generator().manual_seed(rank))
        self.attachment = lc.attach(self._ddp, hook, optimizers=[self._optimizer])

    def seconds(self) -> float:
        """Time of a step that all ranks begin together."""
        dist.barrier()
        begin = time.perf_counter()
        self._optimizer.zero_grad(set_to_none=True)
        self._ddp(self._data).square().mean().backward()
        self._optimizer.step()
        return time.perf_counter() - begin


def num_ranges(run: Run) -> int:
    """Ranges that one step makes."""
    made: list[int] = []

    def counting(*names: str) -> nullcontext[None]:
        made.append(1)
        return _NOTHING

    use(counting)
    run.seconds()
    return len(made)


def measure(name: str, rank: int, steps: int) -> tuple[float, float, float, int]:
    """Median milliseconds of a step without ranges, with them, and in a profiler; and ranges in a step."""
    run = Run(HOOKS[name], rank)
    for _ in range(10):
        run.seconds()
    times: dict[Callable[..., object], list[float]] = {nothing: [], ranges.named: []}
    for turn in range(steps):
        for function in sorted(times, key=lambda each: (each is nothing) == bool(turn % 2)):
            use(function)
            times[function].append(run.seconds())
    number = num_ranges(run)
    use(ranges.named)
    all_threads = torch.profiler._ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], experimental_config=all_threads):
        profiled = [run.seconds() for _ in range(20)]
    run.attachment.close()
    without, with_them = (statistics.median(times[function]) * 1e3 for function in (nothing, ranges.named))
    return without, with_them, statistics.median(profiled) * 1e3, number


def work(rank: int, steps: int, folder: str) -> None:
    """One rank; the first prints the table."""
    warnings.simplefilter("ignore")  # of hooks that are closed early
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    if rank == 0:
        loop, off, null = ns_per_loop(), ns_per_range(ranges.named), ns_per_range(nothing)
        print(
            f"a range while no profiler runs: {off - loop:.0f} ns; with nothing in place of it {null - loop:.0f} ns\n"
        )
        titles = ("without ms", "with ms", "ratio", "in a step", "expected", "profiled ms")
        print(f"{'hook':<16}" + "".join(f"{title:>13}" for title in titles), flush=True)
    dist.barrier()
    for name in HOOKS:
        without, with_them, profiled, number = measure(name, rank, steps)
        if rank == 0:
            expected = 1 + (off - loop) * number / (without * 1e6)
            print(
                f"{name:<16}{without:>13.3f}{with_them:>13.3f}{with_them / without:>13.4f}{number:>13}"
                f"{expected:>13.5f}{profiled:>13.3f}",
                flush=True,
            )
    dist.destroy_process_group()


def main() -> None:
    """Run both ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help="of each kind")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    print(f"$ python {shlex.join(sys.argv)}")
    print(f"# torch {torch.__version__}, {datetime.date.today()}, 2 ranks on one machine, {args.steps} steps of each\n")
    sys.stdout.flush()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (args.steps, folder), nprocs=2)


if __name__ == "__main__":
    main()
