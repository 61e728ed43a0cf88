"""Forecast of the traffic of training, from measurements: a line after its first steps and each change."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakSet

from lightning_commhooks.hooks.quantized import Int8
from lightning_commhooks.interface.averages_models import ALONE, AveragesModels
from lightning_commhooks.interface.error_sample import DEFAULT_NUMEL, ErrorSampler
from lightning_commhooks.interface.hook import ANY_LATER_STEP, NEXT_TO_NOTHING, CommHook
from lightning_commhooks.interface.python_code import code, earlier
from lightning_commhooks.interface.start import RANK, hooks_in, late_starts, start_of, text_of_steps, with_rank
from lightning_commhooks.interface.user_function import UserFunction
from lightning_commhooks.runtime.compression import Watch
from lightning_commhooks.runtime.local_steps import LocalSteps
from lightning_commhooks.runtime.running import RunningHook
from lightning_commhooks.wrappers.auto import Auto
from lightning_commhooks.wrappers.schedule import Schedule

# Runs of fewer steps are trials: no advice on where a hook should start, or on periods.
FEWEST_STEPS = 10
# A relative error of a step that is worth telling of; and the number of steps in which error feedback makes up for one
# of 1. It falls with the square of the error, which is the part of the energy of gradients that a step leaves out. Both
# by docs/hooks/powersgd.md.
_ERROR_TO_TELL = 0.1
_STEPS_TO_CATCH_UP = 300
# How many times the rank a higher one is that is recommended.
_HIGHER_RANK = 4
_LOCAL = "start_localSGD_iter"
# Hooks at work in this process.
_open: WeakSet[RunningHook] = WeakSet()
# A hook with more options is told by its name.
_LONGEST_NAME = 80


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


class _Sent(NamedTuple):
    """Counts until a step, or from one to another: see `Counters`."""

    bytes_sent: float
    bytes_dense: float
    bytes_sent_between_nodes: float
    bytes_dense_between_nodes: float
    numel_compressed: float
    numel_uncompressed: float
    averagings: float

    def plus(self, other: _Sent, times: float) -> _Sent:
        return _Sent(*(own + times * more for own, more in zip(self, other, strict=True)))

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
    def percent_compressed(self) -> float:
        return 100 * self.numel_compressed / max(1, self.numel_compressed + self.numel_uncompressed)


class Forecaster:
    """Measures the traffic of a hook's steps, over whole periods between its changes, and reports it.

    Attributes:
        has_warned: whether the user was warned that next to nothing is compressed.
    """

    def __init__(self, running: RunningHook, local: LocalSteps, watch: Watch) -> None:
        _open.add(running)
        self._running = running
        self._local = local
        self._watch = watch
        self.restart()

    def close(self) -> None:
        """Do not count as another hook any more."""
        _open.discard(self._running)

    def restart(self) -> None:
        """Forget all steps: the hook is reset, or resumes from a checkpoint."""
        self.has_warned = False
        self._step = self._first = self._phase = self._told = -1
        self._hook: CommHook | None = None
        self._is_alone = self._is_seldom = False
        # Steps at which it changes, and the options, as `start_powerSGD_iter`, by which it does.
        self._changes: dict[int, str] = {}
        # Step and counts where measuring begins; then two steps, whole periods apart, and the traffic between them.
        self._begin: tuple[int, _Sent] | None = None
        self._measured: tuple[int, int, _Sent] | None = None
        self._watch.of_step = None

    def begin_step(self, step: int) -> None:
        """Note the traffic before a step, including the traffic of optimizers' steps."""
        now = _Sent(*(getattr(self._running.counters, name) for name in _Sent._fields))
        if self._first < 0:
            self._first, self._before = step, now
        self._step, self._now = step, now
        method, bound = self._running.method, self._running.bound
        # `Auto` sends anything until it has chosen.
        hook: CommHook | None = getattr(bound, "chosen", None) if isinstance(method, Auto) else self._running.config
        # Which backward is the first one that ranks take alone follows from steps of optimizers.
        is_alone = bound.averages_models and bound.is_local(step)
        self._is_seldom |= self._first < step and 0 <= self._local.stepped_after < step
        if hook is None or hook is not self._hook or is_alone is not self._is_alone or self._changes_now(step):
            # The first step is left out: DDP rebuilds its buckets after it, and a hook flushes another's residual.
            self._hook, self._is_alone, self._phase = hook, is_alone, step
            self._begin = self._measured = None
            self._changes = {} if hook is None else _changes(hook, bound)
        elif self._begin is None:
            if step == self._phase + 1:
                self._sample(step)
            if step - self._phase >= self._measured_from(hook):
                self._begin = step, now
        elif (step - self._begin[0]) % self._period(hook) == 0:
            self._measure(step, now.plus(self._begin[1], -1))

    def _measured_from(self, hook: CommHook) -> int:
        steps = hook.measured_from() if self._averages_now else 1
        return steps if steps == 1 else steps * max(1, self._local.num_optimizers)

    def _changes_now(self, step: int) -> bool:
        return step in self._changes and not _is_alone(self._begins(step))

    def _begins(self, change: int) -> str | None:
        """What averages of models begin at a change; `None`: it is another change."""
        return _from_start(self._running.bound) if self._changes[change] == _LOCAL else None

    def _measure(self, step: int, sent: _Sent) -> None:
        assert self._begin is not None
        if not sent.averagings:
            # Optimizers may step more seldom than the backward ends.
            if not self._is_alone and not self._is_awaiting_average:
                self._measured = self._begin[0], step, sent
        elif self._measured is None or sent.averagings > self._measured[2].averagings:
            if self._measured is not None and not self._measured[2].averagings:
                self._told = -1  # there was no average, it was said
            self._measured = self._begin[0], step, sent

    @property
    def _is_awaiting_average(self) -> bool:
        """Whether models are averaged at some time though ranks do not step alone."""
        return _from_start(self._running.bound) is not None and not self._is_alone and self._averages_now

    @property
    def _averages_now(self) -> bool:
        """Whether the hook averages models in this phase; in a schedule, some phases may average gradients."""
        bound, hook = self._running.bound, self._hook
        if not bound.averages_models or hook is None:
            return False
        is_late = any(option == _LOCAL and change > self._step for change, option in self._changes.items())
        return self._is_alone or not (is_late or _has_phases(hook))

    def _period(self, hook: CommHook) -> int:
        """Number of steps after which the traffic repeats. If optimizers take turns, each counts its own steps."""
        if self._averages_now:
            return hook.repeats_after() * max(1, self._local.num_optimizers)
        # Before ranks step alone only half iterations of PowerSGD repeat.
        return 2 if self._running.bound.averages_models else hook.repeats_after()

    def _sample(self, step: int) -> None:
        """Estimate the error of this step, for hooks with memory. All ranks do, since the step is the same on them."""
        running, bound = self._running, self._running.bound
        # Replicas that join have other first steps.
        if bound.has_memory and not bound.averages_models and not running.source.ranks_change:
            numel = sum(map(math.prod, self._local.models.layout.shapes.values()))
            self._watch.of_step = step, ErrorSampler(1, DEFAULT_NUMEL, numel)

    def tell(self, say: Callable[[str], None] | None, num_left: int | None) -> None:
        """Say and warn as `Attachment.tell_forecast`: once in each phase of the hook."""
        if self._told == self._phase or self._measured is None:
            return
        forecast = self.make(None if num_left is None else self._running.clock.steps + num_left)
        if forecast is None:
            return
        self._told, is_first_rank = self._phase, self._running.bound.group.rank == 0
        if say is not None and is_first_rank:
            say(forecast.line)
        for text in () if self.has_warned else forecast.warnings:
            self.has_warned = True
            if is_first_rank:
                warnings.warn(text, stacklevel=3)

    def make(self, num_steps: int | None) -> Forecast | None:
        """The forecast, if a whole period was measured. Not collective; waits for a device for the error alone."""
        method, bound = self._running.method, self._running.bound
        if self._measured is None or isinstance(method, UserFunction) or bound.group.size == 1:
            return None
        if num_steps is not None and num_steps < self._running.clock.steps:
            num_steps = None
        begin, end, sent = self._measured
        change = min((c for c in self._changes if self._step < c < (num_steps or math.inf)), default=None)
        if change is None and self._is_waiting:
            return None
        total = None
        if num_steps is not None and change is None and not bound.averages_models:
            total = self._now.plus(self._before, -1).plus(sent, (num_steps - self._step) / (end - begin))
        name = code(method).replace('"', "'")
        name = name if len(name) <= _LONGEST_NAME else f"'{method.name}'"
        text = self._line(num_steps, self._measured, total, change)
        text += "; of those that leave a node" if sent.is_between_nodes else ""
        error = self._error() if change is None else None
        if error is not None and error >= _ERROR_TO_TELL:
            text += f"; relative error of a step{_at_rank(method)}: {error:.2g}, the rest is sent later"
        warning = self._warning(num_steps, sent, total, change)
        if warning is None and error is not None and num_steps is not None:
            warning = self._error_warning(num_steps, error)
        model = self._running.model()
        # With several models, which of them.
        whose = f" of {type(getattr(model, 'module', model)).__name__}" if len(_open) > 1 and model is not None else ""
        return Forecast(
            f"Forecast for communication hook {name}{whose}: {text}",
            total and total.bytes_sent,
            total and (total.bytes_dense / total.bytes_sent if total.bytes_sent else math.inf),
            () if warning is None else (warning,),
            error,
        )

    @property
    def _is_waiting(self) -> bool:
        """Whether ranks are to step alone by now, and optimizers have not taken the steps after which they do."""
        bound = self._running.bound
        begins = [change for change, option in self._changes.items() if option == _LOCAL]
        return bool(begins) and not self._is_alone and _is_alone(_from_start(bound)) and min(begins) <= self._step

    def _error(self) -> float | None:
        if self._watch.of_step is None or self._watch.of_step[0] != self._phase + 1:
            return None
        error = self._watch.of_step[1].relative_error
        return None if math.isnan(error) else error

    def _line(
        self, num_steps: int | None, measured: tuple[int, int, _Sent], total: _Sent | None, change: int | None
    ) -> str:
        (begin, end, sent), bound = measured, self._running.bound
        of = "on" if num_steps is None else f"of {num_steps:,} on"
        if change is not None:
            return f"{_times(sent)} until step {change:,}; {self._what_comes(change)} {change:,} {of}"
        steps = f"steps {begin:,} to {end - 1:,}" if end - begin > 1 else f"step {begin:,}"
        within = f"{_times(sent)} in {steps}"
        if self._is_alone:
            who = _from_start(bound) or ALONE
            return f"{_averages(sent, end - begin)}; {who} from step {self._phase:,} {of}; {within}"
        if sent.averagings and self._averages_now:
            return (
                f"{_averages(sent, end - begin)} from step {self._phase:,} {of}, and gradients over all "
                f"{bound.group.size} ranks at every step; {within}"
            )
        if self._averages_now:
            return f"gradients are averaged over all {bound.group.size} ranks at every step; {_times(sent)}"
        what = f"{sent.percent_compressed:.3g}% of the gradients are compressed"
        text = f"{what} from step {self._phase:,} {of}; {_times(sent)}"
        if total is None or abs(1 / total.ratio - 1 / sent.ratio) < 0.02:
            return text
        return f"{text} then, {total.ratio:.3g}x over the {'rest of the ' if self._first else ''}run"

    def _what_comes(self, change: int) -> str:
        """What changes, but for the number of the step."""
        bound, begins = self._running.bound, self._begins(change)
        if begins is not None:
            # Optimizers count the steps, and each its own.
            is_about = self._is_seldom or self._local.num_optimizers > 1
            return f"{begins} from {'about ' if is_about else ''}step"
        if bound.is_local(change):
            return f"{ALONE} from step"
        comes = "it compresses" if self._changes[change] and not bound.averages_models else "it sends otherwise"
        return f"{comes} from step"

    def _warning(self, num_steps: int | None, sent: _Sent, total: _Sent | None, change: int | None) -> str | None:
        """Text on what to set, if next to nothing will be compressed."""
        name, saved = self._running.name, 1 - 1 / sent.ratio
        is_trial = num_steps is not None and num_steps < FEWEST_STEPS
        last = self._step if num_steps is None else num_steps - 1
        if change is not None:
            if num_steps is None or is_trial:
                return None
            saved = (max(0.0, saved) * change + num_steps - change) / num_steps
            assert self._hook is not None
            advice = earlier(self._hook, num_steps)
            text = (
                f"hook={name!r} saves at most {saved:.1%} of the bytes that plain DDP sends, because it begins to at "
                f"step {change:,} only; {advice if self._changes[change] else advice.partition(':')[0]}"
            )
        elif reason := self._running.bound.inactive_reason(ANY_LATER_STEP if is_trial else last):
            text, saved = reason, 0.0
        elif self._averages_now:
            if not self._is_alone or sent.ratio > 0.995:
                return None  # what averages besides cost was told when the hook was attached
            text = f"hook={name!r} sends {_times(sent)}; average models more seldom"
        elif not self._now.numel_compressed:
            return None  # a hook that is not for that
        else:
            saves = f"of the bytes that plain DDP sends it saves {saved:.1%}" if saved >= 0 else f"sends {_times(sent)}"
            text = (
                f"hook={name!r} compresses {sent.percent_compressed:.2f}% of the gradients, and {saves}; use another "
                "hook, or none"
            )
            saved = saved if total is None else max(saved, 1 - 1 / total.ratio)
        if saved >= NEXT_TO_NOTHING:
            return None
        return text if num_steps is None else f"training ends after {text_of_steps(num_steps)}, and {text}"

    def _error_warning(self, num_steps: int, error: float) -> str | None:
        """Text on a better hook for a run that is too short for error feedback."""
        enough = math.ceil(_STEPS_TO_CATCH_UP * min(1.0, error) ** 2)
        if not FEWEST_STEPS <= num_steps < enough or error < _ERROR_TO_TELL or self._hook is None:
            return None
        parameters = self._local.models.layout.trained.values()
        int8 = "'int8'" if sum(p.nbytes for p in parameters) >= Int8().min_bytes else code(Int8(min_bytes=0))
        higher = code(with_rank(self._hook, _HIGHER_RANK))
        more = f", or at a higher rank: hook={higher}" if higher != code(self._hook) else ""
        return (
            f"training ends after {text_of_steps(num_steps)}, and hook={self._running.name!r}{_at_rank(self._hook)} "
            f"averages gradients with a relative error of {error:.2g} in a step. Error feedback sends the rest "
            f"in later steps, but a run of less than about {enough} steps is too short for that: it learns more with "
            f"hook={int8}{more}"
        )


def _at_rank(hook: CommHook) -> str:
    ranks = sorted({getattr(each, RANK) for each in hooks_in(hook) if hasattr(each, RANK)})
    return f" at rank {' and '.join(map(str, ranks))}" if ranks else ""


def _has_phases(hook: CommHook) -> bool:
    return any(isinstance(each, Schedule) for each in hooks_in(hook))


def _from_start(bound: object) -> str | None:
    return bound.from_start if isinstance(bound, AveragesModels) and bound.averages_models else None


def _is_alone(begins: str | None) -> bool:
    return begins is not None and begins.endswith(ALONE)


def _changes(hook: CommHook, bound: object) -> dict[int, str]:
    """Steps at which a hook changes, and the options by which it does; phases of a schedule begin by none."""
    options = {start_of(owner, option): option for owner, option, _ in late_starts(hook)}
    phases = {step for each in hooks_in(hook) if isinstance(each, Schedule) for step in each.hooks}
    changes = {change: options.get(change, "") for change in hook.changes_at()}
    if phases:
        changes = {step: "" if step in phases or option == _LOCAL else option for step, option in changes.items()}
    return {step: option for step, option in changes.items() if option != _LOCAL or _from_start(bound) is not None}


def _averages(sent: _Sent, steps: int) -> str:
    if sent.averagings == 1:
        return f"models are averaged every {text_of_steps(steps)}" if steps > 1 else "models are averaged at every step"
    return f"models, or parts of them, are averaged {sent.averagings:,.0f} times in {text_of_steps(steps)}"


def _times(sent: _Sent) -> str:
    ratio = sent.ratio
    if math.isinf(ratio):
        return "nothing is sent"
    if ratio > 1.005:
        return f"{ratio:,.0f}x fewer bytes" if ratio >= 100 else f"{ratio:.3g}x fewer bytes"
    return f"{'' if ratio > 0.995 else f'{1 / ratio:.3g}x '}as many bytes as plain DDP"
