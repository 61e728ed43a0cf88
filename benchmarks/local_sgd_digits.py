"""Does a model get as good when ranks step alone? Local SGD and DiLoCo against dense DDP, on handwritten digits.

    python benchmarks/local_sgd_digits.py

A perceptron of five layers with BatchNorm, 108,000 parameters, learns scikit-learn's digits on 4 ranks over gloo. For
each seed half of the images are for training. All hooks get the same ones in the same order, the same initial weights,
and the same number of epochs with the same optimizer and schedule. Printed for each hook:

- accuracy: in percent, on the other half after the last epoch, of the average over ranks; mean over seeds.
- lowest, highest: of the seeds.
- vs dense: mean minus that of `allreduce`, in points.
- MB sent: `bytes_sent` and `bytes_evaluation` of a rank in one run, so warm-up and last averaging included;
  DDP's broadcast of buffers, which only `allreduce` has after the warm-up, is not.
- fewer: how many times as much `allreduce` sent.
- averagings: of the model in one run; with fragments, of parts of it.

Exits with 1 when averaging every 8 steps is more than 0.5 points worse than dense, or DiLoCo more than 1 point.
"""

import argparse
import itertools
import json
import shlex
import statistics
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import lightning_commhooks as lc

BATCH_SIZE = 8  # per rank
LEARNING_RATE = 1e-3
LIMITS = {"post_localsgd, 8": 0.5, "diloco, 20": 1.0}  # points below dense


def hooks(start: int) -> dict[str, lc.CommHook]:
    """Rows, with labels; ranks step alone after `start` steps."""
    options = {"start_localSGD_iter": start, "post_local_gradient_allreduce": False}
    return {
        "allreduce": lc.AllReduce(),
        "post_localsgd, 8": lc.PostLocalSGD(period=8, **options),
        "hierarchical, 4 and 16": lc.HierarchicalLocalSGD(period_group_size_dict={4: 2, 16: 4}, **options),
        "diloco, 20": lc.DiLoCo(period=20, **options),
        "diloco, 20, 4 x bf16": lc.DiLoCo(period=20, fragments=4, pseudo_gradient="bf16", **options),
    }


def network() -> nn.Module:
    """Images of 64 pixels to 10 classes; four layers of about equal size for the fragments."""
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise((64, 176, 176, 176, 176)):
        layers += [nn.Linear(before, after), nn.BatchNorm1d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(176, 10))


def digits(seed: int) -> tuple[TensorDataset, TensorDataset]:
    """Images and labels for training and for the test."""
    images, labels = load_digits(return_X_y=True)
    x = torch.as_tensor(images).float().div(16)
    y = torch.as_tensor(labels)
    training, test = train_test_split(range(len(y)), test_size=0.5, stratify=labels, random_state=seed)
    return TensorDataset(x[training], y[training]), TensorDataset(x[test], y[test])


def train(label: str, seed: int, epochs: int, warm_up: int) -> dict[str, float]:
    """Accuracy and counts of one run."""
    training, test = digits(seed)
    sampler = DistributedSampler(training, seed=seed)
    loader = DataLoader(training, BATCH_SIZE, sampler=sampler, drop_last=True)
    torch.manual_seed(seed)
    model = DistributedDataParallel(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(loader))
    attachment = lc.attach(model, hooks(warm_up * len(loader))[label], optimizers=[optimizer])
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            scheduler.step()
    attachment.average_weights()
    metrics = attachment.metrics()
    attachment.close()
    model.module.eval()
    x, y = test.tensors
    with torch.no_grad():
        accuracy = (model.module(x).argmax(1) == y).float().mean().item()
    sent = metrics["bytes_sent"] + metrics["bytes_evaluation"]
    return {"accuracy": 100 * accuracy, "bytes": sent, "averagings": metrics["averagings"]}


def worker(rank: int, world: int, folder: str, seeds: int, epochs: int, warm_up: int) -> None:
    """Train with one hook after another; rank 0 writes what it has measured."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    runs = {label: [train(label, seed, epochs, warm_up) for seed in range(seeds)] for label in hooks(0)}
    if rank == 0:
        Path(folder, "runs.json").write_text(json.dumps(runs))
    dist.destroy_process_group()


def report(runs: dict[str, list[dict[str, float]]]) -> list[str]:
    """Print the table; returns the rows that are worse than their limit."""
    print(
        f"{'hook':<24}{'accuracy':>9}{'lowest':>9}{'highest':>9}{'vs dense':>10}{'MB sent':>10}{'fewer':>8}"
        f"{'averagings':>12}"
    )
    mean = {label: {key: statistics.mean(run[key] for run in of) for key in of[0]} for label, of in runs.items()}
    dense = mean["allreduce"]
    for label, row in mean.items():
        accuracies = [run["accuracy"] for run in runs[label]]
        print(
            f"{label:<24}{row['accuracy']:>9.2f}{min(accuracies):>9.2f}{max(accuracies):>9.2f}"
            f"{row['accuracy'] - dense['accuracy']:>+10.2f}{row['bytes'] / 1e6:>10.1f}"
            f"{dense['bytes'] / row['bytes']:>7.1f}x{row['averagings']:>12.0f}"
        )
    return [label for label, limit in LIMITS.items() if mean[label]["accuracy"] < dense["accuracy"] - limit]


def main() -> None:
    """Parse arguments, start the ranks, print the table, exit with 1 if a row is worse than its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--warm-up", type=int, default=2, help="first epochs in which gradients are averaged")
    args = parser.parse_args()
    print(f"$ python {shlex.join(sys.argv)}")
    print(f"torch {torch.__version__}, {args.ranks} ranks, {args.seeds} seeds, {args.epochs} epochs, ", end="")
    print(f"ranks step alone after {args.warm_up}\n", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (args.ranks, folder, args.seeds, args.epochs, args.warm_up), nprocs=args.ranks)
        worse = report(json.loads(Path(folder, "runs.json").read_text()))
    for label in worse:
        print(f"{label}: more than {LIMITS[label]} points below dense")
    print(f"exit code {bool(worse):d}")
    sys.exit(bool(worse))


if __name__ == "__main__":
    main()
