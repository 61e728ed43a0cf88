"""Functions that stay with the original when a model is copied."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def return_none(*args: object) -> None:
    """Return `None`: the replacement of a function in a copy."""


class NotCopied:
    """A function that stays with the object that it is registered on; copies of the object get `in_copies` instead."""

    def __init__(self, function: Callable[..., Any], in_copies: Callable[..., Any] = return_none) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._in_copies = in_copies

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Callable[..., Any]]]:
        return functools.partial, (self._in_copies,)
