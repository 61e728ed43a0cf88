"""Lets PyTorch's profiler record communication threads: by itself it records the thread that starts it.

PyTorch hands a profiler over to threads of its own, as those of autograd on CUDA, and offers nothing of the kind to
Python. (`enableProfilerInChildThread` of C++ leaves a callback behind in the first thread, which then records all its
events twice.) What it has is a setting of the profiler, `profile_all_threads`.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import wrapt
from torch._C._profiler import ActiveProfilerType, _ExperimentalConfig
from torch.autograd import profiler


@functools.cache
def record_all_threads(while_true: Callable[[], bool], paused: Callable[[], AbstractContextManager[None]]) -> None:
    """From now on, let profilers that begin while a condition holds record all threads.

    Those of `torch.profiler.profile`, whoever makes them. Not if it has an `experimental_config` of its own, nor with
    `profile_memory`, which PyTorch counts in the thread of the profiler only.

    Args:
        while_true: whether there are communication threads.
        paused: lets them do nothing that is recorded. A profiler that ends, as after an exception in a backward, frees
            what they would write to; PyTorch up to 2.13 does not wait for them.
    """

    def init(original: Callable[..., None], own: Any, args: tuple[object, ...], options: dict[str, object]) -> None:
        original(*args, **options)
        if own.enabled and options.get("experimental_config") is None and not own.profile_memory and while_true():
            own.experimental_config = _ExperimentalConfig(profile_all_threads=True)

    def end(original: Callable[..., Any], own: Any, args: tuple[object, ...], options: dict[str, object]) -> Any:
        with paused():
            return original(*args, **options)

    wrapt.wrap_function_wrapper(profiler, "profile.__init__", init)
    wrapt.wrap_function_wrapper(profiler, "profile.__exit__", end)


def warn_if_left_out() -> None:
    """Warn, once, if a profiler records the present thread alone."""
    if torch._C._autograd._profiler_type() == ActiveProfilerType.KINETO:
        _warn()


@functools.cache
def _warn() -> None:
    warnings.warn(
        "the communication hook runs in threads of its own, and this profiler records the thread that started it only, "
        "so the ranges commhooks::... are not in its trace: it was started before the hook was attached, or has an "
        "experimental_config of its own, or profile_memory=True. Start it later, or give it "
        "experimental_config=torch.profiler._ExperimentalConfig(profile_all_threads=True)",
        stacklevel=2,
    )
