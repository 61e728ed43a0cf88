"""A wrapper that switches between hooks, one at a time for all parameters."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_commhooks.collectives.group import Group
from lightning_commhooks.collectives.steps import Steps
from lightning_commhooks.interface.averages_models import AveragesModels, averages_models
from lightning_commhooks.interface.bucket import Bucket, Slot
from lightning_commhooks.interface.hook import BoundHook, CommHook
from lightning_commhooks.interface.models import OptimizerStep
from lightning_commhooks.interface.state import StateReader
from lightning_commhooks.interface.wrapper import BoundWrapper


class BoundSwitch(BoundWrapper):
    """Delegates each step to one of several hooks, whose keys the subclass defines.

    The residuals of a hook with error feedback are added to the gradients of its successor's first step.
    """

    def __init__(self, hooks: Mapping[int, CommHook], group: Group) -> None:
        self._hooks = hooks
        self._phases = {key: hook.bind(group) for key, hook in hooks.items()}
        super().__init__(list(self._phases.values()), hooks)
        # For each parameter, the phase that last averaged it.
        self._last_phase = self.numbers["last_phase"] = {}
        # Parameters that this rank has used, if DDP looks for unused parameters.
        self._ever_used: set[str] = set()

    @abstractmethod
    def _phase(self, step: int) -> int:
        """Return the key of a step's hook, equal on all ranks. Called in any order and from any thread."""

    def change_inner(self, change: Callable[[BoundHook], BoundHook]) -> None:
        self._phases = {key: change(phase) for key, phase in self._phases.items()}

    def reduce(self, bucket: Bucket, ranks: Group) -> Steps[Tensor | None]:
        return self._reduce_as(self._phase(bucket.step), bucket, ranks)

    def _reduce_as(self, phase: int, bucket: Bucket, ranks: Group) -> Steps[Tensor | None]:
        if self.has_memory:
            yield from self._hand_over(bucket, phase, ranks)
        return (yield from self._phases[phase].reduce(bucket, ranks))

    def _hand_over(self, bucket: Bucket, phase: int, ranks: Group) -> Steps[None]:
        changing = [slot for slot in bucket.slots if self._last_phase.setdefault(slot.name, phase) != phase]
        if changing and bucket.unused is not None:
            changing = yield from self._used_ones(changing, bucket, phase, ranks)
        for slot in changing:
            self._phases[self._last_phase[slot.name]].flush_(dataclasses.replace(bucket, slots=(slot,)))
            self._last_phase[slot.name] = phase
        if bucket.unused is not None:
            self._ever_used.update(set(bucket.names) - bucket.unused)

    def _used_ones(self, changing: list[Slot], bucket: Bucket, phase: int, ranks: Group) -> Steps[list[Slot]]:
        """Return the parameters of `changing` that some rank uses.

        DDP discards a hook's results for the remaining parameters, so their residuals are handed over later.
        """
        before = dataclasses.replace(bucket, unused=frozenset(bucket.names) - self._ever_used)
        counts = torch.cat([bucket.used(changing, bucket.flat), before.used(changing, bucket.flat)])
        now, before_now = ((yield from ranks.all_reduce_(counts)) > 0).view(2, -1).tolist()
        for slot, is_used, was_used in zip(changing, now, before_now, strict=True):
            if not is_used and not was_used:  # never used, so there is no residual
                self._last_phase[slot.name] = phase
        return [slot for slot, is_used in zip(changing, now, strict=True) if is_used]

    def _at_work(self) -> Sequence[BoundHook]:
        return [self._phases[max(self._last_phase.values(), default=0)]]

    def is_local(self, step: int) -> bool:
        return self._phases[self._phase(step)].is_local(step)

    def after_optimizer_step(self, stepped: OptimizerStep) -> None:
        phase = self._phases[self._phase(max(stepped.step, 0))]
        if isinstance(phase, AveragesModels):
            phase.after_optimizer_step(stepped)

    def applies_average_after(self, stepped: OptimizerStep) -> bool:
        phase = self._phases[self._phase(max(stepped.step, 0))]
        return averages_models(phase) and phase.applies_average_after(stepped)

    def reduce_sparse(self, grad: Tensor, bucket: Bucket, ranks: Group) -> Steps[Tensor]:
        return self._phases[self._phase(bucket.step)].reduce_sparse(grad, bucket, ranks)

    def inactive_reason(self, step: int) -> str | None:
        return self._phases[self._phase(step)].inactive_reason(step)

    def load_state_dict(self, state: dict[str, Any], reader: StateReader) -> None:
        super().load_state_dict(state, reader)
        for name in [name for name, key in self._last_phase.items() if key not in self._phases]:
            del self._last_phase[name]
        self._ever_used = set(self._last_phase)
