"""How the moves of models are sent: hooks of gradients, by name or with options of their own."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

from lightning_commhooks.hooks._local_sgd import LocalSGDConfig
from lightning_commhooks.hooks.allreduce import AllReduce
from lightning_commhooks.hooks.chunked_topk import ChunkedTopK
from lightning_commhooks.hooks.half import BF16
from lightning_commhooks.hooks.int2 import Int2
from lightning_commhooks.hooks.int8 import Int4, Int8
from lightning_commhooks.interface.hook import CommHook
from lightning_commhooks.interface.late_start import late_starts

PseudoGradient = Literal["fp32", "bf16", "int8", "int4", "int2", "topk"]

_HOOKS: dict[str, CommHook] = {
    "fp32": AllReduce(),
    "bf16": BF16(accumulate_dtype="float32"),
    "int8": Int8(compress_1d=True, min_bytes=0, use_error_feedback=False),
    "int4": Int4(compress_1d=True, min_bytes=0, use_error_feedback=False),
    "int2": Int2(compress_1d=True, min_bytes=0, use_error_feedback=False),
    "topk": ChunkedTopK(compress_1d=True),
}


def pseudo_gradient_hook(given: PseudoGradient | CommHook, error_feedback: bool) -> CommHook:
    """The hook that averages pseudo-gradients.

    Args:
        given: its name, of those above, or itself.
        error_feedback: whether what it leaves out is added to the next pseudo-gradient.

    Raises:
        ValueError: there is no such name; a hook that averages no gradients, or begins late; no such error feedback.
    """
    if isinstance(given, CommHook):
        return _checked(given, error_feedback)
    if given not in _HOOKS:
        raise ValueError(
            f"pseudo_gradient must be one of {[*get_args(PseudoGradient)]} or a hook, as "
            f"PowerSGD(start_powerSGD_iter=0); is {given!r}"
        )
    hook = _HOOKS[given]
    if not error_feedback or given == "topk":
        return hook
    if not hasattr(hook, "use_error_feedback"):
        raise ValueError(
            f"error_feedback=True has no effect with pseudo_gradient={given!r}; use 'int8', 'int4', 'int2' or 'topk'"
        )
    return dataclasses.replace(hook, use_error_feedback=True)  # type: ignore[type-var]


def _checked(hook: CommHook, error_feedback: bool) -> CommHook:
    name = type(hook).__name__
    if error_feedback:
        raise ValueError(f"error_feedback=True was given beside pseudo_gradient={name}(...), which has its own option")
    if isinstance(hook, LocalSGDConfig) or hook.is_outermost:
        raise ValueError(f"pseudo_gradient={name}(...) does not average gradients in each step; take another hook")
    for owner, field, start in late_starts(hook):
        raise ValueError(
            f"pseudo_gradient={type(owner).__name__}({field}={start}) would begin after so many outer steps: set "
            f"{field}=0"
        )
    return hook
