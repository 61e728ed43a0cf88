"""Forecast of the traffic of training from counts of its first steps, and of the first steps after each change."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakSet

from lightning_commhooks.hooks.quantized import Int8
from lightning_commhooks.interface.averages_models import ALONE, AveragesModels
from lightning_commhooks.interface.error_sample import DEFAULT_NUMEL, ErrorSampler
from lightning_commhooks.interface.hook import ANY_LATER_STEP, NEXT_TO_NOTHING, CommHook
from lightning_commhooks.interface.python_code import code
from lightning_commhooks.interface.start import RANK, changed, hooks_in, late_starts, start_of, text_of_steps
from lightning_commhooks.interface.user_function import UserFunction
from lightning_commhooks.runtime.local_steps import LocalSteps
from lightning_commhooks.wrappers.auto import Auto
from lightning_commhooks.wrappers.schedule import Schedule

if TYPE_CHECKING:
    from lightning_commhooks.runtime.runtime import Runtime

# Runs of fewer steps are trials: no advice on where a hook should start, or on periods.
FEWEST_STEPS = 10
# The smallest relative error of a step that is shown; and the number of steps in which error feedback makes up for an
# error of 1. It falls with the square of the error, which is the part of the energy of gradients that a step leaves
# out. Both by docs/hooks/powersgd.md.
_SHOWN_ERROR = 0.1
_STEPS_TO_CATCH_UP = 300
# Factor of the rank in a recommendation of a higher rank.
_HIGHER_RANK = 4
# The line of a hook with more options shows its name only.
_LONGEST_CODE = 80
# Hooks at work in this process.
_open: WeakSet[Runtime] = WeakSet()


@dataclass(frozen=True)
class Forecast:
    """Forecast of the traffic of a training run, made by `Attachment.forecast`. `str()` gives it as one line.

    Attributes:
        line: the measurements, and the step from which the hook's traffic changes.
        bytes_sent: payload bytes that this rank sends from the first step in this process to the last; `None` if that
            is not known yet: the number of steps is unknown, the hook changes later on, or it averages models.
        compression_ratio: bytes that plain DDP sends in these steps, over `bytes_sent`; `None` if that is not known.
        warnings: why nothing or next to nothing is compressed, or a short run learns less, and what to set.
        relative_error: of the averaged gradients of one of the first compressed steps, see `Attachment.sample_error`;
            `None` for hooks without error feedback.
    """

    line: str
    bytes_sent: float | None
    compression_ratio: float | None
    warnings: tuple[str, ...]
    relative_error: float | None = None

    def __str__(self) -> str:
        return self.line


class _Counts(NamedTuple):
    """Counts until a step, or from one to another: see `Counters`."""

    bytes_sent: float
    bytes_dense: float
    bytes_sent_between_nodes: float
    bytes_dense_between_nodes: float
    numel_compressed: float
    numel_uncompressed: float
    averagings: float

    def plus(self, other: _Counts, times: float) -> _Counts:
        return _Counts(*(own + times * more for own, more in zip(self, other, strict=True)))

    @property
    def is_between_nodes(self) -> bool:
        """Whether only traffic between nodes counts, since nodes have several ranks each."""
        return 0 < self.bytes_dense_between_nodes < 0.999 * self.bytes_dense

    @property
    def ratio(self) -> float:
        """Bytes of plain DDP over bytes sent; inf if nothing is sent."""
        sent, dense = self[2:4] if self.is_between_nodes else self[:2]
        return dense / sent if sent and dense else math.inf

    @property
    def compressed(self) -> float:
        """Fraction of the gradients that were compressed."""
        return self.numel_compressed / max(1, self.numel_compressed + self.numel_uncompressed)

    @property
    def times(self) -> str:
        """The ratio in words."""
        if math.isinf(self.ratio):
            return "nothing is sent"
        if self.ratio > 1.005:
            return f"{self.ratio:{',.0f' if self.ratio >= 100 else '.3g'}}x fewer bytes"
        return f"{'' if self.ratio > 0.995 else f'{1 / self.ratio:.3g}x '}as many bytes as plain DDP"


class Forecaster:
    """Measures the traffic of a hook over whole periods between its changes, from counts at the beginning of steps.

    Attributes:
        has_warned: whether the user was warned that next to nothing is compressed.
        last_step: the last step that has begun in this process, counted from 0; -1 before the first one.
        sampler: estimates the error of one step after the last change; `None`: none.
    """

    def __init__(self, runtime: Runtime, local: LocalSteps) -> None:
        _open.add(runtime)
        self._runtime = runtime
        self._local = local
        self._not_compressed: Counter[str] = Counter()
        self.last_step = -1
        self._is_counted = True
        self.restart()

    def close(self) -> None:
        """Do not count as another hook any more."""
        _open.discard(self._runtime)

    def restart(self) -> None:
        """Forget all steps: the hook is reset, or resumes from a checkpoint."""
        self.has_warned = False
        # `Auto` sends anything until it has chosen.
        self._is_chosen_late = isinstance(self._runtime.method, Auto)
        # First step in this process, and the change after which the line was shown.
        self._first = self._shown = -1
        self._begin_phase(None, False, -1)

    def _begin_phase(self, hook: CommHook | None, is_alone: bool, step: int) -> None:
        self._hook, self._is_alone, self._changed_at = hook, is_alone, step
        self.sampler: ErrorSampler | None = None
        # Step and counts where measuring begins; then two steps, whole periods apart, and the counts between them.
        self._begin: tuple[int, _Counts] | None = None
        self._measured: tuple[int, int, _Counts] | None = None
        # What begins at `start_localSGD_iter`, at which step, and whether ranks step alone then.
        bound = self._runtime.bound
        self._local_steps = bound.from_start if isinstance(bound, AveragesModels) and bound.averages_models else None
        self._starts_alone = (self._local_steps or "").endswith(ALONE)
        self._has_phases = hook is not None and any(isinstance(each, Schedule) for each in hooks_in(hook))
        late = () if hook is None or self._has_phases else late_starts(hook)
        starts = {start_of(each, name) for each, name, _ in late if name == "start_localSGD_iter"}
        self._local_start = min(starts) if starts and self._local_steps is not None else None
        # Steps of other changes.
        self._changes = set() if hook is None else hook.changes_at() - starts

    @property
    def _counts(self) -> _Counts:
        return _Counts(*(getattr(self._runtime.counters, name) for name in _Counts.__annotations__))

    def begin_step(self, step: int) -> None:
        """Note the counts before a step, which include the counts of optimizers' steps."""
        self.end_step()
        now, bound = self._counts, self._runtime.bound
        if self._first < 0:
            self._first, self._before = step, now
        self.last_step, self._now, self._is_counted = step, now, False
        hook: CommHook | None = getattr(bound, "chosen", None) if self._is_chosen_late else self._runtime.config
        # The first local step follows from steps of optimizers.
        is_alone = bound.averages_models and bound.is_local(step)
        has_changed = step in self._changes or (step == self._local_start and not self._starts_alone)
        if hook is None or hook is not self._hook or is_alone is not self._is_alone or has_changed:
            # The first step is left out: DDP rebuilds its buckets after it, and a hook flushes another's residual.
            self._begin_phase(hook, is_alone, step)
            return
        num_optimizers = max(1, self._local.num_optimizers) if self._averages else 1
        if self._begin is None:
            # Replicas that join have other first steps.
            is_sampled = step == self._changed_at + 1 and not self._runtime.source.ranks_change
            if is_sampled and bound.has_memory and not bound.averages_models:
                numel = sum(map(math.prod, self._local.models.layout.shapes.values()))
                self.sampler = ErrorSampler(1, DEFAULT_NUMEL, numel, only=step)
            waits = hook.measured_from() if self._averages else 1
            if step - self._changed_at >= (waits * num_optimizers if waits > 1 else 1):
                self._begin = step, now
            return
        # Before ranks step alone only half iterations of PowerSGD repeat. Each optimizer counts its own steps.
        period = 2 if bound.averages_models and not self._averages else hook.repeats_after() * num_optimizers
        sent = now.plus(self._begin[1], -1)
        # Optimizers may step more seldom than the backward ends.
        is_whole = not self._averages or sent.averagings > (self._measured[2].averagings if self._measured else 0)
        if (step - self._begin[0]) % period == 0 and is_whole:
            self._measured = self._begin[0], step, sent

    def end_step(self) -> None:
        """Count the last step if it was not compressed."""
        if self._is_counted:
            return
        self._is_counted = True
        sent = self._counts.plus(self._now, -1)
        is_compressed = sent.ratio > 1 + 1e-6  # counts of a long run are rounded
        if sent.bytes_dense and not is_compressed and not self._is_alone:
            reason = self._runtime.bound.inactive_reason(self.last_step) or "gradients are sent as they are"
            self._not_compressed[reason.partition(";")[0]] += 1

    def not_compressed(self) -> dict[str, int]:
        """Number of steps that sent no fewer bytes, or no fewer between nodes, than plain DDP, by reason."""
        self.end_step()
        return dict(self._not_compressed)

    @property
    def _averages(self) -> bool:
        """Whether models are averaged since the last change; in a schedule, some phases may average gradients."""
        is_late = self._local_start is not None and self._local_start > self.last_step
        return self._local_steps is not None and (self._is_alone or not (is_late or self._has_phases))

    def tell(self, say: Callable[[str], None] | None, num_left: int | None) -> None:
        """Say and warn as `Attachment.tell_forecast`: once after each change of the hook."""
        if self._shown == self._changed_at or self._measured is None:
            return
        forecast = self.make(None if num_left is None else self._runtime.clock.steps + num_left)
        if forecast is None:
            return
        self._shown, speaks = self._changed_at, self._runtime.speaks
        if say is not None and speaks:
            say(forecast.line)
        for text in () if self.has_warned else forecast.warnings:
            self.has_warned = True
            if speaks:
                warnings.warn(text, stacklevel=3)

    def make(self, num_steps: int | None) -> Forecast | None:
        """The forecast, if a whole period was measured. Not collective; waits for a device for the error alone."""
        method, bound = self._runtime.method, self._runtime.bound
        if self._measured is None or isinstance(method, UserFunction) or bound.group.size == 1:
            return None
        if num_steps is not None and num_steps < self._runtime.clock.steps:
            num_steps = None
        begin, end, sent = self._measured
        local = math.inf if self._local_start is None else self._local_start
        if local <= self.last_step and self._starts_alone and not self._is_alone:
            return None  # optimizers have not taken the steps after which ranks step alone
        later = (c for c in (*self._changes, local) if self.last_step < c < (num_steps or math.inf))
        change = int(first) if (first := min(later, default=None)) is not None else None
        total = error = None
        if num_steps is not None and change is None and not bound.averages_models:
            total = self._now.plus(self._before, -1).plus(sent, (num_steps - self.last_step) / (end - begin))
        text = self._line(num_steps, total, change) + ("; of those that leave a node" if sent.is_between_nodes else "")
        warning = self._warning(num_steps, sent, total, change)
        if change is None and self.sampler is not None and not math.isnan(found := self.sampler.relative_error):
            error = found
            if error >= _SHOWN_ERROR:
                text += f"; relative error of a step{_at_rank(method)}: {error:.2g}, the rest is sent later"
                warning = warning or self._error_warning(num_steps, error)
        name, model = code(method).replace('"', "'"), self._runtime.model()
        name = name if len(name) <= _LONGEST_CODE else f"'{method.name}'"
        # With several models, which of them.
        whose = f" of {type(getattr(model, 'module', model)).__name__}" if len(_open) > 1 and model is not None else ""
        return Forecast(
            f"Forecast for communication hook {name}{whose}: {text}",
            total and total.bytes_sent,
            total and (total.bytes_dense / total.bytes_sent if total.bytes_sent else math.inf),
            () if warning is None else (warning,),
            error,
        )

    def _line(self, num_steps: int | None, total: _Counts | None, change: int | None) -> str:
        assert self._measured is not None
        begin, end, sent = self._measured
        bound, of = self._runtime.bound, "on" if num_steps is None else f"of {num_steps:,} on"
        if change is not None:
            text = f"{sent.times} until step {change:,}"
            if change != self._local_start:
                begins = "it sends otherwise" if self._has_phases else "it compresses"
                return f"{text}; {begins} from step {change:,} {of}"
            # Each of several optimizers counts its own steps.
            about = "about " if self._local.num_optimizers > 1 else ""
            return f"{text}; from {about}step {change:,} {of}, {self._local_steps}"
        what = f"{100 * sent.compressed:.3g}% of the gradients are compressed"
        if self._is_alone:
            what = self._local_steps or ALONE
        elif self._averages or (bound.averages_models and not sent.numel_compressed):
            what = f"all {bound.group.size} ranks average gradients"
        if self._averages:
            num, steps = end - begin, f"steps {begin:,} to {end - 1:,}" if end - begin > 1 else f"step {begin:,}"
            often = "every" if sent.averagings == 1 else f"{sent.averagings:,.0f} times in"
            text = f"{what}, and models are averaged {often} {text_of_steps(num)}"
            return f"from step {self._changed_at:,} {of}, {text}; {sent.times} in {steps}"
        text = f"{what} from step {self._changed_at:,} {of}; {sent.times}"
        if total is None or abs(total.ratio / sent.ratio - 1) < 0.05:
            return text
        return f"{text} then, {total.ratio:.3g}x over the {'rest of the ' if self._first else ''}run"

    def _warning(self, num_steps: int | None, sent: _Counts, total: _Counts | None, change: int | None) -> str | None:
        """Text on what to set, if next to nothing will be compressed."""
        bound, name = self._runtime.bound, self._runtime.name
        is_trial = num_steps is not None and num_steps < FEWEST_STEPS
        # Before a change, the steps so far, which may include other phases.
        whole = self._now.plus(self._before, -1) if change is not None else total or sent
        is_little = 1 - 1 / max(sent.ratio, whole.ratio) < NEXT_TO_NOTHING
        if change is not None:
            # It begins, but too late: almost all steps are like the measured ones.
            is_late = num_steps is not None and not is_trial and change > (1 - NEXT_TO_NOTHING) * num_steps
            text = bound.inactive_reason(change - 1) if is_late and is_little else None
            if text is not None and self._has_phases:
                text = f"hook={name!r} sends {sent.times} until step {change:,}; let its phases begin earlier"
        else:
            text = bound.inactive_reason(ANY_LATER_STEP if num_steps is None or is_trial else num_steps - 1)
            if text is None and self._is_alone and sent.ratio < 0.995 and not is_trial:
                text = f"hook={name!r} sends {sent.times}; average models more seldom"
            elif text is None and self._now.numel_compressed and not self._averages and is_little:
                share = f"{sent.compressed:.2%} of the gradients, and sends {sent.times}"
                text = f"hook={name!r} compresses {share}; use another hook, or none"
        ends = "" if num_steps is None else f"training ends after {text_of_steps(num_steps)}, and "
        return None if text is None else ends + text

    def _error_warning(self, num_steps: int | None, error: float) -> str | None:
        """Text on a better hook for a run that is too short for error feedback."""
        hook, enough = self._hook, math.ceil(_STEPS_TO_CATCH_UP * min(1.0, error) ** 2)
        if num_steps is None or not FEWEST_STEPS <= num_steps < enough or hook is None:
            return None
        parameters = self._local.models.layout.trained.values()
        int8 = "'int8'" if sum(p.nbytes for p in parameters) >= Int8().min_bytes else code(Int8(min_bytes=0))
        higher = changed(hook, lambda owner, name, value: _HIGHER_RANK * value if name == RANK else value)
        more = f", or at a higher rank: hook={code(higher)}" if higher != hook else ""
        return (
            f"training ends after {text_of_steps(num_steps)}, and hook={self._runtime.name!r}{_at_rank(hook)} "
            f"averages gradients with a relative error of {error:.2g} in a step. Error feedback sends the rest "
            f"in later steps, but a run of less than about {enough} steps is too short for that: it learns more with "
            f"hook={int8}{more}"
        )


def _at_rank(hook: CommHook) -> str:
    ranks = sorted({getattr(each, RANK) for each in hooks_in(hook) if hasattr(each, RANK)})
    return f" at rank {' and '.join(map(str, ranks))}" if ranks else ""
