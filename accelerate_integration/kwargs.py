"""`CommHookKwargs`, a kwargs handler for `accelerate.Accelerator`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

try:
    from accelerate import Accelerator
    from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs
except ImportError as error:
    raise ImportError(
        "accelerate_integration needs Accelerate: pip install 'lightning-commhooks[accelerate]'"
    ) from error

from lightning_commhooks.core.attach import Attachment, attach, resolve_hook
from lightning_commhooks.core.hook import CommHook

_OWN_FIELDS = ("hook", "hook_state", "attachments", "comm_hook", "comm_wrapper", "comm_state_option")


@dataclass(kw_only=True)
class CommHookKwargs(DistributedDataParallelKwargs):
    """Register a communication hook on every model that an `Accelerator` wraps in DDP.

    Args:
        hook: name of a hook (`lightning_commhooks.available_hooks()`, or Accelerate's own spellings such as
            `"power_sgd"` and `DDPCommunicationHookType.POWER_SGD`), a configured hook, or a DDP hook function.
        hook_state: the state of such a function.
        **kwargs: fields of `DistributedDataParallelKwargs` (`find_unused_parameters`, `bucket_cap_mb`, ...)
            without `comm_hook`, `comm_wrapper` and `comm_state_option`.

    Attributes:
        attachments: one for each model prepared so far, in order, for `metrics()`.

    Raises:
        ValueError: no hook, an unknown one, or one of the fields that `hook` replaces.
    """

    hook: str | CommHook | DDPCommunicationHookType | Callable[..., Any] | None = None
    hook_state: object = None
    attachments: list[Attachment] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        no = DDPCommunicationHookType.NO
        if self.comm_hook != no or self.comm_state_option:
            raise ValueError(
                f"CommHookKwargs does not take comm_hook={self.comm_hook} or comm_state_option="
                f"{self.comm_state_option}: pass hook=..., for example hook=PowerSGD(**options)"
            )
        if self.comm_wrapper != no:
            raise ValueError(
                f"CommHookKwargs does not take comm_wrapper={self.comm_wrapper}: pass hook=Cast(hook, 'fp16' or 'bf16')"
            )
        if self.hook is None or self.hook == no:
            raise ValueError("CommHookKwargs needs hook=..., a name such as 'powersgd' or a configured hook")
        name = self.hook.value if isinstance(self.hook, DDPCommunicationHookType) else self.hook
        self.hook = resolve_hook(name, self.hook_state)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        # Accelerate looks handlers up by exact class; the base class is the key under which DDP's is kept.
        return DistributedDataParallelKwargs

    def to_dict(self, ignore_keys: tuple[str, ...] = _OWN_FIELDS) -> dict[str, Any]:
        """The fields that go to `DistributedDataParallel`."""
        return {key: value for key, value in vars(self).items() if key not in ignore_keys}

    def register_comm_hook(self, model: DistributedDataParallel) -> None:
        """Called by Accelerate for each model it wraps."""
        scaler = _scaler_of(sys._getframe(1))
        self.attachments.append(attach(model, self.hook, hook_state=self.hook_state, grad_scaler=scaler))  # type: ignore[arg-type]


def _scaler_of(caller: FrameType | None) -> torch.amp.GradScaler | None:
    """The scaler of the `Accelerator` that calls a handler, which it gives no reference to itself."""
    while caller is not None:
        accelerator = caller.f_locals.get("self")
        if isinstance(accelerator, Accelerator):
            scaler: torch.amp.GradScaler | None = accelerator.scaler
            return scaler
        caller = caller.f_back
    return None
