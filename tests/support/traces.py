"""Reads the traces that PyTorch's profiler writes for Chrome."""

import json
from dataclasses import dataclass

import torch

# Times are in microseconds with three places.
ROUNDING = 2e-3


@dataclass(frozen=True)
class Range:
    """One named range of a thread; times in microseconds."""

    name: str
    thread: int
    begin: float
    end: float

    def within(self, other):
        """Whether it is nested in another one."""
        inside = other.begin - ROUNDING <= self.begin and self.end <= other.end + ROUNDING
        return self.thread == other.thread and inside


def read(path):
    """Our ranges in a trace, in order, and the names of all that is in it."""
    events = json.loads(path.read_text())["traceEvents"]
    own = [event for event in events if event.get("ph") == "X" and event["name"].startswith("commhooks::")]
    found = [Range(event["name"], event["tid"], event["ts"], event["ts"] + event["dur"]) for event in own]
    return sorted(found, key=lambda each: each.begin), {event["name"] for event in events}


def named(ranges, *names):
    """The ranges of that name."""
    return [each for each in ranges if each.name == "::".join(("commhooks", *names))]


def waits(ranges):
    """The waits for collectives."""
    return [each for each in ranges if each.name.count("::") == 1]


def written(profiler, folder):
    """What `read` returns of the trace of a profiler that has ended."""
    path = folder / "trace.json"
    profiler.export_chrome_trace(str(path))
    return read(path)


def only_cpu(**options):
    """A profiler as users make it, of all threads: those of hooks, too."""
    options.setdefault("experimental_config", torch.profiler._ExperimentalConfig(profile_all_threads=True))
    # Else the one of PyTorch 2.10 warns that a second cycle would throw away the first.
    options.setdefault("acc_events", True)
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], **options)
