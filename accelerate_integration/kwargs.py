"""`CommHookKwargs`, a kwargs handler for `accelerate.Accelerator`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

from torch.nn.parallel import DistributedDataParallel

try:
    from accelerate import Accelerator
    from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs
except ImportError as error:
    raise ImportError(
        "accelerate_integration needs Accelerate: pip install 'lightning-commhooks[accelerate]'"
    ) from error

from accelerate_integration.checkpoints import Companion
from lightning_commhooks.core.attach import attach, resolve_hook
from lightning_commhooks.core.attachment import Attachment
from lightning_commhooks.core.hook import CommHook

_OWN_FIELDS = ("hook", "hook_state", "exact_state", "strict_state", "resync")
_REPLACED_FIELDS = ("comm_hook", "comm_wrapper", "comm_state_option")


@dataclass(kw_only=True)
class CommHookKwargs(DistributedDataParallelKwargs):
    """Register a communication hook on every model that an `Accelerator` wraps in DDP.

    Args:
        hook: name of a hook (`lightning_commhooks.available_hooks()`, or Accelerate's own spellings such as
            `"power_sgd"` and `DDPCommunicationHookType.POWER_SGD`), a configured hook, or a DDP hook function.
        hook_state: the state of such a function.
        exact_state: save what differs between ranks for each of them, so that a run resumes bit by bit on CPU.
        strict_state: whether hook state that does not fit is an error in `load_state`. If not, what does not fit begins
            anew, with a warning.
        resync: of hooks that average models. Evaluation, `save_state` and everything after `wait_for_everyone` see the
            average. If not set, each rank goes on from its own model in the next forward that trains; if set, from the
            average.
        **kwargs: fields of `DistributedDataParallelKwargs` (`find_unused_parameters`, `bucket_cap_mb`, ...)
            without `comm_hook`, `comm_wrapper` and `comm_state_option`.

    Attributes:
        attachments: one for each model prepared so far, in order, for `metrics()`.

    Raises:
        ValueError: no hook, an unknown one, or one of the fields that `hook` replaces.
    """

    hook: str | CommHook | DDPCommunicationHookType | Callable[..., Any] | None = None
    hook_state: object = None
    exact_state: bool = False
    strict_state: bool = True
    resync: bool = False
    attachments: list[Attachment] = field(default_factory=list, init=False, repr=False)
    _companions: WeakKeyDictionary[Accelerator, Companion] = field(
        default_factory=WeakKeyDictionary, init=False, repr=False, compare=False
    )

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

    def to_dict(self, ignore_keys: tuple[str, ...] = _REPLACED_FIELDS) -> dict[str, Any]:
        """The fields that go to `DistributedDataParallel`."""
        own = {*ignore_keys, *_OWN_FIELDS, "attachments", "_companions"}
        return {key: value for key, value in vars(self).items() if key not in own}

    def register_comm_hook(self, model: DistributedDataParallel) -> None:
        """Called by Accelerate for each model it wraps."""
        accelerator = _accelerator_of(sys._getframe(1))
        attachment = attach(
            model,
            self.hook,  # type: ignore[arg-type]
            hook_state=self.hook_state,
            grad_scaler=None if accelerator is None else accelerator.scaler,
            exact_state=self.exact_state,
        )
        self.attachments.append(attachment)
        if accelerator is None:
            return
        if accelerator not in self._companions:
            self._companions[accelerator] = Companion(accelerator, resync=self.resync, strict_state=self.strict_state)
        self._companions[accelerator].add(attachment)


def _accelerator_of(caller: FrameType | None) -> Accelerator | None:
    """The `Accelerator` that calls a handler, which it gives no reference to itself."""
    while caller is not None:
        accelerator = caller.f_locals.get("self")
        if isinstance(accelerator, Accelerator):
            return accelerator
        caller = caller.f_back
    return None
