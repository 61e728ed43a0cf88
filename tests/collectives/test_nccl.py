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
from lightning_commhooks.collectives.counters import Timing
from lightning_commhooks.collectives.errors import raise_if_capturing
from lightning_commhooks.collectives.gloo_abort import Connections
from lightning_commhooks.runtime.engine import InlineEngine

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
        InlineEngine(CUDA, Connections(), Timing(every=0), "bf16").submit(None, CUDA, True)


def refused(name):
    return rf"'{name}'.*hooks do not know whether.*use 'nccl'"


# The name that a group is made with; what the backend's class calls itself; the engine, or what is said instead.
BACKENDS = [
    ("nccl", "nccl", "PyTorch to 2.14; then with TORCH_DIST_USE_NCCL2=0", "stream"),
    ("nccl", "nccl2", "PyTorch from 2.15; 2.14 with TORCH_DIST_USE_NCCL2=1", "stream"),
    ("nccl-legacy", "nccl", "PyTorch from 2.14", "stream"),
    ("nccl2", "nccl2", "PyTorch from 2.14", "stream"),
    ("nccl-lazy", "nccl-lazy", "PyTorch from 2.14", "stream"),
    ("cpu:gloo,cuda:nccl", "nccl2", "PyTorch from 2.15", "stream"),
    ("cpu:gloo,cuda:nccl-lazy", "nccl-lazy", "PyTorch from 2.14", "stream"),
    ("cpu:someones,cuda:someones", "nccl", "a plug-in that makes a ProcessGroupNCCL", "stream"),
    ("fake", "fake", "any", "stream"),
    ("gloo", "gloo", "any", "thread"),
    ("cpu:someones,cuda:someones", "gloo", "a plug-in that makes a ProcessGroupGloo", "thread"),
    ("ucc", "ucc", "any", refused("ucc")),
    ("cpu:gloo,cuda:ucc", "ucc", "any", refused("ucc")),
    ("mpi", "mpi", "any", refused("mpi")),
    ("cpu:someones,cuda:someones", "theirs", "a plug-in", refused("someones', which calls itself 'theirs")),
    ("cpu:someones,cuda:someones", None, "a plug-in that makes a group in Python", refused("someones")),
    ("nccl", None, "the same, which says that it is NCCL", "stream"),
]


class Known:
    """In place of a process group that PyTorch has made with this name."""

    def __init__(self, called, is_wrapped):
        self._called, self._is_wrapped = called, is_wrapped

    def _get_backend(self, device):
        if self._called is None:
            raise RuntimeError("No backend type associated with device type cuda")
        backend = types.SimpleNamespace(name=lambda: self._called)
        wrapper = types.SimpleNamespace(name=lambda: "wrapper", wrapped_pg=backend)
        return wrapper if self._is_wrapped else backend


@pytest.mark.parametrize("is_wrapped", [False, True])
@pytest.mark.parametrize(("made_with", "called", "where", "engine"), BACKENDS)
def test_the_engine_follows_from_what_a_group_is(made_with, called, where, engine, is_wrapped, monkeypatch):
    group = Known(called, is_wrapped)
    monkeypatch.setitem(dist.distributed_c10d._world.pg_backend_config, group, made_with)
    assert not process_groups.is_enqueued_on_stream(group, torch.device("cpu"))
    if engine in ("stream", "thread"):
        assert process_groups.is_enqueued_on_stream(group, CUDA) == (engine == "stream")
    else:
        with pytest.raises(ValueError, match=engine):
            process_groups.is_enqueued_on_stream(group, CUDA)


@pytest.mark.parametrize("level", [dist.DebugLevel.OFF, dist.DebugLevel.DETAIL])
def test_a_real_group_calls_itself_gloo(level):
    before = dist.get_debug_level()
    dist.set_debug_level(level)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=9))
    try:
        group = dist.group.WORLD
        assert hasattr(group._get_backend(CUDA), "wrapped_pg") == (level == dist.DebugLevel.DETAIL)
        assert not process_groups.is_enqueued_on_stream(group, CUDA)
        assert process_groups.timeout_of(group, CUDA) == timedelta(seconds=9)
    finally:
        dist.destroy_process_group()
        dist.set_debug_level(before)


class NCCL:
    """In place of `ProcessGroupNCCL` and `ProcessGroupNCCL2`: their signature, and the sums of gloo."""

    Options = dist.ProcessGroupGloo._Options

    def __init__(self, options):
        self.options = options

    def name(self):
        return "nccl2"

    def __new__(cls, *args):
        if len(args) == 1:
            return super().__new__(cls)
        store, rank, size, options = args
        assert type(options) is cls.Options
        assert options._timeout == timedelta(seconds=7)
        return dist.ProcessGroupGloo(store, rank, size, options._timeout)


class Parent:
    """In place of a group of NCCL, of some of all ranks."""

    bound_device_id = CUDA

    def __init__(self, group):
        self._group = group
        self._options = NCCL.Options()
        self._options._timeout = timedelta(seconds=7)

    def rank(self):
        return self._group.rank()

    def _get_backend(self, device):
        return NCCL(self._options)


def split(rank, world):
    """Size and sums of groups of some ranks, which know of different numbers of groups."""
    groups = [dist.new_group(ranks) for ranks in ([0, 1, 2], [0], [3])]
    found = split_of_three(rank, groups[0]) if rank < 3 else None
    for group in groups:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
    return found


def split_of_three(rank, group):
    own = process_groups.own_subgroup(Parent(group), [[0, 2], [1]], "some name", CUDA)
    assert own.process_group.bound_device_id == CUDA  # or the engine of PyTorch 2.15 is not connected
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
    abort = process_groups.BackendConnections(group).abort
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
