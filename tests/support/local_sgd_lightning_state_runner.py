"""Validation, checkpoints and ends of local SGD with Lightning's real `Trainer`; like lightning_runner.py."""

import logging
import os
import sys
import warnings

import local_sgd_tasks as tasks
import torch
from lightning_runner import OUT, CompressedDDP, make_trainer, pl, write
from lightning_state_runner import Unfreeze
from local_sgd_lightning_runner import (
    DEVICES,
    HOOKS,
    POST,
    VALIDATION,
    Regression,
    Trajectory,
    gan_on_four,  # noqa: F401  # a scenario
    loader,
    train,
)

RANK = int(os.environ.get("LOCAL_RANK", "0"))
ModelCheckpoint = pl.callbacks.ModelCheckpoint


def checkpoints(name, **options):
    return ModelCheckpoint(dirpath=OUT, filename=name, save_top_k=-1, **options)


class Copying(Regression):
    """Adds its weights to a checkpoint by itself."""

    def on_save_checkpoint(self, checkpoint):
        checkpoint["copied"] = self.task.state_dict()


class Metrics(pl.Callback):
    """What Lightning says at each validation, and what it has validated."""

    def __init__(self, label):
        self.label = label
        self.losses, self.models, self.sanity = {}, {}, []

    def on_validation_end(self, trainer, module):
        if trainer.sanity_checking:
            self.sanity.append(tasks.flat(module.task))
            return
        self.losses[trainer.global_step] = trainer.callback_metrics["loss"].item()
        self.models[trainer.global_step] = tasks.flat(module.task)
        seen = {"losses": self.losses, "models": self.models, "sanity": self.sanity}
        write(f"{self.label}-metrics", trainer.global_rank, **seen)


def watched():
    runs = {"unwatched": None, "watched": {}, "exact": {"exact_state": True}, "resync": {"resync": True}}
    for label, options in runs.items():
        more, trainer = [], {}
        if options is not None:
            by_validation = checkpoints(f"{label}-val-{{step}}", save_on_train_epoch_end=False)
            by_step = checkpoints(f"{label}-{{step}}", every_n_train_steps=3)
            more = [by_validation, by_step, Metrics(label)]
            trainer = {"val_check_interval": 3, "num_sanity_val_steps": 2}
        module = Copying("adamw", norm=True)
        strategy = CompressedDDP(hook=POST, **(options or {}))
        train(label, strategy, module, epochs=2, more=more, validation=VALIDATION, **trainer)


EPOCHS, SAVED = 4, 2  # of 4 steps each
KINDS = {"exact": {"exact_state": True}, "mean": {}, "resync": {"resync": True}}


def resumable(label, strategy, name, ckpt=None, epochs=EPOCHS, validated=False, **options):
    saving = {"every_n_epochs": SAVED, "save_on_train_epoch_end": not validated}
    more = [] if ckpt else [checkpoints(f"{label}-{{epoch}}", **saving)]
    module = Regression("adamw" if "diloco" in name else "momentum")
    validation = VALIDATION if validated else None
    batches = 8 // DEVICES
    return train(
        label, strategy, module, batches=batches, epochs=epochs, more=more, ckpt=ckpt, validation=validation, **options
    )


def save():
    for name in ("short", "diloco-beside"):
        for kind, options in KINDS.items():
            resumable(f"{name}-{kind}", CompressedDDP(hook=HOOKS[name], **options), name)
    resumable("validated", CompressedDDP(hook=HOOKS["short"], exact_state=True), "short", validated=True)


def resume():
    for name in ("short", "diloco-beside"):
        for kind, options in KINDS.items():
            label = f"{name}-{kind}"
            ckpt = OUT / f"{label}-epoch={SAVED - 1}.ckpt"
            resumable(f"{label}-resumed", CompressedDDP(hook=HOOKS[name], **options), name, ckpt)
    ckpt = OUT / f"validated-epoch={SAVED - 1}.ckpt"
    strategy = CompressedDDP(hook=HOOKS["short"], exact_state=True)
    resumable("validated-resumed", strategy, "short", ckpt, validated=True)


def other_world():
    for kind in ("exact", "mean"):
        ckpt = OUT / f"short-{kind}-epoch={SAVED - 1}.ckpt"
        strategy = CompressedDDP(hook=HOOKS["short"], exact_state=kind == "exact")
        resumable(f"short-{kind}-on-{DEVICES}", strategy, "short", ckpt)


def alone():
    """Validate checkpoints that two ranks wrote mid-period in one process, without this library's strategy."""
    losses = {}
    for path in OUT.glob("*watched-*step=*.ckpt"):
        trainer = make_trainer("never", "auto", devices=1, precision="64-true")
        module = Regression("adamw", norm=True).double()
        (results,) = trainer.validate(module, VALIDATION, ckpt_path=path, verbose=False, weights_only=True)
        losses[path.name] = results["loss"]
    write("alone", 0, losses=losses)


def ends():
    """One trainer and one strategy: validated before, fitted twice, used afterwards."""
    strategy, metrics = CompressedDDP(hook=POST), Metrics("ends")
    options = {"max_epochs": 9, "precision": "64-true", "use_distributed_sampler": False, "val_check_interval": 3}
    trainer = make_trainer("ends-1", strategy, **options)
    stops = pl.callbacks.EarlyStopping("loss", patience=2, min_delta=10.0)
    best = ModelCheckpoint(dirpath=OUT, filename="best", monitor="loss", mode="max")
    trajectory = Trajectory("ends-1")
    trainer.callbacks += [trajectory, metrics, stops, best]
    callbacks = list(trainer.callbacks)

    module = Regression().double()
    (first,) = trainer.validate(module, VALIDATION, verbose=False)
    start = tasks.flat(module.task)
    trainer.fit(module, loader(14), VALIDATION)
    facts = {"first": first, "start": start, "restored": [trainer.callbacks == callbacks], "steps": trainer.global_step}
    trainer.save_checkpoint(OUT / "after.ckpt")
    facts["params"] = tasks.flat(module.task)
    facts["momentum"] = tasks.flat_state(trainer.optimizers[0].state)
    facts["validated"] = trainer.validate(module, VALIDATION, verbose=False)[0]
    facts["tested"] = trainer.test(module, VALIDATION, verbose=False)[0]
    facts["best"], facts["best_score"] = best.best_model_path, best.best_model_score.item()

    trainer.callbacks[0].label = trajectory.label = "ends-2"
    trajectory.before, trajectory.after = [], []
    trainer.fit_loop.epoch_progress.reset()
    stops.wait_count, stops.best_score = 0, torch.tensor(torch.inf)
    trainer.should_stop = False
    trainer.fit(Regression().double(), loader(14), VALIDATION)
    facts["restored"].append(trainer.callbacks == callbacks)
    write("ends", trainer.global_rank, **facts)


class Sharded(Regression):
    def configure_optimizers(self):
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(self.parameters(), torch.optim.SGD, lr=0.1)


class Breaks(Regression):
    """Raises on some ranks at a step in the middle of a period, in training or in validation."""

    def __init__(self, *ranks, error=RuntimeError, where="training_step"):
        super().__init__()
        self.ranks, self.error, self.where = ranks, error, where

    def training_step(self, batch, batch_idx):
        self.maybe("training_step")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.maybe("validation_step")

    def maybe(self, where):
        self.model = tasks.flat(self.task)
        if where == self.where and self.trainer.global_step == 6 and self.global_rank in self.ranks:
            raise self.error("broken on purpose")


def attempt(label, function, *args, **kwargs):
    """Run what raises on all ranks; write what it was."""
    try:
        function(*args, **kwargs)
    except Exception as error:
        write(f"error-{label}", RANK, type=type(error).__name__, text=str(error))


def breaks():
    attempt("sharded", train, "never", CompressedDDP(hook=POST), Sharded())
    module = Breaks(0, 1, where="validation_step")
    attempt("validation", train, "never", CompressedDDP(hook=POST), module, validation=VALIDATION, val_check_interval=6)
    write("validation-broken", RANK, model=module.model, after=tasks.flat(module.task))
    more = [checkpoints("exception-{step}", save_on_exception=True)]
    attempt("training", train, "never", CompressedDDP(hook=POST), Breaks(0, 1), more=more)


def tuned():
    find = {"min_lr": 0.01, "max_lr": 0.1, "update_attr": False}
    options = {"precision": "64-true", "use_distributed_sampler": False, "max_epochs": 1, "default_root_dir": OUT}
    trainer = make_trainer("never", CompressedDDP(hook=POST), **options)
    attempt("tuner", pl.tuner.Tuner(trainer).lr_find, Breaks(0, 1).double(), loader(16), num_training=7, **find)
    trainer = make_trainer("tuned", CompressedDDP(hook=POST), **options)
    trainer.callbacks += [Trajectory("tuned")]
    callbacks, module = list(trainer.callbacks), Regression().double()
    pl.tuner.Tuner(trainer).lr_find(module, loader(16), num_training=7, **find)
    write("tuned-callbacks", RANK, restored=trainer.callbacks == callbacks)
    trainer.fit(module, loader(16))
    train("unbroken", CompressedDDP(hook=POST), Regression())


class Thawed(Regression):
    def configure_optimizers(self):
        return tasks.make_optimizer(self.task.net[2])


class Thaws(Unfreeze):
    def freeze_before_training(self, module):
        self.freeze(module.task.net[0])

    def finetune_function(self, module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.task.net[0], optimizer, lr=0.05, initial_denom_lr=1)


def thaws():
    train("thaws", CompressedDDP(hook=POST), Thawed(), batches=6, epochs=2, more=[Thaws()])


def averaged_over_time():
    """Callbacks whose result, made of each rank's own models, takes the model's place at the end of training."""
    averaging = {
        "swa": pl.callbacks.StochasticWeightAveraging(0.05, swa_epoch_start=1),
        "ema": pl.callbacks.EMAWeightAveraging(decay=0.9),
    }
    for label, callback in averaging.items():
        strategy, module = CompressedDDP(hook=POST), Regression()
        train(label, strategy, module, batches=7, epochs=3, more=[callback])
        write(f"{label}-after", RANK, model=tasks.flat(module.task))


def raise_on_1():
    train("never", CompressedDDP(hook=POST), Breaks(1))


def interrupt_0():
    train("never", CompressedDDP(hook=POST), Breaks(0, error=KeyboardInterrupt))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    warnings.filterwarnings("ignore", module=r"lightning\.|pytorch_lightning\.|lightning_fabric\.")
    for scenario in sys.argv[3:]:
        globals()[scenario]()
