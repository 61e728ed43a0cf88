"""Monitor a communication hook during training: values in TensorBoard and the progress bar, and a closing line.

In two processes:

    python examples/lightning/monitor.py --hook powersgd --devices 2
    tensorboard --logdir monitor_logs
"""

from __future__ import annotations

import argparse

import lightning as L
import torch
from digits import Digits, DigitsData
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_commhooks import CommHookMonitor, CompressedDDPStrategy, Int8, PostLocalSGD, PowerSGD

BARS = {"tqdm": TQDMProgressBar, "rich": RichProgressBar}


class LoggingDigits(Digits):
    """Shows its loss next to the values of the hook."""

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, prog_bar=True)
        return loss


def main() -> None:
    """Train."""
    # Start early in this short run; otherwise a name is enough.
    hooks = {
        "powersgd": PowerSGD(matrix_approximation_rank=2, start_powerSGD_iter=40),
        "int8": Int8(),
        # Each process takes local steps; by default, the GPUs of a node average gradients.
        "post_localsgd": PostLocalSGD(start_localSGD_iter=40, post_local_gradient_allreduce=False),
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hook", default="powersgd", choices=hooks)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--bar", default="tqdm", choices=BARS)
    parser.add_argument("--logs", default="monitor_logs", help="folder")
    args = parser.parse_args()

    L.seed_everything(0)
    trainer = L.Trainer(
        strategy=CompressedDDPStrategy(hook=hooks[args.hook]),
        # More often than by default, because an epoch has 22 steps.
        callbacks=[CommHookMonitor(every_n_steps=10, error_every_n_steps=10), BARS[args.bar]()],
        logger=TensorBoardLogger(args.logs, name=args.hook),
        accelerator="gpu" if torch.cuda.device_count() >= args.devices else "cpu",
        devices=args.devices,
        max_epochs=args.epochs,
        log_every_n_steps=10,
        enable_checkpointing=False,
    )
    trainer.fit(LoggingDigits(), DigitsData())


if __name__ == "__main__":
    main()
