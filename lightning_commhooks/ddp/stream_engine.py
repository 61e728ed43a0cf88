"""The engine for CUDA tensors on NCCL: a side stream."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.futures import Future

from lightning_commhooks.ddp.engine import Engine, T


class StreamEngine(Engine):
    """A side stream, for CUDA tensors on NCCL: the hook's kernels and collectives queue up on it, inline.

    Waiting for a collective blocks the side stream only, so that the backward goes on beside it. The stream has high
    priority: a device serves kernels in the order in which they were launched, and the host has usually launched the
    rest of the backward long before the device comes to what a hook computes of a bucket, for which other ranks wait.
    (NCCL's own stream has the priority that the process group gives it.)

    Args:
        device: of the gradients.
        abort: see `Engine`.
    """

    def __init__(self, device: torch.device, abort: Callable[[], None]) -> None:
        super().__init__(device, abort)
        self._stream = torch.cuda.Stream(device, priority=-1)

    def submit(self, work: Callable[[], Tensor], device: torch.device, index: int, overlaps: bool) -> Future[Tensor]:
        self.raise_if_unusable()
        self._stream.wait_stream(torch.cuda.current_stream(device))

        def run() -> Future[Tensor]:
            future: Future[Tensor] = Future(devices=[device])
            future.set_result(work())
            return future

        with torch.cuda.stream(self._stream):
            return super().aside(run)

    def call(self, function: Callable[[], T]) -> T:
        self.raise_if_unusable()
        return self.aside(function)

    def aside(self, function: Callable[[], T]) -> T:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            result = super().aside(function)
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return result
