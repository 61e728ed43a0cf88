"""A SIGTERM during local steps, in which Lightning lets ranks wait for each other before each batch."""

from __future__ import annotations

import logging
from typing import Any

from lightning_commhooks.basics.copies import NotCopied
from lightning_commhooks.runtime.attachment import Attachment

logger = logging.getLogger(__name__)


class SigtermAfterAverages:
    """Ends training on a SIGTERM of any rank after an average, where ranks are at the same batch.

    Lightning broadcasts from rank 0 before each batch whether rank 0 has received one, so that each batch takes a round
    trip on the network. Its signal handler broadcasts as well, and hangs while another rank waits for this one.
    """

    def __init__(self, trainer: Any, attachment: Attachment) -> None:
        self._trainer, self._attachment = trainer, attachment
        self._loop, self._signals = trainer.fit_loop.epoch_loop, trainer._signal_connector
        self._broadcast, handler = self._loop._broadcast_sigterm_tensor, self._signals._sigterm_notifier_fn
        self._has_come = False
        self._asked_at = -1
        self._loop._broadcast_sigterm_tensor = NotCopied(self._before_batch, in_copies=self._broadcast)
        self._signals._sigterm_notifier_fn = NotCopied(self._note, in_copies=handler)

    def _before_batch(self) -> None:
        """End training on all ranks if any has received a SIGTERM; in local steps, once after each average."""
        runtime = self._attachment.runtime
        averagings = runtime.counters.averagings  # equal on all ranks
        if self._asked_at == averagings and runtime.bound.is_local(runtime.clock.steps):
            return
        self._asked_at = averagings
        if self._trainer.strategy.reduce_boolean_decision(self._has_come, all=False):
            self._signals.received_sigterm = True
            self._broadcast()  # and raise on all ranks

    def _note(self, number: int, frame: object) -> None:
        launcher = self._trainer.strategy.launcher
        if launcher is not None and not self._has_come:
            launcher.kill(number)
        self._has_come = True
        # In `fit`, Lightning would end a validation or an epoch on this rank alone.
        self._signals.received_sigterm |= self._trainer.state.fn != "fit"
        logger.info("rank %d received SIGTERM", self._trainer.global_rank)

    def close(self) -> None:
        """Leave the Trainer as it was."""
        if self._has_come and not self._signals.received_sigterm:
            logger.warning("rank %d received SIGTERM after the last average of fit()", self._trainer.global_rank)
        for owner, name in ((self._loop, "_broadcast_sigterm_tensor"), (self._signals, "_sigterm_notifier_fn")):
            vars(owner).pop(name, None)
