"""Scenarios with Lightning's real `Trainer` in real processes; started by test_lightning.py.

    python lightning_runner.py PACKAGE OUT SCENARIO...

PACKAGE is `lightning.pytorch` or `pytorch_lightning`. Every fit writes `OUT/<label>.<rank>.json`.
"""

import copy
import importlib
import json
import os
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.utils.data import DataLoader, TensorDataset

import lightning_commhooks as lc

pl = importlib.import_module(sys.argv[1])
OUT = Path(sys.argv[2])
CompressedDDP = lc.CompressedDDPStrategy if sys.argv[1] == "lightning.pytorch" else lc.CompressedDDPStrategyPL
DDPStrategy = pl.strategies.DDPStrategy
POWERSGD = lc.PowerSGD(matrix_approximation_rank=2, start_powerSGD_iter=1)
NUM_BATCHES = 4
NAMES = ("allreduce", "allgather", "noop", "bf16", "powersgd", "int8", "post_localsgd")


class Classifier(pl.LightningModule):
    def __init__(self, crash_on=None):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
        self.crash_on = crash_on

    def loss(self, batch):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def training_step(self, batch, batch_idx):
        if batch_idx == 2 and self.global_rank == self.crash_on:
            raise RuntimeError("crash in training_step")
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch, batch_idx):
        self.log("loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Late(Classifier):
    """In batch 2 rank 0 waits, in its backward, for rank 1."""

    def training_step(self, batch, batch_idx):
        if batch_idx == 2:
            write("late", self.global_rank, pid=os.getpid())
            time.sleep(3 * self.global_rank)
        return self.loss(batch)


class Manual(Classifier):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


class GAN(pl.LightningModule):
    """Two optimizers, two backwards per batch, each with its own part of the model."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))
        self.discriminator = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))

    def training_step(self, batch, batch_idx):
        bce = nn.functional.binary_cross_entropy_with_logits
        generator_optimizer, discriminator_optimizer = self.optimizers()
        real, _ = batch
        fake = self.generator(real[:, :8])
        self.toggle_optimizer(discriminator_optimizer)
        on_real, on_fake = self.discriminator(real), self.discriminator(fake.detach())
        loss = bce(on_real, torch.ones_like(on_real)) + bce(on_fake, torch.zeros_like(on_fake))
        discriminator_optimizer.zero_grad()
        self.manual_backward(loss)
        discriminator_optimizer.step()
        self.untoggle_optimizer(discriminator_optimizer)

        self.toggle_optimizer(generator_optimizer)
        on_fake = self.discriminator(fake)
        generator_optimizer.zero_grad()
        self.manual_backward(bce(on_fake, torch.ones_like(on_fake)))
        generator_optimizer.step()
        self.untoggle_optimizer(generator_optimizer)

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.generator, self.discriminator)]


def write(label, rank, **values):
    (OUT / f"{label}.{rank}.json").write_text(json.dumps(values))


class Record(pl.Callback):
    """Writes what the run looked like from inside, in whatever process it happens."""

    def __init__(self, label):
        self.label = label

    def on_train_end(self, trainer, module):
        attachment = getattr(trainer.strategy, "attachment", None)
        write(
            self.label,
            trainer.global_rank,
            strategy=type(trainer.strategy).__name__,
            world_size=trainer.world_size,
            comm_hook=trainer.strategy.model._get_ddp_logging_data().get("comm_hook", ""),
            params=torch.cat([p.detach().view(-1) for p in module.parameters()]).tolist(),
            metrics=attachment.metrics() if attachment else None,
            global_step=trainer.global_step,
            pid=os.getpid(),
        )


def data(num_batches=NUM_BATCHES, batch_size=4):
    """Batches of two ranks."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2 * batch_size * num_batches, 16, generator=generator)
    return DataLoader(TensorDataset(x, x[:, :4].argmax(dim=1)), batch_size=batch_size, shuffle=False)


def make_trainer(label, strategy, **options):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    options = {"accelerator": "cpu", "devices": 2, "max_epochs": 2, "enable_model_summary": False, **quiet, **options}
    return pl.Trainer(strategy=strategy, callbacks=[Record(label)], **options)


def fit(label, strategy, module=Classifier, **options):
    torch.manual_seed(0)
    trainer = make_trainer(label, strategy, **options)
    trainer.fit(module(), data())
    return trainer


def own_hook(state: list, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    state.append(bucket.index())
    return default_hooks.allreduce_hook(None, bucket)


def names():
    fit("dense", DDPStrategy())
    for name in NAMES:
        fit(f"name-{name}", CompressedDDP(hook=name))


def configured():
    hooks = {
        "powersgd": POWERSGD,
        "batched_powersgd": lc.BatchedPowerSGD(start_powerSGD_iter=1),
        "cast": lc.Cast(POWERSGD, "bf16"),
        "schedule": lc.Schedule({0: "bf16", 3: POWERSGD}),
        "per_parameter": lc.PerParameter({"*.bias": "allreduce", "*": lc.Int8(min_bytes=0, block_size=64)}),
        "auto": lc.Auto(candidates=["bf16"], warmup_steps=1, timed_steps=1),
    }
    for label, hook in hooks.items():
        trainer = fit(f"configured-{label}", CompressedDDP(hook=hook))
        attachment = trainer.strategy.attachment
        chosen = getattr(attachment.bound, "chosen", None)
        write(
            f"after-{label}", trainer.global_rank, metrics=attachment.metrics(), chosen=chosen.name if chosen else None
        )


def functions():
    state = []
    trainer = fit("function-own", CompressedDDP(hook=own_hook, hook_state=state))
    write("own-state", trainer.global_rank, calls=len(state))
    fit("function-stock", CompressedDDP(hook=default_hooks.fp16_compress_hook))
    # One bucket: with more PyTorch's hook aborts on gloo, of which there is a warning.
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    wrapped = default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook)
    trainer = fit("function-wrapper", CompressedDDP(hook=wrapped, hook_state=state))
    write("wrapper-state", trainer.global_rank, calls=state.iter)


class Copies(pl.Callback):
    """Holds the trainer, and copies all callbacks wherever it comes by."""

    def __init__(self):
        self.trainer = None

    def copied(self, trainer):
        self.trainer = trainer
        others = copy.deepcopy(trainer.callbacks)
        return next(other for other in others if isinstance(other, Copies)).trainer.strategy

    def on_train_start(self, trainer, module):
        self.copied(trainer)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == 2:
            strategy = self.copied(trainer)
            assert strategy.attachment is None
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                strategy.training_step(batch, batch_idx).backward()
            write("copied-said", trainer.global_rank, said=[str(warning.message) for warning in caught])

    def on_validation_end(self, trainer, module):
        self.copied(trainer)

    def on_train_end(self, trainer, module):
        self.copied(trainer)


def copied():
    for label in ("not-copied", "copied"):
        hook = lc.PostLocalSGD(period=2, start_localSGD_iter=1)
        monitor = lc.CommHookMonitor if "lightning.pytorch" in sys.argv else lc.CommHookMonitorPL
        torch.manual_seed(0)
        trainer = make_trainer(label, CompressedDDP(hook=hook))
        copies = Copies()
        trainer.callbacks += [monitor(), *([copies] if label == "copied" else [])]
        trainer.fit(Classifier(), data(), data())
        assert trainer.strategy.hook == hook
    copies.copied(trainer)


def profiled():
    """With Lightning's profiler of all threads; each rank leaves its trace in a folder."""
    all_threads = torch.profiler._ExperimentalConfig(profile_all_threads=True)
    options = {"dirpath": OUT / "traces", "filename": "trace", "experimental_config": all_threads}
    profiler = importlib.import_module(f"{sys.argv[1]}.profilers").PyTorchProfiler(**options)
    hook = lc.Int8(min_bytes=0, block_size=16)
    fit("profiled", CompressedDDP(hook=hook, bucket_cap_mb=0.001), profiler=profiler)


def strings():
    fit("string", "ddp_powersgd")
    fit("string-bf16", "ddp_bf16")


def options():
    variants = {
        "static-manual": (Manual, {"static_graph": True}, {}),
        "manual": (Manual, {}, {}),
        "accumulate": (Classifier, {"bucket_cap_mb": 0.001}, {"accumulate_grad_batches": 2}),
        "gan": (GAN, {"find_unused_parameters": True}, {}),
    }
    for label, (module, ddp, trainer) in variants.items():
        fit(f"{label}-dense", DDPStrategy(**ddp), module, **trainer)
        fit(f"{label}-allreduce", CompressedDDP(hook="allreduce", **ddp), module, **trainer)
        fit(f"{label}-powersgd", CompressedDDP(hook=POWERSGD, **ddp), module, **trainer)


def repeated():
    """Several runs with one Trainer and one strategy: each like a run with new ones."""
    for label, module, ddp in (("auto", Classifier, {}), ("static-manual", Manual, {"static_graph": True})):
        strategy = CompressedDDP(hook=POWERSGD, **ddp)
        trainer = make_trainer(f"repeated-{label}-1", strategy)
        for i in (1, 2):
            trainer.callbacks[0].label = f"repeated-{label}-{i}"
            trainer.fit_loop.epoch_progress.reset()
            torch.manual_seed(0)
            model = module()
            trainer.fit(model, data())
            assert strategy.attachment.is_closed
        before = strategy.attachment.metrics()
        trainer.validate(model, data(), verbose=False)
        trainer.test(model, data(), verbose=False)
        write(f"repeated-{label}", trainer.global_rank, before=before, after=strategy.attachment.metrics())


def evaluate():
    strategy = CompressedDDP(hook="powersgd")
    trainer = make_trainer("never", strategy)
    (validated,) = trainer.validate(Classifier(), data(), verbose=False)
    (tested,) = trainer.test(Classifier(), data(), verbose=False)
    attached = strategy.attachment is not None
    write("evaluate", trainer.global_rank, validated=validated, tested=tested, attached=attached)


def processes():
    for method in ("spawn", "fork"):
        fit(method, CompressedDDP(hook=POWERSGD, start_method=method))


def nodes():
    fit("nodes", CompressedDDP(hook=POWERSGD), num_nodes=2, devices=1)


def late_start():
    fit("late", CompressedDDP(hook=lc.PowerSGD(start_powerSGD_iter=8)))


def crash_rank_1():
    fit("crash", CompressedDDP(hook=POWERSGD), lambda: Classifier(crash_on=1))


def late():
    fit("trained", CompressedDDP(hook=POWERSGD), Late)


class Requeued(Classifier):
    """In the first run of a SLURM job rank 0 waits in step 10, and rank 1 for it in its backward, for a signal."""

    def training_step(self, batch, batch_idx):
        if (os.environ["SLURM_RESTART_COUNT"], self.global_step) == ("0", 10):
            (OUT / f"there.{self.global_rank}").touch()
            deadline = time.monotonic() + 120
            while self.global_rank == 0 and not (OUT / "signaled").exists() and time.monotonic() < deadline:
                time.sleep(0.01)
        return self.loss(batch)


class Begin(pl.Callback):
    """Writes where a run begins."""

    def on_train_start(self, trainer, module):
        steps = trainer.strategy.attachment.state_dict()["steps"]
        write("begun", trainer.global_rank, global_step=trainer.global_step, state=steps)


def slurm(hook):
    trainer = make_trainer("ended", CompressedDDP(hook=hook), max_epochs=6, default_root_dir=OUT)
    trainer.callbacks.append(Begin())
    torch.manual_seed(0)
    trainer.fit(Requeued(), data())


def slurm_powersgd():
    slurm(lc.PowerSGD(matrix_approximation_rank=2, start_powerSGD_iter=4))


def slurm_post_localsgd():
    slurm(lc.PostLocalSGD(start_localSGD_iter=4, period=4, post_local_gradient_allreduce=False))


if __name__ == "__main__":
    warnings.filterwarnings("ignore", module=r"lightning\.|pytorch_lightning\.|lightning_fabric\.")
    for scenario in sys.argv[3:]:
        globals()[scenario]()
