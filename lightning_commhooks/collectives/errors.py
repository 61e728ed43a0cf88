"""Errors of communication, and where hooks cannot run: in a CUDA graph, and in a fork of their process.

A fork, such as a worker of a `DataLoader`, has a copy of every object of its parent, but no thread other than the one
that forked. The destructor of a process group joins its threads and shuts connections down, which are the parent's: in
a fork it crashes, hangs, or ends the parent's training.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any
from weakref import WeakSet

import torch

_kept: WeakSet[Any] = WeakSet()


class HookError(RuntimeError):
    """A communication hook failed. The message names hook, step and bucket; `__cause__` is the reason."""


def raise_if_capturing(device: torch.device) -> None:
    """Require that no CUDA graph is being captured on the device's current stream; raises a `HookError`."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise HookError(
            "a CUDA graph is being captured, and a communication hook cannot be part of one: its operations differ "
            "from step to step, and the graph would repeat the operations of this step. Graph parts of the model with "
            "torch.cuda.make_graphed_callables() before it is wrapped, so that gradients are averaged outside of them"
        )


def raise_if_fork_of(process: int) -> None:
    """Refuse to use a hook in a fork of the process that it was attached in, by a `HookError`."""
    if os.getpid() != process:
        raise HookError(
            f"the communication hook was attached in process {process}, and this process, {os.getpid()}, is a fork of "
            "it, such as a worker of a DataLoader: connections and threads of the hook are in the process that has "
            "attached it. Train, save and average there; a process that trains by itself calls "
            "init_process_group() and attach()"
        )


def keep_in_forks(thing: object) -> None:
    """Keep an object alive in each fork of this process until the fork ends, including interpreter shutdown."""
    _kept.add(thing)


def _keep_all() -> None:
    for thing in _kept:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_keep_all)
