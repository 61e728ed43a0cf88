"""A SIGTERM during local steps, in which Lightning lets ranks wait for each other before each batch."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from lightning_commhooks.runtime.attachment import Attachment

logger = logging.getLogger(__name__)


class SigtermAfterAverages:
    """Ends training on a SIGTERM after an average, where ranks are at the same batch.

    Lightning broadcasts from rank 0 before each batch whether rank 0 has received one, so that each batch takes a round
    trip on the network. Its signal handler broadcasts as well, and hangs while another rank waits for this one.
    """

    def __init__(self, trainer: Any, attachment: Attachment) -> None:
        self._trainer, self._attachment = trainer, attachment
        self._loop, self._signals = trainer.fit_loop.epoch_loop, trainer._signal_connector
        self._broadcast = partial(type(self._loop)._broadcast_sigterm_tensor, self._loop)
        self._has_come = False
        self._asked_at = -1
        # Functions: a bound method would be copied with the attachment if a user copies the Trainer.
        self._loop._broadcast_sigterm_tensor = lambda: self._before_batch()
        self._signals._sigterm_notifier_fn = lambda number, frame: self._note(number)

    def _before_batch(self) -> None:
        """End training on all ranks if rank 0 has received a SIGTERM; in local steps, once after each average."""
        runtime = self._attachment.runtime
        averagings = runtime.counters.averagings  # equal on all ranks
        if self._asked_at == averagings and runtime.bound.is_local(runtime.clock.steps):
            return
        self._asked_at = averagings
        self._signals.received_sigterm |= self._has_come
        self._broadcast()

    def _note(self, number: int) -> None:
        launcher = self._trainer.strategy.launcher
        if launcher is not None and not self._has_come:
            launcher.kill(number)
        self._has_come = True
        # Lightning ends an evaluation at once, and in training would end the epoch on this rank alone.
        self._signals.received_sigterm |= not self._trainer.training
        logger.info("rank %d received SIGTERM", self._trainer.global_rank)

    def close(self) -> None:
        """Leave the Trainer as it was."""
        del self._loop._broadcast_sigterm_tensor, self._signals._sigterm_notifier_fn
