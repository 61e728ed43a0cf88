"""What is different on NCCL, as far as it can be seen without: stand-ins take the place of what a CPU build lacks."""

import threading
import types
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lightning_commhooks as lc
from lightning_commhooks.collectives import process_groups
from lightning_commhooks.collectives.errors import raise_if_capturing
from lightning_commhooks.collectives.gloo_abort import Connections
from lightning_commhooks.collectives.timing import NoTiming
from lightning_commhooks.runtime.stream_engine import InlineEngine

CUDA = torch.device("cuda", 0)


def on_several_devices(rank, world):
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    ddp.module[1] = nn.Linear(3, 3, device="meta")
    with pytest.raises(ValueError, match=r"parameters on cpu and meta.*one device in each process") as error:
        lc.attach(ddp, "int8")
    return str(error.value)


def test_a_model_on_several_devices_is_refused(run):
    assert all("Start a process for each device" in text for text in run(on_several_devices))


def test_no_part_of_a_graph(monkeypatch):
    raise_if_capturing(torch.device("cpu"))
    for captures in (False, True):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda captures=captures: captures)
        raise_if_capturing(torch.device("cpu"))
        if not captures:
            raise_if_capturing(CUDA)
    with pytest.raises(lc.HookError, match=r"a CUDA graph is being captured.*make_graphed_callables"):
        raise_if_capturing(CUDA)
    with pytest.raises(lc.HookError, match="a CUDA graph is being captured"):
        InlineEngine(CUDA, Connections(), NoTiming(), "bf16").submit(None, CUDA, True)


class NCCL:
    """In place of `ProcessGroupNCCL`: gloo."""

    Options = types.SimpleNamespace

    def __new__(cls, store, rank, size, options):
        assert options._timeout == timedelta(seconds=7)
        return dist.ProcessGroupGloo(store, rank, size, options._timeout)


class Parent:
    """In place of a group of NCCL, of some of all ranks."""

    def __init__(self, group):
        self._group = group

    def rank(self):
        return self._group.rank()

    def _get_backend(self, device):
        options = types.SimpleNamespace(_timeout=timedelta(seconds=7))
        return types.SimpleNamespace(name=lambda: "nccl", options=options)


def split(rank, world):
    """Size and sums of groups of some ranks, which know of different numbers of groups."""
    groups = [dist.new_group(ranks) for ranks in ([0, 1, 2], [0], [3])]
    found = split_of_three(rank, groups[0]) if rank < 3 else None
    for group in groups:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
    return found


def split_of_three(rank, group):
    patch = pytest.MonkeyPatch()
    patch.setattr(dist, "ProcessGroupNCCL", NCCL, raising=False)
    patch.setattr(dist, "get_process_group_ranks", lambda _: [0, 1, 2])
    own = process_groups.own_subgroup(Parent(group), [[0, 2], [1]], "some name", CUDA)
    patch.undo()
    mine = torch.full((1,), 10.0**rank)
    own.process_group._get_backend(CUDA).allreduce([mine]).wait()
    return own.process_group.size(), mine.item()


def test_subgroups_of_some_ranks_are_named_alike(run):
    """PyTorch names a group of some ranks by how many others there are, on which ranks of different ones disagree."""
    assert run(split, world=4) == [(2, 101.0), (1, 10.0), (2, 101.0), None]


def test_abort_does_not_wait_and_holds_nothing():
    begun, end = threading.Event(), threading.Event()

    class Group:
        def abort(self):
            begun.set()
            end.wait()

    group = Group()
    abort = process_groups.connections_of(group).abort
    abort()
    assert begun.wait(10)
    end.set()
    for thread in threading.enumerate():
        if thread.name.endswith("abort"):
            thread.join()
    del group, thread
    before = threading.active_count()
    abort()
    assert threading.active_count() == before
