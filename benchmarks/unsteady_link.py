"""Links that lose packets and change their rate in the middle of a run: does training go on, alike on all ranks?

Hosts are network namespaces: four that are far from each other, and two that are near. A share of their packets never
arrives, and while they train the rate falls to a twentieth and rises again, over and over. Each hook trains a model of
ten buckets; then all ranks' parameters are compared bit by bit. Exits with 1 when they differ, or a run does not end.

    python benchmarks/unsteady_link.py
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
import torch.distributed as dist
from netns import Network, hosts, pin
from records import command
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lightning_commhooks as lc

# Hosts, ms one way, share of packets (of up to 64 KB) that are lost.
LINKS = [(4, 10.0, 0.002), (2, 0.1, 0.01)]
FAST, SLOW = "1gbit", "50mbit"
# Seconds with each rate.
PERIOD = 3.0
HOOKS = {
    "allreduce": {},
    "bf16": {},
    "int8": {},
    "int4": {},
    "fp8": {},
    "powersgd": {"start_powerSGD_iter": 2, "matrix_approximation_rank": 4},
    "post_localsgd": {"start_localSGD_iter": 2, "period": 2, "post_local_gradient_allreduce": False},
}
STEPS = 12


def work() -> None:
    """Train with each hook on this host; rank 0 prints JSON: seconds, and whether all ranks have the same model."""
    dist.init_process_group("gloo")
    pin(dist.get_rank())
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name, options in HOOKS.items():
        begin = time.monotonic()
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(768, 768) for _ in range(10)])
        ddp = DistributedDataParallel(model, bucket_cap_mb=2)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        attachment = lc.attach(ddp, lc.get_hook(name, **options), optimizers=[optimizer])
        torch.manual_seed(dist.get_rank())
        for _ in range(STEPS):
            optimizer.zero_grad()
            ddp(torch.randn(8, 768)).square().mean().backward()
            optimizer.step()
        attachment.average_weights()
        attachment.close()
        flat = torch.cat([parameter.detach().view(-1) for parameter in model.parameters()])
        digests: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(digests, hashlib.sha256(flat.numpy().tobytes()).hexdigest())
        if dist.get_rank() == 0:
            alike = len(set(digests)) == 1 and bool(flat.isfinite().all())
            print(json.dumps([name, time.monotonic() - begin, alike]), flush=True)
    dist.barrier()
    dist.destroy_process_group()


@contextmanager
def changing(network: Network) -> Iterator[list[str]]:
    """Change the rate of all hosts, over and over; gives the rates that there were."""
    rates, over = [FAST], threading.Event()

    def change() -> None:
        while not over.wait(PERIOD):
            rate = SLOW if rates[-1] == FAST else FAST
            network.set_rate(rate)
            rates.append(rate)

    with ThreadPoolExecutor(1) as executor:
        changed = executor.submit(change)
        try:
            yield rates
        finally:
            over.set()
            changed.result()


def main() -> int:
    """Run all, print a table, return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    if parser.parse_args().work:
        work()
        return 0
    print(f"$ {command()}\n# torch {torch.__version__}; {time.strftime('%Y-%m-%d')}")
    print(f"# {STEPS} steps, 10 buckets of 2.4 MB")
    good = True
    for num, delay_ms, loss in LINKS:
        with hosts(num, rate=FAST, delay_ms=delay_ms, loss=loss) as network, changing(network) as rates:
            printed = network.launch([__file__, "--work"], timeout=900)[0]
        print(f"\n{num} hosts, {delay_ms:g} ms one way, {loss:.1%} of packets lost; ", end="")
        print(f"{FAST} and {SLOW} in turn, changed {len(rates) - 1} times")
        print(f"{'hook':<16}{'seconds':>9}   the same model on all ranks")
        for line in printed.splitlines():
            name, seconds, alike = json.loads(line)
            good = good and alike
            print(f"{name:<16}{seconds:>9.1f}   {'yes' if alike else 'NO'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
