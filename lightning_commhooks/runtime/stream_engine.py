"""Engines that run a hook where a bucket is handed over: on that stream, or for NCCL on a side stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from lightning_commhooks.basics.ranges import named
from lightning_commhooks.collectives.gloo_abort import Connections
from lightning_commhooks.collectives.steps import Steps, finish
from lightning_commhooks.collectives.timing import Timing
from lightning_commhooks.runtime.engine import Engine, T


class InlineEngine(Engine):
    """Runs a hook to its end, in the thread and on the stream that hand a bucket over and wait for the hook."""

    def submit(self, reduce: Callable[[], Steps[Tensor]], device: torch.device, is_last: bool) -> Future[Tensor]:
        self.raise_if_unusable()

        def run() -> Future[Tensor]:
            future: Future[Tensor] = Future(devices=[device] if device.type == "cuda" else None)
            with self._timing.work(), named(self._name, "reduce"):
                future.set_result(finish(reduce(), self._timing.comm))
            return future

        # Not the method of a subclass: this work runs in parallel with the backward.
        return Engine.run_inline(self, run)

    def call(self, function: Callable[[], T], in_step: bool = False) -> T:
        self.raise_if_unusable()
        return self.run_inline(function)


class StreamEngine(InlineEngine):
    """A side stream, for CUDA tensors on NCCL: the hook's kernels and collectives queue up on it, inline.

    Waiting for a collective blocks the side stream only, so the backward continues in parallel. The stream has high
    priority: a device serves kernels in the order of their launches, and the host has usually launched the rest of the
    backward long before the device reaches a hook's kernels for a bucket, for which other ranks wait. (NCCL's own
    stream has the priority that the process group gives it.)

    Args:
        device: of the gradients.
        connections: see `Engine`.
        timing: see `Engine`.
        name: see `Engine`.
    """

    def __init__(self, device: torch.device, connections: Connections, timing: Timing[Any], name: str) -> None:
        super().__init__(device, connections, timing, name)
        self._stream = torch.cuda.Stream(device, priority=-1)

    def submit(self, reduce: Callable[[], Steps[Tensor]], device: torch.device, is_last: bool) -> Future[Tensor]:
        self.raise_if_unusable()
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            return super().submit(reduce, device, is_last)

    def run_inline(self, function: Callable[[], T]) -> T:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            result = super().run_inline(function)
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return result
