"""Handlers of an `accelerate.Accelerator`: `CommHookKwargs`, and `FSDPCommHook` for models that it has sharded."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import sys
import traceback
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

from accelerate import Accelerator, PartialState
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs, DistributedType
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from accelerate_integration.accelerator_events import AVERAGED_ELSEWHERE, AcceleratorEvents
from accelerate_integration.replica import AcceleratorReplica
from lightning_commhooks.interface.hook import CommHook
from lightning_commhooks.interface.misplaced import given_beside, parsed, with_options, wrong_call
from lightning_commhooks.interface.python_code import code
from lightning_commhooks.interface.registry import get_hook
from lightning_commhooks.runtime.attachment import Attachment
from lightning_commhooks.runtime.attachments import attachment_of
from lightning_commhooks.sources.attach import attach, check_values
from lightning_commhooks.sources.ddp import check_even, hook_name, resolve_hook
from lightning_commhooks.sources.fsdp import resolve_sharded_hook
from lightning_commhooks.sources.fsdp2 import gather_hooks
from lightning_commhooks.sources.replicas import load_shard, replicas_of, save_shard, shard_file
from lightning_commhooks.torchft.fault_tolerance import FaultTolerance, check_fault_tolerance
from lightning_commhooks.wrappers import Cast
from lightning_commhooks.wrappers.scale import Accumulation

_NO = DDPCommunicationHookType.NO
_WRAPPERS = (_NO, DDPCommunicationHookType.FP16, DDPCommunicationHookType.BF16)
_NOR_DDP = ", and neither has DistributedDataParallelKwargs"
_NEEDED = "use_comm_hook(accelerator, hook) needs a hook, a name such as 'bf16'"
_IN_DDP = (
    "models are in DistributedDataParallel, for which there is Accelerator(kwargs_handlers=[CommHookKwargs("
    "hook={hook!r})])"
)
_REPLACED_FIELDS = ("comm_hook", "comm_wrapper", "comm_state_option")


@dataclass(kw_only=True)
class CommHookKwargs(DistributedDataParallelKwargs):
    """Register a communication hook on every model that an `Accelerator` wraps in DDP.

    Args:
        hook: name of a hook (`lightning_commhooks.available_hooks()`, or Accelerate's own spellings such as
            `"power_sgd"` and `DDPCommunicationHookType.POWER_SGD`), a configured hook, or a DDP hook function. By
            default, the hook named by the environment variable `COMMHOOKS_HOOK`, with the options in
            `COMMHOOKS_OPTIONS`, a JSON object.
        hook_state: the state of such a function.
        exact_state: save state that differs between ranks for every rank, so that a run resumes bit for bit on CPU.
        strict_state: whether hook state that does not fit is an error in `load_state`. If not, the state that does not
            fit is reset, with a warning.
        resync: for hooks that average models. `save_state` and everything after `wait_for_everyone` see the average. If
            not set, each rank continues from its own model in the next forward that trains; if set, from the average.
        accumulation: divisor of gradients that are accumulated over micro-batches. `"framework"`:
            `gradient_accumulation_steps`, as in `accelerator.backward`, also in a shorter last window. `"mean"`: the
            actual number of micro-batches. `"sum"`, an integer or `"weighted"`: see [`ScaleByGradAccumulation`][].
        fault_tolerance: make this `Accelerator`, of one process, one of several replicas, of which some may die and
            come back while the rest continue: see [`FaultTolerance`][] and "Replicas that fail". The dataset is shared
            out, and a step that replicas do not commit is one that Accelerate calls skipped.
        num_steps: optimizer steps that training has in all, for starts that are fractions of it and the default start
            of hooks that are given by name: see [`attach`][]. A `transformers.Trainer` knows it.
        comm_hook, comm_wrapper, comm_state_option: Accelerate's own fields, translated: `comm_hook=POWER_SGD,
            comm_state_option={"matrix_approximation_rank": 2}, comm_wrapper=BF16` is
            `hook=Cast(PowerSGD(matrix_approximation_rank=2), "bf16")`. Not together with `hook`.
        **kwargs: the other fields of `DistributedDataParallelKwargs` (`find_unused_parameters`, `bucket_cap_mb`, ...).

    Pickles, and works with `dataclasses.replace`: a copy has the configuration, and attaches the hook to models that
    are prepared with it. A copied model has no hook, and warns when it is trained.

    Attributes:
        attachments: one for each model prepared so far, in order, for `metrics()`.
        manager: with `fault_tolerance`, the `torchft.Manager`, once a model is prepared: `current_step()` are the steps
            that replicas have taken.

    Raises:
        ValueError: no hook, an unknown one, one given twice, or options that it has not got. By `Accelerator.prepare`
            with FSDP, DeepSpeed or Megatron-LM.
    """

    hook: str | CommHook | DDPCommunicationHookType | Callable[..., Any] | None = None
    hook_state: object = None
    exact_state: bool = False
    strict_state: bool = True
    resync: bool = False
    accumulation: Accumulation = "framework"
    num_steps: int | None = None
    fault_tolerance: FaultTolerance | None = None
    attachments: list[Attachment] = field(default_factory=list, init=False, repr=False, compare=False)
    manager: Any = field(default=None, init=False, repr=False, compare=False)

    if not TYPE_CHECKING:

        def __new__(cls, *args: Any, **options: Any) -> CommHookKwargs:
            if args:
                made = shown(args[0])
                if options and given_beside(args[0], options).startswith("write "):
                    made, options = with_options(args[0], options), {}
                more = "".join(f", {name}={value!r}" for name, value in options.items())
                raise ValueError(f"{cls.__name__} takes options by name: {cls.__name__}(hook={made}{more})")
            text = wrong_call(cls.__name__, cls.__init__.__get__(object()), (), options, _NOR_DDP)
            if text is not None:
                raise ValueError(text)
            return super().__new__(cls)

    def __post_init__(self) -> None:
        name = self.hook.value if isinstance(self.hook, DDPCommunicationHookType) else self.hook
        if name in (None, _NO.value):
            found = self._translated() or from_environment("CommHookKwargs needs hook=..., a name such as 'powersgd'")
            # The hook replaces these fields.
            self.__dict__.update(comm_hook=_NO, comm_wrapper=_NO, comm_state_option={})
            self._resolve(found)
            return
        if self.comm_hook != _NO or self.comm_wrapper != _NO or self.comm_state_option:
            raise ValueError(self._given_twice())
        self._resolve(name)

    def _resolve(self, hook: object) -> None:
        check_values(self.num_steps, exact_state=self.exact_state, strict_state=self.strict_state, resync=self.resync)
        check_fault_tolerance(self.fault_tolerance)
        resolve_hook(hook, self.hook_state, self.accumulation)
        # Without the accumulation, a field of its own, which `dataclasses.replace` would give once more.
        self.hook = resolve_hook(hook, self.hook_state)
        check_even(self.hook, "Accelerate")
        if self.fault_tolerance is not None:
            from lightning_commhooks.torchft.manager import check_options

            hook = resolve_hook(hook, self.hook_state, self.accumulation)
            names = ("exact_state", "static_graph", "resync")
            check_options(hook, {name: getattr(self, name) for name in names})

    @property
    def _config(self) -> CommHook | Callable[..., Any]:
        return cast("CommHook | Callable[..., Any]", self.hook)  # since `_resolve`

    def _given_twice(self) -> str:
        """Name the call that replaces Accelerate's own fields."""
        given = {name: getattr(self, name) for name in _REPLACED_FIELDS if getattr(self, name) not in (_NO, {})}
        text = f"CommHookKwargs does not take {' and '.join(given)} together with hook={shown(self.hook)}"
        if "comm_hook" in given:
            return f"{text}: leave comm_hook out, or hook"
        options = given.get("comm_state_option", {})
        made = shown(self.hook)
        if options:
            beside = given_beside(self.hook, options)
            if not beside.startswith("write "):
                return f"{text}: set the options of the hook, hook=PowerSGD(...)"
            made = with_options(self.hook, options)
        if "comm_wrapper" in given:
            made = f"Cast({made}, {self._kind('comm_wrapper', *_WRAPPERS).value!r})"
        return f"{text}: write hook={made}"

    def _translated(self) -> CommHook | None:
        """The hook that Accelerate's own fields stand for."""
        options = dict(self.comm_state_option)
        if self.comm_hook == _NO:
            if self.comm_wrapper != _NO or options:
                raise ValueError(
                    f"comm_wrapper={self.comm_wrapper} and comm_state_option={options} need a comm_hook, or better: "
                    "hook=Cast(PowerSGD(...), 'bf16')"
                )
            return None
        hook = get_hook(self._kind("comm_hook", *DDPCommunicationHookType).value, **options)
        wrapper = self._kind("comm_wrapper", *_WRAPPERS)
        return hook if wrapper == _NO else Cast(hook, wrapper.value)

    def _kind(self, name: str, *known: DDPCommunicationHookType) -> DDPCommunicationHookType:
        """The value of one of Accelerate's own fields, which may be written as a string."""
        value = getattr(self, name)
        if value not in [*known, *(kind.value for kind in known)]:
            advice = (
                f"names of hooks go into hook={value!r}" if name == "comm_hook" else "write hook=Cast(hook, 'fp16')"
            )
            kinds = ", ".join(kind.name for kind in known)
            raise ValueError(f"{name}={value!r}: {advice}; {name} takes Accelerate's DDPCommunicationHookType: {kinds}")
        return DDPCommunicationHookType(value)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        # Accelerate looks handlers up by exact class; the base class is the key under which DDP's is kept. It gives
        # handlers no reference to itself, and does not call them when there is no DDP: this is the only chance.
        caller = sys._getframe(1)
        if not str(caller.f_globals.get("__name__")).startswith("accelerate."):
            return type(self)
        if caller.f_code is Accelerator.__init__.__code__ and AcceleratorEvents.of(caller.f_locals["self"]) is None:
            self._check_alone(caller.f_locals["kwargs_handlers"])
            self.events(caller.f_locals["self"])
        return DistributedDataParallelKwargs

    def _check_alone(self, handlers: Sequence[object]) -> None:
        """Refuse a second handler of DDP."""
        others = [one for one in handlers if isinstance(one, DistributedDataParallelKwargs) and one is not self]
        if not others:
            return
        # DDP's own fields that differ from their defaults.
        fields = dataclasses.fields(DistributedDataParallelKwargs)
        given = {
            field.name: getattr(one, field.name)
            for one in others
            for field in fields
            if field.name not in _REPLACED_FIELDS and getattr(one, field.name) != field.default
        }
        made = "".join(f", {name}={value!r}" for name, value in given.items())
        raise ValueError(
            f"kwargs_handlers has CommHookKwargs and {type(others[0]).__name__}: give one handler, which has the "
            f"options of DistributedDataParallelKwargs too: CommHookKwargs(hook={shown(self.hook)}{made})"
        )

    def __reduce__(self) -> tuple[Callable[..., CommHookKwargs], tuple[Any, ...]]:
        # Not by `copyreg.__newobj__`, which asks for `__class__`.
        return _restored, (type(self), {**vars(self), "attachments": [], "manager": None})

    def to_dict(self, ignore_keys: tuple[str, ...] = _REPLACED_FIELDS) -> dict[str, Any]:
        """The fields that go to `DistributedDataParallel`."""
        names = [field.name for field in dataclasses.fields(DistributedDataParallelKwargs)]
        return {name: getattr(self, name) for name in names if name not in ignore_keys}

    def events(self, accelerator: Accelerator) -> AcceleratorEvents:
        """The object that replaces methods of an accelerator, whose constructor may still run; one for each."""
        events = AcceleratorEvents.of(accelerator)
        if events is not None:
            return events
        hook, options = hook_name(self._config), {"resync": self.resync, "strict_state": self.strict_state}
        if self.fault_tolerance is None:
            return AcceleratorEvents(accelerator, hook, **options)
        return AcceleratorReplica(accelerator, hook, self.fault_tolerance, self._wrapped, **options)

    def add_weight(self, weight: float | Tensor, model: DistributedDataParallel | None = None) -> None:
        """With `accumulation="weighted"`, say how much the present micro-batch counts, as by its number of tokens.

        Before its `accelerator.backward`; give that the loss as a sum over tokens. In one process there is nothing to
        weigh, but the loss is not divided by the weights either. See `Attachment.add_weight`.

        Args:
            weight: a number of at least 0.
            model: what `prepare` returned; not needed for one model.

        Raises:
            ValueError: see `Attachment.add_weight`; or several models, and none given; or there is no hook, since
                `prepare` was not called or training runs in one process.
        """
        attachment_of(model, self.attachments).add_weight(weight)

    def _wrapped(self, manager: Any, module: nn.Module, accelerator: Accelerator) -> Any:
        """A model among replicas, a `lightning_commhooks.torchft.DistributedDataParallel`."""
        from lightning_commhooks.torchft import DistributedDataParallel as Managed

        self.manager = manager
        options = {**self.to_kwargs(), "hook": self.hook, "num_steps": self.num_steps}
        options.pop("find_unused_parameters", None)
        model = Managed(manager, module, **options)
        self._attached(model.attachment, accelerator)
        return model

    def _attached(self, attachment: Attachment, accelerator: Accelerator | None) -> None:
        self.attachments.append(attachment)
        if accelerator is not None:
            self.events(accelerator).add(attachment)

    def register_comm_hook(self, model: DistributedDataParallel) -> None:
        """Called by Accelerate for each model it wraps."""
        accelerator = _accelerator_of(sys._getframe(1))
        attachment = attach(
            model,
            self._config,
            hook_state=self.hook_state,
            grad_scaler=None if accelerator is None else accelerator.scaler,
            exact_state=self.exact_state,
            accumulation=self.accumulation,
            loss_divided_by=1 if accelerator is None else _divisor(self.events(accelerator)),
            num_steps=self.num_steps,
        )
        self._attached(attachment, accelerator)


# `inspect` would show the `(*args, **options)` of the constructor that checks arguments.
CommHookKwargs.__signature__ = inspect.Signature([*inspect.signature(CommHookKwargs.__init__).parameters.values()][1:])


def shown(hook: object) -> str:
    """Return a hook as users write it."""
    if isinstance(hook, type):
        return f"{hook.__name__}()"
    return code(hook).replace('"', "'") if isinstance(hook, CommHook) else getattr(hook, "__name__", repr(hook))


def _divisor(events: AcceleratorEvents) -> Callable[[], float]:
    """The divisor of the loss, as a function that does not keep the accelerator's models."""
    reference = weakref.ref(events)
    return lambda: 1.0 if (one := reference()) is None else one.loss_divided_by()


def _restored(kind: type[CommHookKwargs], state: dict[str, Any]) -> CommHookKwargs:
    handler = object.__new__(kind)
    handler.__dict__.update(state)
    return handler


def _accelerator_of(caller: FrameType | None) -> Accelerator | None:
    """The `Accelerator` that calls a handler.

    It hands over nothing but the model, and one that was pickled has none of the methods that could be replaced.
    """
    while caller is not None:
        accelerator = caller.f_locals.get("self")
        if isinstance(accelerator, Accelerator):
            return accelerator
        caller = caller.f_back
    return None


def from_environment(otherwise: str) -> CommHook:
    """The hook that `COMMHOOKS_HOOK` and `COMMHOOKS_OPTIONS` name."""
    name, options = os.environ.get("COMMHOOKS_HOOK"), os.environ.get("COMMHOOKS_OPTIONS") or "{}"
    if not name:
        raise ValueError(f"{otherwise} or a configured hook, or the environment variable COMMHOOKS_HOOK")
    try:
        given = json.loads(options)
    except json.JSONDecodeError as error:
        example = _as_json(f"{name} {options}") or '{"option": 1}'
        raise ValueError(f"COMMHOOKS_OPTIONS={options!r} is not JSON, as {example}: {error}") from error
    if not isinstance(given, dict):
        raise ValueError(f'COMMHOOKS_OPTIONS={options!r} must be a JSON object, such as {{"option": 1}}')
    try:
        return get_hook(name, **given)
    except ValueError as error:
        text = f"COMMHOOKS_HOOK={name!r}, COMMHOOKS_OPTIONS={options!r}: "
        if example := _as_json(name):
            raise ValueError(f"{text}options of the hook are JSON, COMMHOOKS_OPTIONS='{example}'") from error
        raise ValueError(f"{text}{error}") from error


def _as_json(text: str) -> str:
    """Options that are written behind a hook's name, as JSON; empty if there are none."""
    meant = parsed(text)
    if meant is None or not meant[1]:
        return ""
    values = (f"{json.dumps(name)}: {value}" for name, value in meant[1].items())
    return f"{{{', '.join(values)}}}"


@dataclass(frozen=True)
class FSDPCommHook:
    """A hook at work on models that FSDP has sharded; made by [`use_comm_hook`][].

    Attributes:
        hook: the configuration.
        attachments: one for each model prepared so far, in order, for `metrics()`.
        resync: as it was given.
        options: further options of [`attach`][].
    """

    hook: CommHook
    attachments: list[Attachment] = field(default_factory=list)
    resync: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def events(self, accelerator: Accelerator) -> AcceleratorEvents:
        """The object that replaces methods of the accelerator."""
        events = AcceleratorEvents.of(accelerator)
        return events or _EventsOfShards(accelerator, self.hook.name, resync=self.resync, strict_state=True)

    def attach(self, accelerator: Accelerator, models: Sequence[nn.Module]) -> list[Attachment]:
        """Attach the hook to models that it is not at work on yet, and return their attachments. Collective."""
        events: Any = AcceleratorEvents.of(accelerator)
        if events is not None and events.resync != self.resync:
            raise ValueError(f"use_comm_hook(..., resync={self.resync!r}): give all models of an accelerator one value")
        known = [events and events.attached_before(model, self.hook, self.options) for model in models]
        attachments = [
            before or attach(model, self.hook, **self.options) for model, before in zip(models, known, strict=True)
        ]
        self.attachments.extend(one for one in attachments if one not in self.attachments)
        new = [one for one in attachments if one not in known]
        events = self.events(accelerator)
        events.take(new, self.hook, self.options, any(map(replicas_of, models)))
        return new


def sharded_hook(
    accelerator: Accelerator,
    hook: str | CommHook | Callable[..., Any] | None,
    options: Sequence[str],
    has_replicas: bool,
    *,
    exact_state: bool,
    resync: bool,
    **sharding: Any,
) -> FSDPCommHook:
    """Check a hook for models that FSDP shards, with further options of `attach`.

    `options` name those that were given, and that only `CommHookKwargs` has.
    """
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
    of_replicas = {"exact_state": exact_state, "resync": resync}
    check_values(**of_replicas)
    options = [*options, *(name for name, value in of_replicas.items() if value and not has_replicas)]
    if options:
        raise ValueError(
            f"{', '.join(options)}: hooks save no state of sharded gradients and do not know their micro-batches; "
            "leave that out with FSDP"
        )
    gather_hooks(sharding)
    resolved = get_hook(given) if has_replicas else resolve_sharded_hook(given, remembers=True)
    check_even(resolved, "Accelerate")
    return FSDPCommHook(resolved, [], resync, {"exact_state": exact_state, **sharding})


def attach_to_prepared(accelerator: Accelerator, hook: Any, options: Sequence[str], **given: Any) -> FSDPCommHook:
    """Attach a hook to all models of an accelerator, with further options as in `sharded_hook`. Collective."""
    models = [*dict.fromkeys(accelerator._models)]
    handle = sharded_hook(accelerator, hook, options, any(map(replicas_of, models)), **given)
    if accelerator.distributed_type == DistributedType.NO:
        return handle
    if not models:
        raise ValueError("the accelerator has no model yet: call use_comm_hook(accelerator, ...) after prepare()")
    new = handle.attach(accelerator, models)
    # Last: where warnings are errors, nothing else may be left to do.
    if any(one.has_state for one in new) and _is_called_by_a_trainer():
        warnings.warn(
            f"use_comm_hook(accelerator, hook={handle.hook.name!r}) in a Trainer: its checkpoints and evaluation do "
            "not know the hook. Call use_comm_hook(trainer, ...) before train() instead",
            stacklevel=4,
        )
    return handle


def _is_called_by_a_trainer() -> bool:
    # A trainer gives its accelerator no sign, and neither saves nor loads by it.
    frames = traceback.walk_stack(sys._getframe())
    return any(frame.f_globals.get("__name__") == "transformers.trainer" for frame, _ in frames)


class _EventsOfShards(AcceleratorEvents):
    """Saves the state of each shard in a file of its own."""

    def __init__(self, accelerator: Accelerator, hook: str, *, resync: bool, strict_state: bool) -> None:
        super().__init__(accelerator, hook, resync=resync, strict_state=strict_state)
        self.resync = resync
        # With the hook and options that were given for them.
        self._taken: list[tuple[Attachment, CommHook, dict[str, Any]]] = []

    def attached_before(self, model: nn.Module, hook: CommHook, options: dict[str, Any]) -> Attachment | None:
        """The attachment of a model that has the same hook already, as in a second `train()` of a trainer."""
        for attachment, *given in self._taken:
            if not attachment.is_closed and attachment.is_attached_to(model) and given == [hook, options]:
                return attachment
        return None

    def take(
        self, attachments: Sequence[Attachment], hook: CommHook, options: dict[str, Any], have_replicas: bool
    ) -> None:
        """Look after further models."""
        self._taken = [one for one in self._taken if not one[0].is_closed]
        self._taken += [(attachment, hook, options) for attachment in attachments]
        for attachment in attachments if have_replicas else ():
            self.add(attachment)
        self.drop_freed()

    def check(self) -> None:
        """A model that is prepared later needs a `use_comm_hook` of its own."""

    def _files(self, folder: str) -> list[tuple[Attachment, Path]]:
        attachments = enumerate(self.attachments.open())
        return [(one, shard_file(one, folder, f"comm_hook_{i}")) for i, one in attachments if one.has_state]

    def write(self, folder: str) -> None:
        for attachment, file in self._files(folder):
            save_shard(attachment, file)

    def read(self, folder: str) -> None:
        for attachment, file in self._files(folder):
            text = load_shard(attachment, file)
            if text is not None and PartialState().is_main_process:
                warnings.warn(text, stacklevel=4)
