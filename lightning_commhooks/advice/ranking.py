"""Which hook, or none: decided from numbers, without measuring anything."""

from __future__ import annotations

import dataclasses
import math
import statistics
from dataclasses import dataclass

from lightning_commhooks.advice.candidates import DENSE, NOOP

# A step that takes less than this part of dense's time less is not worth another method.
MIN_GAIN = 0.10
# Of hooks that are as fast as the fastest within this, the most exact one is recommended.
AS_FAST = 1.05


@dataclass
class Row:
    """What is known about one hook.

    Attributes:
        label: name of the hook, as the user gave it.
        code: the hook as the user writes it.
        step_ms: milliseconds of a step, on the slowest rank.
        bytes_sent: per step and rank.
        bytes_dense: per step and rank, with dense averaging.
        spread_ms: half of what the rounds differ by that count: see [`undisturbed`][].
        exposed_ms: of a step, in which training waits for communication; NaN: unknown.
        codec_ms: of a step, in which the hook works itself; NaN: unknown.
        error: of one step's averaged gradient, relative to its norm; NaN: there is none.
        note: how what was measured differs from what was asked for.
    """

    label: str
    code: str
    step_ms: float
    bytes_sent: float
    bytes_dense: float
    spread_ms: float = 0.0
    exposed_ms: float = math.nan
    codec_ms: float = math.nan
    error: float = math.nan
    note: str = ""

    @property
    def ratio(self) -> float:
        """Bytes of dense averaging over bytes sent."""
        return self.bytes_dense / self.bytes_sent if self.bytes_sent else math.inf

    @property
    def averages_models(self) -> bool:
        """Whether ranks step alone: then there is no error."""
        return math.isnan(self.error) and self.label not in (DENSE, NOOP)


@dataclass(frozen=True)
class Verdict:
    """Advice.

    Attributes:
        choice: label of the recommended hook; `None`: do not compress.
        reason: in a sentence.
        line: to paste; empty without a choice.
        apart: hooks that are not recommended however fast they are, by label, and why.
    """

    choice: str | None
    reason: str
    line: str
    apart: dict[str, str]


def merged(rounds: list[Row]) -> Row:
    """One row of those of several rounds: the faster half, for what else happens on a machine only ever adds time."""
    steps = sorted(row.step_ms for row in rounds)[: -(-len(rounds) // 2)]
    return dataclasses.replace(
        rounds[0],
        step_ms=statistics.mean(steps),
        spread_ms=(steps[-1] - steps[0]) / 2,
        exposed_ms=median([row.exposed_ms for row in rounds]),
        codec_ms=median([row.codec_ms for row in rounds]),
        error=median([row.error for row in rounds]),
    )


def median(values: list[float]) -> float:
    """That of the numbers that are known."""
    known = [value for value in values if not math.isnan(value)]
    return statistics.median(known) if known else math.nan


def amortized(values: list[float], sent: list[float], period_factor: int) -> float:
    """What a step costs on average: the usual one, and in a longer period what is more in some of them.

    Args:
        values: of each step, over whole periods.
        sent: bytes in each step; those that send the least are the usual ones.
        period_factor: how many times longer the period is.
    """
    usual = [value for value, num_bytes in zip(values, sent, strict=True) if num_bytes <= min(sent)]
    common = statistics.median(usual)
    rest = sum(values) - sum(usual) - (len(values) - len(usual)) * common
    return common + rest / len(values) / period_factor


def row_of(label: str, rows: list[Row]) -> Row:
    """The row of one hook."""
    return next(row for row in rows if row.label == label)


def headroom(rows: list[Row]) -> float:
    """The part of dense's step that goes away when nothing is sent, at least 0."""
    return max(0.0, 1 - row_of(NOOP, rows).step_ms / row_of(DENSE, rows).step_ms)


def ranked(rows: list[Row]) -> list[Row]:
    """The fastest first; what sends nothing at all, and so trains nothing, before all."""
    return sorted(rows, key=lambda row: (row.label != NOOP, row.step_ms))


def decide(rows: list[Row], max_error: float) -> Verdict:
    """Recommend one of the hooks, dense and noop among them, or none, with an error of a step up to `max_error`."""
    dense = row_of(DENSE, rows)
    hooks = [row for row in rows if row.label not in (DENSE, NOOP)]
    apart = {row.label: why for row in hooks if (why := _why_apart(row, max_error))}
    eligible = [row for row in hooks if row.label not in apart]
    fastest = min((row.step_ms for row in eligible), default=math.nan)
    as_fast = [row for row in eligible if row.step_ms <= fastest * AS_FAST]
    best = min(as_fast, key=lambda row: (row.error, row.step_ms), default=None)
    reason = _reason_against(best, dense, headroom(rows))
    if reason or best is None:
        return Verdict(None, reason, "", apart)
    gain = 1 - best.step_ms / dense.step_ms
    reason = f"a step takes {best.step_ms:.1f} ms instead of {dense.step_ms:.1f} ms, {gain:.0%} less"
    return Verdict(best.label, reason, f"CompressedDDPStrategy(hook={best.code})", apart)


def _why_apart(row: Row, max_error: float) -> str:
    if row.averages_models:
        return "averaging models instead of gradients is another algorithm: compare what it reaches"
    if row.error <= max_error:
        return ""
    return (
        f"an error of {row.error:.2f} in one step is above --max-error {max_error:g}, though with error feedback what "
        "is missing is sent later: compare what it reaches"
    )


def _reason_against(best: Row | None, dense: Row, room: float) -> str:
    if room < MIN_GAIN:
        return (
            f"a step that sends nothing takes {room:.0%} less time than dense averaging, so no hook can save more; "
            f"less than {MIN_GAIN:.0%} is not worth it"
        )
    if best is None:
        return "no hook is within the error that is allowed"
    gain_ms, noise = dense.step_ms - best.step_ms, dense.spread_ms + best.spread_ms
    if gain_ms < MIN_GAIN * dense.step_ms:
        return (
            f"the best hook, {best.label}, takes {best.step_ms:.1f} ms a step against {dense.step_ms:.1f} ms of dense "
            f"averaging: compressing costs what sending less saves"
        )
    if gain_ms <= noise:
        return (
            f"the best hook, {best.label}, saves {gain_ms:.1f} ms a step, but step times vary by {noise:.1f} ms from "
            "round to round; use more --rounds on a quiet machine"
        )
    return ""
