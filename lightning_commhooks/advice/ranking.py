"""Which hook, or none: decided from numbers, without measuring anything."""

from __future__ import annotations

import dataclasses
import math
import statistics
from dataclasses import dataclass

from lightning_commhooks.advice.candidates import DENSE, NOOP

# A step that takes less than this part of dense's time less is not worth another method.
MIN_GAIN = 0.10
# Of hooks that are as fast as the fastest within this, or within the noise, the most exact one is recommended.
AS_FAST = 1.05
# Standard errors within which a mean is, but for one time in twenty.
_ERRORS = 2.0
# Width of the interval of the part of a step that communication costs, which is narrow enough.
_PRECISE = 0.25
_QUIETER = "measure on a quiet machine, or with more --rounds"


@dataclass
class Row:
    """What is known about one hook.

    Attributes:
        label: name of the hook, as the user gave it.
        code: the hook as the user writes it.
        step_ms: milliseconds of a step, on the slowest rank.
        bytes_sent: per step and rank.
        bytes_dense: per step and rank, with dense averaging.
        spread_ms: standard error of `step_ms`, from the rounds that count: see [`merged`][].
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
        is_noisy: whether nothing is recommended because the difference is within the noise.
    """

    choice: str | None
    reason: str
    line: str
    apart: dict[str, str]
    is_noisy: bool = False


def merged(rounds: list[Row]) -> Row:
    """One row of those of several rounds: the faster half, for what else happens on a machine only ever adds time."""
    steps = sorted(row.step_ms for row in rounds)[: -(-len(rounds) // 2)]
    return dataclasses.replace(
        rounds[0],
        step_ms=statistics.mean(steps),
        spread_ms=statistics.stdev(steps) / math.sqrt(len(steps)) if len(steps) > 1 else 0.0,
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


def noise_ms(one: Row, other: Row) -> float:
    """Milliseconds by which the difference between two hooks' steps may be wrong."""
    return _ERRORS * math.hypot(one.spread_ms, other.spread_ms)


def headroom_interval(rows: list[Row]) -> tuple[float, float]:
    """What `headroom` is, at least and at most."""
    dense, noop = row_of(DENSE, rows), row_of(NOOP, rows)
    room, noise = 1 - noop.step_ms / dense.step_ms, noise_ms(dense, noop) / dense.step_ms
    return max(0.0, room - noise), min(1.0, max(0.0, room + noise))


def is_conclusive(interval: tuple[float, float]) -> bool:
    """Whether an interval of parts of dense's step tells if a hook is worth it, and about how much it can save."""
    low, high = interval
    return high < MIN_GAIN or (low >= MIN_GAIN and high - low <= _PRECISE)


def unsettled(rows: list[Row]) -> set[str]:
    """Labels of the hooks to measure once more, because a conclusion depends on a difference within the noise."""
    again = set() if is_conclusive(headroom_interval(rows)) else {DENSE, NOOP}
    dense, hooks = row_of(DENSE, rows), [row for row in rows if row.label not in (DENSE, NOOP)]
    if hooks:
        best = min(hooks, key=lambda row: row.step_ms)
        if abs(dense.step_ms - best.step_ms - MIN_GAIN * dense.step_ms) <= noise_ms(dense, best):
            again |= {DENSE, best.label}
    return again


def ranked(rows: list[Row]) -> list[Row]:
    """The fastest first; what sends nothing at all, and so trains nothing, before all."""
    return sorted(rows, key=lambda row: (row.label != NOOP, row.step_ms))


def decide(rows: list[Row], max_error: float) -> Verdict:
    """Recommend one of the hooks, dense and noop among them, or none, with an error of a step up to `max_error`."""
    dense = row_of(DENSE, rows)
    hooks = [row for row in rows if row.label not in (DENSE, NOOP)]
    apart = {row.label: why for row in hooks if (why := _why_apart(row, max_error))}
    eligible = [row for row in hooks if row.label not in apart]
    fastest = min(eligible, key=lambda row: row.step_ms, default=dense)
    as_fast = [row for row in eligible if row.step_ms <= fastest.step_ms * AS_FAST + noise_ms(row, fastest)]
    # Within the noise, but not at the cost of the gain over dense averaging.
    as_fast = [row for row in as_fast if row is fastest or _is_worth_it(row, dense)]
    best = min(as_fast, key=lambda row: (row.error, row.step_ms), default=None)
    reason, is_noisy = _reason_against(best, dense, rows)
    if reason or best is None:
        return Verdict(None, reason, "", apart, is_noisy)
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


def _is_worth_it(row: Row, dense: Row) -> bool:
    return dense.step_ms - row.step_ms > max(MIN_GAIN * dense.step_ms, noise_ms(row, dense))


def _reason_against(best: Row | None, dense: Row, rows: list[Row]) -> tuple[str, bool]:
    """Why not to compress, empty if there is no reason; and whether that is noise."""
    room, (low, high) = headroom(rows), headroom_interval(rows)
    if room < MIN_GAIN:
        text = f"a step that sends nothing takes {room:.0%} less time than dense averaging"
        if high >= MIN_GAIN:
            return f"{text}, but {low:.0%} to {high:.0%} is within the noise; {_QUIETER}", True
        return f"{text}, so no hook can save more; less than {MIN_GAIN:.0%} is not worth it", False
    if best is None:
        return "no hook is within the error that is allowed", False
    gain_ms, noise = dense.step_ms - best.step_ms, noise_ms(dense, best)
    if gain_ms + noise < MIN_GAIN * dense.step_ms:
        return (
            f"the best hook, {best.label}, takes {best.step_ms:.1f} ms a step against {dense.step_ms:.1f} ms of dense "
            "averaging: compressing costs what sending less saves"
        ), False
    if not _is_worth_it(best, dense):
        return (
            f"the best hook, {best.label}, saves {gain_ms:.1f} ms of {dense.step_ms:.1f} ms a step, give or take "
            f"{noise:.1f} ms: no more than the noise, or hardly; {_QUIETER}"
        ), True
    return "", False
