"""Saves hook state as tensors and primitives; loads it on any world size, and reports parts that do not fit."""

from __future__ import annotations

import logging
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from lightning_commhooks.interface.averages_models import averages_models
from lightning_commhooks.interface.hook import BoundHook, CommHook
from lightning_commhooks.interface.hook_state import load_hook, save_hook
from lightning_commhooks.interface.layout import Layout
from lightning_commhooks.interface.models import Models
from lightning_commhooks.interface.state import PerRank, StateError, StateReader, StateWriter
from lightning_commhooks.runtime.resharding import resharded
from lightning_commhooks.runtime.running import RunningHook

# Users may refer to this name in their logging configuration.
logger = logging.getLogger(__name__)

FORMAT = 1
_KEYS = {"format", "steps", "world_size", "per_rank", "parameters", "num_tensors", "hook"}
# A value instead of a `PerRank`, for states that one rank saved without its peers.
_STEPS_ONLY = "none"


def save(run: RunningHook, models: Models, kind: PerRank) -> dict[str, Any]:
    """Return a hook's state as tensors and primitives, rank-uniform. Collective."""
    group = run.bound.group
    with group.counters.evaluating():
        models.may_differ |= run.clock.steps > 0 and run.bound.is_local(run.clock.steps - 1)
        writer = StateWriter(group, kind)
        hook = save_hook(run.method, run.bound, writer)
        return _complete(run, models, kind, hook, models.state_dict(writer))


def save_alone(run: RunningHook, models: Models, kind: PerRank) -> dict[str, Any]:
    """Return one rank's state of a hook: its own, or for a joining replica. Not collective."""
    hook = save_hook(run.method, run.bound, StateWriter(run.bound.group, kind))
    return _complete(run, models, kind, hook, {})


def load_alone(saved: Mapping[str, Any], run: RunningHook, bound: BoundHook, models: Models) -> None:
    """Load a result of [`save_alone`][] from this or another rank into a new runtime object. Not collective.

    Raises:
        StateError: the state does not fit.
    """
    _load(_named_as_now(saved, models.layout), run, bound, models, strict=True)


def save_steps(run: RunningHook, models: Models) -> dict[str, Any]:
    """Return only the step count, in the format of [`save`][]. Not collective, and allowed in any thread."""
    return _complete(run, models, _STEPS_ONLY, {}, {})


def _complete(
    run: RunningHook, models: Models, kind: str, hook: dict[str, Any], own_models: dict[str, Any]
) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "steps": run.clock.steps,
        "num_steps": run.num_steps,
        "optimizer_steps": dict(models.num_steps),
        "world_size": run.bound.group.size,
        "per_rank": kind,
        "shard": run.source.shard,
        "parameters": {name: list(shape) for name, shape in models.layout.shapes.items()},
        "num_tensors": _num_tensors(hook, own_models),
        "hook": hook,
        "models": own_models,
    }


def _of_this_shard(states: Sequence[Any], run: RunningHook, layout: Layout) -> dict[str, Any]:
    """Return the state of this rank's shard, from the states of all saved shards."""
    if problem := next((found for state in states if (found := _problem(state))), "" if states else "there is none"):
        raise StateError(f"not the states of a communication hook on all shards: {problem}")
    told = [state.get("shard", []) for state in states]
    if told != [[[i, len(states)]] for i in range(len(states))] and told != [[]]:
        raise StateError(f"not the states of all shards in order: they are of {', '.join(map(_told, told))}")
    shard = run.source.shard
    hook, lost = resharded(states, shard, layout)
    parameters = {name: list(shape) for name, shape in layout.shapes.items()}
    own = {"shard": shard, "parameters": parameters, "num_tensors": _num_tensors(hook, {}), "hook": hook, "models": {}}
    return {**states[0], **own, "lost": lost}


def load(
    saved: Any, run: RunningHook, bound: BoundHook, models: Models, strict: bool
) -> tuple[int, dict[str, int] | None, list[str]]:
    """Load a result of [`save`][] into a new runtime object of a hook. Collective, on the engine.

    A sequence has the states of all shards of a sharded model, perhaps of a different number of shards.

    Returns:
        the step count, 0 if `saved` is not a state; steps by optimizer, `None` for version 0.1; and descriptions of the
        parts that were skipped because they do not fit, none if `strict`.

    Raises:
        StateError: on all ranks, if the state does not fit on one rank, or ranks have different states.
    """
    error, problem = "", ""
    differences: list[str] = []
    staged: list[tuple[Tensor, Tensor]] = []
    try:
        if isinstance(saved, (list, tuple)):
            saved = _of_this_shard([_named_as_now(one, models.layout) for one in saved], run, models.layout)
        saved = _named_as_now(saved, models.layout)
        if problem := _problem(saved):
            if strict:
                raise StateError(
                    f"not the state of a communication hook: {problem}. With strict_state=False it is ignored"
                )
            differences = [f"the whole state, {problem}"]
        elif saved["per_rank"] == _STEPS_ONLY:
            _tell_that_it_begins_anew(saved, run.method, bound)
        else:
            differences, staged = _load(saved, run, bound, models, strict)
    except Exception as reason:
        error = str(reason) if isinstance(reason, ValueError) else f"the state cannot be read: {reason!r}"
    digest = -1 if error else 0 if problem else _digest(saved)
    digests = [own for (own,) in bound.group.all_gather_quietly([digest])]
    if error:
        raise StateError(error)
    if -1 in digests:
        raise StateError(f"the state of the communication hook does not fit on rank {digests.index(-1)} of its group")
    if len(set(digests)) > 1:
        raise StateError("ranks were given different states of the communication hook; load the same on all of them")
    models.restore(staged, saved["models"] if staged else {})
    return (0, None, differences) if problem else (saved["steps"], _optimizer_steps_of(saved), differences)


def _named_as_now(saved: Any, layout: Layout) -> Any:
    """Return a state with this model's names of the parameters, without wrappers."""
    names = saved.get("parameters") if isinstance(saved, Mapping) else None
    if not isinstance(names, Mapping) or all(layout.name_now(name) == name for name in names):
        return saved
    return layout.with_names_of_now(saved)


def _tell_that_it_begins_anew(saved: Mapping[str, Any], hook: CommHook, bound: BoundHook) -> None:
    if (bound.has_memory or averages_models(bound)) and bound.group.rank == 0:
        warnings.warn(
            f"the state of hook {hook.name!r} was saved without averaging over ranks, in a signal handler, after a "
            f"failure or after a fit that wrote no checkpoints: it has the step count, {saved['steps']}, and nothing "
            "else. The hook's memory is reset",
            stacklevel=2,
        )


def _load(
    saved: Any, run: RunningHook, bound: BoundHook, models: Models, strict: bool
) -> tuple[list[str], list[tuple[Tensor, Tensor]]]:
    hook, reader = run.method, StateReader(saved, models.layout.shapes, bound.group, strict)
    if (shard := saved.get("shard", [])) != run.source.shard:
        reader.differs(
            f"it is of shard {_told(shard)}, and this rank has shard {_told(run.source.shard)}: save the state of each "
            "shard, and load it on the ranks of that shard, or load a list of the states of all shards"
        )
        return reader.differences, []
    for name in saved.get("lost", ()):
        reader.differs(f"its memory of {name!r} cannot be resharded for this shard")
    if bound.has_memory and saved["hook"].get("name") == hook.name:
        reader.check_parameters()
    load_hook(saved["hook"], hook, bound, reader)
    own_models = saved.get("models") if reader.is_exact else None
    staged = models.stage(own_models, reader) if own_models else []
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


def _optimizer_steps_of(saved: Mapping[str, Any]) -> dict[str, int] | None:
    """Return steps by optimizer; `None` for a state of version 0.1, which lacks them."""
    found = saved.get("optimizer_steps")
    if not isinstance(found, Mapping) or any(type(num) is not int or num < 0 for num in found.values()):
        return None
    return dict(found)


def _problem(saved: Any) -> str:
    """Return why a value is not a result of [`save`][]; empty if it is one."""
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
