"""Forecast of what training will send, from what was measured: a line after its first steps and each change."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from typing import NamedTuple

from lightning_commhooks.interface.averages_models import averages_models, is_local
from lightning_commhooks.interface.hook import NEXT_TO_NOTHING, CommHook
from lightning_commhooks.interface.python_code import code
from lightning_commhooks.interface.user_function import UserFunction
from lightning_commhooks.runtime.local_steps import LocalSteps
from lightning_commhooks.runtime.running import RunningHook
from lightning_commhooks.wrappers.auto import Auto
from lightning_commhooks.wrappers.late_start import late_starts

# A hook with more options is told by its name.
_LONGEST_NAME = 80
_FEWER = " fewer bytes"


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
        return dense / sent if sent else math.inf

    @property
    def saved(self) -> float:
        """Part of the bytes of plain DDP that is not sent; below 0 if more is sent."""
        return 1 - 1 / self.ratio if self.bytes_dense else 0.0

    @property
    def share_compressed(self) -> float:
        return self.numel_compressed / max(1, self.numel_compressed + self.numel_uncompressed)


class Forecaster:
    """Measures what the steps of a hook send, over whole periods between its changes, and says it.

    Attributes:
        has_warned: whether the user was warned that next to nothing is compressed.
    """

    def __init__(self, running: RunningHook, local: LocalSteps) -> None:
        self._running = running
        self._local = local
        self.restart()

    def restart(self) -> None:
        """Forget all steps: the hook begins anew, or goes on from a checkpoint."""
        self.has_warned = self._has_sparse = False
        self._step = self._first = self._phase = self._told = -1
        self._hook: CommHook | None = None
        self._changes: list[int] = []
        # Where the present period begins, and the last whole one with its two ends.
        self._begin: tuple[int, _Sent] | None = None
        self._measured: tuple[int, int, _Sent] | None = None
        self._framework_began: tuple[int, int] | None = None

    def begin_step(self, step: int, is_sparse: bool) -> None:
        """Note what was sent before a step, by optimizers' steps too. Called for each bucket of the step."""
        self._has_sparse |= is_sparse
        if step == self._step:
            return
        now = _Sent(*(getattr(self._running.counters, name) for name in _Sent.__annotations__))
        if self._first < 0:
            self._first, self._before = step, now
        self._step, self._now = step, now
        hook = self._config()
        if hook is None or hook is not self._hook or step in self._changes:
            # The first step is by itself: DDP builds its buckets anew after it, and a hook pays what another one owed.
            self._hook, self._changes = hook, sorted(hook.changes_at()) if hook is not None else []
            self._phase, self._begin, self._measured = step, None, None
        elif self._begin is None:
            self._begin = step, now
        elif step - self._begin[0] >= self._period(hook):
            begin, before = self._begin
            sent = now.plus(before, -1)
            # Ranks that step alone average now and then: perhaps optimizers step more seldom than the backward ends.
            if sent.averagings or not is_local(self._running.bound, step - 1):
                self._measured = begin, step, sent
            self._begin = step, now

    def _config(self) -> CommHook | None:
        """The hook that is used from now on, if it is known what it sends."""
        method = self._running.method
        if isinstance(method, UserFunction):
            return None
        if isinstance(method, Auto):
            chosen: CommHook | None = getattr(self._running.bound, "chosen", None)
            return chosen
        return self._running.config

    def _period(self, hook: CommHook) -> int:
        """Steps after which what is sent repeats. Of optimizers that take turns each counts its own."""
        if not averages_models(self._running.bound):
            return hook.repeats_after()
        if is_local(self._running.bound, self._step):
            return hook.repeats_after() * max(1, self._local.num_optimizers)
        return 2  # of PowerSGD's half iterations, as in another phase of a schedule

    def tell(self, say: Callable[[str], None] | None, num_left: int | None, steps: tuple[int, float] | None) -> None:
        """Say once in each phase of the hook what training will do, and warn once, on the first rank.

        Arguments are those of `Attachment.tell_forecast`.
        """
        if steps is not None:
            done, end = steps
            if self._framework_began is None or done < self._framework_began[0]:
                self._framework_began = done, self._running.counters.steps
            before, backwards = self._framework_began
            if done == before:
                return
            pace = (self._running.counters.steps - backwards) / (done - before)
            num_left = round((end - done) * pace) if done <= end < math.inf else None
        if self._told == self._phase:
            return
        forecast = self.make(None if num_left is None else self._running.clock.steps + num_left)
        if forecast is None:
            return
        self._told = self._phase
        is_new, self.has_warned = not self.has_warned, self.has_warned or bool(forecast.warnings)
        if self._running.bound.group.rank != 0:
            return
        if say is not None:
            say(forecast.line)
        for text in forecast.warnings if is_new else ():
            warnings.warn(text, stacklevel=3)

    def make(self, num_steps: int | None) -> Forecast | None:
        """The forecast, if a whole period was measured. Neither collective nor waits for a device."""
        if self._measured is None or self._has_sparse or self._running.bound.group.size == 1:
            return None
        if num_steps is not None and num_steps < self._running.clock.steps:
            num_steps = None
        begin, end, sent = self._measured
        change = next((c for c in self._changes if self._step < c < (num_steps or math.inf)), None)
        total = None
        if num_steps is not None and change is None and not averages_models(self._running.bound):
            total = self._now.plus(self._before, -1).plus(sent, (num_steps - self._step) / (end - begin))
        return Forecast(
            f"Forecast for communication hook {self._name()}: {self._line(num_steps, change, total)}",
            total and total.bytes_sent,
            total and (total.bytes_dense / total.bytes_sent if total.bytes_sent else math.inf),
            self._warnings(num_steps, change, sent, total),
        )

    def _name(self) -> str:
        """The hook as a user would write it, unless that is long."""
        method = self._running.method
        name = code(method).replace('"', "'") if is_dataclass(method) else ""
        if isinstance(method, Auto) and self._hook is not None:
            name = f"'auto', which is {code(self._hook)} now".replace('"', "'")
        return name if 0 < len(name) <= _LONGEST_NAME else f"'{method.name}'"

    def _line(self, num_steps: int | None, change: int | None, total: _Sent | None) -> str:
        assert self._measured is not None
        begin, end, sent = self._measured
        is_alone, times = is_local(self._running.bound, end - 1), _times(sent)
        what = f"{100 * sent.share_compressed:.3g}% of the gradients are compressed" if sent.share_compressed else ""
        what = "ranks step alone" if is_alone else what
        first = self._first
        if change is not None:
            when = f"until step {change:,}"
        elif self._phase > first or num_steps is None:
            when = _from(self._phase, num_steps) if self._phase else "from the first step on"
        else:
            when = f"from step {first:,} to {num_steps:,}" if first else f"in all {num_steps:,} steps"
        text = f"{what} {when}; {times}" if what else f"{times} {when}"
        if is_alone:
            text += f" in steps {begin:,} to {end - 1:,}"
        elif what and change is None and self._phase > first:
            text += " then"
        if change is not None:
            text += f"; {self._what_comes(change)} {_from(change, num_steps)}"
        if total is not None and (self._phase > first or abs(total.saved - sent.saved) > 0.02):
            # As in "25x fewer bytes then, 1.2x over the run".
            over = _times(total).removesuffix(_FEWER) if times.endswith(_FEWER) else _times(total)
            text += f", {over} over the {'rest of the ' if first else ''}run"
        return text + ("; of those that leave a node" if sent.is_between_nodes else "")

    def _what_comes(self, change: int) -> str:
        """Say what the hook does from that step on, which is not measured yet."""
        bound = self._running.bound
        if is_local(bound, change):
            return "ranks step alone"
        assert self._hook is not None
        is_late = any(value == change for _, _, value in late_starts(self._hook))
        return "it compresses" if is_late and not averages_models(bound) else "it sends otherwise"

    def _warnings(self, num_steps: int | None, change: int | None, sent: _Sent, total: _Sent | None) -> tuple[str, ...]:
        """Say what the user should change."""
        assert self._hook is not None
        hook, ends = self._hook, "" if num_steps is None else f"training ends after {num_steps:,} steps, and "
        if change is None:
            reason = self._running.bound.not_begun(self._step if num_steps is None else num_steps - 1)
            if reason is not None:
                return (f"{ends}{reason}",)
            is_little = sent.saved < NEXT_TO_NOTHING and (total is None or total.saved < NEXT_TO_NOTHING)
            if not is_little or not self._now.numel_compressed:
                return ()  # the latter for hooks that are not for that
            return (
                f"hook={hook.name!r} compresses {sent.share_compressed:.2%} of the gradients, and of the bytes that "
                f"plain DDP sends it saves {sent.saved:.1%}; use another hook, or none",
            )
        if num_steps is None:
            return ()
        most = (max(0.0, sent.saved) * change + num_steps - change) / num_steps
        if most >= NEXT_TO_NOTHING:
            return ()
        starts = (f"set {option} to" for _, option, value in late_starts(hook) if value == change)
        return (
            f"{ends}hook={hook.name!r} saves at most {most:.1%} of the bytes that plain DDP sends, because it begins "
            f"to at step {change:,} only; {next(starts, 'let it begin after')} about a tenth of training, "
            f"{num_steps // 10:,}",
        )


def _from(step: int, num_steps: int | None) -> str:
    return f"from step {step:,} on" if num_steps is None else f"from step {step:,} of {num_steps:,} on"


def _times(sent: _Sent) -> str:
    ratio = sent.ratio
    if math.isinf(ratio):
        return "nothing is sent"
    if abs(ratio - 1) < 0.005:
        return "as many bytes as plain DDP"
    times = max(ratio, 1 / ratio)
    number = f"{times:,.0f}" if times >= 100 else f"{times:.3g}"
    return f"{number}x{_FEWER}" if ratio > 1 else f"{number}x as many bytes as plain DDP"
