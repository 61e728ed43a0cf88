"""What a hook has taken over for good, for readers in any thread while the next step is under way."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from lightning_commhooks.collectives.errors import HookError
from lightning_commhooks.interface.hook import BoundHook, CommHook
from lightning_commhooks.interface.hook_state import is_readable, save_hook
from lightning_commhooks.interface.state import StateWriter

logger = logging.getLogger(__name__)

# A hook takes over without waiting for peers. Whoever reads in a signal handler may have interrupted just that.
_LONGEST_SECONDS = 1.0


class Committed:
    """The part of a hook's state that is equal on all ranks, as the last step left it.

    No lock: a reader may be a signal handler, and the hook wait for peers. Hooks whose state is replaced, never changed
    (`BoundHook.replaces_state`), are read when somebody asks; of others a copy is kept after each step.
    """

    def __init__(self, config: CommHook, bound: BoundHook) -> None:
        self._config = config
        self._bound = bound
        # Odd while the hook takes over.
        self._number = 0
        self._copy: dict[str, Any] = {}
        self._problem = ""
        self.keep()

    @contextmanager
    def taking_over(self) -> Iterator[None]:
        """While the hook takes over what a step has staged."""
        self._number += 1
        try:
            yield
        finally:
            self._number += 1

    def keep(self) -> None:
        """Keep a copy, if one is needed; called when no step is under way."""
        if is_readable(self._bound):
            return
        try:
            self._copy = save_hook(self._config, self._bound, _Keeper(self._bound.group, "none"))
            self._problem = ""
        except Exception as error:  # of a state_dict() that cannot do without the other ranks
            self._problem = f"{type(self._bound).__name__}.state_dict() of what ranks share, kind='none': {error!r}"

    def read(self) -> dict[str, Any]:
        """The state, on CPU."""
        if self._problem:
            raise HookError(self._problem)
        writer = StateWriter(self._bound.group, "none")
        if not is_readable(self._bound):
            state: dict[str, Any] = copied(self._copy, writer.shared)
            return state
        deadline = time.monotonic() + _LONGEST_SECONDS
        while True:
            number = self._number
            is_late = time.monotonic() > deadline
            if number % 2 == 0 or is_late:
                state = save_hook(self._config, self._bound, writer)
                if self._number == number:
                    if is_late and number % 2:
                        logger.warning("state of hook %r: read while a step was taken over", self._config.name)
                    return state
            time.sleep(0.001)


class _Keeper(StateWriter):
    """Copies tensors where they are, so that no device is waited for."""

    def shared(self, tensor: Tensor) -> Tensor:
        return tensor.detach().clone()


def copied(state: Any, copy_tensor: Callable[[Tensor], Tensor]) -> Any:
    """The same nested state with copies of its tensors."""
    if isinstance(state, Tensor):
        return copy_tensor(state)
    if isinstance(state, dict):
        # Also the `_metadata` of a module's state, which `OrderedDict.copy()` drops.
        new = copy.copy(state)
        new.update((key, copied(value, copy_tensor)) for key, value in state.items())
        return new
    return [copied(value, copy_tensor) for value in state] if isinstance(state, list) else state
