"""Streams and events where there is no CUDA: they note who waits for them, and keep the order of what streams do.

Each stream has a vector clock (Fidge 1988, Mattern 1989): what it does comes after what it did, and after what it waits
for by events.
"""

import contextlib
import itertools
from collections import defaultdict

import torch

HOST = "host"


class Clocks:
    """Clocks by the name of a stream.

    Attributes:
        clocks: of each stream, what it has seen of the others.
        kernels: number of kernels, by stream.
        current: name of the present stream.
    """

    def __init__(self):
        self.clocks = defaultdict(lambda: defaultdict(int))
        self.kernels = defaultdict(int)
        self.current = HOST

    def join(self, stream, clock):
        """Let what a stream does from now on come after what a clock has seen."""
        own = self.clocks[stream]
        for other, time in clock.items():
            own[other] = max(own[other], time)

    def launch(self, stream):
        """Time of the next kernel of a stream, which comes after what the host knows to be over."""
        self.join(stream, self.clocks[HOST])
        self.clocks[stream][stream] += 1
        self.kernels[stream] += 1
        return self.clocks[stream][stream]


class Streams:
    """In place of what `torch.cuda` has of streams and events.

    Args:
        clocks: the [`Clocks`][].
        note: is called with what is waited for.
    """

    def __init__(self, clocks, note):
        numbers, streams = itertools.count(), self

        class Stream:
            def __init__(self, device=None, priority=0):
                self.device = torch.device("cuda", 0) if device is None else torch.device(device)
                self.priority = priority
                self.name = f"stream {next(numbers)}"

            def wait_stream(self, other):
                clocks.join(self.name, clocks.clocks[other.name])

            def wait_event(self, event):
                clocks.join(self.name, event.clock)

            def record_event(self, event=None):
                event = event or Event()
                event.record(self)
                return event

            def synchronize(self):
                note("a stream is waited for")
                clocks.join(HOST, clocks.clocks[self.name])

        class Event:
            """It has come already."""

            def __init__(self, enable_timing=False):
                self.clock, self._has_time = {}, enable_timing

            def record(self, stream=None):
                name = (stream or streams.current_stream()).name
                clocks.launch(name)
                self.clock = dict(clocks.clocks[name])

            def query(self):
                return True

            def synchronize(self):
                note("an event is waited for")
                clocks.join(HOST, self.clock)

            def elapsed_time(self, end):
                assert (self._has_time, end._has_time) == (True, True), (
                    "only an event with enable_timing=True has a time"
                )
                return 1.0

        self.Stream, self.Event, self._clocks = Stream, Event, clocks
        self._entered = [Stream()]
        clocks.current = self._entered[-1].name

    def current_stream(self, device=None):
        return self._entered[-1]

    @contextlib.contextmanager
    def stream(self, stream):
        self._entered.append(stream)
        self._clocks.current = stream.name
        try:
            yield
        finally:
            self._entered.pop()
            self._clocks.current = self._entered[-1].name
