"""Which hook, or none: decided from numbers, without measuring anything."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_commhooks.advice.candidates import DENSE, NOOP

# A step that takes less than this part of dense's time less is not worth another method.
MIN_GAIN = 0.10
# Of hooks that are as fast as the fastest within this, the most exact one is recommended.
AS_FAST = 1.05


@dataclass(frozen=True)
class Row:
    """What is known about one hook.

    Attributes:
        label: name of the hook, as the user gave it.
        code: the hook as the user writes it.
        predicted_ms: milliseconds of a step over the emulated link; `None`: not predicted.
        measured_ms: milliseconds of a real step; `None`: not measured.
        spread_ms: half of what the rounds differ by that count.
        exposed_ms: of a step, in which training waits for communication.
        codec_ms: of a step, in which the hook works itself; NaN: unknown.
        bytes_sent: per step and rank.
        bytes_dense: per step and rank, with dense averaging.
        error: of one step's averaged gradient, relative to its norm; NaN: there is none.
        averages_models: whether ranks step alone.
        setup_ms: milliseconds that attaching took.
        notes: how what was measured differs from what was asked for.
    """

    label: str
    code: str
    predicted_ms: float | None
    measured_ms: float | None
    spread_ms: float
    exposed_ms: float
    codec_ms: float
    bytes_sent: float
    bytes_dense: float
    error: float
    averages_models: bool
    setup_ms: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def step_ms(self) -> float:
        """Milliseconds of a step: as measured, or else as predicted."""
        step = self.measured_ms if self.measured_ms is not None else self.predicted_ms
        return step if step is not None else math.nan

    @property
    def ratio(self) -> float:
        """Bytes of dense averaging over bytes sent."""
        return self.bytes_dense / self.bytes_sent if self.bytes_sent else math.inf

    @property
    def prediction_error(self) -> float:
        """By what part of the measured step the prediction is off; NaN without both."""
        if self.measured_ms is None or self.predicted_ms is None:
            return math.nan
        return self.predicted_ms / self.measured_ms - 1


@dataclass(frozen=True)
class Verdict:
    """What to do.

    Attributes:
        choice: label of the recommended hook; `None`: do not compress.
        gain: the part of dense's step that it saves.
        headroom: the part of dense's step that communication costs, at most.
        reason: in a sentence.
        line: to paste; empty without a choice.
        apart: hooks that were not considered, by label, and why.
        alternative: label of a hook that is faster still, but changes the algorithm; `None`: there is none.
    """

    choice: str | None
    gain: float
    headroom: float
    reason: str
    line: str
    apart: dict[str, str]
    alternative: str | None = None


def headroom(rows: list[Row]) -> float:
    """The part of dense's step that goes away when nothing is sent, at least 0."""
    by_label = {row.label: row for row in rows}
    return max(0.0, 1 - by_label[NOOP].step_ms / by_label[DENSE].step_ms)


def ranked(rows: list[Row]) -> list[Row]:
    """The fastest first; what sends nothing at all, and so trains nothing, before all."""
    return sorted(rows, key=lambda row: (row.label != NOOP, row.step_ms))


def set_apart(rows: list[Row], max_error: float) -> dict[str, str]:
    """Hooks that are not recommended however fast they are, and why."""
    apart = {}
    for row in rows:
        if row.label in (DENSE, NOOP):
            continue
        if row.averages_models:
            apart[row.label] = "averaging models instead of gradients is another algorithm: compare what it reaches"
        elif not row.error <= max_error:
            apart[row.label] = (
                f"an error of {row.error:.2f} in one step is above --max-error {max_error:g}, though with error "
                "feedback what is missing is sent later: compare what it reaches"
            )
    return apart


def decide(rows: list[Row], max_error: float) -> Verdict:
    """Recommend one of the hooks, dense and noop among them, or none, with an error of a step up to `max_error`."""
    dense = next(row for row in rows if row.label == DENSE)
    room, apart = headroom(rows), set_apart(rows, max_error)
    eligible = [row for row in rows if row.label not in (DENSE, NOOP, *apart)]
    best = _best(eligible)
    gain = 1 - best.step_ms / dense.step_ms if best is not None else 0.0
    fastest = best if best is not None and gain > MIN_GAIN else dense
    averaging = [row for row in rows if row.averages_models and row.step_ms < fastest.step_ms * (1 - MIN_GAIN)]
    alternative = min(averaging, key=lambda row: row.step_ms).label if averaging else None
    reason = _reason_against(best, dense, room)
    if reason or best is None:
        return Verdict(None, max(0.0, gain), room, reason, "", apart, alternative)
    reason = f"a step takes {best.step_ms:.1f} ms instead of {dense.step_ms:.1f} ms, {gain:.0%} less"
    return Verdict(best.label, gain, room, reason, f"CompressedDDPStrategy(hook={best.code})", apart, alternative)


def _best(rows: list[Row]) -> Row | None:
    if not rows:
        return None
    fastest = min(row.step_ms for row in rows)
    return min((row for row in rows if row.step_ms <= fastest * AS_FAST), key=lambda row: (row.error, row.step_ms))


def _reason_against(best: Row | None, dense: Row, room: float) -> str:
    if room < MIN_GAIN:
        return (
            f"a step that sends nothing takes {room:.0%} less time than dense averaging, so no hook can save more; "
            f"less than {MIN_GAIN:.0%} is not worth it"
        )
    if best is None:
        return "no hook is within the error that is allowed"
    gain_ms = dense.step_ms - best.step_ms
    if gain_ms < MIN_GAIN * dense.step_ms:
        return (
            f"the best hook, {best.label}, takes {best.step_ms:.1f} ms a step against {dense.step_ms:.1f} ms of dense "
            f"averaging: compressing costs what sending less saves"
        )
    noise = dense.spread_ms + best.spread_ms
    if gain_ms <= noise:
        return (
            f"the best hook, {best.label}, saves {gain_ms:.1f} ms a step, but step times vary by {noise:.1f} ms from "
            "round to round; use more --rounds on a quiet machine"
        )
    return ""
