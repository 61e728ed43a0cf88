"""`CompressedDDPStrategyPL` for the standalone `pytorch_lightning` package."""

from __future__ import annotations

try:
    from lightning_fabric.utilities.exceptions import MisconfigurationException
    from pytorch_lightning import Callback
    from pytorch_lightning.strategies import DDPStrategy
except ImportError as error:
    raise ImportError("CompressedDDPStrategyPL needs the standalone package: pip install pytorch-lightning") from error

from lightning_commhooks.ddp_mixin import AverageFirst, CompressedDDPMixin


class _AverageFirst(AverageFirst, Callback):
    pass


class CompressedDDPStrategyPL(CompressedDDPMixin, DDPStrategy):
    """Lightning's `DDPStrategy` with a communication hook, on CPU and GPU alike.

    `Trainer(strategy=CompressedDDPStrategyPL(hook="powersgd"))`.

    Args:
        hook: name of a hook (`lightning_commhooks.available_hooks()`), a configured hook such as
            `PowerSGD(matrix_approximation_rank=4)`, or a DDP hook function `(state, bucket)`.
        hook_state: the state of such a function.
        exact_state: save what differs between ranks for each of them, so that a run resumes bit by bit on CPU. Makes
            checkpoints larger by the size of the gradients times the number of ranks, instead of once.
        strict_state: whether hook state in a checkpoint that does not fit the model or the hook is an error. If not,
            what does not fit begins anew, with a warning.
        resync: with hooks that let ranks step alone, validation and checkpoints have the average of their models. If
            true, training goes on from that average too, on all ranks, and a run that resumes from a checkpoint is the
            same as one that went on. If not, each rank goes on from its own model as if nothing was.
        accumulation: what gradients are divided by that are accumulated over batches: `"framework"`: by
            `accumulate_grad_batches`, also in the last window of an epoch, which may be shorter, and by nothing in
            manual optimization. `"mean"`: by the batches that there were. `"sum"`, an integer or `"weighted"`: see
            [`ScaleByGradAccumulation`][].
        **kwargs: arguments of `DDPStrategy` and of `torch.nn.parallel.DistributedDataParallel`, without
            `ddp_comm_state`, `ddp_comm_hook`, `ddp_comm_wrapper` and `model_averaging_period`.

    Raises:
        MisconfigurationException: unknown hook, a function that DDP would refuse, or one of the arguments
            that `hook` replaces.
    """

    _misconfiguration = MisconfigurationException
    _callback_class = _AverageFirst
