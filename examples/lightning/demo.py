"""Dense and compressed training side by side: a real model, real data, two processes.

`make demo`, or:

    python examples/lightning/demo.py
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
import warnings
from typing import Any

EPOCHS = 20
# The methods and their encodings of gradients. `train` makes the hooks.
METHODS = {
    "dense": "float32",
    "bf16": "bfloat16",
    "int8": "8-bit integers",
    "powersgd": "low-rank factors",
}


def train(epochs: int) -> None:
    """Train with each method, in this process and one that Lightning starts; rank 0 reports, as lines of JSON."""
    warnings.simplefilter("ignore")
    for package in ("lightning", "lightning.pytorch", "lightning.fabric", "pytorch_lightning"):
        logging.getLogger(package).setLevel(logging.ERROR)

    import lightning as L
    from digits import Digits, DigitsData

    from lightning_commhooks import CompressedDDPStrategy, PowerSGD

    class Report(L.Callback):
        def __init__(self, method: str) -> None:
            self.method = method

        def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            self.start = time.perf_counter()

        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            self.say(trainer, done=trainer.global_step / trainer.estimated_stepping_batches)

        def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            self.seconds = time.perf_counter() - self.start

        def say(self, trainer: L.Trainer, **values: float) -> None:
            if trainer.is_global_zero:
                print(json.dumps({"method": self.method, **values}), flush=True)

    hooks = {
        "dense": "allreduce",
        "bf16": "bf16",
        "int8": "int8",
        "powersgd": PowerSGD(matrix_approximation_rank=2, start_powerSGD_iter=10),
    }
    for method in METHODS:
        L.seed_everything(0, verbose=False)
        strategy = CompressedDDPStrategy(hook=hooks[method])
        report = Report(method)
        trainer = L.Trainer(
            strategy=strategy,
            accelerator="cpu",
            devices=2,
            max_epochs=epochs,
            callbacks=[report],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        model, data = Digits(), DigitsData()
        trainer.fit(model, data)
        metrics = strategy.attachment.metrics()
        (tested,) = trainer.test(model, data, verbose=False)
        report.say(
            trainer,
            accuracy=tested["test_accuracy"],
            bytes_per_step=metrics["bytes_sent"] / metrics["steps"],
            ratio=metrics["compression_ratio"],
            seconds=report.seconds,
        )


def run(epochs: int, progress: Any) -> dict[str, dict[str, float]]:
    """Train in new processes with a progress bar for each method; return their final reports."""
    tasks = {method: progress.add_task(f"{method:9}", total=1.0, start=False) for method in METHODS}
    results: dict[str, dict[str, float]] = {method: {} for method in METHODS}
    command = [sys.executable, __file__, "--train", "--epochs", str(epochs)]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            if not line.startswith("{"):  # gloo of PyTorch 2.8 prints, too
                continue
            reported = json.loads(line)
            method = reported.pop("method")
            results[method].update(reported)
            progress.start_task(tasks[method])
            progress.update(tasks[method], completed=results[method]["done"])
        if process.wait():
            errors.seek(0)
            sys.exit(f"training failed:\n{errors.read()}")
    return results


def compare(epochs: int) -> None:
    """Run all methods and print the table."""
    try:
        import lightning  # noqa: F401
        import sklearn  # noqa: F401
        from rich.console import Console
        from rich.progress import Progress, TimeElapsedColumn
        from rich.table import Table
    except ImportError as error:
        sys.exit(f"the demo needs {error.name}: pip install -e '.[demo]'")

    console = Console()
    console.print(
        "A network of 300,000 parameters learns to read handwritten digits, four times. Each time it trains in two "
        "processes that average their gradients at every step. Only the communication hook differs.\n",
        highlight=False,
    )
    with Progress(*Progress.get_default_columns(), TimeElapsedColumn(), console=console) as progress:
        results = run(epochs, progress)

    table = Table(title="\nSame model, same data, same number of steps")
    table.add_column("hook")
    table.add_column("gradients sent as")
    for title in ("accuracy", "kB per step", "ratio", "seconds"):
        table.add_column(title, justify="right")
    for method, result in results.items():
        table.add_row(
            method,
            METHODS[method],
            f"{result['accuracy']:.1%}",
            f"{result['bytes_per_step'] / 1000:,.1f}",
            f"{result['ratio']:.1f}x",
            f"{result['seconds']:.1f}",
        )
    console.print(table)
    console.print(
        "accuracy: on 360 images kept out of training. kB per step: sent by each process. ratio: how many times "
        "less than dense. seconds: of training; both processes run on this machine, where sending is almost free, "
        "so they show the computing cost of compression, not the savings on a network.\n\n"
        "In your own Lightning script: Trainer(strategy=CompressedDDPStrategy(hook='powersgd'))",
        highlight=False,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        train(arguments.epochs)
    else:
        compare(arguments.epochs)
