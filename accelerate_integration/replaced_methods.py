"""Methods of one object, replaced."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def replace_method(target: object, name: str, replacement: Callable[..., Any]) -> None:
    """Replace a method of one object by `replacement(original, *args, **kwargs)`.

    For the events that Accelerate and transformers have no callback for. The class stays as it is.

    Args:
        target: the object.
        name: of the method.
        replacement: gets the method that there was as its first argument.
    """
    setattr(target, name, _Replaced(target, name, replacement))


class _Replaced:
    """A replaced method; in a copy of its object, as a pickled one, the method of the class is back."""

    def __init__(self, target: object, name: str, replacement: Callable[..., Any]) -> None:
        original = getattr(target, name)
        functools.update_wrapper(self, original)
        self._method = functools.partial(replacement, original)
        self._place = target, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._method(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, str]]:
        # Called before the copy has got attributes of its own.
        return getattr, self._place
