"""A Trainer as one replica of a run with torchft, a process of its own; started by test_torchft_lightning.py.

    python torchft_trainer.py FOLDER NAME OPTIONS

`OPTIONS` are those of [`Options`][], in JSON. Writes what torchft_replica.py writes.
"""

import json
import os
import sys
from dataclasses import dataclass, field
from hashlib import sha1
from pathlib import Path
from time import sleep, time

import torch
import torchft_replica
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from torch.utils.data import DataLoader, TensorDataset
from torchft_replica import (
    BUCKET_CAP_MB,
    HOOKS,
    PERIOD,
    batch,
    die_in_average,
    factor_of,
    loss_of,
    make_model,
    make_optimizer,
    num_steps,
    watch_buckets,
)

import lightning_commhooks as lc

NAMES = ("one", "two", "three")


@dataclass
class Options(torchft_replica.Options):
    """What a run is about.

    Attributes:
        micros: batches whose gradients are accumulated.
        scaler: whether the loss is scaled.
        checkpoint: begin from that one; and after how many steps one is written.
    """

    micros: int = 1
    scaler: bool = False
    checkpoint: str | None = None
    saves: list = field(default_factory=list)

    @property
    def period(self):
        """Steps between votes."""
        return PERIOD if self.hook.startswith("diloco") else 1


class Module(LightningModule):
    def __init__(self, name, options):
        super().__init__()
        self.model, self.name, self.options, self.attempts = make_model(), name, options, 0
        # Steps since the last average.
        self.num_local = 0

    def training_step(self, _, batch_idx):
        sleep(0.02 / self.options.period)  # a process starts in a few dozen steps
        self.attempts += 1
        place = self.trainer.global_step, batch_idx % self.options.micros
        if self.options.period > 1:
            place = self.trainer.strategy.manager.current_step(), self.num_local
        x, y = batch(self.name, *place)
        with torch.autocast("cpu", enabled=False):
            return loss_of(self.model, x, y) * factor_of(self.options, self.trainer.strategy.manager)

    def configure_optimizers(self):
        optimizer = make_optimizer(self, 0 if self.options.period > 1 else 0.9)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Notes(Callback):
    """What each committed step was like; ends training when the file `last` says so."""

    def __init__(self, folder, name, options):
        self.folder, self.name, self.options = folder, name, options
        self.notes = (folder / f"{name}.steps").open("a")

    def on_train_start(self, trainer, module):
        (self.folder / f"{self.name}.up").touch()
        while not all((self.folder / f"{other}.up").exists() for other in self.options.begins_with):
            sleep(0.01)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if (batch_idx + 1) % self.options.micros:
            return
        step, attachment = trainer.strategy.manager.current_step(), trainer.strategy.attachment
        if trainer.global_step in self.options.saves:
            trainer.save_checkpoint(self.folder / f"{self.name}-{trainer.global_step}.ckpt")
        num_local = module.num_local = module.num_local + 1
        if trainer.global_step % self.options.period:
            return
        module.num_local = 0
        line = {
            "step": step - 1,
            "hash": sha1(b"".join(p.detach().numpy().tobytes() for p in module.parameters())).hexdigest(),
            "time": time(),
            "names": [NAMES[int(name[-1])] for name in torchft_replica.names_of(attachment)],
            "lost": attachment.metrics()["steps_not_committed"],
            "process": os.getpid(),
            "sum": sum(p.sum().item() for p in module.parameters()),
            "lr": trainer.optimizers[0].param_groups[0]["lr"],
            "global_step": trainer.global_step,
            "local": num_local,
        }
        self.notes.write(json.dumps(line) + "\n")
        self.notes.flush()
        trainer.should_stop = line["step"] + 1 >= num_steps(self.folder / "last")


def main():
    folder, name, options = Path(sys.argv[1]), sys.argv[2], Options(**json.loads(sys.argv[3]))
    buckets = watch_buckets(options)
    if options.period > 1 and options.dies:
        die_in_average(options.dies[0])
    strategy = lc.CompressedDDPStrategy(
        hook=HOOKS[options.hook],
        fault_tolerance=lc.FaultTolerance(
            replica_rank=NAMES.index(name), num_replica_groups=3, min_replica_size=2, timeout=5, hostname="127.0.0.1"
        ),
        bucket_cap_mb=BUCKET_CAP_MB,
    )
    module = Module(name, options)
    plugins = []
    if options.scaler:
        plugins = [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**10))]
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        plugins=plugins,
        callbacks=[Notes(folder, name, options)],
        max_steps=10**6,
        accumulate_grad_batches=options.micros,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = DataLoader(TensorDataset(torch.zeros(27)), batch_size=1, shuffle=True)
    trainer.fit(module, data, ckpt_path=options.checkpoint)
    end = {
        "parameters": [p.tolist() for p in module.parameters()],
        "metrics": strategy.attachment.metrics(),
        "buckets": [*buckets.values()],
        "attempts": module.attempts,
        "sampler": vars(trainer.train_dataloader.sampler)["rank"],
    }
    (folder / f"{name}.end").write_text(json.dumps(end))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # threads of torchft may wait for a lighthouse
