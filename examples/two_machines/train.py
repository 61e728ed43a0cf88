"""The whole way on two machines: ask for a hook, train, monitor, save a checkpoint, resume from it.

Both machines have this file at the same path. `node1` is the first one; on the second, write `--node-rank=1`. Start
each command on both:

    export NODES="--nnodes=2 --node-rank=0 --nproc-per-node=1 --master-addr=node1 --master-port=29400"
    export GLOO_SOCKET_IFNAME=eth1 NCCL_SOCKET_IFNAME=eth1
    torchrun $NODES -m lightning_commhooks advise examples/two_machines/train.py:make_model
    torchrun $NODES examples/two_machines/train.py --hook int8 --epochs 4
    torchrun $NODES examples/two_machines/train.py --hook int8 --epochs 8 --resume

Rank 0 writes the checkpoint. Both machines read it, so `--folder` is on a file system that they share, or you copy it.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from lightning_commhooks import CommHookMonitor, CompressedDDPStrategy, available_hooks


class Digits(L.LightningModule):
    """A multi-layer perceptron for 8x8 images of digits."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self.net(images), labels)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        accuracy = (self.net(images).argmax(dim=1) == labels).float().mean()
        self.log("test_accuracy", accuracy, sync_dist=True, batch_size=len(labels))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def loaders() -> tuple[DataLoader, DataLoader]:
    """1437 images to train on and 360 to test on; Lightning gives each rank its part."""
    x, y = map(torch.as_tensor, load_digits(return_X_y=True))
    parts = random_split(TensorDataset(x.float() / 16, y), [1437, 360], torch.Generator().manual_seed(0))
    return DataLoader(parts[0], batch_size=32, shuffle=True, drop_last=True), DataLoader(parts[1], batch_size=60)


def make_model() -> tuple[nn.Module, list[Tensor]]:
    """The model and one rank's batch, for `advise`."""
    return Digits(), next(iter(loaders()[0]))


def main() -> None:
    """Train, or continue, and test."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hook", default="int8", choices=available_hooks())
    parser.add_argument("--epochs", type=int, default=4, help="in all, with those before the checkpoint")
    parser.add_argument("--folder", type=Path, default=Path("two_machines"), help="of checkpoints and logs")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint")
    args = parser.parse_args()

    L.seed_everything(0)
    strategy = CompressedDDPStrategy(hook=args.hook)
    devices = int(os.environ["LOCAL_WORLD_SIZE"])
    trainer = L.Trainer(
        strategy=strategy,
        callbacks=[CommHookMonitor(every_n_steps=20), ModelCheckpoint(args.folder, save_last=True)],
        logger=CSVLogger(args.folder, name="logs"),
        accelerator="gpu" if torch.cuda.device_count() >= devices else "cpu",
        devices=devices,
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),  # torchrun sets both
        max_epochs=args.epochs,
        log_every_n_steps=20,
        enable_progress_bar=False,
    )
    model, (train, test) = Digits(), loaders()
    trainer.fit(model, train, ckpt_path=args.folder / "last.ckpt" if args.resume else None)
    metrics = strategy.attachment.metrics()
    (tested,) = trainer.test(model, test, verbose=False)
    if trainer.is_global_zero:
        print(
            f"{args.hook}: step {trainer.global_step}, {metrics['steps']} of them in this run, test accuracy "
            f"{tested['test_accuracy']:.1%}, {metrics['compression_ratio']:.1f}x fewer bytes; values of the monitor: "
            f"{trainer.logger.log_dir}/metrics.csv"
        )


if __name__ == "__main__":
    main()
