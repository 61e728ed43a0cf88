"""Hooks that begin to compress after some steps, and how they would be if they began at once."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lightning_commhooks.interface.hook import CommHook
from lightning_commhooks.interface.registry import get_hook
from lightning_commhooks.interface.start import is_start, start_of

# The option of low-rank hooks.
RANK = "matrix_approximation_rank"


def late_starts(hook: CommHook) -> Iterator[tuple[CommHook, str, float | str]]:
    """Options as `start_powerSGD_iter` that are above 0, of a hook and of those within it: whose, name and value."""
    for name, value in _fields_of(hook).items():
        if is_start(name) and start_of(hook, name):
            yield hook, name, value
    for inner in hook.inner_hooks:
        yield from late_starts(inner)


def _fields_of(hook: CommHook) -> dict[str, Any]:
    names: list[str] = [field.name for field in dataclasses.fields(hook)] if dataclasses.is_dataclass(hook) else []
    return {name: getattr(hook, name) for name in names}


@functools.singledispatch
def at_once(hook: CommHook) -> CommHook:
    """The same hook beginning with what it does in the long run, and the last phase of a schedule."""
    return _changed(hook, {name: 0 for owner, name, _ in late_starts(hook) if owner is hook}, at_once)


def started(hook: CommHook, num_steps: int) -> CommHook:
    """The same hook in a run of `num_steps` synchronized backwards: each start is a step."""
    starts = {name: start_of(hook, name, num_steps) for owner, name, _ in late_starts(hook) if owner is hook}
    return _changed(hook, starts, lambda inner: started(inner, num_steps))


def begun_at(hook: CommHook, step: int) -> CommHook:
    """The same hook with each start that is above 0 at `step`."""
    starts = {name: step for owner, name, _ in late_starts(hook) if owner is hook}
    return _changed(hook, starts, lambda inner: begun_at(inner, step))


def with_rank(hook: CommHook, times: int) -> CommHook:
    """The same hook with each rank of an approximation so many times as high."""
    fields = _fields_of(hook)
    return _changed(hook, {RANK: times * fields[RANK]} if RANK in fields else {}, lambda inner: with_rank(inner, times))


def _changed(hook: CommHook, changes: dict[str, Any], change: Callable[[CommHook], CommHook]) -> CommHook:
    """A hook with other options, and with the hooks within it changed too."""
    for name, value in _fields_of(hook).items():
        if isinstance(value, CommHook):
            changes[name] = change(value)
        elif isinstance(value, Mapping) and hook.inner_hooks:
            changes[name] = {key: change(get_hook(inner)) for key, inner in value.items()}
    return dataclasses.replace(hook, **changes) if changes else hook  # type: ignore[type-var]
