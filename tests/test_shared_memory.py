"""Collectives through the memory of a node against plain sums, and where there is none."""

import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from driver import SHAPES, attached, backward, full_rank_gradients, same
from test_direct import CPU, DTYPES, numbers
from test_hierarchy import HOOKS, on_node

from lightning_commhooks.collectives import process_groups
from lightning_commhooks.collectives.process_groups import own_group, own_subgroup
from lightning_commhooks.collectives.shared_memory import SharedMemory
from lightning_commhooks.collectives.turns import in_lane


class Node:
    """All ranks as one node."""

    def __enter__(self):
        self.own = own_subgroup(dist.group.WORLD, [list(range(dist.get_world_size()))], "node", CPU, True, True)
        return self.own

    def __exit__(self, *_):
        dist.barrier()


def sums(rank, world):
    found = {}
    with Node() as own:
        memory = own.transport
        assert isinstance(memory, SharedMemory)
        for dtype in DTYPES:
            for numel in (0, 1, 3, 1000, 70_001):
                found[dtype, numel] = memory.sum_(numbers(rank, numel, dtype))()
        # Begun before others are finished, in another order than they are waited for.
        several = [memory.sum_(torch.full((n,), rank + 1.0)) for n in (5, 30_000, 7)]
        found["several"] = [several[i]().unique().item() for i in (2, 0, 1)]
        found["large"] = memory.sum_(torch.arange(4_500_000) * (rank + 1))()
        half = torch.randn(999, generator=torch.Generator().manual_seed(rank)).bfloat16()
        found["half"] = memory.sum_(half)()
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_sums(run, world):
    results = run(sums, world=world)
    for (dtype, numel), total in ((key, value) for key, value in results[0].items() if isinstance(key, tuple)):
        expected = sum(numbers(rank, numel, dtype) for rank in range(world))
        assert total.dtype == dtype
        assert total.equal(expected), (dtype, numel)
    assert results[0]["large"].equal(torch.arange(4_500_000) * sum(range(1, world + 1)))
    assert results[0]["several"] == [sum(range(1, world + 1))] * 3
    halves = [torch.randn(999, generator=torch.Generator().manual_seed(rank)).bfloat16() for rank in range(world)]
    assert results[0]["half"].equal(sum(half.float() for half in halves).bfloat16())
    assert all(
        other[key].equal(value) for other in results[1:] for key, value in results[0].items() if key != "several"
    )


def others(rank, world):
    with Node() as own:
        memory = own.transport
        chunks = torch.arange(world * 3).view(world, 3) + 100 * rank
        first, second, third = memory.exchange(chunks), memory.gather(2, torch.float64), memory.sum_of_rows(chunks)
        gathered = second(torch.tensor([rank, 0.5], dtype=torch.float64))
        return gathered(), first(), third()


@pytest.mark.parametrize("world", [2, 4])
def test_gathers_exchanges_and_sums_of_rows(run, world):
    for rank, (gathered, received, total) in enumerate(run(others, world=world)):
        assert gathered.tolist() == [[other, 0.5] for other in range(world)]
        rows = torch.stack([torch.arange(3 * rank, 3 * rank + 3) + 100 * i for i in range(world)])
        assert received.equal(rows)
        assert total.equal(rows.sum(dim=0))


def again_and_again(rank, world, steps):
    """Whether sums are right however often memory is written anew; files that are open in the end."""
    before = len(os.listdir("/proc/self/fd"))
    with Node() as own:
        memory, right, files = own.transport, True, []
        for step in range(steps):
            for number in range(2):
                with in_lane(number):
                    waits = [memory.sum_(torch.full((40_000 + i,), float(rank + step + i))) for i in range(3)]
                    totals = [wait() for wait in waits]
                    gathered = memory.gather(30_000, torch.float32)(torch.full((30_000,), float(rank - step)))()
                expected = [sum(other + step + i for other in range(world)) for i in range(3)]
                right &= [total.unique().tolist() for total in totals] == [[value] for value in expected]
                right &= [row.unique().tolist() for row in gathered] == [[other - step] for other in range(world)]
            files.append(len(os.listdir("/proc/self/fd")))
        del own, memory
    return right, files, before


def test_memory_is_written_anew_when_all_have_read_it(run):
    for right, files, before in run(again_and_again, 30, world=4):
        assert right
        # As many as there are collectives at once, and as many that may be read still, in each lane and size.
        assert files[-1] == files[5] < before + 40


def fails(*_, **__):
    raise RuntimeError("it cannot be mapped")


# What a system may lack.
LACKS = {
    "memory": lambda patch: patch.delattr(os, "memfd_create"),
    "maps": lambda p: p.setattr(torch, "from_file", fails),
}


def without_memory(rank, world, hook, which, lacks):
    """Means of two nodes, of which no process or one cannot share memory; what the node uses."""
    with pytest.MonkeyPatch.context() as patch, on_node(rank // 2):
        if rank in which:
            LACKS[lacks](patch)
        with attached(hook) as (ddp, attachment):
            means = [backward(ddp, full_rank_gradients(rank, step, SHAPES)) for step in range(3)]
            transports = [type(group._transport) for group in attachment.bound.group._split_off.values()]
    return means, transports[0]


@pytest.mark.parametrize(("label", "lacks"), [("int8", "memory"), ("bf16", "maps"), ("powersgd", "memory")])
def test_where_a_rank_has_none_its_node_goes_without(run, label, lacks):
    results = {which: run(without_memory, HOOKS[label], which, lacks, world=4) for which in ((), (1,), (0, 1, 2, 3))}
    for which, of_ranks in results.items():
        expected = [type(None) if node in {rank // 2 for rank in which} else SharedMemory for node in (0, 0, 1, 1)]
        assert [transport for _, transport in of_ranks] == expected
        for means, _ in of_ranks:
            assert all(map(same, means, results[()][0][0]))


def on_another_machine(rank, world):
    """As if the number of a process were that of another one, which has memory under the same number."""
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(os, "getpid", lambda: int(os.environ["STRANGER"]))
        own = own_group(dist.group.WORLD, CPU)
        found = process_groups.shared_memory(process_groups._messages(own.process_group, CPU))
        dist.barrier()
        dist.destroy_process_group(own.process_group)
    return found is None


def test_a_process_of_another_machine_is_not_taken_for_one_of_this(run):
    code = "import os; [os.ftruncate(os.memfd_create('x'), 2**36) for _ in range(60)]; print(); input()"
    stranger = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        stranger.stdout.readline()
        assert run(with_environment, on_another_machine, {"STRANGER": str(stranger.pid)}) == [True, True]
    finally:
        stranger.communicate("\n")


def with_environment(rank, world, function, environment):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        return function(rank, world)


def left_alone(rank, world):
    """What the others are told when a rank is gone, and by what."""
    own = own_subgroup(dist.group.WORLD, [list(range(world))], "node", CPU, True, True)
    if rank == 0:
        own.abort()
    with pytest.raises(RuntimeError) as error:
        sum_thrice(own.transport)
    # As an engine does it: others may wait for this rank, not for the one that has gone.
    own.abort()
    dist.barrier()
    return str(error.value)


def sum_thrice(memory):
    for _ in range(3):
        memory.sum_(torch.ones(5))()


def test_who_is_left_alone_gets_an_error(run):
    assert all(run(left_alone, world=4))
