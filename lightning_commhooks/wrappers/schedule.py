"""Change the method while training."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from lightning_commhooks.core.checkpoint import StateReader, StateWriter
from lightning_commhooks.core.collectives import Group
from lightning_commhooks.core.hook import BoundHook, Bucket, CommHook
from lightning_commhooks.core.optimizers import OptimizerStep
from lightning_commhooks.core.registry import get_hook, get_inner_hook
from lightning_commhooks.hooks import HookName


@dataclass(frozen=True)
class Schedule(CommHook):
    """Use different hooks in different phases of training.

    For example `Schedule({0: "bf16", 1000: PowerSGD(matrix_approximation_rank=4)})`. Steps are counted once,
    from the beginning of training, for all hooks: `start_powerSGD_iter=1000` of a PowerSGD that begins at step
    1000 has passed by then. When a hook with error feedback is replaced, what it still owes is added to the
    gradients of the first step of its successor; when a hook is replaced that lets ranks step alone, models are
    averaged after that step.

    Args:
        hooks: for each phase the step at which it begins, one of them 0, and its hook, a name or a `CommHook`.

    Raises:
        ValueError: no hook for step 0, a negative step, or an unknown hook.
    """

    name: ClassVar[str] = "schedule"

    hooks: Mapping[int, HookName | CommHook]

    def __post_init__(self) -> None:
        for step in self.hooks:
            if isinstance(step, bool) or not isinstance(step, int) or step < 0:
                raise ValueError(f"hooks: steps must be integers of at least 0, one is {step!r}")
        if 0 not in self.hooks:
            raise ValueError(f"hooks: no hook for step 0, only for {sorted(self.hooks)}; add 0: 'allreduce'")
        object.__setattr__(self, "hooks", {step: get_inner_hook(self.hooks[step]) for step in sorted(self.hooks)})

    def __hash__(self) -> int:
        return hash(tuple(self.hooks.items()))

    @property
    def inner_hooks(self) -> tuple[CommHook, ...]:
        return tuple(get_hook(hook) for hook in self.hooks.values())

    def bind(self, group: Group) -> BoundHook:
        return _BoundSchedule({step: get_hook(hook) for step, hook in self.hooks.items()}, group)


class _BoundSchedule(BoundHook):
    def __init__(self, hooks: dict[int, CommHook], group: Group) -> None:
        super().__init__(group)
        self._hooks = hooks
        self._phases = {start: hook.bind(group) for start, hook in hooks.items()}
        self.has_memory = any(phase.has_memory for phase in self._phases.values())
        self.averages_models = any(phase.averages_models for phase in self._phases.values())
        choices = {phase.average_buffers for phase in self._phases.values() if phase.averages_models}
        if len(choices) > 1:
            raise ValueError("hooks of a Schedule that average models must have the same average_buffers")
        self.average_buffers = True in choices
        # For each parameter, when the phase that last averaged it began; and what that will be after this step.
        self._last_phase: dict[str, int] = {}
        self._next_phase: dict[str, int] = {}

    def reduce(self, flat: Tensor, bucket: Bucket) -> Tensor | None:
        phase = self._phase(bucket.step)
        if self.has_memory:
            self._hand_over(flat, bucket, phase)
        return self._phases[phase].reduce(flat, bucket)

    def _hand_over(self, flat: Tensor, bucket: Bucket, phase: int) -> None:
        changing = [slot for slot in bucket.slots if self._last_phase.setdefault(slot.name, phase) != phase]
        if changing and bucket.unused is not None:
            # DDP throws away what a hook returns for a parameter that no rank used: hand over when one does.
            used = self.group.all_reduce_(bucket.used(changing, flat)).tolist()
            changing = [slot for slot, is_used in zip(changing, used, strict=True) if is_used]
        for slot in changing:
            self._phases[self._last_phase[slot.name]].drain_(flat, dataclasses.replace(bucket, slots=(slot,)))
            self._next_phase[slot.name] = phase

    def is_local(self, step: int) -> bool:
        return self._phases[self._phase(step)].is_local(step)

    def after_optimizer_step(self, stepped: OptimizerStep) -> None:
        if stepped.step >= 0:
            self._phases[self._phase(stepped.step)].after_optimizer_step(stepped)

    def end_step(self, finite: Tensor) -> None:
        for hook in self._phases.values():
            hook.end_step(finite)
        # The one time that a CUDA device is waited for: in the first step of a phase.
        if self._next_phase and finite:
            self._last_phase |= self._next_phase
        self._next_phase = {}

    def reduce_sparse(self, grad: Tensor, bucket: Bucket) -> Tensor:
        return self._phases[self._phase(bucket.step)].reduce_sparse(grad, bucket)

    def drain_(self, flat: Tensor, bucket: Bucket) -> None:
        for hook in self._phases.values():
            hook.drain_(flat, bucket)

    def owed(self) -> Iterator[Tensor]:
        for hook in self._phases.values():
            yield from hook.owed()

    def why_not_compressed(self, step: int) -> str | None:
        return self._phases[self._phase(step)].why_not_compressed(step)

    def _phase(self, step: int) -> int:
        return max(start for start in self._phases if start <= step)

    def state_dict(self, writer: StateWriter) -> dict[str, Any]:
        phases = {str(start): writer.hook(self._hooks[start], phase) for start, phase in self._phases.items()}
        return {"phases": phases, "last_phase": dict(self._last_phase)}

    def load_state_dict(self, state: dict[str, Any], reader: StateReader) -> None:
        saved = reader.section(state, "phases")
        for begin in sorted(saved.keys() ^ {str(start) for start in self._phases}):
            reader.differs(f"a phase of the schedule begins at step {begin} {'then' if begin in saved else 'now'} only")
        for start, phase in self._phases.items():
            if str(start) in saved:
                reader.hook(saved[str(start)], self._hooks[start], phase)
        last = reader.section(state, "last_phase")
        self._last_phase = {name: start for name, start in last.items() if start in self._phases}

    def compression_stats(self) -> tuple[float, int, int]:
        return self._phases[max(self._last_phase.values(), default=0)].compression_stats()

    def closing_warnings(self, steps: int) -> list[str]:
        unused = [start for start in self._phases if start >= steps > 0]
        texts = (
            [f"training ended after {steps} steps, before the phases of hook=Schedule at {unused}"] if unused else []
        )
        ends = [*list(self._phases)[1:], steps]
        for end, hook in zip(ends, self._phases.values(), strict=True):
            texts += hook.closing_warnings(min(end, steps))
        return texts

    def release(self) -> None:
        for hook in self._phases.values():
            hook.release()
