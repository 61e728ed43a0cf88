"""Hook state as tensors and primitives; loads on another world size, and says what does not fit."""

from __future__ import annotations

import dataclasses
import logging
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from lightning_commhooks.core.collectives import Group
from lightning_commhooks.core.hook import BoundHook, CommHook

if TYPE_CHECKING:
    from lightning_commhooks.core.models import Models

logger = logging.getLogger(__name__)

FORMAT = 1
_KEYS = {"format", "steps", "world_size", "per_rank", "parameters", "num_tensors", "hook"}

# What a state has of the tensors that differ between ranks: their mean, those of each rank, or nothing.
PerRank = Literal["mean", "exact", "none"]


class StateError(ValueError):
    """A state does not fit the hook. Raised on all ranks alike; the hook goes on as it was."""


def describe(hook: CommHook) -> dict[str, Any]:
    """A hook's name and options as primitives."""
    hook = hook.method
    names: list[str] = [field.name for field in dataclasses.fields(hook)] if dataclasses.is_dataclass(hook) else []
    return {"name": hook.name, "options": {name: _primitive(getattr(hook, name)) for name in names}}


def _primitive(value: object) -> Any:
    if isinstance(value, CommHook):
        return describe(value)
    if isinstance(value, Mapping):
        return {str(key): _primitive(part) for key, part in value.items()}
    return value if value is None or isinstance(value, (str, int, float, bool)) else repr(value)


class StateWriter:
    """Copies tensors into a state, on CPU so that it can be loaded anywhere.

    Args:
        group: the ranks.
        kind: what to keep of the tensors that differ between ranks.
    """

    def __init__(self, group: Group, kind: PerRank) -> None:
        self._group = group
        self.kind = kind

    def shared(self, tensor: Tensor) -> Tensor:
        """A copy of a tensor that is equal on all ranks."""
        return tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)

    def per_rank(self, tensor: Tensor) -> Tensor:
        """Of a tensor that differs between ranks the mean, or all of them, shape `(w, *shape)`, if `kind` is so."""
        assert self.kind != "none"
        if self.kind == "exact":
            return self._group.all_gather(tensor.reshape(-1)).view(-1, *tensor.shape).cpu()
        mean = tensor.clone(memory_format=torch.contiguous_format)
        return self._group.all_reduce_mean_(mean).cpu()

    def hook(self, hook: CommHook, bound: BoundHook) -> dict[str, Any]:
        """The state of a hook, with what is needed to recognize it."""
        return {**describe(hook), "state": bound.state_dict(self)}


class StateReader:
    """Gives a hook its part of a saved state.

    Args:
        saved: what [`save`][] returned.
        shapes: of all parameters of the model, by name.
        group: the ranks now.
        strict: whether a difference is an error.

    Attributes:
        is_exact: whether each rank gets back exactly what it saved.
        has_per_rank: whether anything was saved of the tensors that differ between ranks.
        differences: what was left out so far, one text each.
    """

    def __init__(self, saved: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], group: Group, strict: bool):
        self._group = group
        self._strict = strict
        self._options = ""
        self._saved_exact = saved["per_rank"] == "exact"
        self.has_per_rank = saved["per_rank"] != "none"
        self.is_exact = self._saved_exact and saved["world_size"] == group.size
        self.differences: list[str] = []
        saved_shapes = {name: tuple(shape) for name, shape in saved["parameters"].items()}
        self._shapes = {name: shape for name, shape in shapes.items() if saved_shapes.get(name) == shape}
        self._parameters = saved_shapes, dict(shapes)

    def differs(self, problem: str) -> None:
        """Tell of a part of the state that does not fit. Returns only when that part may be left out.

        Raises:
            StateError: the state is to fit exactly.
        """
        if self._strict:
            raise StateError(
                f"the state of the communication hook does not fit: {problem}{self._options}. With strict_state=False "
                "entries that do not fit begin anew"
            )
        self.differences.append(problem)

    def check_parameters(self) -> None:
        """Tell of the parameters that are not the same as when the state was saved."""
        saved, now = self._parameters
        for name in {**saved, **now}:
            if name not in now:
                self.differs(f"parameter {name!r} of the state is not in the model")
            elif name not in saved:
                self.differs(f"parameter {name!r} of the model is not in the state")
            elif saved[name] != now[name]:
                self.differs(f"parameter {name!r} has shape {list(saved[name])} in the state and {list(now[name])} now")

    def section(self, state: Any, key: str) -> Mapping[str, Any]:
        """The dictionary `state[key]`; an empty one if there is none."""
        section = state.get(key) if isinstance(state, Mapping) else None
        if isinstance(section, Mapping):
            return section
        self.differs(f"it has no {key!r}")
        return {}

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """Shape of a parameter in memory order; `None` if the model now has none of that name and shape."""
        return self._shapes.get(name)

    def shared(self, tensor: Tensor) -> Tensor:
        """A copy on the gradients' device of what `StateWriter.shared` saved."""
        return tensor.to(self._group.device, copy=True)

    def per_rank(self, tensor: Tensor) -> Tensor:
        """This rank's part of what `StateWriter.per_rank` saved: its own or the mean, whose sum is the same."""
        if self._saved_exact:
            tensor = tensor[self._group.rank] if self.is_exact else tensor.mean(dim=0)
        return tensor.to(self._group.device, copy=True)

    def hook(
        self, saved: Any, hook: CommHook, bound: BoundHook, has: Callable[[str], bool] = lambda name: True
    ) -> None:
        """Let a hook load what `StateWriter.hook` saved of it.

        Args:
            saved: what was saved.
            hook: its configuration.
            bound: the hook.
            has: whether a parameter of the model, by name, is one of this hook's.
        """
        if not isinstance(saved, Mapping) or not {"name", "options", "state"} <= saved.keys():
            self.differs(f"there is nothing of hook {hook.method.name!r}")
        elif saved["name"] != hook.method.name:
            self.differs(f"it is of hook {saved['name']!r}, not of {hook.method.name!r}")
        else:
            now = describe(hook)["options"]
            changed = [f"{k} was {v!r}, is {now.get(k)!r}" for k, v in saved["options"].items() if v != now.get(k)]
            around, self._options = self._options, f" ({'; '.join(changed)})" if changed else ""
            others, self._shapes = self._shapes, {name: shape for name, shape in self._shapes.items() if has(name)}
            bound.load_state_dict(saved["state"], self)
            self._options, self._shapes = around, others


def save(
    hook: CommHook, bound: BoundHook, steps: int, shapes: Mapping[str, tuple[int, ...]], kind: PerRank, models: Models
) -> dict[str, Any]:
    """State of a hook as tensors and primitives, equal on all ranks. Collective."""
    with bound.group.counters.paused():
        writer = StateWriter(bound.group, kind)
        state = writer.hook(hook, bound)
        own_models = models.state_dict(writer)
    return complete(state, own_models, bound.group, steps, shapes, kind)


def complete(
    state: dict[str, Any],
    own_models: dict[str, Any],
    group: Group,
    steps: int,
    shapes: Mapping[str, tuple[int, ...]],
    kind: PerRank,
) -> dict[str, Any]:
    """The state of a hook and of models, with what is needed to load it."""
    return {
        "format": FORMAT,
        "steps": steps,
        "world_size": group.size,
        "per_rank": kind,
        "parameters": {name: list(shape) for name, shape in shapes.items()},
        "num_tensors": _num_tensors(state, own_models),
        "hook": state,
        "models": own_models,
    }


def load(
    saved: Any, hook: CommHook, bound: BoundHook, shapes: Mapping[str, tuple[int, ...]], strict: bool, models: Models
) -> tuple[int, list[str]]:
    """Let a hook take over what [`save`][] returned. Collective, on the engine.

    Returns:
        the step count, 0 of what is no state, and what was left out because it does not fit; nothing when `strict`.

    Raises:
        StateError: on all ranks, if on one of them the state does not fit, or ranks have different states.
    """
    error, problem = "", ""
    differences: list[str] = []
    staged: list[tuple[Tensor, Tensor]] = []
    try:
        problem = _problem(saved)
        differences, staged = _load(saved, problem, hook, bound, shapes, strict, models)
    except Exception as reason:
        error = str(reason) if isinstance(reason, ValueError) else f"the state cannot be read: {reason!r}"
    with bound.group.counters.paused():
        digest = -1 if error else 0 if problem else _digest(saved)
        digests = bound.group.all_gather(torch.tensor([digest], device=bound.group.device)).view(-1).tolist()
    if error:
        raise StateError(error)
    if -1 in digests:
        raise StateError(f"the state of the communication hook does not fit on rank {digests.index(-1)} of its group")
    if len(set(digests)) > 1:
        raise StateError("ranks were given different states of the communication hook; load the same on all of them")
    models.restore(staged, saved["models"] if staged else {})
    return 0 if problem else saved["steps"], differences


def _load(
    saved: Any,
    problem: str,
    hook: CommHook,
    bound: BoundHook,
    shapes: Mapping[str, tuple[int, ...]],
    strict: bool,
    models: Models,
) -> tuple[list[str], list[tuple[Tensor, Tensor]]]:
    if problem:
        if strict:
            raise StateError(f"not the state of a communication hook: {problem}. With strict_state=False it is ignored")
        return [f"the whole state, {problem}"], []
    reader = StateReader(saved, shapes, bound.group, strict)
    if bound.has_memory and saved["hook"].get("name") == hook.method.name:
        reader.check_parameters()
    reader.hook(saved["hook"], hook, bound)
    own_models = saved.get("models") if reader.is_exact else None
    staged = models.stage(own_models, reader) if own_models else []
    if bound.has_memory and saved["world_size"] != bound.group.size and bound.group.rank == 0:
        logger.info(
            "state of hook %r: saved on %d ranks, loaded on %d; each begins with the mean of what the ranks still owed",
            hook.method.name,
            saved["world_size"],
            bound.group.size,
        )
    return reader.differences, staged


def _problem(saved: Any) -> str:
    """Why this is nothing that [`save`][] returned, empty if it is."""
    if not isinstance(saved, Mapping):
        return f"it is a {type(saved).__name__}"
    if saved.get("format") != FORMAT:
        return f"its format is {saved.get('format')!r}, not {FORMAT}"
    if missing := _KEYS - saved.keys():
        return f"it has no {sorted(missing)[0]!r}"
    if not isinstance(saved["hook"], Mapping) or not isinstance(saved["parameters"], Mapping):
        return "its hook or parameters are no dictionary"
    for key in ("steps", "world_size"):
        if type(saved[key]) is not int or saved[key] < 0:
            return f"its {key!r} is {saved[key]!r}"
    num_tensors = _num_tensors(saved["hook"], saved.get("models"))
    if num_tensors != saved["num_tensors"]:
        return f"it is truncated: {num_tensors} tensors of {saved['num_tensors']}"
    return ""


def _num_tensors(*states: Any) -> int:
    return sum(isinstance(leaf, Tensor) for state in states for leaf in _leaves(state))


def _leaves(state: Any) -> Iterator[Any]:
    if isinstance(state, Mapping):
        for key in state:
            yield key
            yield from _leaves(state[key])
    else:
        yield state


def _digest(saved: Any) -> int:
    """A number that differs for different states, from a part of each tensor."""
    digest = 0
    for leaf in _leaves(saved):
        some = leaf.reshape(-1)[:64].tolist() if isinstance(leaf, Tensor) else leaf
        digest = zlib.crc32(repr(some).encode(), digest)
    return digest
