"""Hooks by their names, with options."""

from __future__ import annotations

import re
from typing import Any

from lightning_commhooks.interface.hook import CommHook
from lightning_commhooks.interface.misplaced import refusal, with_options, written
from lightning_commhooks.interface.names import available_hooks as available_hooks
from lightning_commhooks.interface.names import get_hook_class as get_hook_class
from lightning_commhooks.interface.names import register as register
from lightning_commhooks.interface.start import auto_starts


def get_hook(hook: str | CommHook, **options: Any) -> CommHook:
    """Return the hook of that name.

    A name means `start_powerSGD_iter="auto"`, or the same of another start, unless that option is given.

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
    named = {name: start for name, start in auto_starts(hook_class).items() if name not in given}
    try:
        return hook_class(**named, **options)
    except TypeError as error:
        raise ValueError(f"{hook_class.__name__}: {error}") from error


def get_inner_hook(hook: str | CommHook, place: str = "") -> CommHook:
    """Return a hook, as [`get_hook`][], for another one to go around; refuse one that no other goes around.

    `place` begins messages: the option of the other hook, such as `"candidates: "`.
    """
    try:
        return _inner_hook(hook)
    except ValueError as error:
        raise ValueError(f"{place}{error}") from error


def _inner_hook(hook: str | CommHook) -> CommHook:
    inner = get_hook(hook)
    if inner.is_outermost:
        name = type(inner).__name__
        raise ValueError(f"{name} cannot be inside another hook: put the other hook inside {name}")
    if inner.is_uneven:
        raise ValueError(f"{inner!r} cannot be inside another hook: with it, ranks take different numbers of steps")
    return inner
