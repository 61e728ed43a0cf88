"""The table of registered hooks, and messages on arguments that a class or a function does not have."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

# Registered classes of hooks by names and aliases.
registered: dict[str, Any] = {}


def parameters_of(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Parameters that may be given by name."""
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p for p in parameters if p.kind in by_name and p.name != "self"}


def closest(name: str, known: Iterable[str]) -> str | None:
    """The closest of some names, `None` if none is close. Capitals do not matter."""
    plain: dict[str, str] = {}
    for each in known:
        plain.setdefault(each.casefold(), each)
    close = difflib.get_close_matches(name.casefold(), plain, n=1)
    return plain[close[0]] if close else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Question that ends in a space, empty if no name is close."""
    close = closest(name, known)
    return f"did you mean {close!r}? " if close else ""


def misfit(
    where: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    options: Iterable[str] = (),
) -> str | None:
    """Say that arguments without names are too many, or that required ones are missing; `None` if they fit.

    Args:
        where: name of the function for the user.
        function: the function, without the first argument of a method.
        args: positional arguments.
        kwargs: keyword arguments.
        options: options, of which the example shows the first that is free.
    """
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return None
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    if len(args) > len(positional):
        most = f"{', '.join(positional)}, and all others by name" if positional else "options by name only"
        extra = args[len(positional)]
        example = next((option for option in options if option not in {*positional, *kwargs}), None)
        write = f"; write for example {example}={extra!r}" if example else ""
        return f"{where} takes {most}: {extra!r} was given without a name{write}"
    given = {*positional[: len(args)], *kwargs}
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    missing = [p.name for p in parameters if p.default is p.empty and p.kind not in variable and p.name not in given]
    return f"{where} needs {' and '.join(f'{name}=' for name in missing)}" if missing else None


def options_of(hook_class: type) -> list[str]:
    """Names of the options of a hook's class; of one without a constructor there are none."""
    if hook_class.__init__ is object.__init__:  # type: ignore[misc]
        return []
    return [*parameters_of(hook_class.__init__)]  # type: ignore[misc]


def values_of(hook: Any) -> dict[str, Any]:
    """Return the options of a hook by name, with their values; of a class that is no dataclass there are none."""
    fields = dataclasses.fields(hook) if dataclasses.is_dataclass(hook) else ()
    return {field.name: getattr(hook, field.name) for field in fields}


def _of_inner_hooks(name: str, given: object) -> str:
    """Say which of the hooks that a hook is made with has an option; empty if none has."""
    if isinstance(given, Mapping):
        given = [*given.values()]
    if isinstance(given, (list, tuple)):
        return next(filter(None, (_of_inner_hooks(name, one) for one in given)), "")
    inner = registered.get(given) if isinstance(given, str) else type(given)
    if inner is None or name not in {*options_of(inner), *getattr(inner, "option_aliases", {})}:
        return ""
    return f"it is an option of the hook inside, {inner.__name__}({name}=...). "


def check_options(hook_class: type, args: tuple[Any, ...], options: Mapping[str, Any]) -> None:
    """Refuse arguments that a hook's class does not have, by a `ValueError` with its options and the closest one."""
    name, init = hook_class.__name__, hook_class.__init__  # type: ignore[misc]
    own, short = options_of(hook_class), dict(getattr(hook_class, "option_aliases", {}))
    takes_any = init is not object.__init__ and any(
        p.kind is p.VAR_KEYWORD for p in inspect.signature(init).parameters.values()
    )
    shown = [" or ".join([option, *(alias for alias, full in short.items() if full == option)]) for option in own]
    known = f"Options of {name}: {', '.join(shown) or 'none'}"
    unknown = next((option for option in options if option not in {*own, *short}), None)
    if unknown is not None and not takes_any:
        hint = did_you_mean(unknown, [*own, *short]) or _of_inner_hooks(unknown, [*args, *options.values()])
        raise ValueError(f"{name} has no option {unknown!r}{'; ' if hint else '. '}{hint}{known}")
    function = (lambda: None) if init is object.__init__ else init.__get__(object())
    described = sorted(own, key=lambda option: (hook_class.__doc__ or "").find(f"    {option}: "))
    wrong = misfit(name, function, args, options, described)
    if wrong is not None:
        raise ValueError(f"{wrong}. {known}")
