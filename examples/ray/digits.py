"""Train on scikit-learn's digits with Lightning on Ray Train, with a communication hook.

On two workers, of this machine or of the cluster that RAY_ADDRESS names, which restart from the last epoch when one
of them fails:

    python examples/ray/digits.py --hook powersgd --workers 2
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import lightning as L
import ray
import torch
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.lightning import RayLightningEnvironment, RayTrainReportCallback, prepare_trainer
from ray.train.torch import TorchTrainer
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_commhooks import CompressedRayDDPStrategy, PostLocalSGD, PowerSGD, available_hooks


class Digits(L.LightningModule):
    """A multi-layer perceptron for 8x8 images of digits."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self.net(images), labels)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        accuracy = (self.net(images).argmax(dim=1) == labels).float().mean()
        self.log("accuracy", accuracy, sync_dist=True, batch_size=len(labels))

    def on_validation_epoch_end(self) -> None:
        # Ray's results have the logged values of each epoch.
        metrics = self.trainer.strategy.attachment.metrics()
        self.log("bytes_per_step", metrics["bytes_sent"] / max(metrics["steps"], 1))
        self.log("compression_ratio", metrics["compression_ratio"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def loaders() -> tuple[DataLoader, DataLoader]:
    """1437 images to train on and 360 to validate on; Lightning gives each worker its part."""
    x, y = load_digits(return_X_y=True)
    parts = train_test_split(x / 16, y, test_size=0.2, random_state=0, stratify=y)
    x_train, x_test, y_train, y_test = map(torch.as_tensor, parts)
    train = DataLoader(TensorDataset(x_train.float(), y_train), batch_size=32, shuffle=True, drop_last=True)
    return train, DataLoader(TensorDataset(x_test.float(), y_test), batch_size=60)


def train_worker(config: dict[str, Any]) -> None:
    """Train in each worker; Ray calls it again after a failure."""
    L.seed_everything(0)
    # A name is enough. PowerSGD starts after 1000 steps by default, too late for this short run.
    configured = {
        "powersgd": PowerSGD(matrix_approximation_rank=2, start_powerSGD_iter=10),
        # Each worker takes local steps; by default, the workers of a node average gradients.
        "post_localsgd": PostLocalSGD(start_localSGD_iter=50, post_local_gradient_allreduce=False),
    }
    # Only this line is new: it replaces RayDDPStrategy().
    strategy = CompressedRayDDPStrategy(hook=configured.get(config["hook"], config["hook"]))
    trainer = L.Trainer(
        strategy=strategy,
        plugins=[RayLightningEnvironment()],
        callbacks=[RayTrainReportCallback()],
        devices="auto",
        accelerator="auto",
        max_epochs=config["epochs"],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer = prepare_trainer(trainer)
    # After a failure: the checkpoint of the last epoch, with the hook's state.
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        trainer.fit(Digits(), *loaders())
    else:
        with checkpoint.as_directory() as folder:
            trainer.fit(Digits(), *loaders(), ckpt_path=Path(folder, RayTrainReportCallback.CHECKPOINT_NAME))


def main() -> None:
    """Train, and print the bytes sent."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hook", default="powersgd", choices=available_hooks())
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--storage", help="where checkpoints go: a path or address that all nodes can write to")
    args = parser.parse_args()

    trainer = TorchTrainer(
        train_worker,
        train_loop_config={"hook": args.hook, "epochs": args.epochs},
        scaling_config=ScalingConfig(num_workers=args.workers, use_gpu=torch.cuda.device_count() >= args.workers),
        run_config=RunConfig(
            storage_path=args.storage or tempfile.mkdtemp(),
            failure_config=FailureConfig(max_failures=2),
            checkpoint_config=CheckpointConfig(num_to_keep=1),  # the last one
        ),
    )
    result = trainer.fit()
    print(
        f"{args.hook}: accuracy {result.metrics['accuracy']:.1%}, {result.metrics['bytes_per_step']:,.0f} bytes sent "
        f"per step, {result.metrics['compression_ratio']:.1f}x less than dense"
    )


if __name__ == "__main__":
    main()
