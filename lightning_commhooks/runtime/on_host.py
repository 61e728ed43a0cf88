"""A boolean on its way from a CUDA device to the host."""

from __future__ import annotations

import torch
from torch import Tensor


class OnHost:
    """A boolean, one element, on its way from a CUDA device; what the device has to do after it goes on."""

    def __init__(self, value: Tensor) -> None:
        self._copy = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        self._copy.copy_(value, non_blocking=True)
        self._arrived = torch.cuda.current_stream(value.device).record_event()

    def wait(self) -> Tensor:
        """The boolean, on CPU."""
        self._arrived.synchronize()
        return self._copy
