"""The part that all strategies share: averages of models, and the lines that a Trainer shows."""

from __future__ import annotations

import copy
import logging
import math
import sys
import traceback
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, ClassVar

from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor

from lightning_commhooks.basics.announce import is_silenced
from lightning_commhooks.lightning.refusals import refusals_of
from lightning_commhooks.lightning.sigterm import SigtermAfterAverages
from lightning_commhooks.monitoring import closing_line
from lightning_commhooks.runtime.attachment import Attachment

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    # The classes add a strategy of `lightning` or of `pytorch_lightning`, which has the methods that the parts call.
    from typing import Any as Strategy
else:
    Strategy = object


class AveragesModelsMixin(Strategy):
    """A strategy that has an attachment."""

    # Lightning's `LambdaCallback`.
    _callback_class: ClassVar[type[Any]]
    # Whether Lightning averages gradients after each batch, also of `accumulate_grad_batches`.
    _averages_each_batch: ClassVar[bool] = False

    def _init_averaging(self, resync: bool) -> None:
        """Begin without an attachment. `resync`: whether ranks continue from averages that were shown."""
        self._resync = resync
        self._callback: Any = None
        self._evaluation = ExitStack()
        self._sigterm: SigtermAfterAverages | None = None
        self._attachment: Attachment | None = None

    def _averaging(self) -> Attachment | None:
        """The attachment if its hook averages models and can do so now."""
        attachment = self._attachment
        if attachment is None or attachment.is_closed or not attachment.averages_when_asked:
            return None
        return attachment

    def setup_optimizers(self, trainer: Any) -> None:
        """Make the optimizers; let a hook that averages models know of them."""
        super().setup_optimizers(trainer)
        self._watch_optimizers(trainer)

    def _watch_optimizers(self, trainer: Any) -> None:
        attachment = self._attachment
        if attachment is None or attachment.is_closed or not attachment.averages_models:
            return
        with refusals_of(self):
            for optimizer in self.optimizers:
                attachment.add_optimizer(optimizer)
        if not attachment.averages_when_asked:
            return
        self._sigterm = SigtermAfterAverages(trainer, attachment)
        # Averages models before other callbacks see them.
        self._callback = self._callback_class(on_validation_start=_begin_evaluation, on_train_end=_average_for_good)
        trainer.callbacks.insert(0, self._callback)

    def _show_forecast(self, attachment: Attachment) -> None:
        """Once the first steps are over, report the hook's expected effect on this run."""
        trainer = self.lightning_module.trainer
        if is_trial(trainer) and attachment.num_steps:
            return  # starts are known, and there is nothing to foresee
        num_left = steps_left(trainer)
        if num_left is not None and self._averages_each_batch:
            num_left *= trainer.accumulate_grad_batches
        attachment.tell_forecast(lambda line: show(trainer, line), num_left)

    def _may_be_elsewhere(self) -> bool:
        """Whether ranks may be at different points of the program, and cannot average together."""
        return handles_signal() or bool(self.lightning_module.trainer.interrupted)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """State of the module for a checkpoint, averaged over ranks where it differs.

        The averages stay until the checkpoint is written: callbacks and the module may add other weights to it.
        """
        attachment = self._averaging()
        if attachment is None:
            return super().lightning_module_state_dict()
        if self._may_be_elsewhere():
            if self.is_global_zero:
                logger.warning("the checkpoint has the model of rank 0, which was not averaged")
            return super().lightning_module_state_dict()
        if self._resync:
            attachment.average_weights()
        else:
            attachment.show_average()
        return _cloned(super().lightning_module_state_dict())

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Write the checkpoint, then restore each rank's own model."""
        try:
            super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)
        finally:
            if (attachment := self._averaging()) is not None and not self._may_be_elsewhere():
                attachment.runtime.local.hide_average()

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """State of an optimizer for a checkpoint, averaged over ranks where it differs."""
        attachment = self._averaging()
        if attachment is None or self._may_be_elsewhere():
            return super().optimizer_state(optimizer)
        with attachment.averaged([optimizer], model=False, permanently=self._resync):
            return _cloned(super().optimizer_state(optimizer))

    def begin_evaluation(self) -> None:
        """Replace each rank's own model with the average, for validation during training."""
        attachment = self._averaging()
        if attachment is not None:
            self._evaluation.enter_context(attachment.averaged(permanently=self._resync))

    def on_validation_end(self) -> None:
        """Go on from each rank's own model. Checkpoints that callbacks write after validation are done by now."""
        super().on_validation_end()
        self._evaluation.close()

    def average_for_good(self) -> None:
        """Average models, and the state of optimizers, at the end of training."""
        attachment = self._averaging()
        if attachment is not None:
            with attachment.averaged(self.optimizers, permanently=True):
                pass

    def on_train_end(self) -> None:
        """End with the average, also of weights that other callbacks have set."""
        super().on_train_end()
        # StochasticWeightAveraging and similar callbacks have set weights that differ between ranks.
        if (averaging := self._averaging()) is not None:
            averaging.average_weights(everything=True)
        if self._attachment is not None:
            self._attachment.note_end(as_planned=not is_trial(self.lightning_module.trainer))
        self._show_closing_line()

    def _show_closing_line(self) -> None:
        """Show one line on all of training, unless a `CommHookMonitor` does."""
        attachment = self._attachment
        if attachment is None or attachment.is_closed or self.global_rank != 0 or is_tuning():
            return
        if (line := closing_line(attachment)) is not None:
            show(self.lightning_module.trainer, line, has_ended=True)

    def __getstate__(self) -> dict[str, Any]:
        return dict(super().__getstate__(), _evaluation=ExitStack(), _sigterm=None)

    def teardown(self) -> None:
        """Close the hook, then tear the strategy down."""
        try:
            if self._attachment is not None:
                self._attachment.close()
        finally:
            self._evaluation.close()
            callbacks = [] if self._callback is None else self.lightning_module.trainer.callbacks
            # Lightning's tuner replaces the callbacks, and does not restore them when it fails.
            if self._callback in callbacks:
                callbacks.remove(self._callback)
            self._callback = None
            if self._sigterm is not None:
                self._sigterm.close()
                self._sigterm = None
            super().teardown()


def _begin_evaluation(trainer: Any, pl_module: Any) -> None:
    trainer.strategy.begin_evaluation()


def _average_for_good(trainer: Any, pl_module: Any) -> None:
    trainer.strategy.average_for_good()


def _cloned(state: Any) -> Any:
    """The same nested state with copies of its tensors."""
    if isinstance(state, Tensor):
        return state.detach().clone()
    if isinstance(state, dict):
        # Also the `_metadata` of a module's state, which `OrderedDict.copy()` drops.
        new = copy.copy(state)
        new.update((key, _cloned(value)) for key, value in state.items())
        return new
    return [_cloned(value) for value in state] if isinstance(state, list) else state


def show(trainer: Any, line: str, has_ended: bool = False) -> None:
    """Show a line above the progress bar, or below once the bar has ended, or in Lightning's log without a bar."""
    if is_silenced():
        return
    bar = trainer.progress_bar_callback
    # Progress bars of users' own need not have `is_enabled`.
    if not getattr(bar, "is_enabled", False):
        rank_zero_info(line)
    elif has_ended:
        # A progress bar of tqdm prints nothing once it is closed. In one piece, as `announce` does.
        print(f"{line}\n", end="", flush=True)
    else:
        # The rich progress bar is drawn over other output on the terminal.
        bar.print(line)


def steps_left(trainer: Any) -> int | None:
    """Number of optimizer steps to come; `None` if unknown, as in manual optimization."""
    if not trainer.lightning_module.automatic_optimization:
        return None
    if any(type(callback).__name__ == "_LRCallback" for callback in trainer.callbacks):
        return None  # Lightning looks for a learning rate
    end = trainer.estimated_stepping_batches
    return int(end) - trainer.global_step if trainer.global_step <= end < math.inf else None


def handles_signal() -> bool:
    """Whether Lightning's handler of SLURM's signal runs, which saves a checkpoint wherever the signal comes."""
    return _runs_in("_slurm_sigusr_handler_fn")


def is_trial(trainer: Any) -> bool:
    """Whether training was never meant to be long."""
    return bool(trainer.fast_dev_run) or is_tuning()


def is_tuning() -> bool:
    """Whether Lightning looks for a learning rate or a batch size, in steps that are taken back."""
    return _runs_in("_try_loop_run")


def _runs_in(function: str) -> bool:
    # Nothing else tells that it runs.
    return any(frame.f_code.co_name == function for frame, _ in traceback.walk_stack(sys._getframe()))
