"""Hooks as users write them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from lightning_commhooks.interface.hook import CommHook
from lightning_commhooks.interface.names import get_hook_class
from lightning_commhooks.interface.start import auto_starts, started_at


def code(hook: CommHook) -> str:
    """A hook as Python code, as short as it can be; of a class that is no dataclass, its `repr`."""
    has_fields: bool = dataclasses.is_dataclass(hook)
    if not has_fields:
        return repr(hook)
    options = {}
    for field in dataclasses.fields(hook):  # type: ignore[arg-type]
        value, default = getattr(hook, field.name), field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if field.init and value != default:
            options[field.name] = value
    if options == auto_starts(type(hook)) and _is_registered(hook):
        return f'"{hook.name}"'
    return f"{type(hook).__name__}({', '.join(f'{key}={_code(value)}' for key, value in options.items())})"


def earlier(hook: CommHook, num_steps: int) -> str:
    """Advice on a hook that does next to nothing in a run of so many steps, since it starts too late."""
    tenth = num_steps // 10
    return f"let it begin after about a tenth of training, {tenth:,}: hook={code(started_at(hook, tenth))}"


def _code(value: object) -> str:
    if isinstance(value, CommHook):
        return code(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_code(k)}: {_code(v)}" for k, v in value.items()) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ", ".join(map(_code, value)) + "]"
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _is_registered(hook: CommHook) -> bool:
    try:
        return get_hook_class(getattr(hook, "name", "")) is type(hook)
    except ValueError:
        return False
