"""Between optimizers and a hook that averages models: called on the main thread, works in turn with the hook."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import nn
from torch.optim import Optimizer

from lightning_commhooks.core.collectives import Group
from lightning_commhooks.core.engine import HookError
from lightning_commhooks.core.layout import Layout
from lightning_commhooks.core.models import Models
from lightning_commhooks.core.optimizers import Optimizers, OptimizerStep, check_optimizer

if TYPE_CHECKING:
    from lightning_commhooks.core.runtime import Runtime


class LocalSteps:
    """Reports optimizer steps to a hook and averages models when they are looked at.

    Args:
        runtime: of the hook.
        group: all ranks.

    Attributes:
        models: what differs between ranks.
        find_optimizers: gives the optimizers when they are needed for the first time.
        reported_by_user: whether optimizers may step that are not known yet.
        evaluates_average: whether forwards of evaluation use the average.
        resync: whether the average that is shown stays.
        awaits_backward: whether a forward has been run whose backward needs the parameters as they are.
    """

    def __init__(self, runtime: Runtime, group: Group) -> None:
        self._runtime = runtime
        self._optimizers = Optimizers(self._before_hooked_step, self._after_hooked_step)
        self.models = Models(group, self._optimizers)
        self.find_optimizers: Callable[[], Iterable[Optimizer]] = list
        self.reported_by_user = False
        self.evaluates_average = False
        self.resync = False
        self.awaits_backward = False
        self._is_shown = False
        self._checked = False

    def add(self, optimizer: Optimizer) -> None:
        """Watch an optimizer.

        Raises:
            ValueError: it is sharded, averages models itself, or has no step hooks.
        """
        self._optimizers.add(optimizer)
        self.models.stepped(optimizer, -1)  # makes its key known to a state that is loaded
        self._checked = False

    def check_optimizers(self) -> None:
        """Called in each backward of ranks that step alone.

        Raises:
            HookError: no optimizer of this model is known, so its parameters would never be averaged.
        """
        for optimizer in self.find_optimizers():
            if not self._optimizers.is_hooked(optimizer):
                self.add(optimizer)
        if self._checked:
            return
        self._checked = True
        name, known = self._runtime.config.name, self._optimizers.parameters()
        unknown = [name for name, p in self.models.layout.trained.items() if p not in known]
        if self.reported_by_user or not unknown:
            return
        fix = f"attach(model, {name!r}, optimizers=[...]), or Attachment.add_optimizer()"
        if len(unknown) == len(self.models.layout.trained):
            raise HookError(f"hook {name!r} averages models after optimizer steps, but knows no optimizer of it: {fix}")
        warnings.warn(
            f"{len(unknown)} trained parameters, {unknown[0]!r} first, are in no optimizer that hook {name!r} knows "
            f"and are never averaged. If something trains them: {fix}",
            stacklevel=2,
        )

    def _before_hooked_step(self) -> None:
        self.hide_average()
        if self.models.is_swapped:
            raise HookError("an optimizer stepped within averaged_weights(), which is for evaluation and saving")

    def _after_hooked_step(self, optimizer: Optimizer) -> None:
        if self._runtime.bound.averages_models:
            self._after_step(optimizer)

    def after_step(self, optimizer: Optimizer) -> None:
        """The user reports a step.

        Raises:
            ValueError: the optimizer is sharded, or reports its steps by itself.
        """
        check_optimizer(optimizer)
        if self._optimizers.is_hooked(optimizer):
            raise ValueError(
                f"{type(optimizer).__name__} reports its steps by itself since it was given to the hook; call "
                "after_optimizer_step() for optimizers that were not"
            )
        self._after_hooked_step(optimizer)

    def _after_step(self, optimizer: Optimizer) -> None:
        stepped = self.models.stepped(optimizer, self._runtime.clock.steps - 1)
        if stepped is None:
            return
        if self.models.is_swapped:
            raise HookError("an optimizer stepped within averaged_weights(), which is for evaluation and saving")
        self._runtime.call(lambda: self._tell(stepped))

    def _tell(self, stepped: OptimizerStep) -> None:
        bound = self._runtime.bound
        try:
            bound.after_optimizer_step(stepped)
            # After a phase of a schedule in which ranks stepped alone.
            if stepped.step < 0 or bound.is_local(stepped.step):
                return
            if not self.models.drifted.isdisjoint(stepped.parameters):
                self.models.average_(stepped.parameters)
            if self.models.state_drifted(stepped):
                self.models.average_state_(stepped)
        except Exception as error:
            raise HookError(
                f"communication hook {self._runtime.config.name!r} failed on rank {bound.group.global_rank} after the "
                f"optimizer's step {stepped.step} ({stepped.optimizer}, ...): {error}"
            ) from error

    @property
    def keeps_own_buffers(self) -> bool:
        """Whether each rank had buffers of its own in the last backward."""
        bound, step = self._runtime.bound, self._runtime.clock.steps - 1
        return bound.average_buffers and step >= 0 and bound.is_local(step)

    def average(self, everything: bool = False) -> None:
        """Average what differs between ranks, or all of the model, for good."""
        self._runtime.clock.end()
        self._runtime.call(lambda: self.models.average_drifted_(everything))

    def show_average(self) -> None:
        """Have the averages in place of each rank's own model until the next forward that trains, or for good.

        Not between a forward and its backward: what looks at the model there is part of training.
        """
        if self.awaits_backward:
            return
        if self.resync:
            self.average()
        elif not self.models.is_swapped:
            self._runtime.clock.end()
            self._runtime.call(self.models.swap_in)
            self._is_shown = True

    def hide_average(self) -> None:
        """Put each rank's own model back after `show_average`."""
        if self._is_shown:
            self._is_shown = False
            self.models.swap_out()

    def average_state(self, optimizer: Optimizer) -> None:
        """Average the state of an optimizer, for good."""
        stepped = self.models.stepped(optimizer, -1)
        if stepped is not None and self.models.state_drifted(stepped):
            self._runtime.call(lambda: self.models.average_state_(stepped))

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Have the averages in place of each rank's own model."""
        if self.models.is_swapped:
            yield
            return
        self._runtime.clock.end()
        self._runtime.call(self.models.swap_in)
        try:
            yield
        finally:
            self.models.swap_out()

    @contextmanager
    def averaged_state(self, optimizer: Optimizer) -> Iterator[None]:
        """Have the averages in place of each rank's own state of an optimizer."""
        stepped = self.models.stepped(optimizer, -1)
        if stepped is None or not self._runtime.call(lambda: self.models.swap_state_in(stepped)):
            yield
            return
        try:
            yield
        finally:
            self.models.swap_state_out(stepped)

    def close(self) -> list[str]:
        """Let go of model and optimizers; returns what the user should know."""
        drifted = len(self.models.drifted)
        self._optimizers.close()
        self.evaluates_average = self._is_shown = False
        self.models.layout = Layout(nn.Module())
        if not drifted or self.models.is_swapped:
            return []
        return [
            f"hook={self._runtime.config.name!r} ended while {drifted} parameters differed between ranks; call "
            "Attachment.average_weights() at the end of training"
        ]
