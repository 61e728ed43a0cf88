"""How many steps a hook has taken over."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_commhooks.interface.memory import Memory
from lightning_commhooks.interface.state import StateReader, StateWriter


class StepsTaken:
    """Counts steps that turn out to be finite, equal on all ranks: `bucket.step` counts the others, too.

    Args:
        device: of the gradients.
    """

    def __init__(self, device: torch.device) -> None:
        self._memory = Memory(torch.zeros((), dtype=torch.int64, device=device))
        self._is_counting = False
        # The number, on CUDA once the event has come.
        self._on_host = torch.zeros((), dtype=torch.int64)
        self._arrived: torch.cuda.Event | None = None

    def number(self) -> int:
        """Steps so far. On CUDA it waits for the end of the step before, and not for this one's backward."""
        if self._arrived is not None:
            self._arrived.synchronize()
            self._arrived = None
        return int(self._on_host)

    def count(self) -> None:
        """Count the present step, once it has ended."""
        torch.add(self._memory.value, 1, out=self._memory.next())
        self._is_counting = True

    def end_step(self, finite: Tensor) -> None:
        """See `BoundHook.end_step`."""
        if not self._is_counting:
            return
        self._is_counting = False
        self._memory.end_step(finite)
        if not finite.is_cuda:
            self._on_host = self._memory.value
            return
        self._on_host = torch.empty((), dtype=torch.int64, pin_memory=True)
        self._on_host.copy_(self._memory.value, non_blocking=True)
        self._arrived = torch.cuda.current_stream(finite.device).record_event()

    def saved(self, writer: StateWriter) -> Tensor:
        """For `load`."""
        return writer.shared(self._memory.value)

    def load(self, saved: Any, reader: StateReader) -> None:
        """Go on from what was saved; from 0 if nothing was."""
        if not isinstance(saved, Tensor):
            saved = torch.zeros((), dtype=torch.int64)
        self._memory, self._on_host, self._arrived = Memory(reader.shared(saved)), saved.cpu().clone(), None
