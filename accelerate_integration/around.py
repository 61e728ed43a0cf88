"""Methods of one object, replaced."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def wrap(target: object, name: str, around: Callable[..., Any]) -> None:
    """Replace a method of one object by `around(original, *args, **kwargs)`.

    For the events that Accelerate and transformers have no callback for. The class stays as it is.

    Args:
        target: the object.
        name: of the method.
        around: gets the method that there was as its first argument.
    """
    setattr(target, name, _Replaced(target, name, around))


class _Replaced:
    """A replaced method; in a copy of its object, as a pickled one, the method of the class is back."""

    def __init__(self, target: object, name: str, around: Callable[..., Any]) -> None:
        original = getattr(target, name)
        functools.update_wrapper(self, original)
        self._method = functools.partial(around, original)
        self._place = target, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._method(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, str]]:
        # Called before the copy has got attributes of its own.
        return getattr, self._place
