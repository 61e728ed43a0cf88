"""Forecast of what training will send, from what was measured: a line after its first steps and each change."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakSet

from lightning_commhooks.interface.averages_models import averages_models, is_local
from lightning_commhooks.interface.hook import NEXT_TO_NOTHING, CommHook
from lightning_commhooks.interface.late_start import begun_at, late_starts
from lightning_commhooks.interface.python_code import code
from lightning_commhooks.interface.user_function import UserFunction
from lightning_commhooks.runtime.local_steps import LocalSteps
from lightning_commhooks.runtime.running import RunningHook
from lightning_commhooks.wrappers.auto import Auto

# Hooks at work in this process.
_open: WeakSet[RunningHook] = WeakSet()
# A hook with more options is told by its name.
_LONGEST_NAME = 80


@dataclass(frozen=True)
class Forecast:
    """Forecast of what a training sends, made by `Attachment.forecast`. `str()` gives it as one line.

    Attributes:
        line: what was measured, and from which step on the hook sends otherwise.
        bytes_sent: payload bytes that this rank sends from the first step in this process to the last; `None` if that
            is not known yet: the number of steps is unknown, the hook changes later on, or it averages models.
        compression_ratio: bytes that plain DDP sends in these steps, over `bytes_sent`; `None` if that is not known.
        warnings: why nothing or next to nothing is compressed, and what to set.
    """

    line: str
    bytes_sent: float | None
    compression_ratio: float | None
    warnings: tuple[str, ...]

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
        """Whether what leaves nodes counts, since they have several ranks each."""
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
    """Measures what the steps of a hook send, over whole periods between its changes, and says it.

    Attributes:
        has_warned: whether the user was warned that next to nothing is compressed.
    """

    def __init__(self, running: RunningHook, local: LocalSteps) -> None:
        _open.add(running)
        self._running = running
        self._local = local
        self.restart()

    def close(self) -> None:
        """Do not count as another hook any more."""
        _open.discard(self._running)

    def restart(self) -> None:
        """Forget all steps: the hook begins anew, or goes on from a checkpoint."""
        self.has_warned = False
        self._step = self._first = self._phase = self._told = -1
        self._hook: CommHook | None = None
        # Steps at which it changes, and the options, as `start_powerSGD_iter`, by which it does.
        self._changes: dict[int, str] = {}
        # Where measuring begins, and what was sent from there on over whole periods, between two steps.
        self._begin: tuple[int, _Sent] | None = None
        self._measured: tuple[int, int, _Sent] | None = None

    def begin_step(self, step: int) -> None:
        """Note what was sent before a step, by optimizers' steps too. Called for each bucket of the step."""
        if step == self._step:
            return
        now = _Sent(*(getattr(self._running.counters, name) for name in _Sent._fields))
        if self._first < 0:
            self._first, self._before = step, now
        self._step, self._now = step, now
        method, bound = self._running.method, self._running.bound
        # `Auto` sends anything until it has chosen.
        hook: CommHook | None = getattr(bound, "chosen", None) if isinstance(method, Auto) else self._running.config
        if hook is None or hook is not self._hook or step in self._changes:
            # The first step is by itself: DDP builds its buckets anew after it, and a hook flushes another's residual.
            self._hook, self._phase, self._begin, self._measured = hook, step, None, None
            options = {value: option for _, option, value in late_starts(hook)} if hook is not None else {}
            self._changes = {change: options.get(change, "") for change in hook.changes_at()} if hook else {}
        elif self._begin is None:
            self._begin = step, now
        elif (step - self._begin[0]) % self._period(hook) == 0:
            sent = now.plus(self._begin[1], -1)
            # Optimizers may step more seldom than the backward ends.
            if sent.averagings or not is_local(bound, step - 1):
                self._measured = self._begin[0], step, sent

    def _period(self, hook: CommHook) -> int:
        """Steps after which what is sent repeats. Of optimizers that take turns each counts its own."""
        if is_local(self._running.bound, self._step):
            return hook.repeats_after() * max(1, self._local.num_optimizers)
        # Before ranks step alone only half iterations of PowerSGD repeat.
        return 2 if averages_models(self._running.bound) else hook.repeats_after()

    def tell(self, say: Callable[[str], None] | None, num_left: int | None) -> None:
        """Say and warn as `Attachment.tell_forecast`: once in each phase of the hook."""
        if self._told == self._phase:
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
        """The forecast, if a whole period was measured. Neither collective nor waits for a device."""
        method, bound = self._running.method, self._running.bound
        if self._measured is None or isinstance(method, UserFunction) or bound.group.size == 1:
            return None
        if num_steps is not None and num_steps < self._running.clock.steps:
            num_steps = None
        begin, end, sent = self._measured
        change = min((c for c in self._changes if self._step < c < (num_steps or math.inf)), default=None)
        total = None
        if num_steps is not None and change is None and not averages_models(bound):
            total = self._now.plus(self._before, -1).plus(sent, (num_steps - self._step) / (end - begin))
        name = code(method).replace('"', "'")
        name = name if len(name) <= _LONGEST_NAME else f"'{method.name}'"
        text = self._line(num_steps, self._measured, total, change)
        text += "; of those that leave a node" if sent.is_between_nodes else ""
        warning = self._warning(num_steps, sent, total, change)
        model = self._running.model()
        # With several models, which of them.
        whose = f" of {type(getattr(model, 'module', model)).__name__}" if len(_open) > 1 and model is not None else ""
        return Forecast(
            f"Forecast for communication hook {name}{whose}: {text}",
            total and total.bytes_sent,
            total and (total.bytes_dense / total.bytes_sent if total.bytes_sent else math.inf),
            () if warning is None else (warning,),
        )

    def _line(
        self, num_steps: int | None, measured: tuple[int, int, _Sent], total: _Sent | None, change: int | None
    ) -> str:
        (begin, end, sent), bound = measured, self._running.bound
        of = "on" if num_steps is None else f"of {num_steps:,} on"
        if change is not None:
            comes = "it compresses" if self._changes[change] and not averages_models(bound) else "it sends otherwise"
            comes = "ranks step alone" if is_local(bound, change) else comes
            return f"{_times(sent)} until step {change:,}; {comes} from step {change:,} {of}"
        if is_local(bound, end - 1):
            return f"ranks step alone from step {self._phase:,} {of}; {_times(sent)} in steps {begin:,} to {end - 1:,}"
        what = f"{sent.percent_compressed:.3g}% of the gradients are compressed"
        text = f"{what} from step {self._phase:,} {of}; {_times(sent)}"
        if total is None or abs(1 / total.ratio - 1 / sent.ratio) < 0.02:
            return text
        return f"{text} then, {total.ratio:.3g}x over the {'rest of the ' if self._first else ''}run"

    def _warning(self, num_steps: int | None, sent: _Sent, total: _Sent | None, change: int | None) -> str | None:
        """Text on what to set, if next to nothing will be compressed."""
        name, saved = self._running.name, 1 - 1 / sent.ratio
        if change is not None:
            if num_steps is None:
                return None
            saved = (max(0.0, saved) * change + num_steps - change) / num_steps
            text = (
                f"hook={name!r} saves at most {saved:.1%} of the bytes that plain DDP sends, because it begins to at "
                f"step {change:,} only; let it begin after about a tenth of training, {num_steps // 10:,}"
            )
            if self._changes[change] and self._hook is not None:
                text += f": hook={code(begun_at(self._hook, num_steps // 10))}"
        elif reason := self._running.bound.inactive_reason(self._step if num_steps is None else num_steps - 1):
            text, saved = reason, 0.0
        elif not self._now.numel_compressed:
            return None  # a hook that is not for that
        else:
            text = (
                f"hook={name!r} compresses {sent.percent_compressed:.2f}% of the gradients, and of the bytes that "
                f"plain DDP sends it saves {saved:.1%}; use another hook, or none"
            )
            saved = saved if total is None else max(saved, 1 - 1 / total.ratio)
        if saved >= NEXT_TO_NOTHING:
            return None
        return text if num_steps is None else f"training ends after {num_steps:,} steps, and {text}"


def _times(sent: _Sent) -> str:
    ratio = sent.ratio
    if math.isinf(ratio):
        return "nothing is sent"
    if ratio > 1.005:
        return f"{ratio:,.0f}x fewer bytes" if ratio >= 100 else f"{ratio:.3g}x fewer bytes"
    return f"{'' if ratio > 0.995 else f'{1 / ratio:.3g}x '}as many bytes as plain DDP"
