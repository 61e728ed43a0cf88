"""`shared_state_dict` and paused counters while a step is under way, by hooks that block where it matters."""

import contextlib
import signal
import threading
import time
import warnings
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


class Gated(lc.CommHook):
    """Waits at two gates in each bucket: before its collective and after it."""

    name = "gated"

    def __init__(self):
        self.before, self.after = Gate(), Gate()

    def bind(self, group):
        return _BoundGated(group, self)


class _BoundGated(lc.BoundHook):
    def __init__(self, group, config):
        super().__init__(group)
        self.config = config

    def reduce(self, bucket, ranks):
        self.config.before()
        yield from ranks.all_reduce_mean_(bucket.flat)
        self.config.after()


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


def step(ddp, number):
    backward(ddp, full_rank_gradients(dist.get_rank(), number, SHAPES))


def read_in_an_outer_step(rank, world):
    """In rank 0's signal handler, while its hook waits for rank 1; then go on from it on both."""
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
        ddp.zero_grad()
        ddp(gradients).backward()
        with in_a_signal_handler(look) if rank == 0 else contextlib.nullcontext():
            if rank == 1:
                store.wait(["read"], timedelta(seconds=SECONDS))
            optimizer.step()
        states = [*read, None][:1]
        dist.broadcast_object_list(states, src=0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            attachment.load_state_dict(states[0])
        begun = attachment.state_dict()
    return states[0], begun, [str(warning.message) for warning in caught]


def test_a_signal_handler_in_the_middle_of_an_averaging_saves_the_step_count(run):
    (read, begun, (text,)), (_, _, others) = run(read_in_an_outer_step)
    assert read["steps"] == begun["steps"] == 4
    assert read["hook"] == read["models"] == {}
    assert begun["hook"]["state"] == {"num_steps": {}, "entries": {}}
    assert text.startswith("the state of hook 'diloco' was saved by one rank without the others")
    assert "it has the step count, 4, and nothing else. What the hook remembers begins anew" in text
    assert others == [], "rank 0 speaks"


@pytest.mark.parametrize(("hook", "has_memory"), [("bf16", False), (lc.PowerSGD(start_powerSGD_iter=0), True)])
def test_only_hooks_that_remember_begin_anew(run, hook, has_memory):
    texts = run(loaded, hook)
    assert texts[1] == []
    assert len(texts[0]) == has_memory


def loaded(rank, world, hook):
    with attached(hook) as (ddp, attachment):
        step(ddp, 0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            attachment.load_state_dict(attachment.shared_state_dict())
        assert attachment.num_steps == 1
        step(ddp, 1)
    return [str(warning.message) for warning in caught]


def count_meanwhile(rank, world):
    hook = Gated()
    begun = hook.before
    hook.after.opened.set()

    def pause():
        assert begun.reached.wait(SECONDS)
        counters = attachment.bound.group.counters
        sent, deadline = counters.bytes_sent, time.monotonic() + SECONDS
        with counters.paused():
            begun.opened.set()
            while counters.bytes_sent == sent and time.monotonic() < deadline:
                time.sleep(0.01)

    with attached(hook) as (ddp, attachment):
        step(ddp, 0)  # DDP has one bucket in it
        begun.closed = True
        with in_the_backward(ddp, pause):
            step(ddp, 1)
        return attachment.metrics()


def test_what_another_thread_sends_is_counted_in_a_pause(run):
    for metrics in run(count_meanwhile):
        assert metrics["bytes_sent"] == metrics["bytes_dense"] > 0
        assert metrics["comm_ms"] > 0
