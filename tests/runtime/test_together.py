"""What all ranks have to call, and only some do: an error on all of them that says which ranks are missing."""

import re
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from driver import POWERSGD, SHAPES, Params, backward, full_rank_gradients
from pool import ignoring
from torch.nn.parallel import DistributedDataParallel

import lightning_commhooks as lc
from lightning_commhooks.collectives import agreement


def error_of(call):
    try:
        call()
    except (lc.HookError, ValueError) as error:
        return type(error).__name__, str(error)
    return None


def attach_on_some(rank, world, hook, attaching):
    """The others go on with something else until those have failed."""
    ddp, told = DistributedDataParallel(Params(SHAPES)), None
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMMHOOKS_ATTACH_TIMEOUT_SECONDS", "1")
        if rank in attaching:
            told = error_of(lambda: lc.attach(ddp, hook))
    dist.barrier()
    # Nothing is left of it that would make the next try fail.
    lc.attach(ddp, "allreduce").close()
    return told


@dataclass(frozen=True)
class Costly(lc.CommHook):
    """Warns on the first rank where it is bound."""

    name = "costly"

    def bind(self, group):
        if group.rank == 0:
            warnings.warn("costs more than it saves", stacklevel=2)
        return lc.BF16().bind(group)


def warnings_of_binding(rank, world):
    """What is told of a hook that is bound several times; and what ranks do where warnings are errors."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ddp = DistributedDataParallel(Params(SHAPES))
        attachment = lc.attach(ddp, Costly())
        attachment.reset_state()
        attachment.move_to(DistributedDataParallel(ddp.module))
        attachment.close()
    with pytest.raises(UserWarning if rank == 0 else lc.HookError, match="costs more than it saves"):
        lc.attach(DistributedDataParallel(Params(SHAPES)), Costly())
    return [str(warning.message) for warning in caught]


def test_warnings_of_binding_are_given_once_when_all_ranks_are_bound(run):
    assert run(warnings_of_binding) == [["costs more than it saves"], []]


@pytest.mark.parametrize(
    ("world", "attaching", "missing"), [(2, [0], "rank 1 has"), (4, [1, 3], "ranks 0, (1, )?2(, 3)? have")]
)
def test_whoever_attaches_alone_is_told_who_is_missing(run, world, attaching, missing):
    told = run(attach_on_some, "int8", attaching, world=world)
    for rank in attaching:
        kind, text = told[rank]
        assert kind == "HookError"
        # One of them may have given up already.
        assert re.match(rf"attach\(\) must be called on all ranks, and {missing} not called it within 1 s", text)
        assert "not under `if rank == 0:`" in text


def test_whoever_attaches_alone_gets_the_own_error_first(run):
    told = run(attach_on_some, "powersdg", [0])
    assert told[0][0] == "ValueError"
    assert "unknown hook 'powersdg'" in told[0][1]


def wait_in_a_destroyed_group(rank, world):
    group = dist.new_group()
    dist.destroy_process_group(group)
    if rank == 0:
        with pytest.raises(lc.HookError, match=r"process group of the hook was destroyed: call state_dict\(\) before"):
            agreement.wait_for_all_ranks(group, "state_dict()", timeout=0.2)
    dist.barrier()


def test_a_destroyed_process_group_is_named(run):
    run(wait_in_a_destroyed_group)


CALLS = {
    "state_dict()": lc.Attachment.state_dict,
    "load_state_dict()": lambda attachment: attachment.load_state_dict(attachment.shared_state_dict()),
    "reset_state()": lc.Attachment.reset_state,
    "measure_link()": lambda attachment: attachment.measure_link(0.1),
    "sample_error()": lc.Attachment.sample_error,
    "average_weights()": lc.Attachment.average_weights,
}
LOCAL = lc.PostLocalSGD(start_localSGD_iter=0, period=4, post_local_gradient_allreduce=False)


def call_on_rank_0(rank, world, hook, what):
    """Rank 0 calls in step 1 what is for all ranks; the others train on."""
    torch.manual_seed(0)
    model = Params(SHAPES)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attachment = lc.attach(ddp, hook, optimizers=[optimizer])

    def train():
        for step in range(8):
            backward(ddp, full_rank_gradients(rank, step, SHAPES))
            optimizer.step()
            if (step, rank) == (1, 0):
                CALLS[what](attachment)

    agreement._SECONDS_TO_WARN = 0.1
    told = error_of(train)
    agreement._SECONDS_TO_WARN = 5.0
    with ignoring(
        "hook='post_localsgd' ended while", "training ended after 2 steps, and hook='post_localsgd' has never"
    ):
        attachment.close()
    return told


@pytest.mark.parametrize(
    ("hook", "what"),
    [*((POWERSGD, what) for what in CALLS if what != "average_weights()"), (LOCAL, "average_weights()")],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_what_rank_0_calls_alone_in_training_ends_in_an_error_on_all(run, hook, what):
    for kind, text in run(call_on_rank_0, hook, what):
        assert kind == "HookError"
        assert (
            f"{what} must be called on all ranks, and rank 1 has gone on to a backward or an optimizer's step" in text
        )


def call_what_sends_nothing(rank, world):
    ddp = DistributedDataParallel(Params(SHAPES))
    attachment = lc.attach(ddp, "bf16")
    backward(ddp, full_rank_gradients(rank, 0, SHAPES))
    if rank == 0:
        attachment.state_dict()
        attachment.average_weights()
        attachment.residual_norm()
    backward(ddp, full_rank_gradients(rank, 1, SHAPES))
    attachment.close()


def test_what_sends_nothing_can_be_called_on_one_rank(run):
    run(call_what_sends_nothing)


class OneOf:
    """A rank of a process group, in the same process as the others."""

    def __init__(self, store, rank, size=2):
        self.rank, self.size, self.get_group_store = lambda: rank, lambda: size, lambda: store


@pytest.fixture
def in_one_process(monkeypatch):
    monkeypatch.setenv("COMMHOOKS_ATTACH_TIMEOUT_SECONDS", "0.2")
    monkeypatch.setattr(agreement, "_named", lambda process_group, ranks: f"rank {ranks}")
    monkeypatch.setattr(dist, "get_rank", lambda: 0)


def arrivals(store):
    return store.add("lightning_commhooks/0/arrived", 0)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_rank_is_not_counted_twice(in_one_process, monkeypatch, error):
    def interrupted(seconds):
        raise error

    store = dist.HashStore()
    waiting = OneOf(store, 0)
    with monkeypatch.context() as patch:
        patch.setattr(agreement.time, "sleep", interrupted)
        with pytest.raises(error):
            agreement.wait_for_all_ranks(waiting, agreement.ATTACH)
    assert arrivals(store) == 0
    with pytest.raises(lc.HookError, match="must be called on all ranks"):
        agreement.wait_for_all_ranks(waiting, agreement.ATTACH)
    assert arrivals(store) == 0


@pytest.mark.parametrize("all_are_said_to_be_there", [True, False])
def test_ranks_that_give_up_while_the_last_arrives_go_on(in_one_process, monkeypatch, all_are_said_to_be_there):
    """Two of three ranks give up right after the third has arrived, perhaps before it has said so."""
    store, prefix = dist.HashStore(), "lightning_commhooks/0"
    give_up, at_once = agreement._leave, threading.Barrier(2)

    def give_up_together(*args):
        if at_once.wait() == 0:
            store.add(f"{prefix}/arrived", 1)
            if all_are_said_to_be_there:
                store.set(f"{prefix}/all", "")
        at_once.wait()
        return give_up(*args)

    monkeypatch.setattr(agreement, "_leave", give_up_together)
    with ThreadPoolExecutor(2) as pool:
        ranks = [OneOf(store, rank, 3) for rank in range(2)]
        for waiting in [pool.submit(agreement.wait_for_all_ranks, one, agreement.ATTACH) for one in ranks]:
            waiting.result()
