"""Copies of models with a hook, and of what holds them: a copy has no hook, and says so."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class LostHook:
    """In a copy of a model in the place of its hook: a forward pre-hook that warns, once, when the copy is trained."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._warned = False

    def __call__(self, model: DistributedDataParallel, inputs: object) -> None:
        """Warn in a forward that trains, unless the copy was given a hook of its own."""
        # Not by `model.training`, which Lightning leaves as it was.
        if self._warned or not torch.is_grad_enabled() or registered_name(model):
            return
        self._warned = True
        if dist.get_rank(model.process_group) == 0:
            warnings.warn(
                f"this DistributedDataParallel is a copy of one with the communication hook {self._name!r}, which is "
                "not copied: DDP averages gradients by itself. To train with a hook, attach it to the copy: "
                "attach(model, hook)",
                stacklevel=2,
            )


def nothing(*args: object) -> None:
    """Do nothing."""


class NotCopied:
    """A function that stays with the object that it is registered on; copies of that have `in_copies` instead."""

    def __init__(self, function: Callable[..., Any], in_copies: Callable[..., Any] = nothing) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._in_copies = in_copies

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Callable[..., Any]]]:
        return _in_copies, (self._in_copies,)


def _in_copies(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def registered_name(model: DistributedDataParallel) -> str:
    """Name of DDP's communication hook, as DDP says; empty for none."""
    return str(model._get_ddp_logging_data().get("comm_hook", ""))
