"""`CommHookMonitor` with Lightning's real `Trainer` in real processes; started by test_monitor_lightning.py.

    python monitor_lightning_runner.py PACKAGE OUT SCENARIO...

PACKAGE is `lightning.pytorch` or `pytorch_lightning`. Every fit writes `OUT/<label>.<rank>.json`.
"""

import contextlib
import importlib
import io
import sys
import warnings

import torch
from lightning_runner import GAN, OUT, POWERSGD, Classifier, CompressedDDP, data, own_hook, pl, write

import lightning_commhooks as lc

PACKAGE = sys.argv[1]
loggers = importlib.import_module(f"{PACKAGE}.loggers")
callbacks = importlib.import_module(f"{PACKAGE}.callbacks")
Monitor = lc.CommHookMonitor if PACKAGE == "lightning.pytorch" else lc.CommHookMonitorPL
CompressedFSDP = lc.CompressedFSDPStrategy if PACKAGE == "lightning.pytorch" else lc.CompressedFSDPStrategyPL


class OwnLogger(loggers.logger.Logger):
    """Writes down what it gets, on every rank."""

    def __init__(self):
        super().__init__()
        self.rows = []

    @property
    def name(self):
        return "own"

    @property
    def version(self):
        return 0

    def log_hyperparams(self, params, *args, **kwargs):
        pass

    def log_metrics(self, metrics, step=None):
        self.rows.append([step, dict(metrics)])
        metrics.clear()  # not for others to see


class Logging(Classifier):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True)
        return loss


class Record(callbacks.Callback):
    """Writes what the run looked like after the monitor, which comes before in the list of callbacks."""

    def __init__(self, label, logger):
        self.label = label
        self.logger = logger

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        bar = trainer.progress_bar_callback
        if bar is not None:
            self.shown = {name: str(value) for name, value in bar.get_metrics(trainer, module).items()}

    def on_train_end(self, trainer, module):
        attachment = trainer.strategy.attachment
        has_memory = isinstance(attachment, lc.Attachment)
        write(
            self.label,
            trainer.global_rank,
            rows=self.logger.rows,
            metrics=attachment.metrics(),
            residual_norm=attachment.residual_norm() if has_memory else None,
            global_step=trainer.global_step,
            callback_metrics=sorted(trainer.callback_metrics),
            progress_bar=dict(trainer.progress_bar_metrics),
            shown=getattr(self, "shown", None),
        )


def make_trainer(label, strategy, monitor=None, first=(), more=(), **options):
    logger = OwnLogger()
    monitor = monitor or Monitor(every_n_steps=3, error_every_n_steps=2, measure_link=False)
    default = {
        "accelerator": "cpu",
        "devices": 2,
        "max_epochs": 2,
        "log_every_n_steps": 1,
        "enable_checkpointing": False,
    }
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    own = options.pop("loggers", [])
    return pl.Trainer(
        strategy=strategy,
        callbacks=[*first, monitor, Record(label, logger), *more],
        logger=[logger, *own],
        **{**default, **quiet, **options},
    )


def fit(label, strategy, module=Logging, **options):
    torch.manual_seed(0)
    trainer = make_trainer(label, strategy, **options)
    trainer.fit(module(), data())
    return trainer


def every_logger():
    own = [loggers.CSVLogger(OUT / "csv"), loggers.TensorBoardLogger(OUT / "tensorboard")]
    fit("loggers", CompressedDDP(hook=POWERSGD), loggers=own)


def bars():
    for name in ("TQDMProgressBar", "RichProgressBar"):
        bar = getattr(callbacks, name)()
        bar.print = lambda line, label=f"{name}-line": write(label, 0, line=line)
        monitor = Monitor(every_n_steps=3, progress_bar=["compression_ratio", "residual_norm"], measure_link=False)
        options = {"enable_progress_bar": True, "more": [bar]}
        fit(name, CompressedDDP(hook=POWERSGD), monitor=monitor, **options)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        first = [callbacks.TQDMProgressBar()]
        trainer = fit("ended", CompressedDDP(hook=POWERSGD), enable_progress_bar=True, first=first)
    write("ended-line", trainer.global_rank, lines=printed.getvalue().splitlines())


def what_a_step_is():
    fit("accumulated", CompressedDDP(hook=POWERSGD), accumulate_grad_batches=2)
    fit("two-optimizers", CompressedDDP(hook=POWERSGD, find_unused_parameters=True), GAN)
    fit("fast", CompressedDDP(hook=POWERSGD), fast_dev_run=2)


def hooks():
    alone = lc.PostLocalSGD(start_localSGD_iter=0, post_local_gradient_allreduce=False, period=2)
    fit("local", CompressedDDP(hook=alone))
    fit("function", CompressedDDP(hook=own_hook, hook_state=[]))
    fit("fsdp", CompressedFSDP(hook="bf16"))


def again():
    """A second fit of the same Trainer, and one that goes on from a checkpoint."""
    torch.manual_seed(0)
    trainer = make_trainer("first", CompressedDDP(hook=POWERSGD))
    model = Logging()
    trainer.fit(model, data())
    trainer.save_checkpoint(OUT / "first.ckpt")
    record = trainer.callbacks[1]
    record.label, record.logger.rows = "second", []
    trainer.fit_loop.max_epochs = 4
    trainer.fit(model, data())
    resumed = make_trainer("resumed", CompressedDDP(hook=POWERSGD), max_epochs=3)
    resumed.fit(Logging(), data(), ckpt_path=OUT / "first.ckpt")


def alone_and_crash():
    """In one process."""
    fit("alone", CompressedDDP(hook=POWERSGD), devices=1)
    fit("crash", CompressedDDP(hook="bf16"), lambda: Classifier(crash_on=0), devices=1)


def closing_line():
    fit("line", CompressedDDP(hook=POWERSGD), monitor=Monitor())
    fit("no-line", CompressedDDP(hook="bf16"), monitor=Monitor(closing_line=False))


if __name__ == "__main__":
    warnings.filterwarnings("ignore", module=r"lightning\.|pytorch_lightning\.|lightning_fabric\.")
    for scenario in sys.argv[3:]:
        globals()[scenario]()
