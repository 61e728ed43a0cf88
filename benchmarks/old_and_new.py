"""Time of a step with the code of an earlier commit and with that of this checkout, in one process, side by side.

Two hosts (network namespaces) joined by a link, one process on each, pinned to one core; 8 x Linear(1024, 1024), 8.4 M
parameters, or with `--small` 64 x Linear(128, 128), 1.1 M. The earlier code is imported under another name. Old and new
take turns, so that a busy machine hurts both alike. Where the memory of a model lies makes up to a fourth of a step,
and that depends on the order in which models are made: each hook has four of them, old, new, new, old, and in every
other launch of the processes new, old, old, new. Reported are medians over rounds of the mean of both models' times,
and of the ratio in a round.

    python benchmarks/old_and_new.py 3ab51be
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import io
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
import warnings
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
from netns import ROOT, hosts, pin
from torch.nn.parallel import DistributedDataParallel

NEW, OLD = "lightning_commhooks", "earlier_commhooks"
# Name, and the hook's class and options.
HOOKS = {
    "allreduce": ("AllReduce", {}),
    "bf16": ("BF16", {}),
    "powersgd, rank 1": ("PowerSGD", {"start_powerSGD_iter": 2}),
    "powersgd, rank 4": ("PowerSGD", {"start_powerSGD_iter": 2, "matrix_approximation_rank": 4}),
    "batched_powersgd": ("BatchedPowerSGD", {"start_powerSGD_iter": 2, "matrix_approximation_rank": 4}),
    "int8": ("Int8", {}),
    "int4": ("Int4", {}),
    "fp8": ("FP8", {}),
    "quantize_per_channel": ("QuantizePerChannel", {}),
}
ORDERS = ((OLD, NEW, NEW, OLD), (NEW, OLD, OLD, NEW))


def export(commit: str, folder: Path) -> None:
    """Write the package as of a commit to a folder, under its other name."""
    archive = subprocess.run(["git", "archive", commit, NEW], cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")
    (folder / NEW).rename(folder / OLD)
    for path in (folder / OLD).rglob("*.py"):
        path.write_text(re.sub(rf"\b{NEW}\b", OLD, path.read_text()))


def make(library: ModuleType, hook: str, small: bool) -> DistributedDataParallel:
    """A wrapped model with a hook of one of the two libraries."""
    torch.manual_seed(0)
    num, size = (64, 128) if small else (8, 1024)
    ddp = DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(size, size) for _ in range(num)]))
    kind, options = HOOKS[hook]
    library.attach(ddp, getattr(library, kind)(**options))
    return ddp


def milliseconds(model: DistributedDataParallel, data: torch.Tensor, steps: int) -> float:
    """Time of a step: forward and backward, no optimizer."""
    start = time.perf_counter()
    for _ in range(steps):
        model.zero_grad(set_to_none=True)
        model(data).square().mean().backward()
    return (time.perf_counter() - start) / steps * 1e3


def work(args: argparse.Namespace) -> None:
    """Time one hook after another; rank 0 prints JSON."""
    rank = int(os.environ["RANK"])
    pin(rank)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    warnings.simplefilter("ignore")  # some gradients of small models are not compressed
    sys.path.insert(0, args.folder)
    libraries = {name: importlib.import_module(name) for name in (OLD, NEW)}
    data = torch.randn(4, 128 if args.small else 1024, generator=torch.Generator().manual_seed(rank))
    found, order = {}, ORDERS[args.launch % 2]
    for hook in args.hooks:
        models = [make(libraries[name], hook, args.small) for name in order]
        for model in models:
            milliseconds(model, data, 6)
        rounds = []
        for _ in range(args.rounds):
            times = dict.fromkeys((OLD, NEW), 0.0)
            for name, model in zip(order, models, strict=True):
                milliseconds(model, data, 1)
                dist.barrier()
                times[name] += milliseconds(model, data, args.steps) / 2
            rounds.append((times[OLD], times[NEW]))
        found[hook] = rounds
    if rank == 0:
        print(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Export the earlier code, run both hosts, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help="of the earlier code")
    parser.add_argument("--launches", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=4, help="in a launch")
    parser.add_argument("--steps", type=int, default=4, help="steps per model and round")
    parser.add_argument("--gbit", type=float, default=10.0, help="of each host's link, per second")
    parser.add_argument("--small", action="store_true", help="many small layers")
    parser.add_argument("--hooks", nargs="*", default=list(HOOKS), choices=HOOKS, help="some of them only")
    # For the processes: where the earlier code is, and how many launches were before this one.
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--launch", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.folder is not None:
        work(args)
        return
    print(f"$ python {shlex.join(sys.argv)}")
    print(f"# torch {torch.__version__}, {datetime.date.today()}, 2 hosts, {args.gbit:g} Gbit/s, one core each\n")
    with tempfile.TemporaryDirectory() as folder, hosts(2, rate=f"{int(args.gbit * 1000)}mbit") as network:
        export(args.commit, Path(folder))
        found: dict[str, list[list[float]]] = {hook: [] for hook in args.hooks}
        for launch in range(args.launches):
            arguments = [__file__, *sys.argv[1:], "--folder", folder, "--launch", str(launch)]
            printed = network.launch(arguments, timeout=1800)[0]
            for hook, rounds in json.loads(printed.splitlines()[-1]).items():
                found[hook] += rounds
    print(f"{'hook':<22}{'old ms':>9}{'new ms':>9}{'new / old':>11}{'quartiles':>16}")
    for hook, rounds in found.items():
        old, new = (statistics.median(times) for times in zip(*rounds, strict=True))
        low, middle, high = statistics.quantiles((b / a for a, b in rounds), n=4)
        print(f"{hook:<22}{old:>9.1f}{new:>9.1f}{middle:>11.3f}{low:>9.3f} to {high:.3f}")


if __name__ == "__main__":
    main()
