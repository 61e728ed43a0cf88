"""Time of a step on two and four hosts at 10, 1 and 0.1 Gbit/s, with and without delay: dense, PyTorch's hooks, ours.

    python benchmarks/network.py > benchmarks/results/network.txt

Hosts are network namespaces joined by links that `tc` holds to their rate and delay; a process each, pinned to a core,
of which four hosts share two. Parameters have the shapes of a ResNet (6.3 M in 62 tensors) and of a GPT (6.1 M in 64);
a step is forward, backward and SGD, with a batch small enough for one core. Hooks take turns, so that a busy machine
hurts all of them alike; reported is the median over rounds, with the lowest and the highest, of whole periods for hooks
that average models. A turn ends with a barrier, which is timed by itself and taken off.

PyTorch's PowerSGD aborts on gloo; here it is made to wait within the hook (`stock.py`).

- floor: the time with `noop`, which sends nothing, in its best round, or that of the bytes sent at the link's rate and
  of its delay, whichever is longer: a step that hides all of one behind the other.
- of floor: the step's time over that.
- MB: sent by a host in a step, by the network interface's own count, with the headers of packets of 1500 bytes.

Configurations that are in the JSON already are left out: `--again` repeats them, `--worlds`, `--gbit`, `--delays` and
`--shapes` run some. `--quick` takes a minute or two, and keeps nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import network_report
import shapes
import stock
import torch
import torch.distributed as dist
from netns import hosts, own_tx_bytes, own_tx_packets, pin, wire_bytes
from records import RESULTS, Records, command, machine
from torch.nn.parallel import DistributedDataParallel

import lightning_commhooks as lc

RECORDS = RESULTS / "network.json"
KEYS = ("shape", "world", "gbit", "delay_ms", "hook")
ALONE: dict[str, Any] = {"start_localSGD_iter": 0, "post_local_gradient_allreduce": False}
# A string is PyTorch's hook of that name, `None` DDP by itself.
HOOKS: dict[str, str | lc.CommHook | None] = {
    "noop": lc.Noop(),
    "dense": None,
    "stock fp16": "fp16",
    "stock bf16": "bf16",
    "stock powersgd, rank 4": "powersgd-4",
    "bf16": lc.BF16(),
    "int8": lc.Int8(),
    "int4": lc.Int4(),
    "powersgd, rank 1": lc.PowerSGD(matrix_approximation_rank=1, start_powerSGD_iter=0),
    "powersgd, rank 4": lc.PowerSGD(matrix_approximation_rank=4, start_powerSGD_iter=0),
    "int8(powersgd, rank 4)": lc.Cast(lc.PowerSGD(matrix_approximation_rank=4, start_powerSGD_iter=0), "int8"),
    "post_localsgd, 8": lc.PostLocalSGD(period=8, **ALONE),
    "diloco, 16, int4": lc.DiLoCo(period=16, pseudo_gradient="int4", **ALONE),
}
# Steps before the first turn: DDP rebuilds its buckets after the first, PyTorch's PowerSGD begins at the third, and low
# rank of either kind gets faster for several more.
WARM_UP, WARM_UP_LOW_RANK = 3, 12
QUICK = ("noop", "dense", "stock bf16", "int8", "int4", "powersgd, rank 4", "diloco, 16, int4")


class Job:
    """A model with a hook, and steps of it."""

    def __init__(self, hook: str, shape: str) -> None:
        model, self.batch = shapes.make(shape, dist.get_rank())
        self.model = DistributedDataParallel(model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)
        configured = HOOKS[hook]
        self.period = getattr(configured, "period", 1)
        if isinstance(configured, lc.CommHook):
            lc.attach(self.model, configured, optimizers=[self.optimizer])
        elif configured is not None:
            stock.register(self.model, configured)

    def run(self, steps: int) -> None:
        """Forward, backward and update."""
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(*self.batch).backward()
            self.optimizer.step()


def work(shape: str, rounds: int, steps: int, hooks: list[str]) -> None:
    """Time the hooks in turn on this host; rank 0 prints JSON: seconds of each round and bytes, per step."""
    pin(int(os.environ["RANK"]))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    warnings.filterwarnings("ignore", "hook=.noop. does not average")  # that is what it is for
    jobs = {hook: Job(hook, shape) for hook in hooks}
    for hook, job in jobs.items():
        job.run(max(WARM_UP_LOW_RANK if "powersgd" in hook else WARM_UP, job.period))
    seconds: dict[str, list[float]] = {hook: [] for hook in hooks}
    sent = dict.fromkeys(hooks, 0.0)
    for _ in range(rounds):
        for hook, job in jobs.items():
            num = job.period if job.period > 1 else steps
            (nothing, few), (took, many) = turn(job, 0), turn(job, num)
            seconds[hook].append((took - nothing) / num)
            sent[hook] += (many - few) / num / rounds
    if dist.get_rank() == 0:
        print(json.dumps({hook: (seconds[hook], sent[hook]) for hook in hooks}))
    dist.barrier()
    dist.destroy_process_group()


def turn(job: Job, steps: int) -> tuple[float, float]:
    """Seconds and bytes of so many steps, and of the barrier after them."""
    dist.barrier()
    num_bytes, packets, start = own_tx_bytes(), own_tx_packets(), time.perf_counter()
    job.run(steps)
    dist.barrier()
    took = time.perf_counter() - start
    return took, wire_bytes(own_tx_bytes() - num_bytes, own_tx_packets() - packets)


def measure(records: Records, shape: str, world: int, gbit: float, delay_ms: float, options: list[str]) -> None:
    """One configuration, all hooks."""
    # On a slow link an idle host may not send at once what a compressing hook sends in a step. With delay whole packets
    # of 64 KB must pass, or else forwarding takes the processor's time.
    burst = "128kb" if gbit >= 1 or delay_ms else "16kb"
    with hosts(world, rate=f"{gbit * 1000:g}mbit", delay_ms=delay_ms, burst=burst) as network:
        output = network.launch([__file__, "--work", shape, *options], timeout=600)[0]
    for hook, (seconds, sent) in json.loads(output.splitlines()[-1]).items():
        values = dict(zip(KEYS, (shape, world, gbit, delay_ms, hook), strict=True))
        period = getattr(HOOKS[hook], "period", 1)
        ms = [round(s * 1e3, 2) for s in seconds]
        sent = round(max(0.0, sent))
        records.put({**values, "ms": statistics.median(ms), "rounds": ms, "bytes": sent, "period": period})


def configurations(args: argparse.Namespace) -> list[tuple[str, int, float, float]]:
    """Shape, hosts, Gbit/s and ms. Delay is added to slow links only, and for one shape: it costs both the same."""
    if args.quick:
        return [("gpt", 2, 1.0, 0.0), ("gpt", 2, 0.1, 0.0)]
    every = itertools.product(args.shapes, args.worlds, args.gbit, args.delays)
    return [(s, w, g, d) for s, w, g, d in every if not d or (g <= 1 and s == "gpt")]


def main() -> None:
    """Measure what is missing, print the tables, draw the plots."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", nargs="*", type=int, default=[2, 4], help="numbers of hosts")
    parser.add_argument("--gbit", nargs="*", type=float, default=[10.0, 1.0, 0.1], help="rates, in Gbit/s")
    parser.add_argument("--delays", nargs="*", type=float, default=[0.0, 10.0], help="one way, in ms")
    parser.add_argument("--shapes", nargs="*", choices=["resnet", "gpt"], default=["resnet", "gpt"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--again", action="store_true", help="also what is in the records already")
    parser.add_argument("--quick", action="store_true", help="two configurations, few hooks, no records")
    parser.add_argument("--work", nargs=4, metavar="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        shape, rounds, steps, hooks = args.work
        work(shape, int(rounds), int(steps), json.loads(hooks))
        return
    with TemporaryDirectory() as folder:
        records = Records(Path(folder, "network.json") if args.quick else RECORDS, KEYS)
        for shape, world, gbit, delay_ms in configurations(args):
            if args.again or not records.has(shape=shape, world=world, gbit=gbit, delay_ms=delay_ms):
                steps = 8 if gbit >= 10 else 4 if gbit >= 1 else 2
                options = [str(args.rounds), str(steps), json.dumps(QUICK if args.quick else list(HOOKS))]
                measure(records, shape, world, gbit, delay_ms, options)
                print(f"{shape}, {world} hosts, {gbit:g} Gbit/s, {delay_ms:g} ms: done", file=sys.stderr, flush=True)
        print(f"$ {command()}")
        rounds = sorted({len(row["rounds"]) for row in records.rows})
        print(f"# {machine(records.rows)}; {' to '.join(map(str, rounds))} rounds")
        network_report.tables(records.rows)
        if not args.quick:
            network_report.draw(records.rows, RESULTS)


if __name__ == "__main__":
    main()
