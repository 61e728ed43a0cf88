"""Scenarios of local SGD with Lightning's real `Trainer`, for test_local_sgd_lightning.py and others."""

import logging
import os
import pickle
import signal
import sys
import warnings
from contextlib import nullcontext, suppress

import local_sgd_tasks as tasks
import torch
from lightning_runner import OUT, CompressedDDP, make_trainer, pl, write
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import lightning_commhooks as lc

DEVICES = int(os.environ.get("DEVICES", "2"))
ALONE = {"start_localSGD_iter": 0, "post_local_gradient_allreduce": False}
POST = lc.PostLocalSGD(period=4, **ALONE)
AVERAGED = lc.PostLocalSGD(period=4, optimizer_state="average", **ALONE)
HOOKS = {
    "post": POST,
    "warmup": lc.PostLocalSGD(period=3, start_localSGD_iter=5, post_local_gradient_allreduce=False),
    "hierarchical": lc.HierarchicalLocalSGD(period_group_size_dict={2: 2, 4: None}, **ALONE),
    "diloco": lc.DiLoCo(period=4, **ALONE),
    "short": lc.PostLocalSGD(period=3, **ALONE),
    "beside": lc.DiLoCo(period=4, delay=2, fragments=2, **ALONE),
    "diloco-beside": lc.DiLoCo(period=3, delay=2, **ALONE),
}


class Regression(pl.LightningModule):
    def __init__(self, kind="momentum", norm=False):
        super().__init__()
        self.task = tasks.Regression(norm)
        self.kind = kind
        self.lr = 0.05

    def training_step(self, batch, batch_idx):
        return self.task.loss(batch[0])

    def validation_step(self, batch, batch_idx):
        self.log("loss", self.task.loss(batch[0]), sync_dist=True)

    test_step = validation_step

    def configure_optimizers(self):
        return tasks.make_optimizer(self.task, self.kind)


class GAN(pl.LightningModule):
    """Two optimizers in manual optimization, which step at different rates."""

    def __init__(self, style="wrapped", overflows=()):
        super().__init__()
        self.automatic_optimization = False
        self.task = tasks.Pair()
        self.style, self.overflows = style, overflows
        self.states = []

    def training_step(self, batch, batch_idx):
        for k, part, i in tasks.schedule(batch_idx + 1):
            if k == batch_idx:
                self.take_step(batch[0], part, self.optimizers(use_pl_optimizer=self.style != "raw")[i])

    def take_step(self, x, part, optimizer):
        if self.style == "toggled":
            self.toggle_optimizer(optimizer)
        (self if self.style == "zeroed" else optimizer).zero_grad()
        overflows = self.global_rank == 1 and len(self.states) in self.overflows
        self.manual_backward(self.task.loss(x, part) * (float("inf") if overflows else 1))
        optimizer.step()
        if self.style == "toggled":
            self.untoggle_optimizer(optimizer)
        self.states.append(tasks.flat(self.task))

    def configure_optimizers(self):
        return tasks.make_optimizers(self.task)


class Trajectory(pl.Callback):
    """The model before and after each batch, and at the end of training."""

    def __init__(self, label):
        self.label = label
        self.before, self.after = [], []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.before.append(tasks.flat(module.task))

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.after.append(tasks.flat(module.task))

    def on_train_end(self, trainer, module):
        after = getattr(module, "states", self.after)
        write(f"{self.label}-trajectory", trainer.global_rank, before=self.before, after=after)


def loader(num_batches, seed=5):
    """As Lightning would make it, which shuffles data to train with on several ranks."""
    data = TensorDataset(tasks.rows(num_batches, seed))
    sampler = DistributedSampler(data, DEVICES, int(os.environ.get("LOCAL_RANK", "0")), shuffle=False)
    return DataLoader(data, batch_size=tasks.BATCH, sampler=sampler)


VALIDATION = loader(6, seed=6)


def train(label, strategy, module, batches=8, epochs=1, more=(), validation=None, ckpt=None, **options):
    options = {
        "max_epochs": epochs,
        "devices": DEVICES,
        "num_sanity_val_steps": 0,
        "use_distributed_sampler": False,
        **options,
    }
    if "plugins" not in options:
        options["precision"] = "64-true"
    trainer = make_trainer(label, strategy, **options)
    trainer.callbacks += [Trajectory(label), *more]
    # Lightning loads weights before it converts the model: those of a double would be rounded.
    trainer.fit(module.double(), loader(batches * DEVICES), validation, ckpt_path=ckpt)
    return trainer


def auto():
    for name in ("post", "beside"):
        train(f"auto-{name}", CompressedDDP(hook=HOOKS[name]), Regression(), batches=14)
    # Windows of 3, 3 and 2 batches.
    train("auto-accumulate", CompressedDDP(hook=POST), Regression(), epochs=4, accumulate_grad_batches=3)
    train("auto-clip", CompressedDDP(hook=POST), Regression(), batches=14, gradient_clip_val=0.1)


def gan(names=("post", "warmup", "diloco"), styles=("wrapped", "raw", "toggled"), batches=18):
    for name, style in zip(names, styles, strict=True):
        strategy = CompressedDDP(hook=HOOKS[name], find_unused_parameters=True)
        train(f"gan-{name}", strategy, GAN(style), batches=batches)


def gan_on_four():
    gan(("hierarchical",), ("toggled",), batches=12)


class Validating(pl.Callback):
    def on_validation_start(self, trainer, module):
        write("validating", trainer.global_rank, model=tasks.flat(module.task))


def validation():
    options = {"validation": VALIDATION, "val_check_interval": 3}
    train("validated", CompressedDDP(hook=POST), Regression(), batches=5, more=[Validating()], **options)


class Scaled(pl.plugins.precision.MixedPrecision):
    """The scaler of "16-mixed", without autocast, so that everything is exact."""

    def __init__(self, scaler):
        super().__init__("16-mixed", "cpu", scaler)

    def forward_context(self):
        return nullcontext()


def overflows():
    for style in ("wrapped", "toggled", "zeroed"):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=6)
        strategy = CompressedDDP(hook=HOOKS["short"], find_unused_parameters=True)
        # A discriminator's step, a generator's and a discriminator's in a row, a generator's.
        model = GAN(style, overflows=(5, 9, 10, 16))
        train(f"overflows-{style}", strategy, model, batches=18, plugins=[Scaled(scaler)])
        write(f"overflows-{style}-scale", strategy.global_rank, scale=scaler.get_scale())


def costs():
    """Checkpoints and validations as in a table of docs/local_sgd.md."""
    saving = {"dirpath": OUT, "save_top_k": -1}
    for label, hook, every in (("post-3", POST, 3), ("post-4", POST, 4), ("averaged-4", AVERAGED, 4)):
        by_step = pl.callbacks.ModelCheckpoint(filename=f"{label}-{{step}}", every_n_train_steps=every, **saving)
        by_loss = pl.callbacks.ModelCheckpoint(
            filename=f"{label}-best-{{step}}", monitor="loss", save_on_train_epoch_end=False, **saving
        )
        options = {"validation": VALIDATION, "val_check_interval": every, "more": [by_step, by_loss]}
        train(f"costs-{label}", CompressedDDP(hook=hook), Regression("adamw", norm=True), batches=12, **options)


class Terminated(Regression):
    """Some ranks get a SIGTERM in the middle of the seventh batch."""

    def __init__(self, ranks):
        super().__init__()
        self.ranks = ranks

    def training_step(self, batch, batch_idx):
        if batch_idx == 6 and self.global_rank in self.ranks:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().training_step(batch, batch_idx)


class Ended(pl.Callback):
    def __init__(self, label):
        self.label = label

    def on_exception(self, trainer, module, exception):
        write(self.label, trainer.global_rank, steps=trainer.global_step, error=type(exception).__name__)


def sigterm():
    for label, ranks in (("sigterm-first", (0,)), ("sigterm-second", (1,)), ("sigterm-all", range(DEVICES))):
        with suppress(SystemExit):
            train(label, CompressedDDP(hook=POST), Terminated(ranks), batches=20, more=[Ended(label)])


def waits():
    """How often ranks ask each other for a SIGTERM in an epoch."""
    for label in ("post", "warmup"):
        strategy, calls = CompressedDDP(hook=HOOKS[label]), []
        stock = strategy.reduce_boolean_decision
        strategy.reduce_boolean_decision = lambda *args, stock=stock, calls=calls, **kw: (
            calls.append(1) or stock(*args, **kw)
        )
        trainer = train(f"waits-{label}", strategy, Regression(), batches=16)
        names = {*vars(trainer.fit_loop.epoch_loop), *vars(trainer._signal_connector)}
        left = sorted(names & {"_broadcast_sigterm_tensor", "_sigterm_notifier_fn"})
        write(f"{label}-calls", trainer.global_rank, calls=calls, left=left)


class Pickled(pl.Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        loop = pickle.loads(pickle.dumps(trainer.fit_loop.epoch_loop))
        write("pickled", trainer.global_rank, name=loop._broadcast_sigterm_tensor.func.__name__)


def pickled():
    train("pickled-fit", CompressedDDP(hook=POST), Regression(), batches=2, more=[Pickled()])


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    warnings.filterwarnings("ignore", module=r"lightning\.|pytorch_lightning\.|lightning_fabric\.")
    for scenario in sys.argv[3:]:
        globals()[scenario]()
