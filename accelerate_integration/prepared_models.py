"""Communication hooks for models that an `Accelerator` has sharded, by FSDP version 1 or 2."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate import Accelerator, PartialState
from accelerate.utils import DDPCommunicationHookType, DistributedType

from accelerate_integration.accelerator_events import AVERAGED_ELSEWHERE, AcceleratorEvents
from accelerate_integration.kwargs import from_environment
from lightning_commhooks.interface.hook import CommHook
from lightning_commhooks.interface.registry import get_hook
from lightning_commhooks.runtime.attachment import Attachment
from lightning_commhooks.sources.attach import attach
from lightning_commhooks.sources.ddp import check_even
from lightning_commhooks.sources.replicas import replicas_of
from lightning_commhooks.sources.shard_files import load_shard, save_shard, shard_file
from lightning_commhooks.sources.sharded_hooks import resolve_sharded_hook

_NEEDED = "use_comm_hook(accelerator, hook) needs a hook, a name such as 'bf16'"
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
    _events: AcceleratorEvents | None = field(default=None, repr=False, compare=False)

    def events(self, accelerator: Accelerator) -> AcceleratorEvents:
        """The object that replaces methods of the accelerator."""
        assert self._events is not None, "there is no attachment"
        return self._events


def attach_to_prepared(
    accelerator: Accelerator,
    hook: str | CommHook | Callable[..., Any] | None,
    options: Sequence[str],
    shard_hook: str | CommHook | None = None,
    exact_state: bool = False,
    resync: bool = False,
) -> FSDPCommHook:
    """Attach a hook to all models of an accelerator. Collective."""
    kind = accelerator.distributed_type
    given: Any = hook.value if isinstance(hook, DDPCommunicationHookType) else hook
    if kind == DistributedType.NO:
        resolved = get_hook(from_environment(_NEEDED) if given is None else given)
        warnings.warn(
            f"use_comm_hook(accelerator, hook={resolved.name!r}) does nothing: training runs in one process, and "
            "attachments stays empty",
            stacklevel=4,
        )
        return FSDPCommHook(resolved)
    if kind != DistributedType.FSDP:
        reason = AVERAGED_ELSEWHERE.get(kind.value, _IN_DDP.format(hook=hook))
        note = "; on CPU, Accelerate does so whatever FSDP plugin it is given" if kind.value == "MULTI_CPU" else ""
        raise ValueError(f"use_comm_hook(accelerator, {hook!r}) is for FSDP; here {reason}{note}")
    given = from_environment(_NEEDED) if given is None else given
    has_replicas = any(map(replicas_of, accelerator._models))
    of_replicas = {"exact_state": exact_state, "resync": resync}
    options = [*options, *(name for name, value in of_replicas.items() if value and not has_replicas)]
    if options:
        raise ValueError(
            f"{', '.join(options)}: hooks keep no state of sharded gradients and do not know what they are the sum of; "
            "leave that out with FSDP"
        )
    if not accelerator._models:
        raise ValueError("the accelerator has no model yet: call use_comm_hook(accelerator, ...) after prepare()")
    resolved = get_hook(given) if has_replicas else resolve_sharded_hook(given, remembers=True)
    check_even(resolved, "Accelerate")
    attachments = [
        attach(model, resolved, exact_state=exact_state, shard_hook=shard_hook) for model in accelerator._models
    ]
    events = _EventsOfShards(accelerator, resolved.name, resync=resync, strict_state=True)
    for attachment in attachments if has_replicas else ():
        events.add(attachment)
    return FSDPCommHook(resolved, attachments, events)


class _EventsOfShards(AcceleratorEvents):
    """Saves the state of each shard in a file of its own."""

    def check(self) -> None:
        """A model that is prepared later needs a `use_comm_hook` of its own."""

    def _files(self, folder: str) -> list[tuple[Attachment, Path]]:
        attachments = enumerate(self._attachments.open())
        return [(one, shard_file(one, folder, f"comm_hook_{i}")) for i, one in attachments if one.has_state]

    def write(self, folder: str) -> None:
        for attachment, file in self._files(folder):
            save_shard(attachment, file)

    def read(self, folder: str) -> None:
        for attachment, file in self._files(folder):
            text = load_shard(attachment, file)
            if text is not None and PartialState().is_main_process:
                warnings.warn(text, stacklevel=4)
