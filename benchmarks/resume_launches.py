"""Fresh launches in a row of a Lightning run that saves, ends and resumes: every process exits cleanly.

    python benchmarks/resume_launches.py --launches 30

One launch is two runs of a script, each with a 2-process `Trainer.fit`: the first saves a checkpoint at the end of
its second epoch and goes on to the fourth, the second resumes from it. A launch fails when a process exits with
another code than 0, takes too long, prints "terminate called" or a traceback, when ranks disagree, or when the
resumed run ends elsewhere than the uninterrupted one.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_commhooks import CompressedDDPStrategy, PowerSGD

METHODS = {"spawn": "spawn", "subprocess": "popen"}
HOOK = PowerSGD(matrix_approximation_rank=2, start_powerSGD_iter=2)


class Model(LightningModule):
    """A small classifier in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4)).double()

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Cross entropy."""
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Keep(Callback):
    """Writes each rank's parameters at the end of training."""

    def __init__(self, folder: Path, label: str) -> None:
        self.folder, self.label = folder, label

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write them."""
        parameters = torch.cat([p.detach().view(-1) for p in pl_module.parameters()])
        torch.save(parameters, self.folder / f"{self.label}.{trainer.global_rank}.pt")


def fit(folder: Path, method: str, label: str) -> None:
    """One run."""
    torch.manual_seed(0)
    x = torch.randn(64, 16, dtype=torch.float64)
    data = DataLoader(TensorDataset(x, x[:, :4].argmax(dim=1)), batch_size=4)
    strategy = CompressedDDPStrategy(hook=HOOK, start_method=METHODS[method], bucket_cap_mb=0.01)
    callbacks: list[Callback] = [Keep(folder, label)]
    if label == "whole":
        callbacks.append(ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1))
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        precision="64-true",
        max_epochs=4,
        callbacks=callbacks,
        enable_checkpointing=label == "whole",
        **quiet,
    )
    trainer.fit(Model(), data, ckpt_path=None if label == "whole" else folder / "epoch=1.ckpt")


def launch(method: str, timeout: float) -> list[str]:
    """Run twice and return what went wrong, nothing at best."""
    problems = []
    with tempfile.TemporaryDirectory() as name:
        for label in ("whole", "resumed"):
            command = [sys.executable, __file__, "--run", name, method, label]
            env = {**os.environ, "OMP_NUM_THREADS": "1"}
            try:
                done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout, check=False)
            except subprocess.TimeoutExpired:
                return [f"{label}: no end after {timeout:.0f} s"]
            if done.returncode or any(text in done.stderr for text in ("terminate called", "Traceback")):
                problems.append(f"{label}: exit code {done.returncode}: {done.stderr[-2000:]}")
        if problems:
            return problems
        whole, other, resumed, mirror = (
            torch.load(Path(name) / f"{label}.{rank}.pt") for label in ("whole", "resumed") for rank in (0, 1)
        )
    if not (torch.equal(whole, other) and torch.equal(resumed, mirror)):
        problems.append("ranks disagree")
    if not torch.allclose(whole, resumed, rtol=0, atol=1e-10):
        problems.append(f"the resumed run ended {(whole - resumed).abs().max():.1e} away")
    return problems


def main() -> int:
    """Launch, print a table, return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launches", type=int, default=30, help="launches with each method")
    parser.add_argument("--timeout", type=float, default=120, help="seconds for one run")
    parser.add_argument("--run", nargs=3, metavar=("FOLDER", "METHOD", "LABEL"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        warnings.filterwarnings("ignore", module=r"lightning\.")
        fit(Path(args.run[0]), args.run[1], args.run[2])
        return 0
    print(f"torch {torch.__version__}, 2 processes, save and resume, hook powersgd\n")
    print("method      launches  clean  seconds per launch", flush=True)
    ok = True
    for method in METHODS:
        clean, start = 0, time.perf_counter()
        for i in range(args.launches):
            problems = launch(method, args.timeout)
            clean += not problems
            for problem in problems:
                print(f"launch {i} with {method}: {problem}", flush=True)
        seconds = (time.perf_counter() - start) / args.launches
        print(f"{method:<12}{args.launches:>8}{clean:>7}{seconds:>20.1f}", flush=True)
        ok &= clean == args.launches
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
