"""`shared_state_dict` and paused counters while a step is under way, by hooks that block where it matters."""

import contextlib
import signal
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from driver import SHAPES, attached, backward, full_rank_gradients
from local_sgd_driver import ALONE, local, one_step, params

import lightning_commhooks as lc

SECONDS = 20


class Gate:
    """A place in a hook at which it waits for `opened`, once `closed`; others see that it is there by `reached`."""

    def __init__(self):
        self.reached, self.opened, self.closed = threading.Event(), threading.Event(), False

    def __call__(self):
        if self.closed:
            self.closed = False
            self.reached.set()
            assert self.opened.wait(SECONDS)


class Halves(lc.CommHook):
    """Has two numbers, of which it changes one after the other: in `reduce`, and in `end_step`."""

    name = "halves"

    def __init__(self, gates, replaces_state=False):
        self.gates, self.replaces_state = gates, replaces_state

    def bind(self, group):
        return _BoundHalves(group, self)


class _BoundHalves(lc.BoundHook):
    has_memory = True

    def __init__(self, group, config):
        super().__init__(group)
        self.gates, self.replaces_state = config.gates, config.replaces_state
        self.reduced, self.ended = torch.zeros(2), [torch.zeros(1), torch.zeros(1)]

    def reduce(self, flat, bucket):
        if not self.replaces_state and bucket.index == 0:
            self.reduced[0] += 1
        self.gates["reduce"]()
        if not self.replaces_state and bucket.index == 0:
            self.reduced[1] += 1
        self.group.all_reduce_mean_(flat)
        self.gates["reduced"]()

    def end_step(self, finite):
        self.ended = [self.ended[0] + 1, self.ended[1]]
        self.gates["end_step"]()
        self.ended = [self.ended[0], self.ended[1] + 1]

    def state_dict(self, writer):
        first, second = self.ended
        return {"reduced": writer.shared(self.reduced), "ended": writer.shared(torch.cat([first, second]))}


@contextlib.contextmanager
def in_the_backward(ddp, function):
    """Call a function in the training thread when some buckets have been handed over, others not."""
    handle = ddp.module.first.register_hook(lambda _: function())
    yield
    handle.remove()


@contextlib.contextmanager
def in_a_signal_handler(function):
    """Call a function in a handler that interrupts the training thread soon."""
    before = signal.signal(signal.SIGALRM, lambda *_: function())
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def gates():
    return {name: Gate() for name in ("reduce", "reduced", "end_step")}


def numbers(state):
    return {name: tensor.tolist() for name, tensor in state["hook"]["state"].items()}


def step(ddp, number):
    backward(ddp, full_rank_gradients(dist.get_rank(), number, SHAPES))


def read_in_reduce(rank, world, wrap):
    hook = Halves(gates())
    gate, read = hook.gates["reduce"], []

    def look():
        assert gate.reached.wait(SECONDS)
        read.append(attachment.shared_state_dict())
        gate.opened.set()

    with attached(lc.PerParameter({"*": hook}) if wrap else hook) as (ddp, attachment):
        step(ddp, 0)
        gate.closed = True
        with in_the_backward(ddp, look):
            step(ddp, 1)
        read.append(attachment.shared_state_dict())
    if wrap:
        read = [{**state, "hook": state["hook"]["state"]["hooks"]["0"]} for state in read]
    return [(state["steps"], numbers(state)) for state in read]


@pytest.mark.parametrize("wrap", [False, True])
def test_state_in_the_middle_of_reduce_is_that_of_the_last_step(run, wrap):
    for during, after in run(read_in_reduce, wrap):
        assert during == (2, {"reduced": [1, 1], "ended": [1, 1]})
        assert after == (2, {"reduced": [2, 2], "ended": [2, 2]})


def read_in_end_step(rank, world, replaces_state):
    hook = Halves(gates(), replaces_state)
    gate, read = hook.gates["end_step"], []

    def look():
        assert gate.reached.is_set()
        threading.Timer(0.2, gate.opened.set).start()
        read.append(attachment.shared_state_dict())

    with attached(hook) as (ddp, attachment):
        step(ddp, 0)
        gate.closed = True
        with in_a_signal_handler(look):
            step(ddp, 1)
    return [numbers(state)["ended"] for state in read]


def test_state_in_the_middle_of_end_step_is_that_of_one_step(run):
    assert run(read_in_end_step, False) == [[[1, 1]]] * 2
    assert run(read_in_end_step, True) == [[[2, 2]]] * 2


def read_in_an_outer_step(rank, world):
    """In rank 0's signal handler, while its hook waits for rank 1."""
    store, shapes = dist.distributed_c10d._get_default_store(), {"a": (6,), "b": (2, 2)}
    model, gradients = params(shapes)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    hook, read = lc.DiLoCo(period=2, **ALONE), []

    def look():
        read.append(attachment.shared_state_dict())
        store.set("read", "yes")

    with local(model, hook, [optimizer]) as (ddp, attachment):
        for _ in range(3):
            one_step(ddp, optimizer, {name: (rank + 1) * g for name, g in gradients.items()})
        read.append(attachment.shared_state_dict())
        ddp.zero_grad()
        ddp(gradients).backward()
        with in_a_signal_handler(look) if rank == 0 else contextlib.nullcontext():
            if rank == 1:
                store.wait(["read"], timedelta(seconds=SECONDS))
            optimizer.step()
        read.append(attachment.shared_state_dict())
    return [state["hook"]["state"] for state in read]


def test_state_in_a_signal_handler_in_the_middle_of_an_averaging_is_that_before(run):
    before, during, after = run(read_in_an_outer_step)[0]
    assert before["num_steps"] == during["num_steps"] == {"a": 3}
    assert after["num_steps"] == {"a": 4}
    for name in ("a", "b"):
        for part in ("anchor", "momentum"):
            assert torch.equal(before["entries"][name][part], during["entries"][name][part])
            assert not torch.equal(before["entries"][name][part], after["entries"][name][part])


def count_meanwhile(rank, world):
    hook = Halves(gates())
    begun, counted = hook.gates["reduce"], hook.gates["reduced"]
    counted.opened.set()

    def pause():
        assert begun.reached.wait(SECONDS)
        with attachment.bound.group.counters.paused():
            begun.opened.set()
            assert counted.reached.wait(SECONDS)

    with attached(hook) as (ddp, attachment):
        step(ddp, 0)  # DDP has one bucket in it
        begun.closed = counted.closed = True
        with in_the_backward(ddp, pause):
            step(ddp, 1)
        return attachment.metrics()


def test_what_another_thread_sends_is_counted_in_a_pause(run):
    for metrics in run(count_meanwhile):
        assert metrics["bytes_sent"] == metrics["bytes_dense"] > 0
        assert metrics["comm_ms"] > 0
