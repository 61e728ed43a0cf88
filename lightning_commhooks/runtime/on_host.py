"""An asynchronous copy of a boolean from a CUDA device to the host."""

from __future__ import annotations

import torch
from torch import Tensor


class OnHost:
    """An asynchronous copy of a boolean of one element, which does not block later work of the device."""

    def __init__(self, value: Tensor) -> None:
        self._copy = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        self._copy.copy_(value, non_blocking=True)
        self._arrived = torch.cuda.current_stream(value.device).record_event()

    def wait(self) -> Tensor:
        """Wait for the copy and return the boolean, on CPU."""
        self._arrived.synchronize()
        return self._copy
