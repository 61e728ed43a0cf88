"""Does a model get as good with quantized gradients? Against dense DDP, on digits and a tiny language model.

    python benchmarks/quantization_quality.py
    python benchmarks/quantization_quality.py --sharded
    python benchmarks/quantization_quality.py --gathered

Digits: the network of `local_sgd_digits.py` without BatchNorm, AdamW, accuracy on that half of scikit-learn's digits
that is not for training. Text: the model and text of `examples/transformers/language_model.py` (Python's own
documentation, character by character), AdamW, loss in nats on a tenth of the text. 4 ranks over gloo; for a seed, all
hooks get the same data, initial weights and number of steps. Printed for each hook:

- mean, and of the seeds lowest and highest.
- vs dense: mean over seeds of the difference to dense with the same seed; for the loss as a fraction of dense's.
- noise: standard deviation of dense over seeds, in the same unit.
- fewer: how many times as many bytes dense sent.

With `--sharded` the language model alone, by `fully_shard`: hooks of the reduce-scatter, without and with the residual
in 8 bits. With `--gathered` the language model of `language_model.py`, by `fully_shard`: formats of the gathered
parameters, with gradients in float32, on 2 ranks; bytes are those of gathers.

Exits with 1 when int8 is worse than dense by more than the noise, or int4 by more than 1% of the loss; sharded, when
either is by more than the noise with its residual; gathered, when differences in 4 bits are by more than 0.5%.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import language_model
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import lightning_commhooks as lc

WORLD = 4
# Small buckets too: there are no others in models of this size.
SMALL: dict[str, Any] = {"min_bytes": 0}
HOOKS: dict[str, lc.CommHook] = {
    "dense": lc.AllReduce(),
    "int8": lc.Int8(**SMALL),
    "int8 without feedback": lc.Int8(**SMALL, use_error_feedback=False),
    "fp8": lc.FP8(**SMALL),
    "int4": lc.Int4(**SMALL),
    "int4 hadamard": lc.Int4(**SMALL, rotation="hadamard"),
    "int4 without feedback": lc.Int4(**SMALL, use_error_feedback=False),
    "quantize_per_tensor": lc.QuantizePerTensor(),
}

FLAT: dict[str, Any] = {**SMALL, "compress_1d": True}
SHARDED_HOOKS: dict[str, lc.CommHook] = {
    "dense": lc.AllReduce(),
    "int8 without feedback": lc.Int8(**FLAT, use_error_feedback=False),
    "int8": lc.Int8(**FLAT),
    "int4 without feedback": lc.Int4(**FLAT, use_error_feedback=False),
    "int4 stochastic": lc.Int4(**FLAT, use_error_feedback=False, rounding="stochastic"),
    "int4": lc.Int4(**FLAT),
}

# Options of `attach`.
INT4, ROTATED = (lc.Int4(**FLAT, use_error_feedback=False, rotation=rotation) for rotation in (None, "hadamard"))
GATHERED: dict[str, dict[str, Any]] = {
    "dense": {},
    "int8": {"gather_hook": lc.Int8(**FLAT, use_error_feedback=False)},
    "int4": {"gather_hook": INT4},
    "int4 differences": {"gather_hook": INT4, "gather_differences": True},
    "int4 hadamard differences": {"gather_hook": ROTATED, "gather_differences": True},
}


class Run:
    """A model under training; `loss(step)` is that of this rank's batch, `score()` the quality of the model."""

    is_sharded = False

    def __init__(self, model: nn.Module, learning_rate: float, steps: int) -> None:
        self.model, self.steps = fully_shard(model) if self.is_sharded else model, steps
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, steps)
        self.ddp: nn.Module = model

    def loss(self, generator: torch.Generator) -> Tensor:
        """Of a batch that the generator draws."""
        raise NotImplementedError

    def score(self) -> float:
        """Accuracy in percent, or loss."""
        raise NotImplementedError

    def sent(self, metrics: dict[str, float]) -> float:
        """Bytes sent."""
        return metrics["bytes_sent"]

    def train(self, hook: lc.CommHook, seed: int, **options: Any) -> tuple[float, float]:
        """Score and bytes sent."""
        self.ddp = self.model if self.is_sharded else DistributedDataParallel(self.model)
        attachment = lc.attach(self.ddp, hook, **options)
        generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
        for _ in range(self.steps):
            self.optimizer.zero_grad()
            self.loss(generator).backward()
            self.optimizer.step()
            self.scheduler.step()
        sent = self.sent(attachment.metrics())
        attachment.close()
        self.model.eval()
        with torch.no_grad():
            return self.score(), sent


class Digits(Run):
    """Images of 64 pixels to 10 classes."""

    def __init__(self, seed: int) -> None:
        images, labels = load_digits(return_X_y=True)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
        self.x, self.y = torch.as_tensor(images).float().div(16)[order], torch.as_tensor(labels)[order]
        sizes = (64, 176, 176, 176, 176)
        layers = [layer for a, b in itertools.pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
        super().__init__(nn.Sequential(*layers, nn.Linear(176, 10)), 1e-3, 600)

    def loss(self, generator: torch.Generator) -> Tensor:
        batch = torch.randint(len(self.y) // 2, (8,), generator=generator)
        return F.cross_entropy(self.ddp(self.x[batch]), self.y[batch])

    def score(self) -> float:
        rest = slice(len(self.y) // 2, None)
        return 100 * (self.model(self.x[rest]).argmax(1) == self.y[rest]).float().mean().item()


class Text(Run):
    """Characters to the next one."""

    def __init__(self, seed: int) -> None:
        sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples" / "transformers"))
        import language_model as example
        from transformers import GPT2Config, GPT2LMHeadModel

        pieces = example.Text(0, 5000).pieces
        self.pieces = pieces[torch.randperm(len(pieces), generator=torch.Generator().manual_seed(0))]
        config = GPT2Config(
            vocab_size=128, n_positions=example.LENGTH, n_embd=128, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
        )
        config._attn_implementation = "eager"
        super().__init__(GPT2LMHeadModel(config), 2e-3, 300)

    def loss(self, generator: torch.Generator) -> Tensor:
        batch = self.pieces[torch.randint(len(self.pieces) * 9 // 10, (8,), generator=generator)]
        loss: Tensor = self.ddp(input_ids=batch, labels=batch).loss
        return loss

    def score(self) -> float:
        batches = self.pieces[len(self.pieces) * 9 // 10 :].split(100)
        return statistics.mean(self.model(input_ids=batch, labels=batch).loss.item() for batch in batches)


class Characters(Run):
    """The language model without a framework, each block of it a unit of FSDP2."""

    is_sharded = True

    def __init__(self, seed: int) -> None:
        self.pieces, self.validation = language_model.text()
        model = language_model.LanguageModel()
        for block in model.blocks:
            fully_shard(block)
        super().__init__(model, 1e-3, 192)

    def loss(self, generator: torch.Generator) -> Tensor:
        batch = self.pieces[torch.randint(len(self.pieces), (1,), generator=generator)]
        loss: Tensor = self.model(batch[:, :-1], batch[:, 1:])
        return loss

    def sent(self, metrics: dict[str, float]) -> float:
        """Bytes of gathers, as a fraction of FSDP2's own."""
        return 1 / metrics.get("gather_compression_ratio", 1.0)

    def score(self) -> float:
        return statistics.mean(self.model(b[:, :-1], b[:, 1:]).item() for b in self.validation[:512].split(64))


TASKS: dict[str, Callable[[int], Run]] = {"digits, accuracy %": Digits, "text, loss": Text}


def sharded_worker(rank: int, folder: str, seeds: int) -> None:
    """Train the language model, sharded."""
    Run.is_sharded = True
    work(rank, folder, seeds, {"text, loss": Text}, SHARDED_HOOKS)


def gathered_worker(rank: int, folder: str, seeds: int) -> None:
    """Train the language model with parameters gathered in each format."""
    work(rank, folder, seeds, {"text, loss": Characters}, GATHERED)


def worker(rank: int, folder: str, seeds: int) -> None:
    """Train all."""
    work(rank, folder, seeds, TASKS, HOOKS)


def work(rank: int, folder: str, seeds: int, tasks: dict[str, Callable[[int], Run]], hooks: Mapping[str, Any]) -> None:
    """Train with each hook; rank 0 writes what it has measured."""
    torch.set_num_threads(1)
    world = 2 if hooks is GATHERED else WORLD
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    results: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for task, make in tasks.items():
        results[task] = {}
        for label, hook in hooks.items():
            for seed in range(seeds):
                torch.manual_seed(seed)
                given = {"hook": lc.AllReduce(), **hook} if isinstance(hook, dict) else {"hook": hook}
                results[task].setdefault(label, []).append(make(seed).train(seed=seed, **given))
            if rank == 0:
                print(f"{task}: {label}: {results[task][label]}", file=sys.stderr, flush=True)
    if rank == 0:
        Path(folder, "results.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def report(task: str, runs: dict[str, list[tuple[float, float]]], limit: float | None) -> bool:
    """Print the table of a task; whether its limits hold, that of int4 as a fraction of the loss, or the noise."""
    is_loss = task.endswith("loss")
    dense = [score for score, _ in runs["dense"]]
    noise = statistics.stdev(dense) / (statistics.mean(dense) if is_loss else 1)
    print(f"\n{task:<26}{'mean':>9}{'lowest':>9}{'highest':>9}{'vs dense':>10}{'fewer':>8}")
    worse = {}
    for label, values in runs.items():
        scores = [score for score, _ in values]
        differences = [(a - b) / (b if is_loss else 1) for a, b in zip(scores, dense, strict=True)]
        worse[label] = statistics.mean(differences) * (1 if is_loss else -1)
        difference = f"{statistics.mean(differences):+.2%}" if is_loss else f"{statistics.mean(differences):+.2f}"
        fewer = runs["dense"][0][1] / values[0][1]
        print(
            f"{label:<26}{statistics.mean(scores):>9.3f}{min(scores):>9.3f}{max(scores):>9.3f}{difference:>10}"
            f"{fewer:>7.1f}x"
        )
    print(f"noise of dense over seeds: {f'{noise:.2%}' if is_loss else f'{noise:.2f}'}")
    four = "int4 differences" if "int4 differences" in worse else "int4"
    ok = worse["int8"] <= noise and (not is_loss or worse[four] <= (noise if limit is None else limit))
    of_int4 = f", {four} within {'noise' if limit is None else f'{100 * limit:g}%'}" if is_loss else ""
    print(f"int8 within noise{of_int4}: {'ok' if ok else 'MISSED'}")
    return ok


def print_seeds(results: dict[str, dict[str, list[tuple[float, float]]]]) -> None:
    """Print the score of each seed."""
    for task, runs in results.items():
        print(f"\n{task}, by seed")
        for label, values in runs.items():
            print(f"{label:<26}" + "".join(f"{score:>9.4f}" for score, _ in values))


def launch(work: Callable[[int, str, int], None], world: int, seeds: int) -> Any:
    """Run `work(rank, folder, seeds)` in so many processes; what rank 0 has written to `results.json` in the folder."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (folder, seeds), nprocs=world)
        return json.loads(Path(folder, "results.json").read_text())


def main() -> None:
    """Train with all hooks, print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--sharded", action="store_true")
    parser.add_argument("--gathered", action="store_true")
    args = parser.parse_args()
    work, world, limit = worker, WORLD, 0.01
    if args.gathered:
        work, world, limit = gathered_worker, 2, 0.005
    elif args.sharded:
        work, limit = sharded_worker, None
    results = launch(work, world, args.seeds)
    print(f"$ python {shlex.join(sys.argv)}")
    print(f"# torch {torch.__version__}, {world} ranks, {args.seeds} seeds")
    ok = [report(task, runs, limit) for task, runs in results.items()]
    if args.gathered:
        print_seeds(results)
    sys.exit(not all(ok))


if __name__ == "__main__":
    main()
