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
        # On CUDA: the number, once the event has come.
        self._arriving: tuple[Tensor, torch.cuda.Event] | None = None

    def number(self) -> int:
        """Steps so far. On CUDA it waits for the end of the step before, and not for this one's backward."""
        if self._arriving is None:
            return int(self._memory.value)
        number, arrived = self._arriving
        arrived.synchronize()
        return int(number)

    def count(self) -> None:
        """Count the present step, once it has ended."""
        torch.add(self._memory.value, 1, out=self._memory.next())

    def end_step(self, finite: Tensor) -> None:
        """See `BoundHook.end_step`."""
        self._memory.end_step(finite)
        if finite.is_cuda:
            on_host = torch.empty((), dtype=torch.int64, pin_memory=True)
            on_host.copy_(self._memory.value, non_blocking=True)
            self._arriving = on_host, torch.cuda.current_stream(finite.device).record_event()

    def saved(self, writer: StateWriter) -> Tensor:
        """For `load`."""
        return writer.shared(self._memory.value)

    def load(self, saved: Any, reader: StateReader) -> None:
        """Go on from what was saved; from 0 if nothing was."""
        number = reader.shared(saved) if isinstance(saved, Tensor) else torch.zeros_like(self._memory.value)
        self._memory, self._arriving = Memory(number), None
