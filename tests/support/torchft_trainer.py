"""A Trainer as one replica of a run with torchft, a process of its own; started by test_torchft_lightning.py.

    python torchft_trainer.py FOLDER NAME OPTIONS

See torchft_replica.py.
"""

from contextlib import nullcontext
from time import sleep

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from torch.utils.data import DataLoader, TensorDataset
from torchft_replica import (
    BUCKET_CAP_MB,
    HOOKS,
    PERIOD,
    Notes,
    batch,
    die_in_average,
    factor_of,
    fault_tolerance,
    loss_of,
    make_model,
    make_optimizer,
    run_replica,
    watch_buckets,
)

import lightning_commhooks as lc


class Module(LightningModule):
    def __init__(self, name, options):
        super().__init__()
        self.model, self.name, self.options, self.attempts = make_model(), name, options, 0
        # Steps since the last average, and number of averages before this step.
        self.num_local = self.num_averages = 0

    def training_step(self, _, batch_idx):
        sleep(0.02 / (PERIOD if self.options.is_local else 1))  # a process starts in a few dozen steps
        self.attempts += 1
        place = self.trainer.global_step, batch_idx % self.options.micros
        if self.options.is_local:
            self.num_averages = self.trainer.strategy.manager.current_step()
            place = self.num_averages, self.num_local
        x, y = batch(self.name, *place)
        with torch.autocast("cpu", enabled=False):
            return loss_of(self.model, x, y) * factor_of(self.options, self.trainer.strategy.manager)

    def configure_optimizers(self):
        optimizer = make_optimizer(self, 0 if self.options.is_local else 0.9)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Noting(Callback):
    """Writes what each committed step was like, and ends training."""

    def __init__(self, notes, options):
        self.notes, self.options = notes, options

    def on_train_start(self, trainer, module):
        self.notes.meet(self.options.begins_with)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if (batch_idx + 1) % self.options.micros:
            return
        step, attachment = trainer.strategy.manager.current_step(), trainer.strategy.attachment
        if trainer.global_step in self.options.saves:
            trainer.save_checkpoint(self.notes.folder / f"{self.notes.name}-{trainer.global_step}.ckpt")
        num_local = module.num_local = module.num_local + 1
        if self.options.is_local and step == module.num_averages:
            return
        module.num_local = 0
        more = {"lr": trainer.optimizers[0].param_groups[0]["lr"], "global_step": trainer.global_step}
        with attachment.averaged_weights() if self.options.is_local else nullcontext():
            self.notes.write(step - 1, [*module.parameters()], attachment, local=num_local, **more)
        trainer.should_stop = step >= self.notes.num_steps


def main(folder, name, options):
    buckets, notes = watch_buckets(options), Notes(folder, name)
    if options.is_local and options.dies:
        die_in_average(options.dies[0], lambda: strategy.manager)
    strategy = lc.CompressedDDPStrategy(
        hook=HOOKS[options.hook], fault_tolerance=fault_tolerance(name), bucket_cap_mb=BUCKET_CAP_MB
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
        callbacks=[Noting(notes, options)],
        max_steps=10**6,
        accumulate_grad_batches=options.micros,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = DataLoader(TensorDataset(torch.zeros(27)), batch_size=1, shuffle=True)
    trainer.fit(module, data, ckpt_path=options.checkpoint)
    more = {"attempts": module.attempts, "sampler": vars(trainer.train_dataloader.sampler)["rank"]}
    notes.end(module.parameters(), strategy.attachment, buckets, **more)


if __name__ == "__main__":
    run_replica(main)
