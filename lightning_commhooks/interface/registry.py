"""Hooks by their names, with options."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from lightning_commhooks.interface.hook import CommHook
from lightning_commhooks.interface.misplaced import refusal, with_options, written
from lightning_commhooks.interface.names import available_hooks as available_hooks
from lightning_commhooks.interface.names import get_hook_class as get_hook_class
from lightning_commhooks.interface.names import register as register
from lightning_commhooks.interface.options import options_of
from lightning_commhooks.interface.start import DefaultStart, is_start


def get_hook(hook: str | CommHook, **options: Any) -> CommHook:
    """Return the hook of that name.

    Args:
        hook: one of `available_hooks()`, an alias, or a `CommHook`, which is returned as it is.
        **options: fields of the hook's class.

    Raises:
        ValueError: unknown name, unknown option, a value out of range, or options given with a `CommHook`.
    """
    if isinstance(hook, CommHook):
        if options:
            raise ValueError(
                f"options {sorted(options)} were given with a configured {type(hook).__name__}: write "
                f"hook={with_options(hook, options)}"
            )
        return hook
    if not isinstance(hook, str):
        raise ValueError(refusal(hook))
    if re.search(r"\W", hook) and (meant := written(hook)) is not None:
        raise ValueError(f"unknown hook {hook!r}, options are no part of a name: write hook={meant}")
    hook_class = get_hook_class(hook)
    short = getattr(hook_class, "option_aliases", {})
    given = {short.get(name, name) for name in options}
    try:
        made = hook_class(**options)
    except TypeError as error:
        raise ValueError(f"{hook_class.__name__}: {error}") from error
    return _by_name(made, [name for name in options_of(hook_class) if name not in given])


def _by_name(hook: CommHook, at_default: Sequence[str]) -> CommHook:
    """The hook with starts that follow the length of the run where that is known."""
    starts = {name: getattr(hook, name) for name in at_default if is_start(name)}
    late = {name: DefaultStart(start) for name, start in starts.items() if type(start) is int and start > 0}
    return dataclasses.replace(hook, **late) if late else hook  # type: ignore[type-var]


def get_inner_hook(hook: str | CommHook) -> CommHook:
    """Return a hook for another one to go around.

    Raises:
        ValueError: see [`get_hook`][]; or it is one that no other goes around.
    """
    inner = get_hook(hook)
    if inner.is_outermost:
        name = type(inner).__name__
        raise ValueError(f"{name} goes around all other hooks; it was put inside of one")
    if inner.is_uneven:
        raise ValueError(f"{inner!r} lets ranks take different numbers of steps, and no other hook goes around it")
    return inner
