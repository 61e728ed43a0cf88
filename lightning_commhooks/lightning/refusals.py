"""Refusals of Lightning's strategies, raised as the exception of the package that a strategy is from."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar, cast

from lightning_commhooks.interface.misplaced import misplaced, wrong_call
from lightning_commhooks.interface.options import parameters_of

Init = TypeVar("Init", bound=Callable[..., None])

# Arguments of Lightning's strategies that are refused, and what to write instead.
REPLACED = {
    "ddp_comm_hook": "pass it as hook=... (with hook_state=... for a function), or use a hook's name",
    "ddp_comm_state": "pass it as hook_state=..., or set the options of a hook: hook=PowerSGD(...)",
    "ddp_comm_wrapper": "use hook=Cast(hook, 'fp16') or hook=Cast(hook, 'bf16')",
    "model_averaging_period": "use hook=PostLocalSGD(period=...)",
}


def misconfigured(user: object, text: str) -> Exception:
    """Return a `MisconfigurationException` of the package, `lightning` or `pytorch_lightning`, of a class of ours."""
    is_standalone = any(base.__module__.startswith("pytorch_lightning.") for base in type(user).__mro__)
    package = "lightning_fabric" if is_standalone else "lightning.fabric"
    made: Exception = importlib.import_module(f"{package}.utilities.exceptions").MisconfigurationException(text)
    return made


@contextmanager
def refusals_of(user: object) -> Iterator[None]:
    """Raise a `ValueError` as Lightning's own exception, which names the strategy or callback."""
    try:
        yield
    except ValueError as error:
        raise misconfigured(user, f"{type(user).__name__}: {error}") from error


def options_of(*classes: type) -> set[str]:
    """Names of the arguments that classes are made with; some of them pass on whatever they get."""
    parameters = (p for made in classes for p in inspect.signature(made).parameters.values())
    return {p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}


def explained(init: Init, example: str = "powersgd") -> Init:
    """Decorator: raise wrong arguments of a constructor as Lightning's own exception, with advice.

    `example` is the name of a hook that works there, if the constructor takes one.
    """

    @functools.wraps(init)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            init(self, *args, **kwargs)
        except TypeError:
            text = wrong_call(type(self).__name__, init.__get__(self), args, kwargs, example=example)
            if text is None:
                raise  # of another function
        else:
            return
        raise misconfigured(self, text)

    return cast("Init", made)


def needs_hook(example: str) -> Callable[[Init], Init]:
    """`explained`, of a constructor that takes a hook."""
    return lambda init: explained(init, example)


def check_options(strategy: object, given: Mapping[str, Any], known: Collection[str], hook: object, also: str) -> None:
    """Refuse options that neither a strategy nor its wrapper of models has."""
    unknown = {name: value for name, value in given.items() if name not in known}
    if unknown:
        own = parameters_of(type(strategy).__init__)
        text = misplaced(type(strategy).__name__, unknown, {*known, *own}, hook, f", and neither has {also}")
        raise misconfigured(strategy, text)
