"""Saves hook state as tensors and primitives; loads it on any world size, and reports parts that do not fit."""

from __future__ import annotations

import itertools
import logging
import math
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_commhooks.collectives.averaging import own_part
from lightning_commhooks.interface.hook import BoundHook, CommHook
from lightning_commhooks.interface.hook_state import load_hook, save_hook
from lightning_commhooks.interface.layout import Layout, memory_shape
from lightning_commhooks.interface.state import PerRank, StateError, StateReader, StateWriter

if TYPE_CHECKING:
    from lightning_commhooks.runtime.runtime import Runtime

# Users may refer to this name in their logging configuration.
logger = logging.getLogger(__name__)

FORMAT = 1
_DICTS = ("hook", "parameters", "orders", "models", "optimizer_steps")
_KEYS = {"format", "steps", "num_steps", "world_size", "per_rank", "shard", "num_tensors", *_DICTS}
# A value instead of a `PerRank`, for states that one rank saved without its peers.
_STEPS_ONLY = "none"
_NOTHING = object()


def save(runtime: Runtime, kind: PerRank) -> dict[str, Any]:
    """Return a hook's state as tensors and primitives, rank-uniform. Collective."""
    group, models = runtime.bound.group, runtime.local.models
    with group.counters.evaluating():
        models.may_differ |= runtime.clock.steps > 0 and runtime.bound.is_local(runtime.clock.steps - 1)
        writer = StateWriter(group, kind)
        hook = save_hook(runtime.method, runtime.bound, writer)
        return _complete(runtime, kind, hook, models.state_dict(writer))


def save_alone(runtime: Runtime, kind: PerRank) -> dict[str, Any]:
    """Return one rank's state of a hook: its own, or for a joining replica. Not collective."""
    hook = save_hook(runtime.method, runtime.bound, StateWriter(runtime.bound.group, kind))
    return _complete(runtime, kind, hook, {})


def load_alone(saved: Mapping[str, Any], runtime: Runtime, bound: BoundHook) -> None:
    """Load a result of [`save_alone`][] from this or another rank into a new runtime object. Not collective.

    Raises a `StateError` if the state does not fit.
    """
    _load(saved, runtime, bound, strict=True)


def save_steps(runtime: Runtime) -> dict[str, Any]:
    """Return only the step count, in the format of [`save`][]. Not collective, and allowed in any thread."""
    return _complete(runtime, _STEPS_ONLY, {"name": runtime.method.name}, {})


def _complete(runtime: Runtime, kind: str, hook: dict[str, Any], own_models: dict[str, Any]) -> dict[str, Any]:
    models = runtime.local.models
    return {
        "format": FORMAT,
        "steps": runtime.clock.steps,
        "num_steps": runtime.num_steps,
        "optimizer_steps": dict(models.num_steps),
        "world_size": runtime.bound.group.size,
        "per_rank": kind,
        "shard": runtime.source.shard,
        "parameters": {name: list(shape) for name, shape in models.layout.shapes.items()},
        "orders": models.layout.orders,
        "num_tensors": _num_tensors(hook, own_models),
        "hook": hook,
        "models": own_models,
    }


def _of_this_shard(states: Sequence[Any], runtime: Runtime) -> dict[str, Any]:
    """Return the state of this rank's shard, from the states of all saved shards."""
    if problem := next((found for state in states if (found := _problem(state))), "" if states else "there is none"):
        raise StateError(f"not the states of a communication hook on all shards: {problem}")
    told = [state["shard"] for state in states]
    are_nested = all(len(one) > 1 for one in told)
    if told != [[[i, len(states)]] for i in range(len(states))] and told != [[]] and not are_nested:
        raise StateError(f"not the states of all shards in order: they are of {', '.join(map(_told, told))}")
    shard, layout = runtime.source.shard, runtime.layout
    hook, lost = resharded(states, shard, layout)
    parameters = {name: list(shape) for name, shape in layout.shapes.items()}
    own = {"shard": shard, "parameters": parameters, "num_tensors": _num_tensors(hook, {}), "hook": hook, "models": {}}
    return {**states[0], **own, "lost": lost}


def load(saved: Any, runtime: Runtime, bound: BoundHook, strict: bool) -> tuple[int, dict[str, int], list[str]]:
    """Load a result of [`save`][] into a new runtime object of a hook. Collective, on the engine.

    A sequence has the states of all shards of a sharded model, perhaps of a different number of shards.

    Returns:
        the step count, 0 if `saved` is not a state; steps by optimizer; and descriptions of the parts that were skipped
        because they do not fit, none if `strict`.

    Raises:
        StateError: on all ranks, if the state does not fit on one rank, or ranks have different states.
    """
    error, problem = "", ""
    differences: list[str] = []
    staged: list[tuple[Tensor, Tensor]] = []
    try:
        if isinstance(saved, (list, tuple)):
            saved = _of_this_shard(saved, runtime)
        if problem := _problem(saved):
            if strict:
                raise StateError(
                    f"not the state of a communication hook: {problem}. With strict_state=False it is ignored"
                )
            differences = [f"the whole state, {problem}"]
        elif saved["per_rank"] == _STEPS_ONLY:
            differences = _of_another_hook(saved, runtime, bound, strict)
            _warn_of_reset(saved, runtime.method, bound)
        else:
            differences, staged = _load(saved, runtime, bound, strict)
    except Exception as reason:
        error = str(reason) if isinstance(reason, ValueError) else f"the state cannot be read: {reason!r}"
    digest = -1 if error else 0 if problem else _digest(saved)
    digests = [own for (own,) in bound.group.all_gather_quietly([digest])]
    if not error and -1 in digests:
        error = f"the state of the communication hook does not fit on rank {digests.index(-1)} of its group"
    elif not error and len(set(digests)) > 1:
        error = "ranks were given different states of the communication hook; load the same on all of them"
    fits_everywhere = not error
    if runtime.source.shard_groups:
        fits = torch.tensor(fits_everywhere, device=runtime.source.device)
        fits_everywhere = bool(runtime.source.smallest(fits))
    if error or not fits_everywhere:
        raise StateError(error or "the state of the communication hook does not fit on the ranks of another shard")
    runtime.local.models.restore(staged, saved["models"] if staged else {})
    return (0, {}, differences) if problem else (saved["steps"], dict(saved["optimizer_steps"]), differences)


def _of_another_hook(saved: Mapping[str, Any], runtime: Runtime, bound: BoundHook, strict: bool) -> list[str]:
    reader = StateReader(saved, {}, bound.group, strict, {})
    if (name := saved["hook"].get("name", runtime.method.name)) != runtime.method.name:
        reader.differs(f"it is of hook {name!r}, not of {runtime.method.name!r}")
    return reader.differences


def _warn_of_reset(saved: Mapping[str, Any], hook: CommHook, bound: BoundHook) -> None:
    if (bound.has_memory or bound.averages_models) and bound.group.rank == 0:
        name = saved["hook"].get("name", hook.name)
        warnings.warn(
            f"the state of hook {name!r} was saved without averaging over ranks, in a signal handler, after a failure "
            f"or after a fit that wrote no checkpoints: it has the step count, {saved['steps']}, and nothing else. The "
            "hook's memory is reset",
            stacklevel=2,
        )


def _load(
    saved: Any, runtime: Runtime, bound: BoundHook, strict: bool
) -> tuple[list[str], list[tuple[Tensor, Tensor]]]:
    hook, layout = runtime.method, runtime.layout
    reader = StateReader(saved, layout.shapes, bound.group, strict, layout.orders)
    if (shard := saved["shard"]) != runtime.source.shard:
        reader.differs(
            f"it is of shard {_told(shard)}, and this rank has shard {_told(runtime.source.shard)}: save the state of "
            "each shard, and load it on the ranks of that shard, or load a list of the states of all shards"
        )
        return reader.differences, []
    for name in saved.get("lost", ()):
        reader.differs(f"its memory of {name!r} cannot be resharded for this shard")
    if bound.has_memory and saved["hook"].get("name") == hook.name:
        reader.check_parameters()
    load_hook(saved["hook"], hook, bound, reader)
    # Without averages of models, ranks would never be equal again.
    own_models = saved["models"] if reader.is_exact and bound.averages_models else None
    staged = runtime.local.models.stage(own_models, reader) if own_models else []
    is_alone = saved["per_rank"] in ("own", "joining")
    if bound.has_memory and saved["world_size"] != bound.group.size and bound.group.rank == 0 and not is_alone:
        logger.info(
            "state of hook %r: saved on %d ranks, loaded on %d; each begins with the mean of the residuals",
            hook.name,
            saved["world_size"],
            bound.group.size,
        )
    return reader.differences, staged


def _told(shard: Sequence[Sequence[int]]) -> str:
    return " and ".join(f"{index} of {size}" for index, size in shard) or "0 of 1"


def num_steps_of(saved: Any) -> int | None:
    """Return the length of the run that determined its starts; see `Runtime.num_steps`."""
    saved = saved[0] if isinstance(saved, (list, tuple)) and saved else saved
    found = saved.get("num_steps") if isinstance(saved, Mapping) else None
    return found if type(found) is int and found >= 0 else None


def _problem(saved: Any) -> str:
    """Return why a value is not a result of [`save`][]; empty if it is one."""
    if not isinstance(saved, Mapping):
        return f"it is a {type(saved).__name__}"
    if saved.get("format") != FORMAT:
        return f"its format is {saved.get('format')!r}, not {FORMAT}"
    if missing := _KEYS - saved.keys():
        return f"it has no {sorted(missing)[0]!r}"
    if wrong := next((key for key in _DICTS if not isinstance(saved[key], Mapping)), ""):
        return f"its {wrong!r} is no dictionary"
    for key in ("steps", "world_size"):
        if type(saved[key]) is not int or saved[key] < 0:
            return f"its {key!r} is {saved[key]!r}"
    num_tensors = _num_tensors(saved["hook"], saved["models"])
    if num_tensors != saved["num_tensors"]:
        return (
            f"it has {num_tensors} tensors of {saved['num_tensors']}: it is truncated, or torch.distributed.checkpoint "
            "loaded it into the state of a new hook, which has none yet. Save it with torch.save"
        )
    return ""


def _num_tensors(*states: Any) -> int:
    return sum(isinstance(leaf, Tensor) for state in states for leaf in _leaves(state))


def _leaves(state: Any) -> Iterator[Any]:
    if isinstance(state, Mapping):
        # The order of the parameters may differ between ranks.
        for key in sorted(state, key=repr):
            yield key
            yield from _leaves(state[key])
    else:
        yield state


def _digest(saved: Any) -> int:
    """Return a digest of a state, from a part of each tensor."""
    digest = 0
    for leaf in _leaves(saved):
        some = leaf.reshape(-1)[:64].tolist() if isinstance(leaf, Tensor) else leaf
        digest = zlib.crc32(repr(some).encode(), digest)
    return digest


def resharded(
    states: Sequence[Mapping[str, Any]], shard: Sequence[Sequence[int]], layout: Layout
) -> tuple[Any, list[str]]:
    """Return the state of a hook for this rank's shard, and the names of parameters whose memory was lost.

    Per-element state of a parameter, such as residuals and anchors, is concatenated and split again. Other state of a
    parameter, such as PowerSGD's Q, comes from the shard that had this shard's first row. State that depends on the
    number of rows, such as PowerSGD's P, is reset.

    Args:
        states: results of `checkpoint.save` for each saved shard, in order.
        shard: index of this rank's shard and number of shards: `Source.shard`.
        layout: layout of the model.
    """
    # With nested sharding, as by tensor parallelism, the state of parameters is reset.
    are_nested = len(shard) > 1 or any(len(state["shard"]) > 1 for state in states)
    named = layout.trained.items() if not are_nested else ()
    index, size = shard[0] if shard else (0, 1)
    parts = {name: _Part(name, p, states, (index, size)) for name, p in named}
    lost: list[str] = []
    return _merged([state["hook"] for state in states], parts, None, lost), lost


class _Part:
    """Rows of a parameter on the saved shards and on this one; or columns, if these are sharded."""

    def __init__(
        self, name: str, parameter: Tensor, states: Sequence[Mapping[str, Any]], shard: tuple[int, int]
    ) -> None:
        dims = [one.dim for one in getattr(parameter, "placements", ()) if one.is_shard()]
        self._dim, self._shape = dims[0] if dims else 0, memory_shape(parameter)
        # Shards without rows lack the parameter.
        self._shapes = [tuple(state["parameters"].get(name, ())) for state in states]
        self._lengths = [shape[self._dim] if shape else 0 for shape in self._shapes]
        self._num_replicas = states[0]["world_size"] if states[0]["per_rank"] == "exact" else 1
        index, size = shard
        total = sum(self._lengths)
        self._start = min(index * -(-total // size), total)  # as `torch.chunk`
        self._length = self._shape[self._dim] if self._shape else 0
        # For a sharded parameter, whether the shards cover all of its rows.
        is_whole = not dims or total == parameter.shape[self._dim]
        others = {shape[: self._dim] + shape[self._dim + 1 :] for shape in (*self._shapes, self._shape) if shape}
        is_in_order = self._shape == tuple(own_part(parameter).shape)
        fits = 0 < self._length <= total - self._start and len(others) == 1
        self._fits = is_in_order and is_whole and fits
        # A shard without rows loses nothing.
        self.is_lost = self._length > 0 and not self._fits

    def of(self, tensors: Sequence[Tensor | None]) -> Tensor | None:
        """Return this shard's tensor from the tensors of the saved shards; `None`: there is none, or it is reset."""
        if not self._fits:
            return None
        about = zip(tensors, self._shapes, self._lengths, strict=True)
        found = [(tensor, shape, length) for tensor, shape, length in about if tensor is not None]
        nums = {tensor.numel() / math.prod(shape) for tensor, shape, _ in found}
        if nums not in ({1}, {self._num_replicas}):
            if all(length in tensor.shape for tensor, _, length in found):
                return None
            ends = itertools.accumulate(self._lengths)
            return next(tensor for tensor, end in zip(tensors, ends, strict=True) if self._start < end)
        num, (like, shape, _) = int(nums.pop()), found[0]
        is_flat = like.shape[-len(shape) :] != shape
        lead = like.shape[:-1] if is_flat else like.shape[: -len(shape)]
        whole = [
            (like.new_zeros(num, *shape) if tensor is None else tensor).reshape(num, *shape)
            for tensor, shape in zip(tensors, self._shapes, strict=True)
            if shape
        ]
        own = torch.cat(whole, dim=self._dim + 1).narrow(self._dim + 1, self._start, self._length)
        return own.reshape(*lead, *((-1,) if is_flat else self._shape)).clone()


def _merged(values: Sequence[Any], parts: Mapping[str, _Part], part: _Part | None, lost: list[str]) -> Any:
    """Merge the nested states of all shards, `_NOTHING` for a missing one, into the state of this shard."""
    there = [value for value in values if value is not _NOTHING]
    if all(isinstance(value, Mapping) for value in there):
        merged = {}
        for key in dict.fromkeys(key for value in there for key in value):
            of_key = [value if value is _NOTHING else value.get(key, _NOTHING) for value in values]
            own = _merged(of_key, parts, parts.get(key) if part is None else part, lost)
            if own is not _NOTHING:
                merged[key] = own
            elif any(isinstance(value, Mapping) for value in of_key) and (key not in parts or parts[key].is_lost):
                lost.append(key)
        had_tensors = any(isinstance(one, Tensor) for value in there for one in value.values())
        return _NOTHING if had_tensors and not merged else merged
    if not isinstance(there[0], Tensor):
        return there[0]
    found = None if part is None else part.of([None if value is _NOTHING else value for value in values])
    return _NOTHING if found is None else found
