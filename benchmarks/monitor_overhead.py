"""What a monitor costs: time of a step over a slow link with and without it, sampling as often as by default.

Two hosts (network namespaces) joined by a link of 1 Gbit/s, one process on each, pinned to one core; 8 x Linear(1024,
1024): 8.4 M parameters. Two models with the same hook, one of them monitored, take turns step by step, so that a busy
machine hurts both alike. That difference is near its own noise, so what the monitor does is timed by itself too:

- `sample ms`: of a step in which the error is sampled, more than of one in which it is not, by steps of one model that
  take turns; amortized over `error_every_n_steps=100` steps.
- `log ms`: of one `Monitor.values()`, as logged, on the training thread; amortized over `every_n_steps=50` steps.
- `count ms`: of asking whether it is time to log, in each step.

`overhead` is their sum for an average step, relative to a step without the monitor. Exit code 1 if it is more than 1%.
Not in it are the half second in which the link is measured, once, and what a logger takes to write the values.

    python benchmarks/monitor_overhead.py
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
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from netns import hosts, pin
from torch.nn.parallel import DistributedDataParallel

import lightning_commhooks as lc
from lightning_commhooks.monitoring import MonitorOptions

HOOKS: dict[str, lc.CommHook] = {
    "bf16": lc.BF16(),
    "int8": lc.Int8(),
    "powersgd": lc.PowerSGD(start_powerSGD_iter=2),
    "post_localsgd": lc.PostLocalSGD(start_localSGD_iter=2, post_local_gradient_allreduce=False),
}
LIMIT = 0.01
_NEVER = 10**9


class Run:
    """A model with a hook, and how to take a step."""

    def __init__(self, hook: lc.CommHook, data: torch.Tensor) -> None:
        torch.manual_seed(0)
        self._ddp = DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(8)]))
        self._optimizer = torch.optim.SGD(self._ddp.parameters(), lr=1e-3)
        self._data = data
        self.attachment = lc.attach(self._ddp, hook, optimizers=[self._optimizer])

    def step(self) -> None:
        """Forward, backward and optimizer."""
        self._optimizer.zero_grad(set_to_none=True)
        self._ddp(self._data).square().mean().backward()
        self._optimizer.step()


def seconds(function: Callable[[], object]) -> float:
    """Time of a call that all ranks begin together."""
    dist.barrier()
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def side_by_side(hook: lc.CommHook, data: torch.Tensor, steps: int, period: int) -> tuple[float, float, float]:
    """Median milliseconds of `period` steps without and with the monitor, per step; and of asking if it is time."""
    without: list[float] = []
    with_it: list[float] = []
    asking: list[float] = []
    for is_second_monitored in (True, False):
        # Two models differ, by a few percent, in their memory and connections.
        runs = [Run(hook, data), Run(hook, data)]
        take_turns(
            runs[not is_second_monitored], runs[is_second_monitored], steps // 2, period, without, with_it, asking
        )
        for run in runs:
            run.attachment.close()
    return statistics.median(without) * 1e3, statistics.median(with_it) * 1e3, statistics.median(asking) * 1e3


def take_turns(
    plain: Run,
    monitored: Run,
    steps: int,
    period: int,
    without: list[float],
    with_it: list[float],
    asking: list[float],
) -> None:
    """Let two models step in turns, `period` steps each; append seconds per step, and of asking if it is time."""
    options = MonitorOptions(measure_link=False)
    monitor = options.monitor(monitored.attachment)

    def watched() -> None:
        for _ in range(period):
            monitored.step()
            begin = time.perf_counter()
            is_time = monitor.num_new_steps >= options.every_n_steps
            asking.append(time.perf_counter() - begin)
            if is_time:
                monitor.values()

    def unwatched() -> None:
        for _ in range(period):
            plain.step()

    for run in (unwatched, watched):
        run()
    for turn in range(steps // period):
        pair = [(unwatched, without), (watched, with_it)]
        for function, times in pair if turn % 2 else reversed(pair):
            times.append(seconds(function) / period)


def by_itself(hook: lc.CommHook, data: torch.Tensor, steps: int, period: int) -> tuple[float, float]:
    """Milliseconds that sampling adds to a step, and of one look at all values."""
    run = Run(hook, data)
    monitor = MonitorOptions(measure_link=False).monitor(run.attachment)
    sampled: list[float] = []
    unsampled: list[float] = []
    looks: list[float] = []

    def several() -> None:
        for _ in range(period):
            run.step()

    several()
    for turn in range(2 * (steps // period)):
        # Both ways of each are collective, so both ranks take them.
        run.attachment.sample_error(1 if turn % 2 else _NEVER)
        (sampled if turn % 2 else unsampled).append(seconds(several) / period)
        looks.append(seconds(monitor.values))
    run.attachment.close()
    return (statistics.median(sampled) - statistics.median(unsampled)) * 1e3, statistics.median(looks) * 1e3


def work(steps: int, names: list[str]) -> None:
    """Measure each hook; rank 0 prints JSON."""
    rank = int(os.environ["RANK"])
    pin(rank)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    warnings.simplefilter("ignore")  # of hooks that are closed early
    data = torch.randn(4, 1024, generator=torch.Generator().manual_seed(rank))
    rows = {}
    for name in names:
        # Of local SGD, whole periods, in which there is one averaging.
        period = HOOKS[name].period if isinstance(HOOKS[name], lc.PostLocalSGD) else 1
        without, with_it, asking = side_by_side(HOOKS[name], data, steps, period)
        sampling, look = by_itself(HOOKS[name], data, steps, period)
        rows[name] = (without, with_it, sampling, look, asking)
    if rank == 0:
        print(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def report(rows: dict[str, tuple[float, ...]]) -> bool:
    """Print the table; whether the limit holds."""
    options, ok = MonitorOptions(), True
    titles = ("step ms", "monitored", "ratio", "sample ms", "log ms", "count ms", "overhead")
    print(f"{'hook':<16}" + "".join(f"{title:>11}" for title in titles))
    for name, (without, with_it, sampling, look, asking) in rows.items():
        # Below zero is noise.
        added = max(0.0, sampling) / options.error_every_n_steps + look / options.every_n_steps + asking
        ok &= added / without < LIMIT
        print(
            f"{name:<16}{without:>11.2f}{with_it:>11.2f}{with_it / without:>11.3f}{sampling:>11.2f}{look:>11.2f}"
            f"{asking:>11.4f}{added / without:>11.2%}"
        )
    print(f"overhead below {LIMIT:.0%}: {'ok' if ok else 'MISSED'}")
    return ok


def main() -> None:
    """Make the network, run both hosts, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=80, help="of each model")
    parser.add_argument("--gbit", type=float, default=1.0, help="of each host's link, per second")
    parser.add_argument("--hooks", nargs="*", default=list(HOOKS), choices=list(HOOKS))
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args.steps, args.hooks)
        return
    print(f"$ python {shlex.join(sys.argv)}")
    print(f"# torch {torch.__version__}, {datetime.date.today()}, 2 hosts, {args.gbit:g} Gbit/s, {args.steps} steps\n")
    with hosts(2, rate=f"{args.gbit:g}gbit") as network:
        arguments = [__file__, "--worker", "--steps", str(args.steps), "--hooks", *args.hooks]
        outputs = network.launch(arguments, timeout=900)
    rows = json.loads(next(line for line in outputs[0].splitlines() if line.startswith("{")))
    sys.exit(0 if report(rows) else 1)


if __name__ == "__main__":
    main()
