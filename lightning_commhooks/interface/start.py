"""The start of a hook: a step, a fraction of the run or `"auto"`; and copies of hooks with other starts."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lightning_commhooks.interface.checks import check_integer
from lightning_commhooks.interface.hook import CommHook
from lightning_commhooks.interface.options import values_of

# "auto" begins after this fraction of the run, or at the default step of the class if that is sooner.
_AUTO_FRACTION = 0.1
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
    """Return the step that a start option of a hook means in a run of `num_steps` synchronized backwards.

    If that number is unknown, 0, a fraction is returned as it is.
    """
    start = getattr(hook, field)
    if start == "auto":
        default: int = type(hook).__dataclass_fields__[field].default
        return min(default, int(num_steps * _AUTO_FRACTION)) if num_steps else default
    return int(num_steps * start) if isinstance(start, float) and num_steps else start


def auto_starts(hook_class: type) -> dict[str, str]:
    """Return the options of a hook that is chosen by its name: `"auto"` for each start above 0 whose type allows it."""
    fields: dict[str, Any] = getattr(hook_class, "__dataclass_fields__", {})
    starts = {name: field for name, field in fields.items() if is_start(name) and "auto" in str(field.type)}
    return {name: "auto" for name, field in starts.items() if isinstance(field.default, int) and field.default > 0}


def late_starts(hook: CommHook) -> Iterator[tuple[CommHook, str, float | str]]:
    """Yield the starts above 0 of a hook and of the hooks inside it: the hook, the name and the value of each."""
    for each in hooks_in(hook):
        for name, value in values_of(each).items():
            if _is_late(each, name):
                yield each, name, value


def _is_late(hook: CommHook, option: str) -> bool:
    # The start of a third-party hook may be `None`.
    return is_start(option) and (start_of(hook, option) or 0) > 0


def hooks_in(hook: CommHook) -> Iterator[CommHook]:
    """Yield a hook and the hooks inside it."""
    yield hook
    for inner in hook.inner_hooks:
        yield from hooks_in(inner)


@functools.singledispatch
def started_at_once(hook: CommHook) -> CommHook:
    """Return the hook as it is after all starts: each start is 0, and of a schedule only the last phase is left."""
    return changed(hook, lambda own, name, value: 0 if _is_late(own, name) else value, started_at_once)


def started(hook: CommHook, num_steps: int) -> CommHook:
    """Return the hook for a run of `num_steps` synchronized backwards: each start is a step."""
    return changed(hook, lambda own, name, value: start_of(own, name, num_steps) if _is_late(own, name) else value)


def started_at(hook: CommHook, step: int) -> CommHook:
    """Return the hook with each start above 0 set to `step`."""
    return changed(hook, lambda own, name, value: step if _is_late(own, name) else value)


def changed(
    hook: CommHook,
    option: Callable[[CommHook, str, Any], Any],
    inner: Callable[[CommHook], CommHook] | None = None,
) -> CommHook:
    """Return a hook with other options.

    `option` returns the new value of an option, from its owner, name and value. `inner` changes the hooks inside; by
    default, their options change in the same way.
    """
    change = inner or (lambda hook: changed(hook, option))
    new: dict[str, Any] = {}
    for name, value in values_of(hook).items():
        if isinstance(value, CommHook):
            new[name] = change(value)
        elif isinstance(value, Mapping) and hook.inner_hooks:
            new[name] = {k: change(v) if isinstance(v, CommHook) else v for k, v in value.items()}
        else:
            new[name] = option(hook, name, value)
    new = {name: value for name, value in new.items() if value != getattr(hook, name)}
    return dataclasses.replace(hook, **new) if new else hook  # type: ignore[type-var]
