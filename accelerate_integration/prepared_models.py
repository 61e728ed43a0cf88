"""Communication hooks for models that an `Accelerator` has sharded, by FSDP version 1 or 2."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DDPCommunicationHookType, DistributedType

from accelerate_integration.kwargs import AVERAGED_ELSEWHERE, from_environment
from lightning_commhooks.interface.hook import CommHook
from lightning_commhooks.runtime.attachment import Attachment
from lightning_commhooks.sources.attach import attach
from lightning_commhooks.sources.sharded_hooks import resolve_sharded_hook

_INSTEAD = {"NO": "training runs in one process, and there is nothing to reduce", **AVERAGED_ELSEWHERE}
_IN_DDP = (
    "models are in DistributedDataParallel, for which there is Accelerator(kwargs_handlers=[CommHookKwargs("
    "hook={hook!r})])"
)


@dataclass(frozen=True)
class FSDPCommHook:
    """A hook at work on the models of an `Accelerator`; made by [`use_comm_hook`][].

    Attributes:
        hook: the configuration.
        attachments: one for each model prepared so far, in order, for `metrics()`.
    """

    hook: CommHook
    attachments: list[Attachment] = field(default_factory=list)


def attach_to_prepared(
    accelerator: Accelerator, hook: str | CommHook | Callable[..., Any] | None, options: Sequence[str]
) -> FSDPCommHook:
    """Attach a hook to all models of an accelerator. Collective."""
    kind = accelerator.distributed_type
    if kind != DistributedType.FSDP:
        reason = _INSTEAD.get(kind.value, _IN_DDP.format(hook=hook))
        note = "; on CPU, Accelerate does so whatever FSDP plugin it is given" if kind.value == "MULTI_CPU" else ""
        raise ValueError(f"use_comm_hook(accelerator, {hook!r}) is for FSDP; here {reason}{note}")
    if options:
        raise ValueError(
            f"{', '.join(options)}: hooks keep no state of sharded gradients and do not know what they are the sum of; "
            "leave that out with FSDP"
        )
    name = hook.value if isinstance(hook, DDPCommunicationHookType) else hook
    needed = "use_comm_hook(accelerator, hook) needs a hook, a name such as 'bf16'"
    resolved = resolve_sharded_hook(from_environment(needed) if name is None else name)
    if not accelerator._models:
        raise ValueError("the accelerator has no model yet: call use_comm_hook(accelerator, ...) after prepare()")
    return FSDPCommHook(resolved, [attach(model, resolved) for model in accelerator._models])
