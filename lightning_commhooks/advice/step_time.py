"""What a hook's step takes, from the times of single steps."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field


@dataclass
class Turn:
    """The steps of one hook in one round, on one rank.

    Attributes:
        seconds: of each step.
        sent: bytes in each step.
        dense: bytes that dense averaging would have sent in each step.
        exposed_ms: per step, in which training waited for the hook, by its own clock; NaN: unknown.
        codec_ms: per step, in which the hook worked, by its own clock; NaN: unknown.
        errors: relative errors of the averaged gradient in some steps.
        setup_ms: milliseconds that attaching took.
    """

    seconds: list[float]
    sent: list[float]
    dense: float
    exposed_ms: float = math.nan
    codec_ms: float = math.nan
    errors: list[float] = field(default_factory=list)
    setup_ms: float = 0.0


@dataclass(frozen=True)
class StepTime:
    """A hook's step, agreed on by all ranks.

    Attributes:
        step_ms: milliseconds of a step, on the slowest rank.
        spread_ms: half of what the rounds differ by that count: see [`undisturbed`][].
        bytes_sent: per step and rank.
        bytes_dense: per step and rank, with dense averaging.
        exposed_ms: of a step, in which the training thread waited for the hook; NaN: unknown.
        codec_ms: of a step, in which the hook worked and did not wait for others; NaN: unknown.
        error: of the averaged gradient, relative to its norm; NaN: ranks step alone.
        setup_ms: milliseconds that attaching took, most of them for compiling.
    """

    step_ms: float
    spread_ms: float
    bytes_sent: float
    bytes_dense: float
    exposed_ms: float
    codec_ms: float
    error: float
    setup_ms: float


def own_step_time(turns: list[Turn], period_factor: int) -> StepTime:
    """What one rank's turns come to; see [`amortized`][] for the period."""
    rounds = undisturbed([amortized(turn.seconds, turn.sent, period_factor) * 1e3 for turn in turns])
    sent = [num_bytes for turn in turns for num_bytes in turn.sent]
    exposed = _median([turn.exposed_ms for turn in turns])
    return StepTime(
        step_ms=statistics.mean(rounds),
        spread_ms=(max(rounds) - min(rounds)) / 2,
        bytes_sent=amortized(sent, sent, period_factor),
        bytes_dense=turns[0].dense,
        # Else it is that of steps that average models, more of which there are than in a long period.
        exposed_ms=exposed if period_factor == 1 else math.nan,
        codec_ms=_median([turn.codec_ms for turn in turns]) / period_factor,
        error=_median([error for turn in turns for error in turn.errors]),
        setup_ms=max(turn.setup_ms for turn in turns),
    )


def _median(values: list[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return statistics.median(known) if known else math.nan


def undisturbed(rounds: list[float]) -> list[float]:
    """The faster half of rounds: what else happens on a machine only ever adds time."""
    return sorted(rounds)[: -(-len(rounds) // 2)]


def amortized(values: list[float], sent: list[float], period_factor: int) -> float:
    """What a step costs on average: the usual one, and in a longer period what is more in some of them.

    Args:
        values: of each step, over whole periods.
        sent: bytes in each step; those that send the least are the usual ones.
        period_factor: how many times longer the period is.
    """
    least = min(sent)
    usual = [value for value, num_bytes in zip(values, sent, strict=True) if num_bytes <= least]
    rest = [value for value, num_bytes in zip(values, sent, strict=True) if num_bytes > least]
    common = statistics.median(usual)
    return common + sum(value - common for value in rest) / len(values) / period_factor
