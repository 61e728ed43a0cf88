"""The three studies of the command line: what is measured in each, in which order. Collective throughout."""

from __future__ import annotations

import dataclasses
import math
import platform
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from lightning_commhooks.advice.candidates import DENSE, NOOP, Candidate
from lightning_commhooks.advice.measure import Bench, Setting, UnfitError
from lightning_commhooks.advice.ranking import MIN_GAIN, Row, Verdict, decide, headroom, ranked
from lightning_commhooks.advice.step_time import StepTime
from lightning_commhooks.advice.task import Tell
from lightning_commhooks.collectives.link import Link
from lightning_commhooks.collectives.measure_link import measure_link


@dataclass(frozen=True)
class WhatIf:
    """Another network than the one at hand.

    Attributes:
        bandwidth: bytes per second; `None`: as it is.
        latency: seconds; `None`: as it is.
        world_size: ranks, each on a host of its own; `None`: as many as there are, but at least two.
    """

    bandwidth: float | None = None
    latency: float | None = None
    world_size: int | None = None


@dataclass
class Result:
    """What a study found.

    Attributes:
        command: `"headroom"`, `"bench"` or `"advise"`.
        rows: of all hooks, the fastest first.
        gradient_bytes: of the model.
        world_size: ranks that were measured, or are emulated.
        link: what collectives cost; `None`: not measured.
        verdict: what to do; `None` in a bench.
        is_what_if: whether steps were predicted only, over a link that was given.
        notes: what to know about the predictions, in sentences.
    """

    command: str
    rows: list[Row]
    gradient_bytes: int
    world_size: int
    device: str
    link: Link | None = None
    verdict: Verdict | None = None
    is_what_if: bool = False
    notes: tuple[str, ...] = ()

    @property
    def headroom(self) -> float:
        """The part of a dense step that communication costs, at most."""
        return headroom(self.rows)

    @property
    def compute_ms(self) -> float:
        """Milliseconds of a step that sends nothing."""
        return next(row.step_ms for row in self.rows if row.label == NOOP)

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it: unknown numbers are `None`."""
        rows = [
            {**dataclasses.asdict(row), "ratio": row.ratio, "prediction_error": row.prediction_error}
            for row in self.rows
        ]
        found = {
            "command": self.command,
            "world_size": self.world_size,
            "device": self.device,
            "torch": torch.__version__,
            "is_what_if": self.is_what_if,
            "gradient_bytes": self.gradient_bytes,
            "compute_ms": self.compute_ms,
            "headroom": self.headroom,
            "link": self.link.as_dict() if self.link is not None else None,
            "notes": self.notes,
            "hooks": rows,
            "verdict": dataclasses.asdict(self.verdict) if self.verdict is not None else None,
        }
        return _plain(found)  # type: ignore[no-any-return]


def measured(bench: Bench, chosen: list[Candidate], rounds: int, command: str, tell: Tell) -> Result:
    """Time hooks for real: `headroom`, with dense and noop alone, and `bench`.

    Raises:
        UnfitError: there is one rank.
    """
    if bench.group.size == 1:
        raise UnfitError("one process sends nothing: use --nproc or torchrun; `advise --bandwidth` predicts with one")
    (timings,) = bench.times(chosen, rounds, [None], tell)
    return _result(bench, chosen, command, {}, timings)


def advised(
    bench: Bench, chosen: list[Candidate], rounds: int, what_if: WhatIf | None, max_error: float, tell: Tell
) -> Result:
    """Measure the link, predict steps over it, measure them too unless the network is a `what_if`, and recommend.

    Raises:
        UnfitError: there is no link to measure, and none is given.
    """
    tell("link", "")
    setting = _setting(bench, what_if)
    is_what_if = what_if is not None
    predicted, *timed = bench.times(chosen, rounds, [setting] if is_what_if else [setting, None], tell)
    result = _result(bench, chosen, "advise", predicted, timed[0] if timed else {})
    result.link, result.world_size = setting.link, setting.link.world_size
    result.is_what_if = is_what_if
    result.notes = _notes(setting.link, bench.task.device)
    if is_what_if and (num_averaged := bench.num_averaged(result.world_size)) < result.world_size:
        result.notes += (f"Errors are those of an average over {num_averaged} of the {result.world_size} ranks.",)
    result.notes += _delay_notes(result)
    result.verdict = decide(result.rows, max_error)
    return result


def _setting(bench: Bench, what_if: WhatIf | None) -> Setting:
    group = bench.group
    real = measure_link(group, of_steps=True) if group.size > 1 else None
    if what_if is None:
        if real is None:
            raise UnfitError("one process has no link to measure: use --nproc, torchrun, or --bandwidth")
        nodes = group.nodes()
        inside = group.split(nodes) if 1 < len(nodes) < group.size else None
        sizes = {len(node) for node in nodes}
        # Only if all take part; nodes of different sizes are rare.
        takes_part = inside is not None and len(sizes) == 1 and inside.size > 1
        return Setting(real, nodes, measure_link(inside, of_steps=True) if inside and takes_part else None)
    world_size = what_if.world_size or max(2, group.size)
    link = real.scaled(world_size) if real is not None else None
    if what_if.bandwidth is not None or what_if.latency is not None:
        bandwidth = what_if.bandwidth or (link.bandwidth if link is not None else 0)
        latency = what_if.latency if what_if.latency is not None else 0.0
        if not bandwidth:
            raise UnfitError("--latency alone says nothing about how fast data moves: give --bandwidth, too")
        on_cpu = group.device.type == "cpu"
        given = Link.given(bandwidth=bandwidth, latency=latency, world_size=world_size, on_cpu=on_cpu)
        link = link.no_faster_than(given) if link is not None else given
    if link is None:
        raise UnfitError("one process has no link to measure: give --bandwidth")
    return Setting(link, [[rank] for rank in range(world_size)])


def _notes(link: Link, device: torch.device) -> tuple[str, ...]:
    """NCCL leaves processors alone; a measured link has what gloo takes of them."""
    if device.type == "cuda" or link.takes_processors:
        return ()
    return (
        "Processor time of gloo and the network stack is left out: optimistic at 1 Gbit/s and more; --nproc 2 has it.",
    )


def _delay_notes(result: Result) -> tuple[str, ...]:
    """Whether dense averaging waits longer for messages to arrive than it takes to send them."""
    assert result.link is not None
    dense = next(row for row in result.rows if row.label == DENSE)
    exposed_ms = max(0.0, dense.step_ms - result.compute_ms)
    sending_ms = min(exposed_ms, 1e3 * dense.bytes_sent / result.link.bandwidth)
    is_far = result.link.message_seconds > 0
    if not is_far or result.headroom < MIN_GAIN or sending_ms > exposed_ms / 2:
        return ()
    return (
        f"Delay, not bandwidth, is what costs: of the {exposed_ms:.1f} ms that communication adds to a dense step, "
        f"sending takes {sending_ms:.1f} ms, waiting for messages to arrive the rest. Hooks with few rounds of "
        "messages, and larger buckets (bucket_cap_mb), save more than fewer bytes do.",
    )


def _result(
    bench: Bench, chosen: list[Candidate], command: str, predicted: dict[str, StepTime], timings: dict[str, StepTime]
) -> Result:
    found = timings or predicted
    idle = found[NOOP].step_ms
    rows = []
    for candidate in chosen:
        timing = found[candidate.label]
        guess = predicted.get(candidate.label)
        hidden = max(0.0, timing.step_ms - idle)
        rows.append(
            Row(
                label=candidate.label,
                code=candidate.code,
                predicted_ms=guess.step_ms if guess is not None else None,
                measured_ms=timing.step_ms if timings else None,
                spread_ms=timing.spread_ms,
                exposed_ms=hidden if candidate.label == DENSE or math.isnan(timing.exposed_ms) else timing.exposed_ms,
                codec_ms=math.nan if candidate.hook is None else timing.codec_ms,
                bytes_sent=timing.bytes_sent,
                bytes_dense=timing.bytes_dense,
                error=math.nan if candidate.label == NOOP else timing.error,
                averages_models=math.isnan(timing.error) and candidate.label not in (DENSE, NOOP),
                setup_ms=max(timing.setup_ms, guess.setup_ms if guess is not None else 0),
                notes=tuple(candidate.notes),
            )
        )
    size = dist.get_world_size()
    return Result(command, ranked(rows), bench.task.gradient_bytes, size, _device_name(bench.task.device))


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"CPU, {threads} thread{'s' if threads > 1 else ''}, {platform.machine()}"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
