"""Does a model get as good with half an iteration of PowerSGD a step, or with ranks shared out over its matrices?

    python benchmarks/low_rank_quality.py > benchmarks/results/low_rank_quality.txt

Digits: the network of `quantization_quality.py`, accuracy on that half of scikit-learn's digits that is not for
training. Text: the model of `time_to_loss.py`, loss in nats. 2 ranks over gloo, AdamW; for a seed, all hooks get the
same data, initial weights and number of steps, and compress from the first step on. Printed for each hook: the mean
over seeds, each seed, and how many times as many bytes dense sent.

- rank 4: `num_iters_per_step=2`, PyTorch's algorithm. Half: `num_iters_per_step=1`.
- shared out: as many bytes as rank 4, but each matrix has a rank of its own. From rank 1 on, whichever matrix's next
  singular value explains most for its bytes gets one more: of all gradients' energy (absolute), or of the energy of its
  own gradient (relative). Energies are those of dense's averaged gradients, every eighth step of a run with another
  seed: more than a hook could know.

Exits with 1 when ranks that are shared out are better than rank 4 with all seeds of both tasks: then they are worth an
option.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import language_model
import torch
import torch.distributed as dist
from quantization_quality import Digits, Run, launch
from records import command
from time_to_loss import low_rank
from torch import Tensor

import lightning_commhooks as lc

WORLD, OTHER_SEED, RANK = 2, 100, 4
SHARED_OUT = ("absolute", "relative")


class Text(Run):
    """Characters to the next one."""

    def __init__(self, seed: int) -> None:
        self.pieces, self.validation = language_model.text()
        super().__init__(language_model.LanguageModel(), 6e-4, 256)

    def loss(self, generator: torch.Generator) -> Tensor:
        """Of one piece of text."""
        piece = self.pieces[torch.randint(len(self.pieces), (1,), generator=generator)]
        loss: Tensor = self.ddp(piece[:, :-1], piece[:, 1:])
        return loss

    def score(self) -> float:
        """Loss on 256 pieces for validation."""
        parts = self.validation[:256].split(32)
        return statistics.mean(self.model(part[:, :-1], part[:, 1:]).item() for part in parts)


TASKS: dict[str, tuple[Callable[[int], Run], bool]] = {
    "digits, accuracy %": (Digits, False),
    "text, loss": (Text, True),
}


def compressed(shape: torch.Size, rank: int) -> bool:
    """Whether `PowerSGD` compresses a gradient at that rank."""
    n, m = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, 1)
    return (n + m) * rank * 2 < n * m


def energies(run: Run) -> dict[str, Tensor]:
    """Squared singular values of averaged gradients, summed over some steps, by parameter."""
    parameters = {n: p for n, p in run.model.named_parameters() if compressed(p.shape, RANK)}
    found = {name: torch.zeros(min(p.shape)) for name, p in parameters.items()}
    step = 0

    def add(*_: object) -> None:
        nonlocal step
        if step % 8 == 0:
            for name, p in parameters.items():
                assert p.grad is not None
                found[name] += torch.linalg.svdvals(p.grad) ** 2
        step += 1

    run.optimizer.register_step_pre_hook(add)
    run.train(lc.AllReduce(), OTHER_SEED)
    return found


def shared_out(run: Run, energy: dict[str, Tensor], is_relative: bool) -> lc.PerParameter:
    """A rank for each matrix, at the bytes of `RANK` for all."""
    shapes = {name: parameter.shape for name, parameter in run.model.named_parameters() if name in energy}
    ranks = dict.fromkeys(energy, 1)
    left = sum((RANK - 1) * sum(shape) for shape in shapes.values())

    def gain(name: str) -> float:
        share = energy[name] / energy[name].sum() if is_relative else energy[name]
        return share[ranks[name]].item() / sum(shapes[name])

    while grows := [n for n in ranks if sum(shapes[n]) <= left and compressed(shapes[n], ranks[n] + 1)]:
        best = max(grows, key=gain)
        ranks[best] += 1
        left -= sum(shapes[best])
    if dist.get_rank() == 0:
        print(f"{'relative' if is_relative else 'absolute'}: {ranks}", file=sys.stderr)
    return lc.PerParameter({**{name: low_rank(rank) for name, rank in ranks.items()}, "*": "allreduce"})


def worker(rank: int, folder: str, seeds: int) -> None:
    """Train all; rank 0 writes what it has measured."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    results: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for task, (make, _) in TASKS.items():
        torch.manual_seed(OTHER_SEED)
        energy = energies(make(OTHER_SEED))
        hooks: dict[str, lc.CommHook] = {
            "dense": lc.AllReduce(),
            "rank 4": low_rank(4),
            "rank 8": low_rank(8),
            "half, rank 4": low_rank(4, 1),
            "half, rank 8": low_rank(8, 1),
            "half, rank 16": low_rank(16, 1),
            **{f"rank 4, {how}": shared_out(make(0), energy, how == "relative") for how in SHARED_OUT},
        }
        results[task] = {}
        for label, hook in hooks.items():
            for seed in range(seeds):
                torch.manual_seed(seed)
                results[task].setdefault(label, []).append(make(seed).train(hook, seed))
    if rank == 0:
        Path(folder, "results.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def report(task: str, runs: dict[str, list[tuple[float, float]]]) -> set[str]:
    """Print the table of a task; which ways to share ranks out are better with all seeds."""
    print(f"\n{task:<22}{'mean':>8}{'each seed':>30}{'fewer bytes':>13}")
    for label, values in runs.items():
        scores = [score for score, _ in values]
        each, fewer = " ".join(f"{score:.3f}" for score in scores), runs["dense"][0][1] / values[0][1]
        print(f"{label:<22}{statistics.mean(scores):>8.3f}{each:>30}{fewer:>12.1f}x")
    is_loss = TASKS[task][1]
    uniform = [score for score, _ in runs["rank 4"]]
    better = {
        how
        for how in SHARED_OUT
        if all((a < b) == is_loss and a != b for (a, _), b in zip(runs[f"rank 4, {how}"], uniform, strict=True))
    }
    print(f"shared out, better than rank 4 with all seeds: {', '.join(better) or 'none'}")
    return better


def main() -> None:
    """Train with all hooks, print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    results = launch(worker, WORLD, args.seeds)
    print(f"$ {command()}")
    print(f"# torch {torch.__version__}, {WORLD} ranks, {args.seeds} seeds")
    better = [report(task, runs) for task, runs in results.items()]
    sys.exit(bool(set.intersection(*better)))


if __name__ == "__main__":
    main()
