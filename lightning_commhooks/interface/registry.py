"""Names of hooks: built in, or added by third parties through entry points."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from lightning_commhooks.interface.hook import CommHook
from lightning_commhooks.interface.start import DefaultStart, is_start

ENTRY_POINT_GROUP = "lightning_commhooks.hooks"

_HookClass = TypeVar("_HookClass", bound=type[CommHook])
_classes: dict[str, type[CommHook]] = {}
_aliases: dict[str, str] = {}


def register(hook_class: _HookClass) -> _HookClass:
    """Class decorator: make a [`CommHook`][] known by its `name` and `aliases`.

    Raises:
        ValueError: another class has that name already.
    """
    own = (hook_class.name, *hook_class.aliases)
    known = {_plain(name): taken for name, taken in _classes.items()}
    known |= {_plain(alias): _classes[name] for alias, name in _aliases.items()}
    for name in own:
        taken = known.get(_plain(name))
        if taken is not None and taken is not hook_class:
            raise ValueError(
                f"the hook name {name!r} is taken by {taken.__module__}.{taken.__qualname__}; capitals and underscores "
                "make no other name"
            )
    _classes[hook_class.name] = hook_class
    _aliases.update(dict.fromkeys(hook_class.aliases, hook_class.name))
    return hook_class


def _third_party() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP)}


def available_hooks() -> list[str]:
    """Names that `get_hook`, `attach` and every adapter accept, sorted; those of entry points included."""
    return sorted({*_classes, *_third_party()})


def get_hook_class(name: str) -> type[CommHook]:
    """Return the configuration class of a hook.

    Args:
        name: one of `available_hooks()` or an alias of one; capitals and underscores do not matter, so that the name of
            the class does as well.

    Raises:
        ValueError: there is no such hook; the message has the known names and the closest one. Or the entry
            point of that name is not a `CommHook` class.
    """
    if (own := _classes.get(_aliases.get(name, name))) is not None:
        return own
    others = _third_party()
    if name in others:
        loaded = others[name].load()
        if not (isinstance(loaded, type) and issubclass(loaded, CommHook)):
            raise ValueError(
                f"entry point {name!r} of group {ENTRY_POINT_GROUP!r} must be a CommHook class, is {loaded!r}"
            )
        return loaded
    exact = {_plain(known): known for known in (*others, *_aliases, *_classes)}
    if _plain(name) in exact:
        return get_hook_class(exact[_plain(name)])
    known = sorted({*_classes, *others})
    raise ValueError(f"unknown hook {name!r}; {_closest(name, [*known, *_aliases])}available hooks: {', '.join(known)}")


def _plain(name: str) -> str:
    return name.replace("_", "").casefold()


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
                f"options {sorted(options)} were given beside a configured {type(hook).__name__}; "
                f"set them there: {type(hook).__name__}({', '.join(f'{k}=...' for k in sorted(options))})"
            )
        return hook
    if not isinstance(hook, str):
        raise ValueError(
            f"hook must be a name or a CommHook, is {hook!r}"
            + (f"; did you mean {hook.__name__}()?" if isinstance(hook, type) else "")
        )
    hook_class = get_hook_class(hook)
    has_fields: bool = dataclasses.is_dataclass(hook_class)
    fields = [field.name for field in dataclasses.fields(hook_class) if field.init] if has_fields else []  # type: ignore[arg-type]
    known = f"its options are: {', '.join(fields) or 'none'}"
    short = getattr(hook_class, "option_aliases", {})
    unknown = sorted(set(options) - {*fields, *short})
    if unknown and has_fields:
        raise ValueError(f"{hook_class.__name__}: unknown option {unknown[0]!r}; {_closest(unknown[0], fields)}{known}")
    try:
        made = hook_class(**options)
        return _by_name(made, [field for field in fields if field not in {short.get(name, name) for name in options}])
    except TypeError as error:
        raise ValueError(f"{hook_class.__name__}: {str(error).split(') ', 1)[-1]}; {known}") from error


def _by_name(hook: CommHook, at_default: Sequence[str]) -> CommHook:
    """The hook with starts that follow the length of the run where that is known."""
    starts = {name: getattr(hook, name) for name in at_default if is_start(name)}
    late = {name: DefaultStart(start) for name, start in starts.items() if type(start) is int and start > 0}
    return dataclasses.replace(hook, **late) if late else hook  # type: ignore[type-var]


def _closest(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}? " if close else ""


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
