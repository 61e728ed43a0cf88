"""The start of a hook: a step, a fraction of the run or `"auto"`; and copies of hooks with other starts."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lightning_commhooks.interface.checks import check_integer
from lightning_commhooks.interface.hook import CommHook

# The fraction of the run after which "auto" begins, if the length of the run is known and this is sooner than the
# default of the class.
_PART = 0.1
# The option of low-rank hooks that sets the rank.
RANK = "matrix_approximation_rank"


def check_start(field: str, value: object) -> None:
    """Refuse anything but a step, a fraction of the run or `"auto"`; raises a `ValueError`."""
    if (isinstance(value, float) and not 0 < value < 1) or (isinstance(value, str) and value != "auto"):
        raise ValueError(f"{field} must be a step, an integer, a fraction of the run, as 0.1, or 'auto', got {value!r}")
    if not isinstance(value, (float, str)):
        check_integer(field, value, 0)


def text_of_steps(num: int) -> str:
    """Return a number of steps as text, such as `1 step` or `1,200 steps`."""
    return f"{num:,} step{'' if num == 1 else 's'}"


def is_start(field: str) -> bool:
    """Whether an option of a hook is a start, such as `start_powerSGD_iter`."""
    return field.startswith("start_") and field.endswith("_iter")


def depends_on_length(start: object) -> bool:
    """Whether the step that a start means depends on the length of the run."""
    return isinstance(start, (float, str))


def start_of(hook: Any, field: str, num_steps: int = 0) -> float:
    """Return the step that a start option of a hook means.

    Args:
        hook: the configuration of the hook.
        field: name of the option.
        num_steps: length of the run, in synchronized backwards; 0: unknown, and a fraction is returned as it is.
    """
    start = getattr(hook, field)
    if start == "auto":
        default: int = type(hook).__dataclass_fields__[field].default
        return min(default, int(num_steps * _PART)) if num_steps else default
    return int(num_steps * start) if isinstance(start, float) and num_steps else start


def auto_starts(hook_class: type) -> dict[str, str]:
    """Return the options of a hook that is chosen by its name: `"auto"` for each start above 0 whose type allows it."""
    fields: dict[str, Any] = getattr(hook_class, "__dataclass_fields__", {})
    starts = {name: field for name, field in fields.items() if is_start(name) and "auto" in str(field.type)}
    return {name: "auto" for name, field in starts.items() if isinstance(field.default, int) and field.default > 0}


def late_starts(hook: CommHook) -> Iterator[tuple[CommHook, str, float | str]]:
    """Yield the starts above 0 of a hook and of the hooks inside it: the hook, the name and the value of each."""
    for each in hooks_in(hook):
        for name, value in _fields_of(each).items():
            if is_start(name) and start_of(each, name):
                yield each, name, value


def hooks_in(hook: CommHook) -> Iterator[CommHook]:
    """Yield a hook and the hooks inside it."""
    yield hook
    for inner in hook.inner_hooks:
        yield from hooks_in(inner)


def _fields_of(hook: CommHook) -> dict[str, Any]:
    names: list[str] = [field.name for field in dataclasses.fields(hook)] if dataclasses.is_dataclass(hook) else []
    return {name: getattr(hook, name) for name in names}


@functools.singledispatch
def at_once(hook: CommHook) -> CommHook:
    """Return the hook as it is after all starts: each start is 0, and of a schedule only the last phase is left."""
    return _changed(hook, {name: 0 for owner, name, _ in late_starts(hook) if owner is hook}, at_once)


def started(hook: CommHook, num_steps: int) -> CommHook:
    """Return the hook for a run of `num_steps` synchronized backwards: each start is a step."""
    starts = {name: start_of(hook, name, num_steps) for owner, name, _ in late_starts(hook) if owner is hook}
    return _changed(hook, starts, lambda inner: started(inner, num_steps))


def begun_at(hook: CommHook, step: int) -> CommHook:
    """Return the hook with each start above 0 set to `step`."""
    starts = {name: step for owner, name, _ in late_starts(hook) if owner is hook}
    return _changed(hook, starts, lambda inner: begun_at(inner, step))


def with_rank(hook: CommHook, times: int) -> CommHook:
    """Return the hook with each rank of an approximation multiplied by `times`."""
    fields = _fields_of(hook)
    return _changed(hook, {RANK: times * fields[RANK]} if RANK in fields else {}, lambda inner: with_rank(inner, times))


def _changed(hook: CommHook, changes: dict[str, Any], change: Callable[[CommHook], CommHook]) -> CommHook:
    """Return a hook with the options in `changes`, and with `change` applied to the hooks inside it."""
    for name, value in _fields_of(hook).items():
        if isinstance(value, CommHook):
            changes[name] = change(value)
        elif isinstance(value, Mapping) and hook.inner_hooks:
            changes[name] = {k: change(v) if isinstance(v, CommHook) else v for k, v in value.items()}
    return dataclasses.replace(hook, **changes) if changes else hook  # type: ignore[type-var]
