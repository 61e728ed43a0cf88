"""What all-reduces take: between and beyond what was measured, and the measuring."""

import json
import random
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from lightning_commhooks.advice.emulated import Emulated, Network, emulated_group
from lightning_commhooks.collectives import link as measuring
from lightning_commhooks.collectives.counters import Counters
from lightning_commhooks.collectives.group import Backend, Group
from lightning_commhooks.collectives.link import Link, measure_link, rising
from lightning_commhooks.collectives.process_groups import destroy, own_group

CPU = torch.device("cpu")
MEASURED = Link(2, ((0, 1.0), (100, 2.0), (1000, 11.0)))


@pytest.mark.parametrize(
    ("num_bytes", "seconds"), [(0, 1.0), (50, 1.5), (100, 2.0), (550, 6.5), (1000, 11.0), (2000, 21.0)]
)
def test_between_and_beyond_what_was_measured(num_bytes, seconds):
    assert MEASURED.seconds(num_bytes) == pytest.approx(seconds)


def test_summary():
    numbers = json.loads(json.dumps(MEASURED.as_dict()))
    assert numbers["latency"] == MEASURED.latency == 1
    assert numbers["bandwidth"] == MEASURED.bandwidth == pytest.approx(100)


def test_disturbed_measurements_are_smoothed():
    """More bytes do not take less time."""
    assert rising([(1, 2.0), (2, 1.5), (3, 3.0)]) == ((1, 1.5), (2, 1.5), (3, 3.0))


def measure(rank, world):
    group = Group(Backend(dist.group.WORLD), process_group=dist.group.WORLD)
    link = measure_link(group, 0.3)
    assert group.counters.bytes_sent == 0
    assert group.counters.collectives == 0
    return link


def test_measured(run, world):
    link, *others = run(measure, world=world)
    assert all(other == link for other in others)
    assert link.world_size == world
    sizes = [num_bytes for num_bytes, _ in link.costs]
    assert sizes == sorted(set(sizes))
    assert len(sizes) > 1
    assert 1e-6 < link.latency < 1
    assert 1e5 < link.bandwidth < 1e12


def measure_far(rank, world):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMMHOOKS_LATENCY_MS", "5")
        own = own_group(dist.group.WORLD, CPU)
        link = measure_link(Group.of(own, None, CPU), 0.3)
        dist.barrier()
        destroy([own.process_group])
    return link


def test_measured_of_far_ranks(run):
    link, other = run(measure_far)
    assert other == link
    assert link.message_seconds == 0.005


class JitteryClock:
    """Time passes when somebody sleeps, a few percent more than asked for."""

    def __init__(self):
        self.time = 100.0
        self._random = random.Random(0)

    def perf_counter(self):
        return self.time

    def sleep(self, seconds):
        self.time += seconds * (1 + 0.04 * self._random.random())


@pytest.mark.parametrize("bandwidth", [1.25e6, 1.25e9])
@pytest.mark.parametrize(("latency", "most_seconds"), [(0.0001, 6), (0.003, 3), (0.01, 4), (0.1, 25)])
def test_latency_is_not_taken_for_size(monkeypatch, latency, bandwidth, most_seconds):
    """Of a large all-reduce it is only the bytes that say how fast the link is."""
    clock = JitteryClock()
    monkeypatch.setattr(measuring, "time", SimpleNamespace(perf_counter=clock.perf_counter))
    group = emulated_group(Emulated(Network(bandwidth, latency, 2), clock=clock), Counters(), CPU)
    found = measure_link(group)
    group.release()
    of_smallest = 2 * latency * (1 if latency > 0.004 else 2.5)
    assert found.latency == pytest.approx(of_smallest + 256 / bandwidth, rel=0.05)
    assert found.bandwidth == pytest.approx(bandwidth, rel=0.25)
    for num_bytes in (2**18, 2**22):
        assert found.seconds(num_bytes) == pytest.approx(of_smallest + num_bytes / bandwidth, rel=0.25), num_bytes
    assert clock.time - 100 < most_seconds


def test_one_rank_has_no_link():
    with pytest.raises(ValueError, match="no link to measure among one rank"):
        measure_link(Group(None))
