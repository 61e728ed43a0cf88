"""What `hook="auto"` chooses on a slow and on a fast link, and whether the run is faster for it.

Two hosts (network namespaces), one process on each, pinned to one core. A model for which averaging gradients takes
long, 8 x Linear(512, 512) with 8 rows per rank, over 100 Mbit/s; and one for which it does not, the same with 1024
rows, over 10 Gbit/s. Each is trained twice: with `allreduce` and with `auto`.

    python benchmarks/auto_choice.py

Exits with 1 when `auto` compresses where it does not pay, or does not where it does, or ranks choose differently.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import io
import json
import os
import shlex
import statistics
import sys
import time

import torch
import torch.distributed as dist
from netns import hosts, pin
from torch.nn.parallel import DistributedDataParallel

import lightning_commhooks as lc

# Rate as `tc` writes it, rows per rank, whether compressing pays.
CASES = {"slow link": ("100mbit", 8, True), "fast link, more to compute": ("10gbit", 1024, False)}
MEASURING = 46  # steps that `auto` takes by default
STEPS = MEASURING + 20


def train(hook: str, rows: int) -> tuple[float, str, str]:
    """Median seconds of the last steps, the hook that is at work then, and what was said."""
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(8)]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randn(rows, 512, generator=torch.Generator().manual_seed(dist.get_rank()))
    said, times = io.StringIO(), []
    attachment = lc.attach(model, hook)
    with contextlib.redirect_stderr(said):
        for _ in range(STEPS):
            start = time.perf_counter()
            optimizer.zero_grad()
            model(data).square().mean().backward()
            optimizer.step()
            times.append(time.perf_counter() - start)
    bound = attachment.bound
    assert bound is not None
    chosen = bound.chosen.name if bound.chosen is not None else hook
    attachment.close()
    return statistics.median(times[MEASURING + 2 :]), chosen, said.getvalue().strip()


def work(rows: int) -> None:
    """Train twice; each rank prints JSON."""
    pin(int(os.environ["RANK"]))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    print(json.dumps([train(hook, rows) for hook in ("allreduce", "auto")]))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Make the networks, run both hosts on each, print what happened."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args.worker)
        return
    print(f"$ python {shlex.join(sys.argv)}")
    print(f"# torch {torch.__version__}, {datetime.date.today()}, 2 hosts, one core each, {STEPS} steps")
    ok = True
    for name, (rate, rows, pays) in CASES.items():
        with hosts(2, rate=rate) as network:
            outputs = network.launch([__file__, "--worker", str(rows)], timeout=280)
        (dense, _, _), (auto, chosen, said) = json.loads(outputs[0].splitlines()[-1])
        same = json.loads(outputs[1].splitlines()[-1])[1][1] == chosen
        right = same and (chosen != "allreduce") == pays
        ok &= right
        print(f"\n{name}, {rate}: {'ok' if right else 'WRONG'}\n  {said}")
        print(
            f"  afterwards {1e3 * auto:.1f} ms per step; a run of its own with allreduce {1e3 * dense:.1f} ms, "
            f"{dense / auto:.2f} times as long"
        )
    sys.exit(not ok)


if __name__ == "__main__":
    main()
