"""Does a model get as good with half an iteration of PowerSGD a step, or with ranks shared out over its matrices?

    python benchmarks/low_rank_quality.py > benchmarks/results/low_rank_quality.txt
    python benchmarks/low_rank_quality.py --basis > benchmarks/results/low_rank_basis.txt

Digits: the network of `quantization_quality.py`, accuracy on that half of scikit-learn's digits that is not for
training. Text: the model of `time_to_loss.py`, loss in nats. 2 ranks over gloo, AdamW; for a seed, all hooks get the
same data, initial weights and number of steps, and compress from the first step on. Printed for each hook: the mean
over seeds, each seed, and how many times as many bytes dense sent.

- rank 4: `num_iters_per_step=2`, PyTorch's algorithm. Half: `num_iters_per_step=1`.
- shared out: as many bytes as rank 4, but each matrix has a rank of its own. From rank 1 on, whichever matrix's next
  singular value explains most for its bytes gets one more: of all gradients' energy (absolute), or of the energy of its
  own gradient (relative). Energies are those of dense's averaged gradients, every eighth step of a run with another
  seed: more than a hook could know.

With `--basis` the text alone, 2 ranks in memory: rank 4 with other bases and residuals, see `Basis` and `BASES`. Each
is trained until a seed with which it is not better than rank 4.

Exits with 1 when a variant is better than rank 4 at its bytes, or up to 10% more, with all seeds of all tasks: then it
is worth an option.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import language_model
import torch
import torch.distributed as dist
from quantization_quality import Digits, Run, launch
from records import command
from time_to_loss import low_rank
from torch import Tensor

import lightning_commhooks as lc
from lightning_commhooks.collectives.group import Group
from lightning_commhooks.collectives.steps import Steps
from lightning_commhooks.hooks.powersgd import orthonormal_basis, random_factors
from lightning_commhooks.interface.bucket import Bucket, Slot
from lightning_commhooks.interface.error_feedback import ErrorFeedback
from lightning_commhooks.interface.hook import BoundHook

WORLD, OTHER_SEED, RANK = 2, 100, 4
SHARED_OUT = ("absolute", "relative")


@dataclass(frozen=True, kw_only=True)
class Basis(lc.PowerSGD):
    """PowerSGD with another basis or another residual.

    There is no option to make a rank's residual orthogonal to P: the mean of the residuals is so already, and the
    algorithm depends on the mean alone.

    Args:
        renew_every: each step whose number is divisible by it begins with random directions; 0: step 0 alone.
        extra: number of directions of such a step in excess of the rank. The step sends them all, and the next one
            begins with the first singular vectors of the product: a randomized SVD, Halko et al. 2011,
            https://arxiv.org/abs/0909.4061, algorithms 4.1 and 5.1.
        keep_last: such a step begins with the previous factor, and only the extra directions are random.
        exact: such a step begins with the first singular vectors of the mean, which is sent in full: PowerSGD+, Xie et
            al. 2025, https://arxiv.org/abs/2509.11254.
        decay: factor by which the residual is multiplied before each step.
        drop_rows: remove from the residual its projection on the rows of Q after each step.
    """

    renew_every: int = 0
    extra: int = 0
    keep_last: bool = False
    exact: bool = False
    decay: float = 1.0
    drop_rows: bool = False

    def bind(self, group: Group) -> BoundHook:
        return BoundBasis(group, self)


class BoundBasis(ErrorFeedback):
    """`PowerSGD` as in the paper, one matrix after another."""

    hook: Basis

    def lay_out(self, bucket: Bucket) -> tuple[list[Slot], list[Slot]]:
        """Return the gradients in matrices that are compressed, and the remaining ones."""
        slots = [slot for of in self.hook.matrices(bucket.slots).values() for matrix in of for slot in matrix]
        return slots, [slot for slot in bucket.slots if slot not in slots]

    def average_(self, residual: Tensor | None, bucket: Bucket, ranks: Group) -> Steps[Tensor | None]:
        assert residual is not None
        residual.mul_(self.hook.decay)
        return (yield from super().average_(residual, bucket, ranks))

    def average(self, residual: Tensor, bucket: Bucket, ranks: Group) -> Steps[tuple[Tensor, Tensor]]:
        slots, others = self.plan(bucket)
        mean, sent = residual.clone(), residual.clone()
        matrices = [slot.view(residual).flatten(1) for slot in slots]
        starts = yield from self._starts(slots, matrices, bucket.step, ranks)
        ps = [start @ matrix.T for start, matrix in zip(starts, matrices, strict=True)]
        uncompressed = [slot.view(mean).div_(ranks.size) for slot in others]
        uncompressed, ps = yield from ranks.all_reduce_factors(uncompressed, ps)
        for slot, own in zip(others, uncompressed, strict=True):
            slot.view(mean).copy_(own)
        ps = [orthonormal_basis(p[None])[0] for p in ps]
        qs = [p @ matrix / ranks.size for p, matrix in zip(ps, matrices, strict=True)]
        _, qs = yield from ranks.all_reduce_factors([], qs)
        for slot, matrix, p, q in zip(slots, matrices, ps, qs, strict=True):
            approximation = p.T @ q
            slot.view(mean).flatten(1).copy_(approximation)
            if self.hook.drop_rows:
                basis = orthonormal_basis(q[None])[0]
                approximation += (matrix - approximation) @ basis.T @ basis
            slot.view(sent).flatten(1).copy_(approximation)
            self.remember(slot.name, first_singular(q, self.hook.rank(*matrix.shape)))
        return mean, sent

    def _starts(
        self, slots: Sequence[Slot], matrices: Sequence[Tensor], step: int, ranks: Group
    ) -> Steps[list[Tensor]]:
        """The rows with which a step begins, shape `(r, m)` for each matrix."""
        hook, starts = self.hook, []
        renews = step % hook.renew_every == 0 if hook.renew_every else step == 0
        if renews and hook.exact:
            means = [matrix / ranks.size for matrix in matrices]
            means = yield from ranks.all_reduce_coalesced(means)
            return [first_singular(mean, hook.rank(*mean.shape)) for mean in means]
        for slot, matrix in zip(slots, matrices, strict=True):
            rank, m = hook.rank(*matrix.shape), matrix.shape[1]
            rows = (rank + hook.extra if renews else rank, m)
            start = random_factors([slot.name], rows, matrix, hook.random_seed, step)[0]
            if not renews or (hook.keep_last and step):
                start[:rank] = self.remembered(slot.name, start[:rank].clone)
            starts.append(orthonormal_basis(start[None])[0])
        return starts


def first_singular(matrix: Tensor, rank: int) -> Tensor:
    """Rows that span as many of the first right singular vectors; the matrix itself if it has no more rows."""
    if len(matrix) <= rank:
        return matrix
    if len(matrix) > matrix.shape[1]:
        return torch.linalg.eigh(matrix.T @ matrix).eigenvectors[:, -rank:].T
    return torch.linalg.eigh(matrix @ matrix.T).eigenvectors[:, -rank:].T @ matrix


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


def rank_4(**options: Any) -> Basis:
    """Rank 4 from the first step on."""
    return Basis(matrix_approximation_rank=RANK, start_powerSGD_iter=0, **options)


BASES: dict[str, lc.CommHook] = {
    "dense": lc.AllReduce(),
    "rank 4": low_rank(RANK),
    "rank 4, another start": dataclasses.replace(low_rank(RANK), random_seed=1),
    "rank 8": low_rank(8),
    "rank 8, int8": lc.Cast(low_rank(8), "int8"),
    "step 0, 4 extra": rank_4(extra=4),
    "every 50, 4 extra": rank_4(renew_every=50, extra=4),
    "every 10, 4 extra": rank_4(renew_every=10, extra=4),
    "every 10, 4 extra, kept": rank_4(renew_every=10, extra=4, keep_last=True),
    "every step": rank_4(renew_every=1),
    "exact, every 50": rank_4(renew_every=50, exact=True),
    "exact, every step": rank_4(renew_every=1, exact=True),
    "decay 0.99": rank_4(decay=0.99),
    "decay 0.95": rank_4(decay=0.95),
    "decay 0.9": rank_4(decay=0.9),
    "rows of Q dropped": rank_4(drop_rows=True),
}


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


def train_in_memory(hook: lc.CommHook, seed: int) -> tuple[float, float]:
    """Score of `Text` and bytes sent, as by `Run.train`, but with all ranks in this process."""
    from gpu_quality import Averaging

    torch.manual_seed(seed)
    run = Text(seed)
    averaging = Averaging(hook, run.model, torch.device("cpu"), WORLD)
    generators = [torch.Generator().manual_seed(1000 * seed + rank) for rank in range(WORLD)]
    for _ in range(run.steps):
        gradients = []
        for generator in generators:
            run.optimizer.zero_grad()
            run.loss(generator).backward()
            gradients.append({name: p.grad for name, p in run.model.named_parameters() if p.grad is not None})
        for name, gradient in averaging(gradients).items():
            run.model.get_parameter(name).grad = gradient
        run.optimizer.step()
        run.scheduler.step()
    run.model.eval()
    with torch.no_grad():
        return run.score(), averaging.bytes_sent


def compare_bases(seeds: int) -> dict[str, list[tuple[float, float]]]:
    """Train with `BASES`. A candidate is out at the first seed with which it is not better than rank 4."""
    torch.set_num_threads(1)
    runs: dict[str, list[tuple[float, float]]] = {}
    for label, hook in BASES.items():
        runs[label] = []
        for seed in range(seeds):
            runs[label].append(train_in_memory(hook, seed))
            print(f"{label}: {runs[label]}", file=sys.stderr, flush=True)
            if isinstance(hook, Basis) and runs[label][seed][0] >= runs["rank 4"][seed][0]:
                break
    return runs


def report(task: str, runs: dict[str, list[tuple[float, float]]], candidates: Sequence[str]) -> set[str]:
    """Print the table of a task; which candidates are better than rank 4 with all seeds at its bytes, or 10% more."""
    print(f"\n{task:<28}{'mean':>8}{'each seed':>30}{'fewer bytes':>13}")
    dense, rank_4 = runs["dense"], runs["rank 4"]
    for label, values in runs.items():
        scores = [score for score, _ in values]
        each, fewer = " ".join(f"{score:.3f}" for score in scores), dense[0][1] / values[0][1]
        mean = f"{statistics.mean(scores):.3f}" if len(scores) == len(dense) else ""
        print(f"{label:<28}{mean:>8}{each:>30}{fewer:>12.1f}x")
    is_loss = TASKS[task][1]
    better = {
        label
        for label in candidates
        if runs[label][0][1] <= 1.1 * rank_4[0][1]
        and all((a < b) == is_loss and a != b for (a, _), (b, _) in zip(runs[label], rank_4, strict=False))
    }
    print(f"better than rank 4 with all seeds, at equal bytes: {', '.join(sorted(better)) or 'none'}")
    return better


def main() -> None:
    """Train with all hooks, print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--basis", action="store_true", help="other bases and residuals of rank 4")
    args = parser.parse_args()
    if args.basis:
        results = {"text, loss": compare_bases(args.seeds)}
        candidates = [label for label, hook in BASES.items() if isinstance(hook, Basis)]
    else:
        results = launch(worker, WORLD, args.seeds)
        candidates = [f"rank 4, {how}" for how in SHARED_OUT]
    print(f"$ {command()}")
    print(f"# torch {torch.__version__}, {WORLD} ranks, {args.seeds} seeds")
    better = [report(task, runs, candidates) for task, runs in results.items()]
    sys.exit(bool(set.intersection(*better)))


if __name__ == "__main__":
    main()
