"""A hook among ranks that change: what it remembers goes along, and to those that join."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from lightning_commhooks.collectives.group import Group
from lightning_commhooks.collectives.process_groups import OwnGroup
from lightning_commhooks.interface.hook import BoundHook
from lightning_commhooks.runtime import checkpoint
from lightning_commhooks.runtime.ranks import Ranks
from lightning_commhooks.runtime.runtime import Runtime


class Members:
    """Moves a runtime from some ranks to others."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def go_on_among(self, own: OwnGroup, compare: Callable[[Group], None]) -> None:
        """Go on among other ranks, with what the hook remembers here, if `compare` raises nothing. Collective.

        Whatever else it raises, one of them has gone. What the hook remembers stays.
        """
        self._go_on(Ranks.of_members(self._runtime, own), self.own_state(), compare)

    def go_on_alone(self, state: Mapping[str, Any]) -> None:
        """Go on without other ranks, from what `own_state` returned."""
        self._go_on(Ranks.of_source(self._runtime, None), state, lambda group: None)

    def own_state(self) -> dict[str, Any]:
        """What the hook remembers here. Not collective."""
        return checkpoint.save_alone(self._runtime, self._runtime.local.models, "own")

    def _go_on(self, ranks: Ranks, state: Mapping[str, Any], compare: Callable[[Group], None]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the user got them when the hook was attached
            self._runtime.run_among(ranks, compare)
        self._runtime.local.models.regroup(ranks.group)
        self._take(state, self._runtime.bound)

    def take_state(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_for_others` of another rank returned."""
        self._take(state, self._runtime.bind_again())

    def _take(self, state: Mapping[str, Any], fresh: BoundHook) -> None:
        checkpoint.load_alone(state, self._runtime, fresh, self._runtime.local.models)
        self._runtime.begin_at(fresh, state["steps"], state["optimizer_steps"])

    def state_for_others(self) -> dict[str, Any]:
        """What a rank needs that joins: all that ranks have alike. Not collective."""
        return checkpoint.save_alone(self._runtime, self._runtime.local.models, "joining")
