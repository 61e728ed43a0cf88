"""Groups of communication threads: what they leave behind, how they are aborted, how far ranks are found to be."""

import gc
import math
import os
import socket
import time

import pytest
import torch
import torch.distributed as dist
from driver import SHAPES, attached, backward, full_rank_gradients
from torch.nn.parallel import DistributedDataParallel

import lightning_commhooks as lc
from lightning_commhooks.collectives import agreement, direct, process_groups
from lightning_commhooks.collectives.group import Group
from lightning_commhooks.collectives.process_groups import BackendConnections, destroy, own_group, own_subgroup

CPU = torch.device("cpu")


def resources():
    """Open descriptors and threads of this process."""
    gc.collect()
    return len(os.listdir("/dev/fd")), len(os.listdir("/proc/self/task"))


def settled(expected):
    """`resources` as soon as there are not more than these; gloo's threads end a little later."""
    deadline = time.monotonic() + 5
    while (found := resources()) > expected and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def connections(rank, world):
    """Connections of this rank's that a group of near ranks, and one of far ones, has."""
    found = []
    for latency in ("0", "10"):
        os.environ["COMMHOOKS_LATENCY_MS"] = latency
        before, _ = resources()
        own = own_group(dist.group.WORLD, CPU)
        found.append(len(own.connections._files))
        dist.barrier()  # what a rank shuts down, the others do not count
        own.connections.abort()
        del own
        assert settled((before, math.inf))[0] <= before
    os.environ["COMMHOOKS_LATENCY_MS"] = "0"
    return found


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts descriptors as Linux lists them")
def test_near_ranks_have_a_connection_for_each_collective_at_once(run, world):
    assert run(connections, world=world) == [[3 * (world - 1), world - 1]] * world


def kept(rank, world, hook):
    """Descriptors and threads before, and with attachments that are closed, but kept."""
    closed = []
    for turn in range(4):
        with attached(hook) as (ddp, attachment):
            backward(ddp, full_rank_gradients(rank, 0, SHAPES))
        closed.append(attachment)
        del ddp
        if turn == 0:
            time.sleep(0.2)
            before = resources()
    return before, settled(before)


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads as Linux lists them")
@pytest.mark.parametrize(
    "hook", [lc.Cast(lc.PowerSGD(start_powerSGD_iter=0), "int8"), lc.PowerSGD(start_powerSGD_iter=0)], ids=repr
)
def test_closed_attachments_keep_no_connections(run, hook):
    for (descriptors, threads), (descriptors_later, threads_later) in run(kept, hook):
        assert descriptors_later <= descriptors
        assert threads_later <= threads


def refused(rank, world):
    with pytest.MonkeyPatch.context() as patch:
        own = own_group(dist.group.WORLD, CPU)
        destroy([own.process_group])
        del own
        time.sleep(0.2)
        before, groups = resources(), len(dist.distributed_c10d._world.pg_map)
        patch.setenv("COMMHOOKS_LATENCY_MS", "soon")
        ddp = DistributedDataParallel(torch.nn.Linear(2, 2))
        for _ in range(3):
            with pytest.raises(ValueError, match="COMMHOOKS_LATENCY_MS"):
                lc.attach(ddp, "bf16")
        return before, settled(before), len(dist.distributed_c10d._world.pg_map) - groups


def test_a_refused_latency_leaves_no_group_behind(run):
    for (descriptors, _), (descriptors_later, _), groups in run(refused):
        assert descriptors_later <= descriptors
        assert groups == 0


def with_subgroups(rank, world):
    """Descriptors and groups before subgroups of CPU ranks are made, and with some."""
    own = own_group(dist.group.WORLD, CPU)
    group = Group.of(own, None, CPU)
    before, groups = resources(), len(dist.distributed_c10d._world.pg_map)
    pairs, across = group.split([[0, 1], [2, 3]]), group.split([[0, 2], [1, 3]])
    total = group.finish(pairs.all_reduce_(torch.tensor([2.0**rank]))).item()
    total_across = group.finish(across.all_reduce_(torch.tensor([2.0**rank]))).item()
    with pytest.raises(RuntimeError, match="these ranks have no process group: they are a subgroup, or emulated"):
        _ = pairs.process_group
    after, made = settled(before), len(dist.distributed_c10d._world.pg_map) - groups
    dist.barrier()
    own.connections.abort()
    destroy([own.process_group, *group.release()])
    with pytest.raises(RuntimeError, match="is gone: the hook was closed"):
        _ = group.process_group
    return before, after, made, (total, total_across)


def test_subgroups_on_cpu_take_no_connections(run):
    for rank, (before, after, made, totals) in enumerate(run(with_subgroups, world=4)):
        assert after <= before
        assert made == 0
        assert totals == ((3.0, 12.0)[rank // 2], (5.0, 10.0)[rank % 2])


def of_gloo(rank, world):
    """A sum over a process group of a part of the ranks, as those of tensors on CUDA, and what aborts it."""
    own = own_group(dist.group.WORLD, CPU)
    some = own_subgroup(own.process_group, [[0, 3], [1, 2]], "some", CPU)
    group = Group.of(some, None, CPU)
    total = group.finish(group.all_reduce_(torch.tensor([2.0**rank]))).item()
    dist.barrier()
    begin = time.monotonic()
    if group.rank == 0:
        some.connections.abort()
    with pytest.raises(RuntimeError):
        group.finish(group.all_reduce_(torch.ones(3)))
    seconds = time.monotonic() - begin
    dist.barrier()
    own.connections.abort()
    destroy([own.process_group, some.process_group])
    return total, group.is_ordered, seconds


def test_process_groups_of_subgroups(run):
    for rank, (total, is_ordered, seconds) in enumerate(run(of_gloo, world=4)):
        assert total == (9.0 if rank in (0, 3) else 6.0)
        assert is_ordered
        assert seconds < 10


def aborted(rank, world):
    """Seconds until a peer notices, and whether another thread's listener still listens."""
    others = []

    def devices():
        if not others:  # as another thread would in between
            others.append(socket.create_server(("127.0.0.1", 0)))
        return made()

    made = process_groups._devices
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process_groups, "_devices", devices)
        own = own_group(dist.group.WORLD, CPU)
    begin = time.monotonic()
    if rank == 0:
        own.connections.abort()
    with pytest.raises(RuntimeError):
        dist.all_reduce(torch.ones(3), group=own.process_group, async_op=True).wait()
    seconds = time.monotonic() - begin
    with socket.create_connection(others[0].getsockname()):
        pass
    others[0].close()
    dist.barrier()
    destroy([own.process_group])
    return seconds


def test_aborts_though_another_thread_opened_a_listener_meanwhile(run):
    assert all(seconds < 10 for seconds in run(aborted))


class Other:
    """A group of another backend."""

    def __init__(self, error=None):
        self.error, self.aborted = error, 0

    def abort(self):
        self.aborted += 1
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize("error", [None, RuntimeError("Backend mpi does not support abort")])
def test_other_backends_are_aborted_if_they_can_be(error):
    group = Other(error)
    BackendConnections(group).abort()
    deadline = time.monotonic() + 5
    while not group.aborted and time.monotonic() < deadline:
        time.sleep(0.01)
    assert group.aborted == 1
    gone = BackendConnections(Other()).abort
    gone()


def busy(rank, world):
    """The latency when a processor is busy for the first pings, and how many pings there were."""
    calls = []
    swap = direct.Direct.swap

    def slow(self, *args):
        calls.append(args)
        if len(calls) <= 8:
            time.sleep(0.02)
        swap(self, *args)

    own = own_group(dist.group.WORLD, CPU)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("COMMHOOKS_LATENCY_MS", raising=False)
        patch.setattr(direct.Direct, "swap", slow)
        latency = direct.measure_latency(direct.Direct(process_groups._backend_of(own.process_group, CPU)))
    dist.barrier()
    destroy([own.process_group])
    return latency, {distance for *_, distance in calls}


def test_a_processor_that_is_busy_for_a_moment_does_not_make_ranks_far(run):
    for latency, distances in run(busy, world=4):
        assert latency < direct.FAR
        assert distances == {1, 2}, "one message at a time"


def differ(rank, world):
    """Errors of ranks that name different values to compare, and the keys that remain in the store."""
    number = agreement.num_waits(dist.group.WORLD)
    with (
        pytest.raises(ValueError, match="must be the same on all ranks") as raised,
        agreement.raise_on_all_ranks(dist.group.WORLD, "attach()") as same,
    ):
        same["sharded" if rank else "model"] = True
    keys = [f"lightning_commhooks/{number}/{key}" for key in ("0", "1", "arrived", "all", "left")]
    return str(raised.value), [key for key in keys if agreement.store_of(dist.group.WORLD).check([key])]


def test_ranks_that_name_different_values(run):
    for message, left in run(differ):
        assert "model must be the same on all ranks, is True on rank 0 and missing on rank 1" in message
        assert left == []


def arrives_late(rank, world):
    """Whether rank 0 goes on if its peer arrives while it gives up."""
    group, number = dist.group.WORLD, agreement.num_waits(dist.group.WORLD)
    store, prefix = agreement.store_of(group), f"lightning_commhooks/{number}"

    def arrive(missing):
        store.set(f"{prefix}/1", "")
        store.add(f"{prefix}/arrived", 1)
        store.set(f"{prefix}/all", "")
        return "gone"

    if rank == 0:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(agreement, "_SECONDS_TO_WARN", 0.0)
            agreement.wait_for_all_ranks(group, "save_checkpoint()", arrive)
    else:
        agreement._num_waits[group] = number + 1
    dist.barrier()
    return agreement.num_waits(group) - number


def test_a_rank_that_arrives_at_the_last_moment(run):
    assert run(arrives_late) == [1, 1]
