"""The engine for CPU tensors: which bucket goes on when, in a fixed order and without; failures and closing."""

import random
import threading
import time

import pytest
import torch

import lightning_commhooks as lc
from lightning_commhooks.collectives.counters import Timing
from lightning_commhooks.collectives.gloo_abort import Connections
from lightning_commhooks.collectives.steps import Wait, finish
from lightning_commhooks.runtime import engine
from lightning_commhooks.runtime.engine import BUCKETS_AT_ONCE, ThreadEngine

CPU = torch.device("cpu")
SECONDS = 10


class Peers(Connections):
    """What an engine waits for: each wait has a name, and ends when it may, or when all is aborted."""

    def __init__(self, engine_options):
        self.log, self.gates, self.aborted = [], {}, threading.Event()
        self.engine = ThreadEngine(CPU, self, Timing(), **engine_options)

    def abort(self):
        self.aborted.set()
        for gate in [*self.gates.values()]:
            gate.set()

    def let_go(self, *names):
        for name in names:
            self.gates[name].set()

    def wait_for(self, name):
        assert self.gates[name].wait(SECONDS)
        if self.aborted.is_set():
            raise RuntimeError(f"{name} was aborted")

    def bucket(self, name, num_waits=2, delay=lambda: 0.0, is_gated=True):
        """A computation that waits so many times and logs how far it is."""
        for i in range(num_waits):
            self.gates[f"{name}{i}"] = threading.Event()
            if not is_gated:
                self.gates[f"{name}{i}"].set()

        def reduce():
            for i in range(num_waits):
                self.log.append(f"{name}{i}")
                yield Wait([_Work(self, f"{name}{i}", delay())])
            self.log.append(f"{name} ends")
            return torch.tensor([float(num_waits)])

        return reduce

    def until(self, *log):
        """Wait until so much has been logged, in any order."""
        deadline = time.monotonic() + SECONDS
        while sorted(self.log) != sorted(log) and time.monotonic() < deadline:
            time.sleep(1e-3)
        assert sorted(self.log) == sorted(log)


class _Work:
    def __init__(self, peers, name, seconds):
        self.peers, self.name, self.seconds = peers, name, seconds

    def wait(self):
        time.sleep(self.seconds)
        self.peers.wait_for(self.name)


@pytest.fixture
def peers(request):
    """Of an engine without order, unless a test has it otherwise."""
    made = Peers({"is_ordered": getattr(request, "param", False)})
    yield made
    made.abort()
    made.engine.close()


BOTH = pytest.mark.parametrize("peers", [True, False], ids=["in order", "in any order"], indirect=True)
IN_ORDER = pytest.mark.parametrize("peers", [True], ids=["in order"], indirect=True)


def done_soon(future):
    deadline = time.monotonic() + SECONDS
    while not future.done() and time.monotonic() < deadline:
        time.sleep(1e-3)
    return future.done()


def test_whichever_wait_has_ended_lets_its_bucket_go_on(peers):
    a, b, c = (peers.engine.submit(peers.bucket(name), CPU) for name in "abc")
    peers.until("a0", "b0", "c0")
    peers.let_go("b0")
    peers.until("a0", "b0", "c0", "b1")
    peers.let_go("c0", "c1")
    assert done_soon(c)
    peers.let_go("b1")
    assert done_soon(b)
    assert not a.done()
    peers.let_go("a0", "a1")
    assert a.wait().tolist() == [2.0]


@IN_ORDER
def test_in_order_each_earlier_bucket_goes_one_wait_further_when_the_next_one_comes(peers):
    for name in "abcd":
        peers.engine.submit(peers.bucket(name, 3, is_gated=False), CPU, is_last=False)
    peers.engine.call(lambda: peers.log.append("called"))
    first_ends = ["a0", "b0", "a1", "c0", "a2", "b1", "d0", "a ends", "b2", "c1"]
    assert peers.log == [*first_ends, "b ends", "c2", "d1", "c ends", "d2", "d ends", "called"]


@IN_ORDER
def test_in_order_so_many_are_under_way_at_most(peers):
    for name in range(2 * BUCKETS_AT_ONCE):
        peers.engine.submit(peers.bucket(f"{name}.", 20, is_gated=False), CPU, is_last=False)
    peers.engine.call(lambda: None)
    under_way, most = set(), 0
    for entry in peers.log:
        name = entry.split(".")[0]
        (under_way.discard if entry.endswith("ends") else under_way.add)(name)
        most = max(most, len(under_way))
    assert most == BUCKETS_AT_ONCE


@IN_ORDER
def test_in_order_the_last_bucket_of_a_step_ends_all(peers):
    futures = [
        peers.engine.submit(peers.bucket(name, is_gated=False), CPU, is_last=name == "c") for name in ("a", "b", "c")
    ]
    assert all(map(done_soon, futures))


def test_in_order_delays_change_no_order():
    logs = []
    for seed in range(4):
        chance = random.Random(seed)
        peers = Peers({"is_ordered": True})
        for step in range(3):
            for number in range(7):
                delay = lambda: chance.uniform(0, 2e-3) if seed else 0.0  # noqa: B023, E731
                reduce = peers.bucket(f"{step}.{number}.", 1 + number % 3, delay, is_gated=False)
                peers.engine.submit(reduce, CPU, is_last=number == 6)
                time.sleep(delay())
        peers.engine.call(lambda: None)
        peers.engine.close()
        logs.append(peers.log)
    assert all(log == logs[0] for log in logs)


@BOTH
def test_calls_wait_for_all_buckets(peers):
    for name in "abc":
        peers.engine.submit(peers.bucket(name), CPU, is_last=False)
    threading.Timer(0.1, peers.let_go, ("a0", "a1", "b0", "b1", "c0", "c1")).start()
    assert peers.engine.call(lambda: sum(entry.endswith("ends") for entry in peers.log)) == 3


@BOTH
def test_a_failure_in_one_bucket_fails_all_and_aborts(peers):
    def failing():
        yield from peers.bucket("b", 1, is_gated=False)()
        raise ArithmeticError("out of numbers")

    a = peers.engine.submit(peers.bucket("a", 1), CPU, is_last=False)
    b = peers.engine.submit(failing, CPU, is_last=False)
    c = peers.engine.submit(peers.bucket("c", 1), CPU, is_last=False)
    if peers.engine._is_ordered:
        # `a` is waited for before `b` goes on.
        peers.let_go("a0")
    with pytest.raises(lc.HookError, match="out of numbers") as error:
        peers.engine.call(lambda: peers.log.append("called"))
    assert isinstance(error.value.__cause__, ArithmeticError)
    assert peers.aborted.is_set()
    for future in (b, c) if peers.engine._is_ordered else (a, b, c):
        with pytest.raises(RuntimeError, match="out of numbers"):
            future.wait()
    with pytest.raises(lc.HookError, match="out of numbers"):
        peers.engine.submit(peers.bucket("d"), CPU)
    assert "called" not in peers.log


@BOTH
def test_what_fails_in_a_wait_is_raised_in_the_computation(peers):
    class Lost:
        def wait(self):
            raise ConnectionError("peer has gone")

    def reduce():
        try:
            yield Wait([Lost()])
        except ConnectionError as error:
            raise ValueError(f"in bucket 7: {error}") from error
        return torch.zeros(1)

    future = peers.engine.submit(reduce, CPU)
    with pytest.raises(RuntimeError, match="in bucket 7: peer has gone"):
        future.wait()
    assert peers.aborted.is_set()


@BOTH
def test_close_ends_a_bucket_that_never_does(peers, monkeypatch):
    monkeypatch.setattr(engine, "GRACE_SECONDS", 0.2)
    future = peers.engine.submit(peers.bucket("a"), CPU)
    begin = time.monotonic()
    peers.engine.close()
    assert 0.2 <= time.monotonic() - begin < SECONDS / 2
    assert peers.aborted.is_set()
    assert done_soon(future), "somebody may wait for it"
    with pytest.raises(RuntimeError, match="was closed before its work was done"):
        future.wait()
    with pytest.raises(lc.HookError, match="was closed before"):
        peers.engine.submit(peers.bucket("b"), CPU)


@BOTH
def test_close_waits_for_buckets_that_end(peers):
    future = peers.engine.submit(peers.bucket("a"), CPU)
    threading.Timer(0.1, peers.let_go, ("a0", "a1")).start()
    peers.engine.close()
    assert future.value().tolist() == [2.0]


@BOTH
def test_close_waits_for_what_is_computed_though_it_takes_long(peers, monkeypatch):
    monkeypatch.setattr(engine, "GRACE_SECONDS", 0.1)

    def reduce():
        time.sleep(0.5)
        peers.log.append("computed")
        yield Wait(())

    peers.engine.submit(reduce, CPU)
    peers.engine.close()
    assert peers.log == ["computed"]
    assert not peers.engine._thread.is_alive()


class LostPeers(Peers):
    """Waits that nothing ends, as gloo leaves them when a peer is gone; `progress` is what the others do meanwhile."""

    progress = 0

    def abort(self):
        """End nothing."""

    def without_a_peer(self):
        return self.progress

    def close(self):
        """Close the engine, which does not wait for threads that wait, and then let these go."""
        self.engine.close()
        super().abort()
        for thread in (self.engine._thread, *self.engine._waiters.end()):
            thread.join(SECONDS)


def lost_peers(is_ordered, monkeypatch):
    monkeypatch.setattr(engine, "PATIENCE_SECONDS", 0.5)
    monkeypatch.setattr(engine, "GRACE_SECONDS", 0.1)
    return LostPeers({"is_ordered": is_ordered})


def explained(steps):
    """A computation that says what it was about."""
    try:
        return (yield from steps)
    except ConnectionError as error:
        raise lc.HookError(f"in bucket 7: {error}") from error


@pytest.mark.parametrize("is_ordered", [True, False])
def test_a_wait_that_gloo_leaves_alone_fails_when_a_peer_is_gone(is_ordered, monkeypatch):
    peers = lost_peers(is_ordered, monkeypatch)
    first = peers.engine.submit(lambda: explained(peers.bucket("a")()), CPU, is_last=False)
    second = peers.engine.submit(peers.bucket("b"), CPU, is_last=True)
    for future in (first, second):
        with pytest.raises(RuntimeError, match="in bucket 7: another rank is gone"):
            future.wait()
    with pytest.raises(lc.HookError, match="in bucket 7"):
        peers.engine.call(lambda: None)
    peers.close()


def test_a_call_fails_when_a_peer_is_gone(monkeypatch):
    peers = lost_peers(is_ordered=True, monkeypatch=monkeypatch)
    with pytest.raises(lc.HookError, match="another rank is gone"):
        peers.engine.call(lambda: finish(peers.bucket("a", 1)()))
    peers.close()


@pytest.mark.parametrize("is_ordered", [True, False])
def test_who_goes_on_receiving_is_not_given_up(is_ordered, monkeypatch):
    """A rank that has ended may be gone while the others still finish the same sum."""
    peers = lost_peers(is_ordered, monkeypatch)
    future = peers.engine.submit(peers.bucket("a", 1), CPU)
    for _ in range(12):
        time.sleep(0.1)
        peers.progress += 1
    assert not future.done()
    peers.let_go("a0")
    assert future.wait().tolist() == [1.0]
    time.sleep(0.8)  # nobody waits any more
    assert peers.engine.call(lambda: 3) == 3
    peers.engine.close()
