"""Scenarios about state with Lightning's real `Trainer`, for test_lightning_state.py; like lightning_runner.py."""

import contextlib
import copy
import logging
import os
import sys
import warnings

import torch
from lightning_runner import OUT, POWERSGD, Classifier, CompressedDDP, DDPStrategy, data, make_trainer, pl, write

import lightning_commhooks as lc

EPOCHS, SAVED = 7, 2  # of 4 steps each
DEVICES = int(os.environ.get("DEVICES", "2"))


def resumable(label, strategy, ckpt=None, module=Classifier, save=True, epochs=EPOCHS, more=(), **options):
    """Fit; save a checkpoint at the end of the second epoch, and what is asked for after the fit."""
    torch.manual_seed(0)
    checkpoints = pl.callbacks.ModelCheckpoint(dirpath=OUT, filename=f"{label}-{{epoch}}", save_top_k=-1)
    options = {"max_epochs": epochs, "enable_checkpointing": save, "devices": DEVICES, **options}
    trainer = make_trainer(label, strategy, **options)
    trainer.callbacks += [*more, *([checkpoints] if save else [])]
    # Lightning loads weights before it converts the model: those of a double would be rounded.
    model = module().double() if options.get("precision") == "64-true" else module()
    trainer.fit(model, data(), ckpt_path=ckpt)
    return trainer


def hook_of(name):
    return {"powersgd": POWERSGD, "schedule": lc.Schedule({0: "bf16", 10: POWERSGD, 14: "fp16"})}[name]


def strategy_of(name, exact):
    return CompressedDDP(hook=hook_of(name), exact_state=exact)


NAMES = ("powersgd", "schedule")


def save():
    for name in NAMES:
        for exact in (False, True):
            label = f"{name}-{exact}"
            trainer = resumable(label, strategy_of(name, exact), precision="64-true")
            if name == "powersgd":
                trainer.save_checkpoint(OUT / f"{label}-after.ckpt")
                trainer.save_checkpoint(OUT / f"{label}-weights.ckpt", weights_only=True)
    resumable("dense", DDPStrategy())
    unsaved()


def unsaved():
    """A checkpoint after a fit that wrote none; and what a fit sent besides gradients, that wrote one at its end."""
    evaluated = {}
    for label, save in (("unsaved", False), ("saved", True)):
        trainer = resumable(label, CompressedDDP(hook=POWERSGD), save=save, epochs=2)
        evaluated[label] = trainer.strategy.attachment.metrics()["bytes_evaluation"]
        with heard() as told:
            trainer.save_checkpoint(OUT / f"{label}-after.ckpt")
        evaluated[f"{label} told"] = told
    write("evaluated", trainer.global_rank, **evaluated)


@contextlib.contextmanager
def heard():
    """What the strategy logs of its checkpoints."""
    told, handler = [], logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    log = logging.getLogger("lightning_commhooks.lightning.ddp")
    log.addHandler(handler)
    yield told
    log.removeHandler(handler)


def resume():
    for name in NAMES:
        for exact in (False, True):
            label = f"{name}-{exact}"
            ckpt = OUT / f"{label}-epoch={SAVED - 1}.ckpt"
            resumable(f"{label}-resumed", strategy_of(name, exact), ckpt, save=False, precision="64-true")


def other_world():
    for exact in (False, True):
        ckpt = OUT / f"powersgd-{exact}-epoch={SAVED - 1}.ckpt"
        strategy = strategy_of("powersgd", exact)
        resumable(f"powersgd-{exact}-on-{DEVICES}", strategy, ckpt, precision="64-true")


def mismatches():
    ckpt = OUT / f"powersgd-False-epoch={SAVED - 1}.ckpt"
    hooks = {"hook": "bf16", "rank": lc.PowerSGD(matrix_approximation_rank=1, start_powerSGD_iter=1)}
    for label, hook in hooks.items():
        try:
            resumable(f"strict-{label}", CompressedDDP(hook=hook), ckpt, save=False, precision="64-true")
        except Exception as error:
            rank = os.environ.get("LOCAL_RANK", 0)
            write(f"error-{label}", rank, type=type(error).__name__, text=str(error))
        loose = CompressedDDP(hook=hook, strict_state=False)
        resumable(f"loose-{label}", loose, ckpt, save=False, precision="64-true")
    dense = OUT / f"dense-epoch={SAVED - 1}.ckpt"
    resumable("from-dense", CompressedDDP(hook=POWERSGD), dense, save=False)
    resumable("after", CompressedDDP(hook=POWERSGD), OUT / "powersgd-False-after.ckpt", save=False, epochs=8)
    # A checkpoint of ours without us, and evaluation with a hook that it does not fit.
    resumable("to-dense", DDPStrategy(), ckpt, save=False, precision="64-true")
    trainer = make_trainer("never", CompressedDDP(hook="bf16"), precision="64-true")
    trainer.validate(Classifier(), data(), ckpt_path=ckpt, verbose=False, weights_only=True)
    write("validated", trainer.global_rank)


class Unfreeze(pl.callbacks.BaseFinetuning):
    """Trains the last layer only, and the whole model from the second epoch on."""

    def freeze_before_training(self, module):
        self.freeze(module.net[:4])

    def finetune_function(self, module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.net[:4], optimizer, lr=0.1, initial_denom_lr=1)


class Finetuned(Classifier):
    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


def finetuning():
    for name in ("allreduce", POWERSGD):
        label = f"finetuning-{getattr(name, 'name', name)}"
        resumable(label, CompressedDDP(hook=name), module=Finetuned, save=False, epochs=3, more=[Unfreeze()])


class UnfrozenInStep(Classifier):
    """Trains the last layer only, and from the fourth step on the whole model, as its `training_step` decides."""

    def __init__(self):
        super().__init__()
        self.net[:4].requires_grad_(False)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def training_step(self, batch, batch_idx):
        if self.trainer.global_step == 3:
            self.net[:4].requires_grad_(True)
        return super().training_step(batch, batch_idx)


def unfrozen_in_step():
    resumable("unfrozen-in-step", CompressedDDP(hook="allreduce"), module=UnfrozenInStep, save=False, epochs=3)


class FrozenBetweenSteps(Classifier):
    """Trains the first layers within each `training_step` only, in a backward of their own."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.net[:4].requires_grad_(False)

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        for is_last in (False, True):
            self.net[:4].requires_grad_(is_last)
            self.net[4:].requires_grad_(not is_last)
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()
        self.net.requires_grad_(True)
        self.net[:4].requires_grad_(False)


def frozen_between_steps():
    strategy = CompressedDDP(hook="allreduce", find_unused_parameters=True)
    resumable("frozen-between-steps", strategy, module=FrozenBetweenSteps, save=False, epochs=1)


class Overflows(Classifier):
    """The loss of one batch is infinite on one rank."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        return loss * float("inf") if self.trainer.global_step == 5 and self.global_rank == 1 else loss


class Plugin(pl.plugins.precision.MixedPrecision):
    """Lightning's plugin for 16-mixed, which picks bfloat16 on CPU, with the scaler of "16-mixed"."""

    def __init__(self, scaler):
        super().__init__("16-mixed", "cpu", scaler)

    def forward_context(self):
        return torch.autocast("cpu", dtype=torch.bfloat16)


def mixed():
    for name in ("allreduce", POWERSGD):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=3)
        label = f"mixed-{getattr(name, 'name', name)}"
        strategy = CompressedDDP(hook=name)
        resumable(label, strategy, module=Overflows, save=False, epochs=4, plugins=[Plugin(scaler)])
        write(f"scale-{label}", strategy.global_rank, scale=scaler.get_scale())


def other_model():
    class Small(Classifier):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(16, 4)

    strategy = CompressedDDP(hook=POWERSGD)
    trainer = resumable("first-model", strategy, save=False, epochs=2)
    trainer.callbacks[0].label = "second-model"
    trainer.fit_loop.epoch_progress.reset()
    torch.manual_seed(0)
    trainer.fit(Small(), data())
    resumable("second-model-alone", CompressedDDP(hook=POWERSGD), module=Small, save=False, epochs=2)


def tuned():
    for label, more in {"untuned": [], "tuned": [pl.callbacks.LearningRateFinder(num_training_steps=5)]}.items():

        class Tunable(Classifier):
            lr = 0.1

            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), lr=0.1)  # whatever was found

        resumable(label, CompressedDDP(hook=POWERSGD), module=Tunable, save=False, epochs=2, more=copy.copy(more))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    warnings.filterwarnings("ignore", module=r"lightning\.|pytorch_lightning\.|lightning_fabric\.")
    for scenario in sys.argv[3:]:
        globals()[scenario]()
