"""Train on scikit-learn's digits with Lightning and a communication hook.

In two processes:

    python examples/lightning/digits.py --hook powersgd --devices 2
"""

from __future__ import annotations

import argparse

import lightning as L
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_commhooks import CompressedDDPStrategy, PostLocalSGD, PowerSGD, available_hooks


class Digits(L.LightningModule):
    """A multi-layer perceptron for 8x8 images of digits.

    Args:
        hidden: width of the two hidden layers.
        lr: learning rate of Adam.
    """

    def __init__(self, hidden: int = 512, lr: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 10)
        )

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self.net(images), labels)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        accuracy = (self.net(images).argmax(dim=1) == labels).float().mean()
        self.log("test_accuracy", accuracy, sync_dist=True, batch_size=len(labels))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


class DigitsData(L.LightningDataModule):
    """1437 images to train on and 360 to test on.

    Args:
        batch_size: number of images per process and step.
    """

    def __init__(self, batch_size: int = 32) -> None:
        super().__init__()
        self.batch_size = batch_size
        x, y = load_digits(return_X_y=True)
        parts = train_test_split(x / 16, y, test_size=0.2, random_state=0, stratify=y)
        x_train, x_test, y_train, y_test = map(torch.as_tensor, parts)
        self.train = TensorDataset(x_train.float(), y_train)
        self.test = TensorDataset(x_test.float(), y_test)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True, drop_last=True)

    def test_dataloader(self) -> DataLoader:
        return DataLoader(self.test, batch_size=60)


def main() -> None:
    """Train, test, and print the bytes sent."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hook", default="powersgd", choices=available_hooks())
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=20)
    args = parser.parse_args()

    L.seed_everything(0)
    # A name is enough, `hook=args.hook`. PowerSGD starts after 1000 steps by default, too late for this short run.
    configured = {
        "powersgd": PowerSGD(matrix_approximation_rank=2, start_powerSGD_iter=10),
        # Each process takes local steps; by default, the GPUs of a node average gradients.
        "post_localsgd": PostLocalSGD(start_localSGD_iter=50, post_local_gradient_allreduce=False),
    }
    hook = configured.get(args.hook, args.hook)
    strategy = CompressedDDPStrategy(hook=hook)
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="gpu" if torch.cuda.device_count() >= args.devices else "cpu",
        devices=args.devices,
        max_epochs=args.epochs,
        logger=False,
        enable_checkpointing=False,
    )
    model, data = Digits(), DigitsData()
    trainer.fit(model, data)
    metrics = strategy.attachment.metrics()
    trainer.test(model, data)
    if trainer.is_global_zero:
        per_step = metrics["bytes_sent"] / metrics["steps"]
        print(f"{args.hook}: {per_step:,.0f} bytes sent per step, {metrics['compression_ratio']:.1f}x less than dense")


if __name__ == "__main__":
    main()
