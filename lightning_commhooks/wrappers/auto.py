"""A hook that measures other hooks in the first steps of training and keeps the fastest."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_commhooks.basics.announce import announce
from lightning_commhooks.collectives.group import Group
from lightning_commhooks.collectives.steps import Steps
from lightning_commhooks.hooks._local_sgd import LocalSGDConfig
from lightning_commhooks.hooks.allreduce import AllReduce
from lightning_commhooks.hooks.noop import Noop
from lightning_commhooks.interface.bucket import Bucket
from lightning_commhooks.interface.checks import check_integer
from lightning_commhooks.interface.error_sample import DEFAULT_NUMEL, ErrorSampler
from lightning_commhooks.interface.hook import ANY_LATER_STEP, BoundHook, CommHook
from lightning_commhooks.interface.hook_state import describe
from lightning_commhooks.interface.python_code import code
from lightning_commhooks.interface.registry import get_hook, get_inner_hook, register
from lightning_commhooks.interface.start import hooks_in, late_starts, started_at_once
from lightning_commhooks.interface.state import StateReader, StateWriter
from lightning_commhooks.wrappers._turns import BoundSwitch

# Untimed steps of each candidate: the first also sends its predecessor's residuals, and the rest sample its error.
_LEAD_IN = 3
_AVERAGES_MODELS = (
    "averages models instead of gradients, which changes the result of training; to use it, set it as the hook yourself"
)


@register
@dataclass(frozen=True, kw_only=True)
class Auto(CommHook):
    """Measure hooks in the first steps of training and use the fastest, or none if plain averaging is as fast.

    Plain averaging is measured first, then each candidate for a few steps. Training continues meanwhile: all candidates
    average gradients, and each passes its residuals to the next. Then all ranks agree on the hook with the shortest
    step among those with an acceptable error, and rank 0 prints the reason. The choice is final, also for a resumed
    run. A step is the whole time from one backward to the next. Measuring takes `warmup_steps + timed_steps +
    len(candidates) * (timed_steps + 3)` steps, 46 by default.

    Args:
        candidates: names or configured hooks that compress from the first step on, for example with
            `start_powerSGD_iter=0`, which is the default for hooks given by name. Hooks that average models are
            rejected: they change the result of training, not only its speed. A `Schedule` is measured in its first
            phase.
        max_error: highest acceptable error of the averaged gradients of one step, `|averaged - mean| / |mean|`; int8
            has about 0.01, int4 0.1, PowerSGD up to 1 in one step, which error feedback corrects later.
        min_gain: fraction by which a hook must shorten steps to replace plain averaging.
        warmup_steps: steps before measuring, in which DDP rebuilds its buckets and memory is allocated.
        timed_steps: timed steps of each hook; the median counts.

    Raises:
        ValueError: there are no candidates; one of them is unknown, starts later or averages models; a value is out of
            range.
    """

    name: ClassVar[str] = "auto"
    is_outermost: ClassVar[bool] = True

    candidates: Sequence[str | CommHook] = ("bf16", "int8", "int4")
    max_error: float = 0.3
    min_gain: float = 0.05
    warmup_steps: int = 5
    timed_steps: int = 8

    def __post_init__(self) -> None:
        if isinstance(self.candidates, str) or not isinstance(self.candidates, Sequence) or not self.candidates:
            raise ValueError(f"candidates must be a list of at least one hook, got {self.candidates!r}")
        candidates = [_candidate(hook) for hook in self.candidates]
        for hook in candidates:
            if candidates.count(hook) > 1:
                raise ValueError(f"candidates: {hook.name!r} is listed twice")
        object.__setattr__(self, "candidates", tuple(candidates))
        if not isinstance(self.max_error, (int, float)) or not self.max_error > 0:
            raise ValueError(f"max_error must be above 0, got {self.max_error!r}")
        if not isinstance(self.min_gain, (int, float)) or not 0 <= self.min_gain < 1:
            raise ValueError(f"min_gain must be in [0, 1), got {self.min_gain!r}")
        for field, lowest in (("warmup_steps", 0), ("timed_steps", 1)):
            check_integer(field, getattr(self, field), lowest)

    @property
    def inner_hooks(self) -> tuple[CommHook, ...]:
        return (AllReduce(), *(get_hook(hook) for hook in self.candidates))

    def bind(self, group: Group) -> BoundHook:
        return _BoundAuto(self, group)


def _candidate(hook: str | CommHook) -> CommHook:
    if hook == Noop.name or isinstance(hook, Noop):
        raise ValueError("candidates: 'noop' does not average, so the models of the ranks would diverge; leave it out")
    candidate = get_inner_hook(hook, "candidates: ")
    if any(isinstance(inner, LocalSGDConfig) for inner in hooks_in(candidate)):
        raise ValueError(f"candidates: {candidate.name!r} {_AVERAGES_MODELS}")
    if isinstance(hook, str):
        return started_at_once(candidate)
    for inner, field, steps in late_starts(candidate):
        raise ValueError(
            f"candidates: {inner.name!r} compresses from {field}={steps!r} on only, so it cannot be measured before; "
            f"set {field}=0"
        )
    return candidate


class _BoundAuto(BoundSwitch):
    """Keys are positions in `Auto.inner_hooks`: 0 is plain averaging."""

    def __init__(self, config: Auto, group: Group) -> None:
        super().__init__(dict(enumerate(config.inner_hooks)), group)
        for key, phase in self._phases.items():
            if phase.averages_models:
                raise ValueError(f"hook='auto': candidate {self._hooks[key].name!r} {_AVERAGES_MODELS}")
        self._config = config
        # A single rank has nothing to choose.
        self._choice: int | None = 0 if group.size == 1 else None
        # Step in which this process made the choice.
        self._chosen_at = -1
        self._is_tidy = False
        self._restart()

    def _restart(self) -> None:
        self._first_step: int | None = None
        self._moments: list[Any] = []
        self._numel = 0
        self._samplers: dict[int, ErrorSampler] = {}

    @property
    def chosen(self) -> CommHook | None:
        return None if self._choice is None else self._hooks[self._choice]

    @property
    def has_memory(self) -> bool:  # type: ignore[override]
        """Whether a hook that may still be used has memory."""
        return self._phases[self._choice or 0].has_memory if self._is_tidy else super().has_memory

    def _begins(self, key: int) -> int:
        """Return the first step of a hook, counted from the start of measuring; after the last hook, the final step."""
        if key == 0:
            return 0
        config = self._config
        return config.warmup_steps + config.timed_steps + (key - 1) * (_LEAD_IN + config.timed_steps)

    def _phase(self, step: int) -> int:
        if self._choice is not None:
            return self._choice
        elapsed = 0 if self._first_step is None else step - self._first_step
        return max(key for key in self._phases if self._begins(key) <= elapsed)

    def is_local(self, step: int) -> bool:
        return False

    def reduce(self, bucket: Bucket, ranks: Group) -> Steps[Tensor | None]:
        yield from self._enter(bucket, bucket.flat.numel(), ranks)
        phase, sampler = self._phase(bucket.step), self._sampler(bucket.step)
        # The gradients that this hook gets are averaged as they are.
        bucket = dataclasses.replace(bucket, accumulated=None)
        taken = sampler.take(bucket.flat, bucket) if sampler is not None else None
        finite = yield from self._reduce_as(phase, bucket, ranks)
        if sampler is not None and taken is not None:
            yield from sampler.compare(taken, bucket.flat, bucket, ranks)
        return finite

    def reduce_sparse(self, grad: Tensor, bucket: Bucket, ranks: Group) -> Steps[Tensor]:
        yield from self._enter(bucket, grad._values().numel(), ranks)
        return (yield from super().reduce_sparse(grad, bucket, ranks))

    def _enter(self, bucket: Bucket, numel: int, ranks: Group) -> Steps[None]:
        """Record the time of a step before a bucket is reduced, and choose after the last step of measuring.

        A bucket's collectives depend on its step only: whether another bucket of the step has already made the choice
        may differ between ranks, so each bucket makes it.
        """
        if self._choice is not None and bucket.step != self._chosen_at:
            return
        if self._first_step is None or not 0 <= bucket.step - self._first_step - len(self._moments) + 1 <= 1:
            self._restart()
            self._first_step = bucket.step
        elapsed = bucket.step - self._first_step
        if elapsed == len(self._moments):
            self._moments.append(self.group.counters.timing.now())
        self._numel += numel if elapsed == 0 else 0
        if elapsed == self._begins(len(self._phases)):
            self._chosen_at = bucket.step
            yield from self._choose(ranks)

    def _sampler(self, step: int) -> ErrorSampler | None:
        """Return the sampler of a step's errors, or `None` if the step is not sampled."""
        if self._choice is not None or self._first_step is None:
            return None
        key = self._phase(step)
        if key == 0 or not 1 <= step - self._first_step - self._begins(key) < _LEAD_IN:
            return None
        if key not in self._samplers:
            self._samplers[key] = ErrorSampler(1, DEFAULT_NUMEL, self._numel)
        return self._samplers[key]

    def _choose(self, ranks: Group) -> Steps[None]:
        own = [self._samplers[key].relative_error if key in self._samplers else math.nan for key in self._phases]
        agreed = yield from self._agreed([*(self._step_ms(key) for key in self._phases), *own], ranks)
        times, errors = agreed[: len(own)], agreed[len(own) :]
        acceptable = [key for key in self._phases if key == 0 or errors[key] <= self._config.max_error]
        best = min(acceptable, key=times.__getitem__)
        is_first = self._choice is None
        self._choice = best if times[best] <= times[0] * (1 - self._config.min_gain) else 0
        if is_first and self.group.rank == 0:
            announce(self._explain(times, errors))

    def _step_ms(self, key: int) -> float:
        end = self._begins(key + 1)
        moments = self._moments[end - self._config.timed_steps : end + 1]
        timing = self.group.counters.timing
        return statistics.median(timing.ms(a, b) for a, b in itertools.pairwise(moments))

    def _agreed(self, numbers: list[float], ranks: Group) -> Steps[list[float]]:
        """Return means over ranks, bit-identical on all ranks."""
        own = torch.tensor(numbers, dtype=torch.float64, device=self.group.device)
        means: list[float] = (yield from ranks.quiet().all_reduce_mean_(own)).tolist()
        return means

    def _explain(self, times: list[float], errors: list[float]) -> str:
        assert self._choice is not None
        names = [code(hook).strip('"') for hook in self._hooks.values()]
        rows = [f"{name} {ms:.1f} ms" for name, ms in zip(names, times, strict=True)]
        rows = [f"{row}, error {errors[key]:.2g}" if key else row for key, row in enumerate(rows)]
        if self._choice:
            gain = times[0] / times[self._choice]
            why = f"steps are {gain:.2f} times as fast as with plain averaging"
        else:
            why = (
                f"no candidate with an error of at most {self._config.max_error:g} makes steps "
                f"{self._config.min_gain:.0%} shorter, so compression does not pay here"
            )
        return f"hook='auto' chose {names[self._choice]}: {why}. Per step: {'; '.join(rows)}"

    def end_step(self, finite: Tensor) -> None:
        super().end_step(finite)
        if self._choice is None or self._is_tidy:
            return
        # Until then the remaining candidates may hold residuals.
        if all(phase == self._choice for phase in self._last_phase.values()):
            self._is_tidy = True
            for key, phase in self._phases.items():
                if key != self._choice:
                    phase.release()

    def state_dict(self, writer: StateWriter) -> dict[str, Any]:
        choice = {} if self._choice is None else {"choice": describe(self._hooks[self._choice])}
        return {**super().state_dict(writer), **choice}

    def _part_differs(self, key: str, when: str, reader: StateReader) -> None:
        """Ignore differences: the choice is final."""

    def load_state_dict(self, state: dict[str, Any], reader: StateReader) -> None:
        super().load_state_dict(state, reader)
        self._restart()
        if "choice" in state and self.group.size > 1:
            known = {key: describe(hook) for key, hook in self._hooks.items()}
            self._choice = next((key for key, hook in known.items() if hook == state["choice"]), None)
            if self._choice is None:
                reader.differs(f"it has chosen {state['choice']!r}, which is not a candidate now: it measures again")
        if any(key not in self._phases for key in reader.section(state, "last_phase").values()):
            reader.differs("it has the residuals of a hook that is not a candidate now")

    @property
    def compression_stats(self) -> Any:
        """The statistics of the hook in use, if it has any."""
        return getattr(self._phases[self._choice or 0], "compression_stats", None)

    def inactive_reason(self, step: int) -> str | None:
        if self._choice is not None:
            return self._phases[self._choice].inactive_reason(step)
        if not self._moments or step == ANY_LATER_STEP:
            return None
        num = self._begins(len(self._phases)) + 1
        return f"hook='auto' has not chosen: measuring takes {num} steps; use fewer candidates or timed_steps"
