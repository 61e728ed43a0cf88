"""Errors of communication."""

from __future__ import annotations

import torch


class HookError(RuntimeError):
    """A communication hook failed. The message names hook, step and bucket; `__cause__` is the reason."""


def raise_if_capturing(device: torch.device) -> None:
    """Require that no CUDA graph is being captured.

    Args:
        device: device of the gradients.

    Raises:
        HookError: the device's current stream is being captured.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise HookError(
            "a CUDA graph is being captured, and a communication hook cannot be part of one: what it does differs from "
            "step to step, and the graph would repeat this step's for good. Graph parts of the model with "
            "torch.cuda.make_graphed_callables() before it is wrapped, so that gradients are averaged outside of them"
        )
