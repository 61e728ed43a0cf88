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
    original = getattr(target, name)

    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(target, name, method)
