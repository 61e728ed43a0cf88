"""What is lost when residuals become zero after steps with inf: a bad step in every 25 against none.

    python benchmarks/bad_steps.py > benchmarks/results/bad_steps.txt

Digits and text of `low_rank_quality.py`, 2 ranks over gloo, AdamW; for a seed, all rows get the same data and initial
weights. In a bad step the gradients of rank 1 are infinite, and all ranks skip it, as with a `GradScaler`, which makes
one bad step in 2,000. Dense skips the same steps: what a hook loses more than dense does is what residuals had.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path

import torch
import torch.distributed as dist
from low_rank_quality import TASKS, WORLD
from quantization_quality import Run, launch
from records import command
from time_to_loss import low_rank
from torch import Tensor

import lightning_commhooks as lc

EVERY = 25
HOOKS: dict[str, lc.CommHook] = {"dense": lc.AllReduce(), "rank 4": low_rank(4), "int4": lc.Int4(min_bytes=0)}


def with_bad_steps(run: Run) -> Run:
    """Make each 25th step of a run bad, and skip it."""
    loss, calls = run.loss, 0

    def sometimes_infinite(generator: torch.Generator) -> Tensor:
        nonlocal calls
        calls += 1
        return loss(generator) * (math.inf if calls % EVERY == 0 and dist.get_rank() == 1 else 1.0)

    def skip(optimizer: torch.optim.Optimizer, *_: object) -> None:
        if not all(bool(p.grad.isfinite().all()) for p in run.model.parameters() if p.grad is not None):
            optimizer.zero_grad()

    run.loss = sometimes_infinite  # type: ignore[method-assign]
    run.optimizer.register_step_pre_hook(skip)
    return run


def worker(rank: int, folder: str, seeds: int) -> None:
    """Train all; rank 0 writes what it has measured."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    results: dict[str, dict[str, list[list[float]]]] = {}
    for task, (make, _) in TASKS.items():
        results[task] = {label: [] for label in HOOKS}
        for label, hook in HOOKS.items():
            for seed in range(seeds):
                scores = []
                for change in (lambda run: run, with_bad_steps):
                    torch.manual_seed(seed)
                    scores.append(change(make(seed)).train(hook, seed)[0])
                results[task][label].append(scores)
    if rank == 0:
        Path(folder, "results.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def main() -> None:
    """Train with all hooks, print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    results = launch(worker, WORLD, args.seeds)
    print(f"$ {command()}")
    print(f"# torch {torch.__version__}, {WORLD} ranks, mean of {args.seeds} seeds, lowest and highest difference")
    for task, rows in results.items():
        print(f"\n{task:<22}{'no bad step':>12}{'one in 25':>12}{'difference':>12}{'lowest':>9}{'highest':>9}")
        for label, scores in rows.items():
            good, bad = (statistics.mean(column) for column in zip(*scores, strict=True))
            each = [b - a for a, b in scores]
            print(f"{label:<22}{good:>12.3f}{bad:>12.3f}{bad - good:>+12.3f}{min(each):>+9.3f}{max(each):>+9.3f}")


if __name__ == "__main__":
    main()
