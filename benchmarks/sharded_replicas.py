"""Sharded replicas on two nodes over a slow link: seconds to a loss, and bytes between the nodes.

    python benchmarks/sharded_replicas.py > benchmarks/results/sharded_replicas.txt

Two nodes (network namespaces) of two ranks, joined by a link of 100 Mbit/s; two cores are shared by all. The
transformer of `language_model.py` (0.84 M parameters) is sharded over the ranks of a node, and the nodes are replicas:
HSDP. All methods have the same learning rate, that of plain HSDP, and the same data. Printed are:

- ms: of a step, over the whole run.
- interface: what a node's interface sends in a step, kB; payload: that without 66 bytes of headers in each packet,
  which are small on so slow a link; counted: the same by our `metrics()`.
- seconds to the target: interpolated between evaluations, at the same steps for all; the clock stops meanwhile.
- loss at the end.

Exits with 1 when the payload and our own count differ by more than 3%.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import math
import os
import sys
import time
import warnings
from typing import Any

import language_model
import torch
import torch.distributed as dist
from netns import hosts, own_tx_bytes, own_tx_packets, pin
from records import command, machine
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import lightning_commhooks as lc

STEPS, EVERY, TARGET, LEARNING_RATE = 256, 32, 2.65, 6e-4
NUM_VALIDATION, TOLERANCE, RATE, HEADERS = 256, 0.03, "100mbit", 66
DILOCO = {"pseudo_gradient": "int4", "outer_lr": 1.0, "outer_momentum": 0.0, "nesterov": False}
HALF = "reduce_dtype=bfloat16"
METHODS: dict[str, lc.CommHook | None] = {
    "HSDP": None,
    HALF: None,
    "allreduce": lc.AllReduce(),
    "bf16": lc.BF16(),
    "int8": lc.Int8(),
    "int4": lc.Int4(),
    "powersgd, rank 4": lc.PowerSGD(matrix_approximation_rank=4, start_powerSGD_iter=0),
    "diloco, 16, int4": lc.DiLoCo(period=16, start_localSGD_iter=0, post_local_gradient_allreduce=False, **DILOCO),
}


def train(method: str, hook: lc.CommHook | None, mesh: DeviceMesh) -> dict[str, Any]:
    """Train with one method; what rank 0 has seen."""
    pieces, validation = language_model.text()
    own = validation[:NUM_VALIDATION][dist.get_rank() :: dist.get_world_size()]
    generator = torch.Generator().manual_seed(dist.get_rank())
    torch.manual_seed(0)
    model = language_model.LanguageModel()
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16 if method == HALF else None)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    attachment = None if hook is None else lc.attach(model, hook, optimizers=[optimizer])

    def evaluate() -> float:
        with torch.no_grad():
            total = sum(model(some[:, :-1], some[:, 1:]) * len(some) for some in own.split(32))
        assert isinstance(total, torch.Tensor)
        dist.all_reduce(total)
        return total.item() / NUM_VALIDATION

    seconds, sent, packets, curve = 0.0, 0, 0, [(0.0, evaluate())]
    for _ in range(STEPS // EVERY):
        dist.barrier()
        before, start = (own_tx_bytes(), own_tx_packets()), time.perf_counter()
        for _ in range(EVERY):
            batch = pieces[torch.randint(len(pieces), (1,), generator=generator)]
            optimizer.zero_grad()
            model(batch[:, :-1], batch[:, 1:]).backward()
            optimizer.step()
        dist.barrier()
        seconds += time.perf_counter() - start
        sent += own_tx_bytes() - before[0]
        packets += own_tx_packets() - before[1]
        curve.append((seconds, evaluate()))
    counted = math.nan
    if attachment is not None:
        told = torch.tensor([attachment.metrics()["bytes_sent"]])
        dist.all_reduce(told, group=mesh["shards"].get_group())
        counted = told.item() / STEPS
        attachment.close()
    per_step = {"ms": 1e3 * seconds / STEPS, "sent": sent / STEPS, "payload": (sent - HEADERS * packets) / STEPS}
    return {"method": method, **per_step, "counted": counted, "curve": curve}


def work() -> None:
    """Train on this rank with all methods; rank 0 prints a line of JSON for each."""
    pin(int(os.environ["RANK"]))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    for method, hook in METHODS.items():
        found = train(method, hook, mesh)
        if dist.get_rank() == 0:
            print(json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def seconds_to(curve: list[tuple[float, float]]) -> float:
    """When the loss was at the target, inf if never."""
    for (before, high), (after, low) in itertools.pairwise(curve):
        if low <= TARGET:
            return before + (after - before) * (high - TARGET) / (high - low)
    return math.inf


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    if parser.parse_args().work:
        work()
        return
    row = {"torch": torch.__version__, "date": datetime.date.today(), "cores": os.cpu_count()}
    print(f"$ {command()}\n# {machine([row])}; 2 nodes of 2 ranks, {RATE}; {STEPS} steps\n", flush=True)
    with hosts(2, rate=RATE, burst="16kb") as network:
        lines = network.launch([__file__, "--work"], timeout=1500, per_host=2)[0].splitlines()
    found = [json.loads(line) for line in lines]
    whole, wrong = seconds_to(found[0]["curve"]), []
    to_target = f"seconds to {TARGET}"
    head = f"{'method':<24} {'ms':>7} {'interface':>10} {'payload':>9} {'counted':>9}"
    print(f"{head} {to_target:>16} {'speedup':>8} {'loss':>7}")
    for one in found:
        reached, loss = seconds_to(one["curve"]), one["curve"][-1][1]
        counts = f"{one['sent'] / 1e3:>10.1f} {one['payload'] / 1e3:>9.1f} {one['counted'] / 1e3:>9.1f}"
        print(f"{one['method']:<24} {one['ms']:>7.1f} {counts} {reached:>16.1f} {whole / reached:>7.1f}x {loss:>7.3f}")
        if abs(off := one["payload"] / one["counted"] - 1) > TOLERANCE:
            wrong.append(f"{one['method']}: counted and payload differ by {off:+.1%}")
    print("\n" + ("\n".join(wrong) or "within the limits"))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
