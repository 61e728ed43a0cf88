"""Functions that are not copied or pickled with the model that they are registered on: a copy has no hook."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def nothing(*args: object) -> None:
    """Do nothing."""


class NotCopied:
    """A function that stays with the object that it is registered on; copies of the object get `in_copies` instead."""

    def __init__(self, function: Callable[..., Any], in_copies: Callable[..., Any] = nothing) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._in_copies = in_copies

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Callable[..., Any]]]:
        return _in_copies, (self._in_copies,)


def _in_copies(function: Callable[..., Any]) -> Callable[..., Any]:
    return function
