"""Hooks that begin to compress after some steps, and how they would be if they began at once."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

from lightning_commhooks.interface.hook import CommHook


def late_starts(hook: CommHook) -> Iterator[tuple[CommHook, str, int]]:
    """Options as `start_powerSGD_iter` that are above 0, of a hook and of those within it: whose, name and value."""
    for name, value in _fields_of(hook).items():
        if name.startswith("start_") and name.endswith("_iter") and value:
            yield hook, name, value
    for inner in hook.inner_hooks:
        yield from late_starts(inner)


def _fields_of(hook: CommHook) -> dict[str, Any]:
    names: list[str] = [field.name for field in dataclasses.fields(hook)] if dataclasses.is_dataclass(hook) else []
    return {name: getattr(hook, name) for name in names}


@functools.singledispatch
def at_once(hook: CommHook) -> CommHook:
    """The same hook beginning with what it does in the long run, and the last phase of a schedule."""
    changes: dict[str, Any] = {name: 0 for owner, name, _ in late_starts(hook) if owner is hook}
    for name, value in _fields_of(hook).items():
        if isinstance(value, CommHook):
            changes[name] = at_once(value)
        elif isinstance(value, Mapping) and any(isinstance(inner, CommHook) for inner in value.values()):
            changes[name] = {key: at_once(inner) for key, inner in value.items()}
    return dataclasses.replace(hook, **changes) if changes else hook  # type: ignore[type-var]
