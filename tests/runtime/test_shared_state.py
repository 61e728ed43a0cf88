"""`shared_state_dict`, of one rank without the others: the step count and nothing else."""

import contextlib
import signal
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from driver import SHAPES, attached, backward, full_rank_gradients
from local_sgd_driver import ALONE, local, one_step, params

import lightning_commhooks as lc

SECONDS = 20


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
    assert (read["hook"], read["models"]) == ({"name": "diloco"}, {})
    assert begun["hook"]["state"] == {
        "num_steps": {},
        "start": {"backward": 0},
        "entries": {},
        "own_kinds": ["residual"],
    }
    assert text.startswith("the state of hook 'diloco' was saved without averaging over ranks")
    assert "it has the step count, 4, and nothing else. The hook's memory is reset" in text
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
