"""`CommHookMonitorPL` for the standalone `pytorch_lightning` package."""

from __future__ import annotations

try:
    from lightning_fabric.utilities.exceptions import MisconfigurationException
    from pytorch_lightning import Callback
    from pytorch_lightning.utilities.rank_zero import rank_zero_info  # type: ignore[attr-defined]
except ImportError as error:
    raise ImportError("CommHookMonitorPL needs the standalone package: pip install pytorch-lightning") from error

from lightning_commhooks.monitor_mixin import CommHookMonitorMixin


class CommHookMonitorPL(CommHookMonitorMixin, Callback):
    """Logs what a communication hook does while it trains, and says at the end what it was good for.

    `Trainer(strategy=CompressedDDPStrategyPL(hook="int8"), callbacks=[CommHookMonitorPL()])`.

    To every logger of the Trainer, at the step of `LightningModule.log`: `comm/bytes_sent`, `comm/averagings` and
    `comm/nonfinite_steps` since `fit` began; `comm/compression_ratio`, and `comm/exposed_ms` and `comm/codec_ms` per
    step, since they were logged last; `comm/relative_error` if it was sampled since then; `comm/residual_norm` now.
    They are those of rank 0. What is unknown is left out: with a hook function of your own all of it, with FSDP all but
    bytes and ratio.

    A step is a synchronized backward: with gradient accumulation one in several batches, with several optimizers
    several in one batch.

    Args:
        every_n_steps: log so often, and once more when training ends.
        error_every_n_steps: sample the error of averaged gradients so often, at the cost of an all-reduce of
            `error_numel` numbers; 0: never.
        error_numel: number of gradient elements to estimate the error from; `None`: all.
        progress_bar: which values to show there, by their names without `comm/`.
        closing_line: whether to show one line when training ends, above the progress bar or in Lightning's log: bytes
            sent and saved, seconds saved against plain DDP (an estimate), and steps that were not compressed, with the
            reason.
        measure_link: whether to measure the network for that estimate, for half a second when training begins. If not,
            the closing line has no seconds.

    Raises:
        MisconfigurationException: a value is out of range; in `fit`, when the strategy has no communication hook.
    """

    _misconfiguration = MisconfigurationException
    _rank_zero_info = staticmethod(rank_zero_info)
    _strategy = "CompressedDDPStrategyPL"
