"""Bytes that leave a node, and time of a step, on nodes of several ranks that share one network card.

    python benchmarks/nodes.py > benchmarks/results/nodes.txt

Nodes are network namespaces joined by a link that `tc` holds to its rate; ranks of one share its interface, and talk
to each other by loopback, which no interface counts. Two nodes of two ranks, and two of four with `--bytes-only`; two
cores are shared by all. Parameters have the shapes of a GPT (6.1 M), and hooks take turns in the same processes; with
`--bytes-only` it is an MLP (8.4 M), and one hook after another. Printed per step:

- counted: `bytes_sent_between_nodes`, of all ranks of a node together, MB.
- interface: what the node's interface sent, MB. Headers are in it.
- difference: of the two, on the node where it is largest.
- fewer: `compression_ratio_between_nodes`: times fewer bytes than plain DDP, as `metrics()` says.
- fewer, interface: the same by the interface, with `allreduce` for plain DDP.
- ms: median over rounds, with the lowest and the highest.
- of the time without: a step by node as a share of one without in the same round, median with quartiles.

Exits with 1 when a difference is above 3%, or `int8` with `hierarchy="node"` sends more than it has to: on two nodes
the encoded gradients once, of which without it leave a node, with two ranks on each, 1.75 times as many, by an exchange
among four ranks and a ring of four; with four 2.875 times.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import sys
import time
import warnings
from typing import Any

import shapes
import torch
import torch.distributed as dist
from netns import hosts, own_tx_bytes, pin
from records import command, machine
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lightning_commhooks as lc

TOLERANCE = 0.03
# By ranks of a node, with 2% for what is not encoded.
MOST_OF_INT8 = {2: 1.02 / 1.75, 4: 1.02 / 2.875}
POWERSGD: dict[str, Any] = {"start_powerSGD_iter": 0, "matrix_approximation_rank": 32}
PERIOD = 4
HOOKS: dict[str, lc.CommHook | None] = {
    "allreduce": lc.AllReduce(),
    "bf16": lc.BF16(),
    "bf16, by node": lc.BF16(hierarchy="node"),
    "int8": lc.Int8(),
    "int8, by node": lc.Int8(hierarchy="node"),
    "int4": lc.Int4(),
    "int4, by node": lc.Int4(hierarchy="node"),
    "fp8": lc.FP8(),
    "fp8, by node": lc.FP8(hierarchy="node"),
    "powersgd, rank 32": lc.PowerSGD(**POWERSGD),
    "powersgd, rank 32, by node": lc.PowerSGD(**POWERSGD, hierarchy="node"),
    "post_localsgd, period 4": lc.PostLocalSGD(start_localSGD_iter=0, period=PERIOD),
}
WARM_UP = 4
BY_NODE = ", by node"
Job = tuple[DistributedDataParallel, torch.optim.Optimizer, tuple[torch.Tensor, ...], Any]


def make(hook: lc.CommHook | None, shape: str) -> Job:
    """A wrapped model with a hook, its optimizer, a batch, and the attachment."""
    if shape == "gpt":
        model, batch = shapes.make(shape, dist.get_rank())
    else:
        torch.manual_seed(0)
        model, batch = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(8)]), (torch.randn(2, 1024),)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    return ddp, optimizer, batch, None if hook is None else lc.attach(ddp, hook, optimizers=[optimizer])


def run(job: Job, steps: int) -> None:
    """Train."""
    ddp, optimizer, batch, _ = job
    for _ in range(steps):
        optimizer.zero_grad()
        ddp(*batch).square().mean().backward()
        optimizer.step()


def work(rounds: int, steps: int, shape: str) -> None:
    """Measure on this rank; rank 0 prints a line of JSON for each hook, with what each rank has counted."""
    pin(int(os.environ["RANK"]))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    warnings.simplefilter("ignore")
    hooks = {"plain DDP": None, **HOOKS}
    found: dict[str, dict[str, list[float]]] = {
        label: {"ms": [], "interface": [], "counted": [], "dense": []} for label in hooks
    }
    # Eight ranks have no memory for all at once.
    for labels in [list(hooks)] if shape == "gpt" else [[label] for label in hooks]:
        in_turns({label: make(hooks[label], shape) for label in labels}, rounds, steps, found)
    for label, of_rank in found.items():
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, of_rank)
        if dist.get_rank() == 0:
            print(json.dumps({"hook": label, "ranks": of_ranks}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def in_turns(jobs: dict[str, Job], rounds: int, steps: int, found: dict[str, dict[str, list[float]]]) -> None:
    """Measure jobs, one after another in each round."""
    for job in jobs.values():
        run(job, WARM_UP)
    for _ in range(rounds):
        for label, job in jobs.items():
            dist.barrier()
            before, metrics = own_tx_bytes(), {} if job[3] is None else job[3].metrics()
            dist.barrier()
            start = time.perf_counter()
            run(job, steps)
            dist.barrier()
            found[label]["ms"].append((time.perf_counter() - start) / steps * 1e3)
            dist.barrier()
            found[label]["interface"].append((own_tx_bytes() - before) / steps)
            now = {} if job[3] is None else job[3].metrics()
            for name, key in (("counted", "bytes_sent_between_nodes"), ("dense", "bytes_dense_between_nodes")):
                found[label][name].append((now.get(key, 0.0) - metrics.get(key, 0.0)) / steps)


def report(num_nodes: int, per_node: int, lines: list[dict[str, Any]], timed: bool) -> list[str]:
    """Print the table; what is wrong with it."""
    wrong, sent = [], {}
    head = f"{'hook':<28} {'counted':>9} {'interface':>10} {'difference':>11} {'fewer':>7} {'fewer, interface':>17}"
    print(head + (f" {'ms':>8} {'lowest':>8} {'highest':>8}" if timed else ""))
    for line in lines:
        label, ranks = line["hook"], line["ranks"]
        nodes = [ranks[i * per_node : (i + 1) * per_node] for i in range(num_nodes)]
        counted = [sum(sum(rank["counted"]) for rank in node) / len(node[0]["ms"]) for node in nodes]
        interface = [sum(node[0]["interface"]) / len(node[0]["ms"]) for node in nodes]
        dense = sum(sum(rank["dense"]) for rank in ranks) / len(ranks[0]["ms"])
        sent[label] = sum(interface)
        if label == "plain DDP":
            print(f"{label:<28} {'':>9} {interface[0] / 1e6:>10.3f} {'':>11} {'':>7} {'':>17}", end="")
        else:
            difference = max((i / c - 1 for i, c in zip(interface, counted, strict=True)), key=abs)
            if abs(difference) > TOLERANCE:
                wrong.append(f"{label}: counted and interface differ by {difference:+.1%}")
            fewer, by_interface = dense / sum(counted), sent["plain DDP"] / sum(interface)
            print(
                f"{label:<28} {counted[0] / 1e6:>9.3f} {interface[0] / 1e6:>10.3f} {difference:>+11.2%} {fewer:>7.2f} "
                f"{by_interface:>17.2f}",
                end="",
            )
        ms = ranks[0]["ms"]
        print(f" {statistics.median(ms):>8.1f} {min(ms):>8.1f} {max(ms):>8.1f}" if timed else "", flush=True)
    if timed:
        print_shares({line["hook"]: line["ranks"][0]["ms"] for line in lines})
    share = sent["int8, by node"] / sent["int8"]
    print(f"\nint8 by node sends {share:.3f} of what it sends without, by the interface\n")
    if share > MOST_OF_INT8[per_node]:
        wrong.append(f"int8 by node sends {share:.3f} of what it sends without, more than {MOST_OF_INT8[per_node]:.3f}")
    return wrong


def print_shares(ms: dict[str, list[float]]) -> None:
    """Print what a step by node takes as a share of one without."""
    print()
    for label, by_node in ms.items():
        if label.endswith(BY_NODE):
            pairs = zip(by_node, ms[label.removesuffix(BY_NODE)], strict=True)
            low, median, high = statistics.quantiles([a / b for a, b in pairs], n=4)
            print(f"{label:<28} {median:.2f} of the time without ({low:.2f} to {high:.2f})")


def main() -> None:
    """Run on two nodes of two ranks, and with `--bytes-only` on two of four."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=PERIOD, help="of a round; a multiple of the period")
    parser.add_argument("--rate", default="1gbit", help="of each node's link, as tc writes it")
    parser.add_argument("--bytes-only", action="store_true", help="two nodes of two ranks and of four, no times")
    parser.add_argument("--work", nargs=3, metavar="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(int(args.work[0]), int(args.work[1]), args.work[2])
        return
    row = {"torch": torch.__version__, "date": datetime.date.today(), "cores": os.cpu_count()}
    print(f"$ {command()}\n# {machine([row])}; links of {args.rate}\n", flush=True)
    wrong = []
    for per_node in (2, 4) if args.bytes_only else (2,):
        print(f"2 nodes of {per_node} ranks")
        shape, rounds = ("mlp", "1") if args.bytes_only else ("gpt", str(args.rounds))
        with hosts(2, rate=args.rate) as network:
            script = [__file__, "--work", rounds, str(args.steps), shape]
            output = network.launch(script, timeout=900, per_host=per_node)[0]
        wrong += report(2, per_node, [json.loads(line) for line in output.splitlines()], not args.bytes_only)
    print("\n".join(wrong) or "within the limits")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
