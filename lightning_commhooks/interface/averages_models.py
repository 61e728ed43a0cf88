"""Hooks that let ranks step alone and average their models."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TypeGuard

from torch import Tensor

from lightning_commhooks.interface.hook import BoundHook
from lightning_commhooks.interface.models import OptimizerStep

# What begins at `start_localSGD_iter`.
ALONE = "ranks step alone"


class AveragesModels(BoundHook):
    """A hook that lets ranks step alone, and averages their models after steps of an optimizer.

    Attributes:
        averages_models: whether it ever does; wrappers may not.
        average_buffers: whether running statistics of normalization layers are averaged with the parameters. DDP then
            does not broadcast buffers while ranks step alone.
        from_start: the change at `start_localSGD_iter`, as text for forecasts; `None`: nothing changes on these ranks.
            Ends with `ALONE` unless all ranks continue to average gradients.
        keeps_common_model: whether `common_model` returns the parameters after the first local step.
    """

    averages_models: bool = True
    average_buffers: bool = False
    from_start: str | None = ALONE
    keeps_common_model: bool = False

    def begin_backward(self, step: int, num_steps: Mapping[str, int]) -> None:  # optional to override
        """Note how many steps optimizers have taken when a synchronized backward begins; equal on all ranks.

        Args:
            step: number of synchronized backwards before this one.
            num_steps: steps by optimizer, by the key of `OptimizerStep`; empty: no optimizer is known.
        """

    @abstractmethod
    def is_local(self, step: int) -> bool:
        """Return whether the gradients of a step may differ between ranks after `reduce`: see `BoundHook.is_local`."""

    @abstractmethod
    def after_optimizer_step(self, stepped: OptimizerStep) -> None:
        """Average models, if it is time to. Called on all ranks when an optimizer has stepped.

        Args:
            stepped: the parameters, the number of steps that count, and the rest of the model.
        """

    def communicates_after(self, stepped: OptimizerStep) -> bool:
        """Whether `after_optimizer_step` is about to communicate, or the next backward to be the first local one.

        Not asked after it. `stepped.num_steps` may be more than will count: then ranks count before they communicate.
        """
        return stepped.num_steps > 0

    def applies_average_after(self, stepped: OptimizerStep) -> bool:
        """Whether `after_optimizer_step` is about to apply an average; if it communicates only, it begins one.

        Replicas that come and go vote on an average when it is applied.
        """
        return self.communicates_after(stepped)

    def common_model(self) -> Mapping[str, Tensor]:
        """Parameters as all ranks had them after their last average, flat in memory order, if the hook keeps them."""
        return {}


def averages_models(hook: BoundHook) -> TypeGuard[AveragesModels]:
    """Whether a hook averages models, in this step or a later one."""
    return isinstance(hook, AveragesModels) and hook.averages_models


def common_choice_of_buffers(hooks: list[BoundHook], where: str) -> bool:
    """Return `average_buffers` of the hooks in a wrapper of that name; refuse hooks that differ, by a `ValueError`."""
    choices = {hook.average_buffers for hook in hooks if averages_models(hook)}
    if len(choices) > 1:
        raise ValueError(f"hooks of a {where} that average models must have the same average_buffers")
    return True in choices
