"""The part that the `CommHookMonitor` callbacks of `lightning` and `pytorch_lightning` share."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, ClassVar

from lightning_commhooks.interface.error_sample import DEFAULT_NUMEL
from lightning_commhooks.lightning.averaging import show
from lightning_commhooks.lightning.refusals import explained, misconfigured, refusals_of
from lightning_commhooks.monitoring import NAMES, PREFIX, MetricName, Monitor, MonitorOptions


class CommHookMonitorMixin:
    """Logs the metrics of a communication hook during training, and sums up its benefit at the end.

    `Trainer(strategy=CompressedDDPStrategy(hook="int8"), callbacks=[CommHookMonitor()])`.

    To every logger of the Trainer, at the step of `LightningModule.log`: `comm/bytes_sent`, `comm/nonfinite_steps` and,
    of hooks that average models, `comm/averagings` since `fit` began; `comm/compression_ratio`,
    `comm/exposed_ms_per_step` and `comm/codec_ms_per_step` since they were logged last; `comm/relative_error` if it was
    sampled since then; `comm/residual_norm` now. The values are rank 0's. Unknown values are left out: with a hook
    function of your own all of them, with FSDP all but bytes and ratio.

    A step is a synchronized backward: with gradient accumulation one in several batches, with several optimizers
    several in one batch.

    Args:
        every_n_steps: log so often, and once more when training ends.
        error_every_n_steps: interval between samples of the error of averaged gradients, at the cost of an all-reduce
            of `error_numel` numbers; 0: never.
        error_numel: number of gradient elements to estimate the error from; `None`: all.
        progress_bar: which values to show there, by their names without `comm/`.
        closing_line: whether to show one line when training ends, at the progress bar or in Lightning's log: bytes
            sent and saved, seconds saved against plain DDP (an estimate), and steps that were not compressed, with the
            reason.
        measure_link: whether to measure the network for that estimate, for half a second when training begins. If not,
            the closing line has no seconds.

    Raises:
        MisconfigurationException: a value is out of range; in `fit`, when the strategy has no communication hook.
    """

    _strategy: ClassVar[str]

    @explained
    def __init__(
        self,
        every_n_steps: int = 50,
        error_every_n_steps: int = 100,
        error_numel: int | None = DEFAULT_NUMEL,
        progress_bar: Sequence[MetricName] = ("compression_ratio", "exposed_ms_per_step"),
        closing_line: bool = True,
        measure_link: bool = True,
    ) -> None:
        with refusals_of(self):
            self._options = MonitorOptions(
                every_n_steps=every_n_steps,
                error_every_n_steps=error_every_n_steps,
                error_numel=error_numel,
                closing_line=closing_line,
                measure_link=measure_link,
            )
            self._progress_bar = _checked_names(progress_bar)
        self._monitor: Monitor | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Refuse strategies without a communication hook."""
        if stage == "fit" and not hasattr(trainer.strategy, "attachment"):
            raise misconfigured(
                self,
                f"{type(self).__name__} shows metrics of a communication hook, and {type(trainer.strategy).__name__} "
                f"has none: use Trainer(strategy={self._strategy}(hook='powersgd')) or strategy='ddp_powersgd', or "
                "leave the callback out",
            )

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to count. Collective."""
        attachment = trainer.strategy.attachment
        if attachment is None:
            raise misconfigured(
                self,
                f"{type(self).__name__} has nothing to show with {type(trainer.strategy).__name__} and "
                f"sharding_strategy={trainer.strategy.sharding_strategy}: FSDP takes no communication hook there and "
                "reduces by itself. Leave the callback out, or use sharding_strategy='FULL_SHARD'",
            )
        self._monitor = self._options.monitor(attachment)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log every so many steps, on rank 0."""
        if (
            not trainer.is_global_zero
            or self._monitor is None
            or self._monitor.num_new_steps < self._options.every_n_steps
        ):
            return
        values = self._log(trainer, self._monitor, trainer.fit_loop.epoch_loop._batches_that_stepped)
        # Not by LightningModule.log, which would add to `callback_metrics`, too.
        shown = {name: values[PREFIX + name] for name in self._progress_bar if PREFIX + name in values}
        trainer.progress_bar_metrics.update(shown)

    def _log(self, trainer: Any, monitor: Monitor, step: int) -> dict[str, float]:
        # At the step of LightningModule.log and of Lightning's own callbacks: `global_step` counts each optimizer's.
        values = monitor.values()
        for logger in trainer.loggers if values else ():
            logger.log_metrics(dict(values), step=step)
        return values

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Log the remaining values and the closing line."""
        if trainer.is_global_zero and self._monitor is not None and self._monitor.num_new_steps:
            # The last batch has been counted by now.
            self._log(trainer, self._monitor, trainer.fit_loop.epoch_loop._batches_that_stepped - 1)
        callbacks = trainer.callbacks
        # A progress bar that comes first has ended by now, and one that comes later is still on its line.
        self._close(trainer, trainer.progress_bar_callback in callbacks[: callbacks.index(self)])

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Say the closing line; on CUDA this would wait for collectives that other ranks may have left."""
        if trainer.strategy.root_device.type == "cpu":
            # A failure here must not hide the exception.
            with contextlib.suppress(Exception):
                self._close(trainer)

    def _close(self, trainer: Any, has_ended: bool = False) -> None:
        monitor, self._monitor = self._monitor, None
        if monitor is None or not self._options.closing_line or not trainer.is_global_zero:
            return
        show(trainer, monitor.summary(), has_ended)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Release the hook."""
        self._monitor = None


def _checked_names(names: object) -> tuple[MetricName, ...]:
    """Names of values for the progress bar."""
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise ValueError(f"progress_bar must be a list of names, got {names!r}; () shows nothing")
    for name in names:
        if name not in NAMES:
            raise ValueError(f"progress_bar has {name!r}; there are {', '.join(NAMES)}")
    return tuple(names)
