"""The state of a hook with its name and options, to recognize it: for checkpoints, and for hooks made of hooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lightning_commhooks.interface.hook import BoundHook, CommHook
from lightning_commhooks.interface.options import values_of
from lightning_commhooks.interface.state import StateReader, StateWriter


def describe(hook: CommHook) -> dict[str, Any]:
    """A hook's name and options as primitives."""
    return {"name": hook.name, "options": {name: _primitive(value) for name, value in values_of(hook).items()}}


def _primitive(value: object) -> Any:
    if isinstance(value, CommHook):
        return describe(value)
    if isinstance(value, Mapping):
        return {str(key): _primitive(part) for key, part in value.items()}
    return value if type(value) in (type(None), str, int, float, bool) else repr(value)


def save_hook(hook: CommHook, bound: BoundHook, writer: StateWriter) -> dict[str, Any]:
    """The state of a hook, with its name and options."""
    return {**describe(hook), "state": bound.state_dict(writer)}


def load_hook(
    saved: Any,
    hook: CommHook,
    bound: BoundHook,
    reader: StateReader,
    has: Callable[[str], bool] = lambda name: True,
) -> None:
    """Load a result of [`save_hook`][] into a hook, with the reader of the whole state.

    `has` says whether a parameter of the model, by name, is one of this hook's.
    """
    if not isinstance(saved, Mapping) or not {"name", "options", "state"} <= saved.keys():
        reader.differs(f"there is nothing of hook {hook.name!r}")
    elif saved["name"] != hook.name:
        reader.differs(f"it is of hook {saved['name']!r}, not of {hook.name!r}")
    else:
        now = describe(hook)["options"]
        changed = [f"{k} was {v!r}, is {now.get(k)!r}" for k, v in saved["options"].items() if v != now.get(k)]
        with reader.of_hook(f" ({'; '.join(changed)})" if changed else "", has):
            bound.load_state_dict(saved["state"], reader)
