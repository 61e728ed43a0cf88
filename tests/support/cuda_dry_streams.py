"""Streams and events where there is no CUDA: they do nothing, and tell who waits for them."""

import contextlib

import torch


class Stream:
    """In place of `torch.cuda.Stream`."""

    waits = None

    def __init__(self, device=None, priority=0):
        self.device = torch.device("cuda", 0) if device is None else torch.device(device)

    def wait_stream(self, other):
        assert isinstance(other, Stream)

    def wait_event(self, event):
        assert isinstance(event, Event)

    def record_event(self, event=None):
        return event or torch.cuda.Event()

    def synchronize(self):
        self.waits.note("a stream is waited for")


class Event:
    """In place of `torch.cuda.Event`; it has come already."""

    waits = None

    def __init__(self, enable_timing=False):
        self._has_time = enable_timing

    def record(self, stream=None):
        assert stream is None or isinstance(stream, Stream)

    def query(self):
        return True

    def synchronize(self):
        self.waits.note("an event is waited for")

    def elapsed_time(self, end):
        assert (self._has_time, end._has_time) == (True, True), "an event without enable_timing=True has no time"
        return 1.0


class Streams:
    """In place of what `torch.cuda` knows of the current stream."""

    def __init__(self):
        self._current = Stream()

    def current_stream(self, device=None):
        return self._current

    @contextlib.contextmanager
    def stream(self, stream):
        self._current, before = stream, self._current
        yield
        self._current = before
