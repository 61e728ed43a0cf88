"""A wrapper that changes the hook at given steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from lightning_commhooks.collectives.group import Group
from lightning_commhooks.hooks._pseudo_gradients import has_residuals
from lightning_commhooks.hooks.diloco import DiLoCo
from lightning_commhooks.interface.averages_models import common_choice_of_buffers
from lightning_commhooks.interface.hook import BoundHook, CommHook
from lightning_commhooks.interface.registry import get_hook, get_inner_hook
from lightning_commhooks.interface.start import hooks_in, late_starts, started_at_once
from lightning_commhooks.interface.state import StateReader
from lightning_commhooks.wrappers._turns import BoundSwitch
from lightning_commhooks.wrappers.hook_name import HookName


@dataclass(frozen=True)
class Schedule(CommHook):
    """Use different hooks in different phases of training.

    For example, `Schedule({0: "bf16", 1000: PowerSGD(matrix_approximation_rank=4)})`. All hooks count steps from the
    start of training: a PowerSGD that begins at step 1000 has passed its `start_powerSGD_iter=1000`. When a hook with
    error feedback is replaced, its residuals are added to the gradients of its successor's first step; those of
    DiLoCo's pseudo-gradients are lost, with a warning. When a hook with local steps is replaced, models are averaged
    after that step; by another one, at that one's first average.

    Args:
        hooks: hooks by the step at which their phase begins, one of them 0; each hook is a name or a `CommHook`. A step
            may be a string, as in JSON.

    Raises:
        ValueError: there is no hook for step 0, a step is negative, or a hook is unknown.
    """

    name: ClassVar[str] = "schedule"

    # Not `Mapping[int, ...]`, whose keys jsonargparse rounds.
    hooks: Mapping[int | str, CommHook | HookName]

    def __post_init__(self) -> None:
        if not isinstance(self.hooks, Mapping):
            raise ValueError(f"hooks must be a dict of hooks by step, such as {{0: 'bf16'}}, got {self.hooks!r}")
        given = {int(step) if str(step).isdecimal() else step: hook for step, hook in self.hooks.items()}
        for step in given:
            if isinstance(step, bool) or not isinstance(step, int) or step < 0:
                raise ValueError(f"hooks: steps must be integers of at least 0, got {step!r}")
        if len(given) < len(self.hooks):
            raise ValueError(f"hooks must have each step once, got {self.hooks!r}")
        if 0 not in given:
            raise ValueError(f"hooks has no hook for step 0, only for {sorted(given)}; add 0: 'allreduce'")
        hooks = {step: get_inner_hook(given[step], f"hooks: for step {step}: ") for step in sorted(given)}
        object.__setattr__(self, "hooks", hooks)

    def __hash__(self) -> int:
        return hash(tuple(self.hooks.items()))

    @property
    def _phases(self) -> dict[int, CommHook]:
        return {int(step): get_hook(hook) for step, hook in self.hooks.items()}

    @property
    def inner_hooks(self) -> tuple[CommHook, ...]:
        return tuple(self._phases.values())

    def changes_at(self) -> set[int]:
        return super().changes_at() | set(self._phases)

    def check_parameters(self, names: Sequence[str]) -> list[str]:
        phases = self._phases
        ended = [(begin, end, hook) for (begin, hook), end in zip(phases.items(), [*phases][1:], strict=False)]
        texts = [
            f"hook=Schedule: the phase that begins at step {begin} ends at {end}, before {name}={value}: it does not "
            f"compress. Lower {name}, or make the phase longer"
            for begin, end, hook in ended
            for _, name, value in late_starts(hook)
            if isinstance(value, int) and value >= end
        ]
        texts += [
            f"hook=Schedule: the phase that begins at step {begin} ends at {end}, and the residuals of {each.name!r} "
            "are lost then: choose a pseudo_gradient without error feedback, or make this the last phase"
            for begin, end, hook in ended
            for each in hooks_in(hook)
            if isinstance(each, DiLoCo) and has_residuals(each.pseudo_gradient, each.error_feedback)
        ]
        return super().check_parameters(names) + texts

    def bind(self, group: Group) -> BoundHook:
        return _BoundSchedule(self._phases, group)


@started_at_once.register(Schedule)
def _last_at_once(hook: Schedule) -> CommHook:
    *_, last = hook.inner_hooks
    return started_at_once(last)


class _BoundSchedule(BoundSwitch):
    def __init__(self, hooks: dict[int, CommHook], group: Group) -> None:
        super().__init__(hooks, group)
        self.average_buffers = common_choice_of_buffers(list(self._phases.values()), "Schedule")

    def _phase(self, step: int) -> int:
        return max(start for start in self._phases if start <= step)

    def _part_differs(self, key: str, when: str, reader: StateReader) -> None:
        reader.differs(f"a phase of the schedule begins at step {key} {when} only")

    def inactive_reason(self, step: int) -> str | None:
        later = [start for start in self._phases if start > step]
        unreached = f"the phases of hook=Schedule at {later} have not begun" if later else None
        return super().inactive_reason(step) or unreached
