"""What Lightning's real `Trainer` says of a run after its first steps; started by test_forecast_lightning.py.

python forecast_lightning_runner.py PACKAGE OUT SCENARIO...
"""

import contextlib
import io
import logging
import sys
import warnings

import torch
from lightning_runner import GAN, OUT, Classifier, CompressedDDP, data, make_trainer, pl, write
from lightning_utilities.core import rank_zero
from torch.utils.data import DataLoader, IterableDataset

import lightning_commhooks as lc

RANK_2 = lc.PowerSGD(matrix_approximation_rank=2, start_powerSGD_iter=4)


class Lines(logging.Handler):
    """Keeps what Lightning logs of a forecast, and after how many steps."""

    def __init__(self):
        super().__init__(logging.INFO)
        self.lines, self.trainer = [], None

    def emit(self, record):
        if record.getMessage().startswith("Forecast"):
            self.lines.append([self.trainer.strategy.attachment.num_steps, record.getMessage()])


LINES = Lines()
rank_zero.log.addHandler(LINES)


class Endless(IterableDataset):
    """Nobody knows how long it is."""

    def __iter__(self):
        return iter(data().dataset)


def fit(label, hook, module=Classifier, trainer=None, loader=None, ckpt_path=None, **options):
    """Fit, and write what was said, and in which order of ranks."""
    torch.manual_seed(0)
    trainer = trainer or make_trainer(label, CompressedDDP(hook=hook, find_unused_parameters=module is GAN), **options)
    LINES.lines, LINES.trainer = [], trainer
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module(), data() if loader is None else loader, ckpt_path=ckpt_path)
    texts = [str(warning.message) for warning in caught if "hook=" in str(warning.message)]
    metrics = trainer.strategy.attachment.metrics()
    write(f"{label}-said", trainer.global_rank, lines=LINES.lines, warned=texts, metrics=metrics)
    return trainer


def good():
    trainer = fit("good", RANK_2)
    trainer.save_checkpoint(OUT / "good.ckpt")
    trainer.fit_loop.max_epochs = 4
    fit("again", None, trainer=trainer)
    fit("resumed", RANK_2, max_epochs=5, ckpt_path=OUT / "good.ckpt")
    fit("max_steps", RANK_2, max_steps=6, max_epochs=-1)


def steps():
    """Where a step is not a batch."""
    fit("accumulated", RANK_2, accumulate_grad_batches=2, max_epochs=4)
    fit("two-optimizers", RANK_2, GAN)
    fit("name", "powersgd", max_epochs=10)
    fit("unknown", RANK_2, loader=DataLoader(Endless(), batch_size=4))


class Stop(pl.Callback):
    """Training ends after twelve batches, whatever it was told."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        trainer.should_stop = trainer.global_step >= 12


def shorter():
    trainer = make_trainer("shorter", CompressedDDP(hook=lc.PowerSGD(start_powerSGD_iter=20)), max_epochs=20)
    trainer.callbacks.append(Stop())
    fit("shorter", None, trainer=trainer)


class Broken(Classifier):
    """Fails after twelve steps."""

    def training_step(self, batch, batch_idx):
        if self.trainer.global_step == 12:
            raise ArithmeticError
        return super().training_step(batch, batch_idx)


def trials():
    """No training that could take advice."""
    fit("fast", lc.PowerSGD(), fast_dev_run=True)
    trainer = make_trainer("broken", CompressedDDP(hook=lc.PowerSGD(start_powerSGD_iter=20)), max_epochs=20)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with contextlib.suppress(ArithmeticError):
            trainer.fit(Broken(), data())
    texts = [str(warning.message) for warning in caught if "hook=" in str(warning.message)]
    write("broken-said", trainer.global_rank, warned=texts)


def bar():
    """The line is above the bar, which rich would draw over it."""
    shown = []
    progress = pl.callbacks.TQDMProgressBar()
    progress.print = shown.append
    trainer = make_trainer("bar", CompressedDDP(hook=RANK_2), enable_progress_bar=True)
    trainer.callbacks[:] = [each for each in trainer.callbacks if not isinstance(each, pl.callbacks.ProgressBar)] + [
        progress
    ]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        fit("bar", None, trainer=trainer)
    closing = [line for line in printed.getvalue().splitlines() if line.startswith("Communication hook")]
    write("shown", trainer.global_rank, shown=shown, closing=closing)


def fabric():
    from lightning.fabric import Fabric

    strategy = lc.CompressedDDPFabricStrategy(hook="int8")
    run = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    run.launch()
    module = Classifier()
    model, optimizer = run.setup(module.net, torch.optim.SGD(module.parameters(), lr=0.1))
    texts = []
    for _ in range(5):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run.backward(model(torch.randn(4, 16)).square().mean())
        optimizer.step()
        texts.append([str(warning.message) for warning in caught if "hook=" in str(warning.message)])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        strategy.attachments[0].close()
    write("fabric", run.global_rank, texts=texts, closing=[str(warning.message) for warning in caught])


if __name__ == "__main__":
    warnings.filterwarnings("ignore", module=r"lightning\.|pytorch_lightning\.|lightning_fabric\.")
    for scenario in sys.argv[3:]:
        globals()[scenario]()
