"""Time of a step between hosts with a delay: plain DDP, PyTorch's hooks, and ours, with this code and an earlier one.

Hosts are network namespaces joined by links that `tc` holds to their rate and delay; a process each, pinned to a core,
of which four hosts share two. The earlier code is imported under another name. All take turns in the same processes;
reported are the median over rounds, the share of plain DDP's step, the share of what plain DDP's communication adds to
a step with `noop` that communication adds with this hook, and how busy the cores were: near 1, processors are the limit
and not the network. A step is forward, backward and SGD.

- gpt: 6.1 M parameters, two buckets of 25 MB at most.
- mlp, 25 MB and 3 MB: 10 x Linear(1024, 1024), 10.5 M parameters, in buckets of that size at most.

    python benchmarks/far_away.py db1fd9b

- gpt elsewhere: as many parameters; a step takes 50 ms on a device that leaves the host's processor alone, which here
  is a pause.

Models averaged every 16 steps, at once or while ranks train on, are for 13 to 16, with steps in multiples of 16:

    python benchmarks/far_away.py 3a59fcc --only 13 14 15 16 --steps 96 --rows noop 'diloco, before' \
        'diloco, int4, before' 'diloco, int4, now' 'diloco, int4, 2 fragments, delay 8, now'

`--only 3 5` runs configurations by number. `--rows` with names of hooks; with "dense, 4 connections" and "dense, 20
groups" plain DDP as others make it faster over such links: four connections between two ranks (`GLOO_SOCKET_IFNAME`
names the interface four times), and 20 groups that sum a piece each, as torchft's `ParallelProcessGroup`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import sys
import time
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType

import shapes
import stock
import torch
import torch.distributed as dist
from netns import INTERFACE, hosts, pin
from old_and_new import NEW, OLD, export
from records import command, machine
from torch import nn
from torch.nn.parallel import DistributedDataParallel

# Shape, hosts, Gbit/s, ms one way.
CONFIGURATIONS = [
    ("gpt", 2, 1.0, 10.0),
    ("gpt", 4, 1.0, 10.0),
    ("mlp, 25 MB", 2, 1.0, 10.0),
    ("mlp, 25 MB", 4, 1.0, 10.0),
    ("mlp, 3 MB", 4, 1.0, 10.0),
    ("gpt", 2, 1.0, 40.0),
    ("gpt", 4, 1.0, 40.0),
    ("gpt", 4, 0.1, 10.0),
    ("mlp, 3 MB", 2, 1.0, 0.0),
    ("mlp, 3 MB", 4, 1.0, 0.0),
    ("gpt", 4, 10.0, 0.0),
    ("gpt", 2, 1.0, 0.0),
    ("gpt", 4, 1.0, 0.0),
    ("gpt", 2, 0.1, 40.0),
    ("gpt", 4, 0.1, 40.0),
    ("gpt elsewhere", 2, 0.1, 40.0),
    ("gpt elsewhere", 4, 0.1, 40.0),
]
POWERSGD = {"start_powerSGD_iter": 0, "matrix_approximation_rank": 4}
HOOKS = {
    "noop": ("Noop", {}),
    "allreduce": ("AllReduce", {}),
    "bf16": ("BF16", {}),
    "int8": ("Int8", {}),
    "int4": ("Int4", {}),
    "powersgd, rank 4": ("PowerSGD", POWERSGD),
}
DILOCO = {"period": 16, "start_localSGD_iter": 0, "post_local_gradient_allreduce": False}
INT4 = {**DILOCO, "pseudo_gradient": "int4"}
# What averages models, for which each host steps by itself.
LOCAL = {
    "diloco": ("DiLoCo", DILOCO),
    "diloco, int4": ("DiLoCo", INT4),
    "diloco, int4, 2 fragments": ("DiLoCo", {**INT4, "fragments": 2}),
    "diloco, int4, 2 fragments, delay 8": ("DiLoCo", {**INT4, "fragments": 2, "delay": 8}),
    "diloco, int4, 2 fragments, delay 12": ("DiLoCo", {**INT4, "fragments": 2, "delay": 12}),
}
STOCK = {"stock bf16": "bf16", "stock powersgd, rank 4": "powersgd-4"}
# How others fill a link with a delay.
CONNECTIONS, GROUPS = "dense, 4 connections", "dense, 20 groups"
ROWS = ["dense", *STOCK, "noop", *(f"{hook}, {which}" for hook in list(HOOKS)[1:] for which in ("before", "now"))]
WARM_UP = 8


class Elsewhere(nn.Module):
    """A model whose steps are computed while the host's processor is idle."""

    def __init__(self, model: nn.Module, seconds: float) -> None:
        super().__init__()
        self.model, self._seconds = model, seconds

    def forward(self, *_: torch.Tensor) -> torch.Tensor:
        """Something that has gradients."""
        time.sleep(self._seconds)
        return torch.stack([parameter.sum() for parameter in self.model.parameters()])


Job = tuple[DistributedDataParallel, torch.optim.Optimizer, tuple]


def make(row: str, shape: str, libraries: dict[str, ModuleType]) -> Job:
    """A wrapped model with a hook, its optimizer, and a batch."""
    if shape.startswith("gpt"):
        (model, batch), cap = shapes.make("gpt", dist.get_rank()), 25
        model = Elsewhere(model, 0.05) if shape == "gpt elsewhere" else model
    else:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(10)])
        batch, cap = (torch.randn(2, 1024),), int(shape.split()[1])
    group = connected(4) if row == CONNECTIONS else None
    ddp = DistributedDataParallel(model, bucket_cap_mb=cap, process_group=group)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-5)
    if row in STOCK:
        stock.register(ddp, STOCK[row])
    elif row == GROUPS:
        ddp.register_comm_hook([dist.new_group() for _ in range(20)], stock.side_by_side)
    elif row not in ("dense", CONNECTIONS):
        name, _, which = row.rpartition(", ") if row not in HOOKS else (row, "", "now")
        kind, options = {**HOOKS, **LOCAL}[name]
        library = libraries[OLD if which == "before" else NEW]
        library.attach(ddp, getattr(library, kind)(**options), optimizers=[optimizer] if name in LOCAL else None)
    return ddp, optimizer, batch


def connected(num_connections: int) -> dist.ProcessGroup:
    """A group with so many connections between two ranks, made as gloo's author says: the interface's name repeated."""
    os.environ["GLOO_SOCKET_IFNAME"] = ",".join([INTERFACE] * num_connections)
    try:
        return dist.new_group()
    finally:
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE


def run(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, batch: tuple, steps: int) -> None:
    """Steps with plain SGD."""
    for _ in range(steps):
        optimizer.zero_grad()
        ddp(*batch).square().mean().backward()
        optimizer.step()


def work(shape: str, folder: str, rows: list[str], rounds: int, steps: int) -> None:
    """Time the rows in turn on this host; rank 0 prints JSON."""
    pin(int(os.environ["RANK"]))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    warnings.simplefilter("ignore")
    sys.path.insert(0, folder)
    needed = {OLD if row.endswith("before") else NEW for row in rows}
    libraries = {name: importlib.import_module(name) for name in needed}
    jobs = {row: make(row, shape, libraries) for row in rows}
    for job in jobs.values():
        run(*job, WARM_UP)
    seconds: dict[str, list[float]] = {row: [] for row in rows}
    busy: dict[str, list[float]] = {row: [] for row in rows}
    for _ in range(rounds):
        for row, job in jobs.items():
            run(*job, 1)
            took = []
            for num in (0, steps):
                dist.barrier()
                start, before = time.perf_counter(), busy_seconds()
                run(*job, num)
                dist.barrier()
                took.append(time.perf_counter() - start)
            seconds[row].append((took[1] - took[0]) / steps * 1e3)
            busy[row].append((busy_seconds() - before) / took[1] / (os.cpu_count() or 1))
            time.sleep(1.0 if "delay" in row else 0.0)  # what is under way is not to disturb the next row
    if dist.get_rank() == 0:
        print(json.dumps({"ms": seconds, "busy": busy}))
    dist.barrier()
    dist.destroy_process_group()


def busy_seconds() -> float:
    """Seconds that the machine's cores have worked since it started, all together; what was stolen from it, too."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split(maxsplit=9)[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def table(rows: dict[str, list[float]], busy: dict[str, list[float]]) -> None:
    """Medians, and shares of plain DDP's time."""
    middle = {row: statistics.median(ms) for row, ms in rows.items()}
    dense, noop = (middle.get(row, float("nan")) for row in ("dense", "noop"))
    print(f"{'hook':<40}{'ms':>9}{'lowest':>9}{'highest':>9}{'of dense':>10}{'added':>8}{'of noop':>9}{'busy':>7}")
    for row, ms in rows.items():
        added = (middle[row] - noop) / (dense - noop)
        shares = f"{middle[row] / dense:>10.2f}{added:>8.2f}{middle[row] / noop:>9.2f}"
        shares += f"{statistics.mean(busy[row]):>7.2f}"
        print(f"{row:<40}{middle[row]:>9.1f}{min(ms):>9.1f}{max(ms):>9.1f}{shares}")


def main() -> None:
    """Export the earlier code, run all hosts, print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help="of the earlier code")
    parser.add_argument("--only", nargs="*", type=int, default=range(len(CONFIGURATIONS)), help="numbers, from 0 on")
    choices = [*ROWS, CONNECTIONS, GROUPS, *(f"{hook}, {which}" for hook in LOCAL for which in ("before", "now"))]
    parser.add_argument("--rows", nargs="*", choices=choices, default=ROWS, metavar="ROW", help="hooks")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(*args.work, args.rows, args.rounds, args.steps)
        return
    torch_row = {"torch": torch.__version__, "date": time.strftime("%Y-%m-%d"), "cores": os.cpu_count()}
    print(f"$ {command()}\n# {machine([torch_row])}; {args.rounds} rounds of {args.steps} steps", flush=True)
    with TemporaryDirectory() as folder:
        export(args.commit, Path(folder))
        for number in args.only:
            shape, world, gbit, delay_ms = CONFIGURATIONS[number]
            arguments = [__file__, args.commit, "--work", shape, folder, "--rows", *args.rows]
            arguments += ["--rounds", str(args.rounds), "--steps", str(args.steps)]
            with hosts(world, rate=f"{gbit * 1000:g}mbit", delay_ms=delay_ms) as network:
                printed = network.launch(arguments, timeout=900)[0]
            found = json.loads(printed.splitlines()[-1])
            print(f"\n{number}. {shape}; {world} hosts, {gbit:g} Gbit/s, delay {delay_ms:g} ms one way")
            table(found["ms"], found["busy"])
            sys.stdout.flush()


if __name__ == "__main__":
    main()
