"""What a GPU did in a profile of PyTorch's, by stream: what ran beside the backward."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.profiler import profile

# Of events in a trace: what runs on the device itself, and not what is named around it.
_ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}

Interval = tuple[float, float]


@dataclass(frozen=True, order=True)
class Work:
    """A kernel or a copy: begin and end in microseconds, its stream and name."""

    begin: float
    end: float
    stream: int
    name: str


def device_work(profiler: profile) -> list[Work]:
    """What ran on this process's device while it was profiled, in the order of beginning."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return parsed(json.loads(path.read_text()))


def parsed(trace: dict[str, Any]) -> list[Work]:
    """The same, from a trace in Chrome's format."""
    events = (event for event in trace["traceEvents"] if event.get("cat") in _ON_DEVICE)
    return sorted(
        Work(event["ts"], event["ts"] + event["dur"], event["args"]["stream"], event["name"]) for event in events
    )


def beside(work: list[Work]) -> tuple[float, float]:
    """Of streams other than the one that begins, a model's: milliseconds, and those in which both are busy."""
    first = work[0].stream if work else 0
    main = merged((one.begin, one.end) for one in work if one.stream == first)
    others = merged((one.begin, one.end) for one in work if one.stream != first)
    return sum(end - begin for begin, end in others) / 1e3, common(main, others) / 1e3


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Intervals that do not touch, and cover the same."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def common(some: list[Interval], others: list[Interval]) -> float:
    """Length of what two lists of `merged` both cover."""
    total, i, j = 0.0, 0, 0
    while i < len(some) and j < len(others):
        total += max(0.0, min(some[i][1], others[j][1]) - max(some[i][0], others[j][0]))
        if some[i][1] < others[j][1]:
            i += 1
        else:
            j += 1
    return total
