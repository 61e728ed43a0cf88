"""A hook at run time, as the parts of a runtime share it."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

from torch import nn

from lightning_commhooks.collectives.counters import Counters
from lightning_commhooks.collectives.errors import HookError, raise_if_fork_of
from lightning_commhooks.collectives.group import Group
from lightning_commhooks.interface.hook import BoundHook, CommHook
from lightning_commhooks.interface.start import text_of_steps
from lightning_commhooks.runtime.engine import Engine
from lightning_commhooks.runtime.source import Source
from lightning_commhooks.runtime.steps import StepClock
from lightning_commhooks.wrappers.scale import without_scale

T = TypeVar("T")


class RunningHook:
    """A bound hook, and the engine that it runs on.

    Attributes:
        method: the configuration that users and checkpoints know, without the division of accumulated gradients.
        source: where its buckets come from.
        model: returns the model, or `None` if it is gone.
        is_alone: whether there are no other ranks to train with, and there will be none.
        num_steps: of the run, by which starts were determined that depend on it: `None` before, 0 if it is not known.
    """

    bound: BoundHook
    is_alone: bool = False

    def __init__(self, config: CommHook, source: Source, end_step: Callable[[bool], None]) -> None:
        self.source = source
        self._process = os.getpid()
        self.num_steps: int | None = None
        self.model: Callable[[], nn.Module | None] = lambda: None
        self.configure(config)
        self.counters = Counters()
        self.clock = StepClock(self.counters, end_step, self._break_off)
        # None for a user's own function.
        self._engine: Engine | None = None

    def configure(self, config: CommHook) -> None:
        """Take a configuration."""
        self.config, self.method = config, without_scale(config)

    @property
    def is_even(self) -> bool:
        """Whether all ranks are known and take the same number of steps."""
        return not (self.source.ranks_change or self.method.is_uneven)

    @property
    def name(self) -> str:
        """Name of the hook, or `module.function` of a user's own."""
        return self.method.name

    @property
    def is_forked(self) -> bool:
        """Whether this process is a fork of the one that the hook was attached in."""
        return os.getpid() != self._process

    def raise_if_forked(self) -> None:
        """Raise a `HookError` in a fork of the process that the hook was attached in."""
        raise_if_fork_of(self._process)

    def aborting(self) -> AbstractContextManager[None]:
        """A context for work of this thread while peers may already wait for it: an exception in it ends all ranks.

        With a user's own function nothing can be aborted: its collectives are the user's.
        """
        if self._engine is None:
            self.raise_if_forked()
            return nullcontext()
        self._engine.raise_if_unusable()
        return self._engine.aborting()

    def begin_together(self, what: str) -> None:
        """End the last step before what all ranks do together: see `Runtime.begin_together`."""

    def call(self, function: Callable[[], T], in_step: bool = False) -> T:
        """Run a function in turn with the hook, after its last step has ended. Whatever it raises ends all ranks.

        Args:
            function: what to run.
            in_step: whether it is a part of a step, which all ranks take.

        Raises:
            HookError: the function failed, or earlier work did.
        """
        if self._engine is None:
            self.raise_if_forked()
            return function()
        self._engine.raise_if_unusable()
        self.commit()
        return self._engine.call(lambda: self._named(function), in_step)

    def _break_off(self) -> None:
        """End all ranks, whose collectives would not match this rank's any more, after a backward that has raised."""
        if self._engine is None or self._engine.has_failed:
            return
        text = (
            f"communication hook {self.name!r}: the backward of step {self.clock.steps - 1} broke off on rank "
            f"{self.bound.group.global_rank} before all gradients were handed to the hook, and other ranks may have "
            "handed over more: wrap the model again, on all ranks, and attach a hook to that"
        )
        self._tell_peers(text)
        self._engine.break_off(HookError(text))

    def commit(self) -> None:
        """Tell the hook whether its last step was finite, before its state is read: see `FiniteSteps.commit`."""

    def _named(self, function: Callable[[], T]) -> T:
        try:
            return function()
        except HookError:
            raise
        except Exception as error:
            raise self.failed(self.bound.group, f"after {text_of_steps(self.clock.steps)}", error) from error

    def failed(self, group: Group, where: str, error: Exception) -> HookError:
        """The error that a user sees for one of the hook."""
        reason = self._peers_reason()
        text = f"communication hook {self.name!r} failed on rank {group.global_rank} {where}: "
        return HookError(f"{text}{reason} ({error})" if reason else f"{text}{error}")

    def _tell_peers(self, reason: str) -> None:
        """Tell other ranks why they will fail, before they do."""

    def _peers_reason(self) -> str:
        """The reason that another rank has given for the failure; empty if there is none."""
        return ""
