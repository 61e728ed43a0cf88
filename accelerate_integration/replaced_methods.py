"""Methods of one object, replaced."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from lightning_commhooks.runtime.copies import NotCopied


def replace_method(target: object, name: str, replacement: Callable[..., Any]) -> None:
    """Replace a method of one object by `replacement(original, *args, **kwargs)`.

    For the events that Accelerate and transformers have no callback for. The class stays as it is.
    """
    original = getattr(target, name)
    replaced = functools.update_wrapper(functools.partial(replacement, original), original)
    # A copy of the object, as a pickled one, has the method of its class.
    setattr(target, name, _Replaced(replaced, in_copies=original))


class _Replaced(NotCopied):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)
