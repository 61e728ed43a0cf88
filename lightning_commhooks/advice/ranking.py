"""The recommendation of a hook, or none, from measured numbers."""

from __future__ import annotations

import dataclasses
import math
import statistics
from dataclasses import dataclass

from lightning_commhooks.advice.candidates import DENSE, NOOP

# A hook has to shorten a dense step by at least this fraction.
MIN_GAIN = 0.10
# The most exact of the hooks within this factor of the fastest, or within the noise, is recommended.
AS_FAST = 1.05
# Half-width of a 95% confidence interval, in standard errors.
_ERRORS = 2.0
# Largest conclusive width of the interval of communication's share of a step.
_PRECISE = 0.25
_QUIETER = "measure on a quiet machine, or with more --rounds"


@dataclass
class Row:
    """The measurements of one hook: times and bytes of a step, on the slowest rank; NaN: unknown.

    Attributes:
        spread_ms: standard error of `step_ms` over the rounds that [`merged`][] keeps.
        exposed_ms: time in which training waits for communication.
        codec_ms: time in which the hook computes.
        error: error of the averaged gradient, relative to its norm; NaN: the hook averages models.
        note: how the measured hook differs from the user's.
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
        """Bytes of dense averaging divided by bytes sent."""
        return self.bytes_dense / self.bytes_sent if self.bytes_sent else math.inf

    @property
    def averages_models(self) -> bool:
        """Whether the hook averages models instead of gradients, which have no error then."""
        return math.isnan(self.error) and self.label not in (DENSE, NOOP)


@dataclass(frozen=True)
class Verdict:
    """The recommendation.

    Attributes:
        choice: label of the recommended hook; `None`: do not compress.
        line: code to paste; empty without a choice.
        apart: reasons against the hooks that are never recommended, by label.
        is_noisy: whether no hook is recommended because the difference is within the noise.
    """

    choice: str | None
    reason: str
    line: str
    apart: dict[str, str]
    is_noisy: bool = False


def merged(rounds: list[Row]) -> Row:
    """Merge the rows of several rounds into one; step times come from the faster half, since disturbances add time."""
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
    """Return the median of the values that are not NaN."""
    known = [value for value in values if not math.isnan(value)]
    return statistics.median(known) if known else math.nan


def amortized(values: list[float], sent: list[float], period_factor: int) -> float:
    """Return the average cost of a step in a period that is `period_factor` times as long as the measured one.

    The steps that send the least recur in the longer period.
    """
    usual = [value for value, num_bytes in zip(values, sent, strict=True) if num_bytes <= min(sent)]
    common = statistics.median(usual)
    rest = sum(values) - sum(usual) - (len(values) - len(usual)) * common
    return common + rest / len(values) / period_factor


def row_of(label: str, rows: list[Row]) -> Row:
    """Return the row of one hook."""
    return next(row for row in rows if row.label == label)


def headroom(rows: list[Row]) -> float:
    """Return the fraction of a dense step that is saved if nothing is sent, at least 0."""
    return max(0.0, 1 - row_of(NOOP, rows).step_ms / row_of(DENSE, rows).step_ms)


def noise_ms(one: Row, other: Row) -> float:
    """Return the uncertainty of the difference between two step times."""
    return _ERRORS * math.hypot(one.spread_ms, other.spread_ms)


def headroom_interval(rows: list[Row]) -> tuple[float, float]:
    """Return the bounds of `headroom`."""
    dense, noop = row_of(DENSE, rows), row_of(NOOP, rows)
    room, noise = 1 - noop.step_ms / dense.step_ms, noise_ms(dense, noop) / dense.step_ms
    return max(0.0, room - noise), min(1.0, max(0.0, room + noise))


def is_conclusive(interval: tuple[float, float]) -> bool:
    """Return whether an interval of `headroom` shows if a hook is worth it and roughly how much it can save."""
    low, high = interval
    return high < MIN_GAIN or (low >= MIN_GAIN and high - low <= _PRECISE)


def unsettled(rows: list[Row]) -> set[str]:
    """Return the labels of the hooks to measure again because a conclusion depends on a difference within the noise."""
    again = set() if is_conclusive(headroom_interval(rows)) else {DENSE, NOOP}
    dense, hooks = row_of(DENSE, rows), [row for row in rows if row.label not in (DENSE, NOOP)]
    if hooks:
        best = min(hooks, key=lambda row: row.step_ms)
        if abs(dense.step_ms - best.step_ms - MIN_GAIN * dense.step_ms) <= noise_ms(dense, best):
            again |= {DENSE, best.label}
    return again


def decide(rows: list[Row], max_error: float) -> Verdict:
    """Recommend one of the hooks with an error of at most `max_error`, or none; `rows` include dense and noop."""
    dense = row_of(DENSE, rows)
    hooks = [row for row in rows if row.label not in (DENSE, NOOP)]
    apart = {row.label: why for row in hooks if (why := _why_apart(row, max_error))}
    eligible = [row for row in hooks if row.label not in apart]
    fastest = min(eligible, key=lambda row: row.step_ms, default=dense)
    as_fast = [row for row in eligible if row.step_ms <= fastest.step_ms * AS_FAST + noise_ms(row, fastest)]
    # A more exact hook must not cost the gain over dense averaging.
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
        return "averaging models instead of gradients is a different algorithm: compare the final loss"
    if row.error <= max_error:
        return ""
    return (
        f"an error of {row.error:.2g} in one step is above --max-error {max_error:g}; if the hook has error feedback, "
        "it sends the residual later: compare the final loss"
    )


def _is_worth_it(row: Row, dense: Row) -> bool:
    return dense.step_ms - row.step_ms > max(MIN_GAIN * dense.step_ms, noise_ms(row, dense))


def _reason_against(best: Row | None, dense: Row, rows: list[Row]) -> tuple[str, bool]:
    """Return the reason not to compress, empty if there is none, and whether that reason is noise."""
    room, (low, high) = headroom(rows), headroom_interval(rows)
    if room < MIN_GAIN:
        text = f"a step that sends nothing takes {room:.0%} less time than dense averaging"
        if high >= MIN_GAIN:
            return f"{text}, but {low:.0%} to {high:.0%} is within the noise; {_QUIETER}", True
        return f"{text}, so no hook can save more; less than {MIN_GAIN:.0%} is not worth it", False
    if best is None:
        return "no hook is within the error that --max-error allows", False
    gain_ms, noise = dense.step_ms - best.step_ms, noise_ms(dense, best)
    if gain_ms + noise < MIN_GAIN * dense.step_ms:
        return (
            f"the best hook, {best.label}, takes {best.step_ms:.1f} ms a step against {dense.step_ms:.1f} ms of dense "
            "averaging: compression costs as much as it saves"
        ), False
    if not _is_worth_it(best, dense):
        return (
            f"the best hook, {best.label}, saves {gain_ms:.1f} ms of {dense.step_ms:.1f} ms a step, give or take "
            f"{noise:.1f} ms: about as much as the noise; {_QUIETER}"
        ), True
    return "", False
