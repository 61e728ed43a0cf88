"""One rank fails and stays alive: places where a user's code or a hook can raise, each with what the ranks do."""

import contextlib
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from driver import SHAPES, Params, backward, full_rank_gradients
from pool import ignoring
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lightning_commhooks as lc
from lightning_commhooks.interface import options


class Failing(lc.CommHook):
    """Raises a `ValueError` on the last rank, at one place: by name, since a configuration has no state."""

    name = "failing"
    where = "nowhere"

    def __init__(self):
        fail_at("constructor")

    def check_parameters(self, names):
        fail_at("check_parameters")
        return []

    def bind(self, group):
        fail_at("bind")
        group.finish(group.all_gather(torch.zeros(1)))
        return _BoundFailing(group)


class Quiet(Failing):
    """Sends nothing in `bind`, where another rank would notice that one is lost."""

    name = "quiet"

    def bind(self, group):
        fail_at("bind")
        return _BoundFailing(group)


class _BoundFailing(lc.AveragesModels):
    has_memory = True

    def reduce(self, bucket, ranks):
        fail_at("reduce")
        yield from ranks.all_reduce_mean_(bucket.flat)

    def reduce_sparse(self, grad, bucket, ranks):
        fail_at("reduce_sparse")
        return super().reduce_sparse(grad, bucket, ranks)

    def end_step(self, finite):
        fail_at("end_step")

    def is_local(self, step):
        fail_at("is_local")
        return False

    def after_optimizer_step(self, stepped):
        fail_at("after_optimizer_step")
        self.group.finish(self.group.all_gather(torch.zeros(1)))

    def state_dict(self, writer):
        fail_at("state_dict")
        return {"mean": writer.per_rank(torch.zeros(3))}

    def load_state_dict(self, state, reader):
        fail_at("load_state_dict")


def is_last():
    return dist.get_rank() == dist.get_world_size() - 1


def fail_at(where):
    if Failing.where == where and is_last():
        Failing.where = "nowhere"
        raise ValueError(f"out of numbers in {where}")


def one_step(ddp, optimizer, step=0):
    backward(ddp, full_rank_gradients(dist.get_rank(), step, SHAPES))
    optimizer.step()


def attach(process_group, model=None, hook="failing", **options):
    """`(ddp, attachment, optimizer)` after a step."""
    model = Params(SHAPES) if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ddp = DistributedDataParallel(model, bucket_cap_mb=4e-3, process_group=process_group)
    options = {"optimizers": [optimizer], **options}
    return ddp, lc.attach(ddp, hook, **options), optimizer


# What fails, and how it is reached: a function for each, which gets the process group and yields once, when all ranks
# are well; what follows is to raise on all of them.


def in_attach(group):
    yield None
    attach(group)


def in_attach_of_quiet(group):
    yield None
    attach(group, hook=Quiet())


def in_attach_by_argument(group):
    yield None
    attach(group, hook="powersdg" if is_last() else "bf16")


def in_the_optimizers_of_attach(group):
    def optimizers():
        fail_at("optimizers")
        yield from ()

    yield None
    attach(group, optimizers=optimizers())


def in_a_step(group):
    ddp, attachment, optimizer = attach(group)
    one_step(ddp, optimizer)
    yield attachment
    for step in range(1, 3):
        one_step(ddp, optimizer, step)


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 4, sparse=True)

    def forward(self, gradients):
        return self.embedding(torch.arange(dist.get_rank(), 5)).sum()


def in_a_sparse_step(group):
    ddp, attachment, optimizer = attach(group, Sparse())
    one_step(ddp, optimizer)
    yield attachment
    for step in range(1, 3):
        one_step(ddp, optimizer, step)


def with_loss_divided_by(group):
    def divided_by():
        return 0 if chosen and is_last() else 2

    chosen = []
    ddp, attachment, optimizer = attach(group, accumulation="mean", loss_divided_by=divided_by)
    one_step(ddp, optimizer)
    yield attachment
    chosen.append(True)
    for step in range(1, 3):
        one_step(ddp, optimizer, step)


def with_a_function_that_finds_optimizers(group):
    def find():
        fail_at("find_optimizers")
        return known

    known = []
    hook = lc.PostLocalSGD(start_localSGD_iter=0, post_local_gradient_allreduce=True, subgroup_size=1, period=1)
    ddp, attachment, optimizer = attach(group, hook=hook, optimizers=find)
    known.append(optimizer)
    one_step(ddp, optimizer)
    yield attachment
    for step in range(1, 3):
        one_step(ddp, optimizer, step)


def after_a_step(act):
    def scenario(group):
        ddp, attachment, optimizer = attach(group)
        one_step(ddp, optimizer)
        yield attachment
        act(attachment)

    return scenario


def in_load_state_dict(group):
    ddp, attachment, optimizer = attach(group)
    one_step(ddp, optimizer)
    state = attachment.state_dict()
    yield attachment
    attachment.load_state_dict(state)


def in_move_to(group):
    ddp, attachment, _ = attach(group)
    new = DistributedDataParallel(ddp.module, process_group=group)
    yield attachment
    attachment.move_to(new)


def in_sample_error(group):
    _ddp, attachment, _ = attach(group)
    yield attachment
    attachment.sample_error(every=-1 if is_last() else 100)


def in_measure_link(group):
    _ddp, attachment, _ = attach(group)
    yield attachment
    attachment.measure_link("long" if is_last() else 0.2)


def within_averaged_weights(group):
    hook = lc.PostLocalSGD(start_localSGD_iter=0, post_local_gradient_allreduce=False, period=1)
    ddp, attachment, optimizer = attach(group, hook=hook)
    one_step(ddp, optimizer)
    one_step(ddp, optimizer, 1)  # DDP's second forward has a collective of its own
    yield attachment
    with attachment.averaged_weights() if is_last() else contextlib.nullcontext():
        one_step(ddp, optimizer, 2)


PLACES = {
    "constructor": in_attach,
    "attach": in_attach_by_argument,
    "bind": in_attach,
    "bind without collectives": in_attach_of_quiet,
    "check_parameters": in_attach,
    "optimizers": in_the_optimizers_of_attach,
    "reduce": in_a_step,
    "is_local": in_a_step,
    "end_step": in_a_step,
    "after_optimizer_step": in_a_step,
    "reduce_sparse": in_a_sparse_step,
    "loss_divided_by": with_loss_divided_by,
    "find_optimizers": with_a_function_that_finds_optimizers,
    "state_dict": after_a_step(lc.Attachment.state_dict),
    "load_state_dict": in_load_state_dict,
    "bind to load": in_load_state_dict,
    "bind to reset": after_a_step(lc.Attachment.reset_state),
    "check_parameters to move": in_move_to,
    "sample_error": in_sample_error,
    "measure_link": in_measure_link,
    "averaged_weights": within_averaged_weights,
}


def fail_somewhere(rank, world, place):
    """The last rank fails, and does nothing more until all others have failed.

    Returns:
        the error, its message, and how long after the first failure it came, in seconds.
    """
    store = dist.distributed_c10d._get_default_store()
    # With PyTorch's timeout: whoever waits for it hangs.
    group = dist.new_group(timeout=timedelta(minutes=30))
    Failing.where = "nowhere"
    lc.register(Failing)
    scenario = PLACES[place](group)
    attachment = next(scenario)
    Failing.where = place.split()[0]
    with pytest.raises((ValueError, RuntimeError, TypeError)) as error:
        next(scenario, None)
    if rank == world - 1:
        store.set("failed", repr(time.monotonic()))
        store.wait(["seen by all"], timedelta(seconds=20))
    seconds = time.monotonic() - float(store.get("failed"))
    if rank < world - 1 and store.add("seen", 1) == world - 1:
        store.set("seen by all", "yes")
    outcome = type(error.value).__name__, str(error.value), seconds
    del error, scenario
    if attachment is not None:
        with ignoring("hook='.*' (ended while|never averaged)"):
            attachment.close()
    options.registered.pop(Failing.name)
    dist.barrier()
    dist.destroy_process_group(group)
    return outcome
