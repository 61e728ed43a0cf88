"""What a link costs: formulas of a given one, and a measured one."""

import json
import random
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from lightning_commhooks.advice.emulated import Emulated, emulated_group
from lightning_commhooks.collectives import measure_link as measuring
from lightning_commhooks.collectives.backend import Backend
from lightning_commhooks.collectives.counters import Counters
from lightning_commhooks.collectives.group import Group
from lightning_commhooks.collectives.link import Cost, Link
from lightning_commhooks.collectives.measure_link import _rising, measure_link
from lightning_commhooks.collectives.process_groups import destroy, own_group

CPU = torch.device("cpu")
MEASURED = Link(
    2,
    {
        "all_reduce": (Cost(0, 1.0, 0.5), Cost(100, 2.0, 1.0), Cost(1000, 11.0, 4.0)),
        "all_reduce:bfloat16": (Cost(0, 3.0), Cost(100, 30.0)),
        "all_gather": (Cost(0, 1.0), Cost(100, 3.0)),
    },
    burst_seconds=0.5,
)


@pytest.mark.parametrize(
    ("num_bytes", "seconds", "cpu_seconds"),
    [(0, 1.0, 0.5), (50, 1.5, 0.75), (100, 2.0, 1.0), (550, 6.5, 2.5), (1000, 11.0, 4.0), (2000, 21.0, 4 + 1000 / 300)],
)
def test_between_and_beyond_what_was_measured(num_bytes, seconds, cpu_seconds):
    cost = MEASURED.cost("all_reduce", num_bytes)
    assert cost.seconds == pytest.approx(seconds)
    assert cost.cpu_seconds == pytest.approx(cpu_seconds)


def test_kinds_and_dtypes():
    assert MEASURED.cost("all_reduce", 100, torch.bfloat16).seconds == 30
    assert MEASURED.cost("all_reduce", 100, torch.float16).seconds == 2
    assert MEASURED.cost("all_gather", 100, torch.bfloat16).seconds == 3
    assert MEASURED.cost("all_to_all", 100).seconds == 2  # not measured: as an all-reduce
    assert MEASURED.latency == 1
    assert MEASURED.bandwidth == pytest.approx(100)


def test_disturbed_measurements_are_smoothed():
    """More bytes do not take less time."""
    curve = _rising([Cost(1, 2.0, 0.3, 1.0), Cost(2, 1.5, 0.4, 1.4), Cost(3, 3.0, 0.2, 2.0)])
    assert curve == (Cost(1, 1.5, 0.2, 1.0), Cost(2, 1.5, 0.2, 1.4), Cost(3, 3.0, 0.2, 2.0))


def test_given():
    link = Link.given(bandwidth=1e6, latency=0.01, world_size=4, on_cpu=False)
    assert link.cost("all_reduce", 2e6).seconds == pytest.approx(2.0 + 6 * 0.01)
    assert link.cost("all_gather", 2e6).seconds == pytest.approx(2.0 + 3 * 0.01)
    assert link.cost("all_to_all", 2e6).seconds == pytest.approx(2.0 + 0.01)
    assert link.cost("all_reduce", 2e6).cpu_seconds == 0
    assert link.bandwidth == pytest.approx(1e6)
    assert link.num_at_once == 0
    assert link.message_seconds == 0


@pytest.mark.parametrize(("world", "of_sum"), [(2, 2), (4, 3), (64, 3)])
def test_given_on_cpu(world, of_sum):
    """Far ranks send directly: as many latencies whatever their number; without a hook they go around the ring."""
    far = Link.given(bandwidth=1e6, latency=0.01, world_size=world)
    assert far.message_seconds == 0.01
    for kind, latencies in (("all_reduce", of_sum), ("all_gather", 2), ("all_to_all", 2)):
        cost = far.cost(kind, 1e6)
        assert (cost.seconds, cost.occupancy) == pytest.approx((1 + latencies * 0.01, 1.0))
    assert far.without_hook.cost("all_reduce", 1e6).seconds == pytest.approx(1 + 2 * (world - 1) * 0.025)
    assert (far.num_at_once, far.without_hook.num_at_once) == (0, 2)
    assert far.scaled(2).latency == pytest.approx(0.02)
    assert far.scaled(2).without_hook.latency == pytest.approx(0.05)
    near = Link.given(bandwidth=1e6, latency=0.001, world_size=world)
    assert near.message_seconds == 0
    assert near.latency == near.without_hook.latency == pytest.approx(2 * (world - 1) * 0.0025)


def test_far_by_what_if():
    """A measured link, if it were far: no faster than the far one, with its processor time."""
    far = Link.given(bandwidth=1e6, latency=0.5, world_size=2)
    link = MEASURED.no_faster_than(far)
    assert link.message_seconds == 0.5
    assert link.latency == pytest.approx(1.0)
    assert link.without_hook.latency == pytest.approx(2.5)
    assert link.without_hook.cost("all_reduce", 100).cpu_seconds == pytest.approx(1.0)


def test_more_ranks_take_more_rounds():
    """Of messages; bytes are those that a rank sends, and take as long."""
    wide = MEASURED.scaled(8)
    assert wide.world_size == 8
    assert wide.cost("all_reduce", 0).seconds == pytest.approx(7.0)
    assert wide.cost("all_reduce", 1000).seconds == pytest.approx(17.0)
    assert MEASURED.scaled(2) == MEASURED


def test_no_faster_than():
    slow = Link.given(bandwidth=50, latency=0, world_size=2)
    both = MEASURED.no_faster_than(slow)
    assert both.cost("all_reduce", 0).seconds == 1  # of the measured one
    assert both.cost("all_reduce", 1000).seconds == pytest.approx(20)  # of the slow one
    assert both.cost("all_reduce", 1000).cpu_seconds == pytest.approx(4)


def test_as_json():
    numbers = json.loads(json.dumps(MEASURED.as_dict()))
    assert numbers["bandwidth"] == pytest.approx(100)
    assert numbers["curves"]["all_gather"][1] == {
        "num_bytes": 100,
        "seconds": 3.0,
        "cpu_seconds": 0.0,
        "busy_seconds": None,
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bandwidth": 0}, "bandwidth must be positive, in bytes per second, is 0"),
        ({"latency": -1}, "latency must be at least 0, in seconds, is -1"),
        ({"world_size": 0}, "world_size must be at least 1, is 0"),
    ],
)
def test_bad_values(options, message):
    with pytest.raises(ValueError, match=message):
        Link.given(**{"bandwidth": 1e9, "latency": 0, "world_size": 2, **options})


def measure(rank, world, of_steps=False):
    group = Group(Backend(dist.group.WORLD), process_group=dist.group.WORLD)
    link = measure_link(group, 0.3, of_steps)
    assert group.counters.bytes_sent == 0
    assert group.counters.collectives == 0
    return link


@pytest.mark.parametrize(("world", "of_steps"), [(2, True), (4, False)])
def test_measured(run, world, of_steps):
    link, *others = run(measure, of_steps, world=world)
    assert all(other == link for other in others)
    assert link.world_size == world
    assert set(link.curves) == {"all_reduce", "all_reduce:bfloat16", "all_reduce:float16", "all_gather", "all_to_all"}
    for curve in link.curves.values():
        sizes = [cost.num_bytes for cost in curve]
        assert sizes == sorted(set(sizes))
        assert len(curve) > 1
        assert all(0 <= cost.cpu_seconds <= cost.seconds for cost in curve)
    assert 1e-6 < link.latency < 1
    assert 1e5 < link.bandwidth < 1e12


def measure_far(rank, world):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMMHOOKS_LATENCY_MS", "5")
        own = own_group(dist.group.WORLD, CPU)
        link = measure_link(Group.of(own, None, CPU), 0.3, of_steps=True)
        dist.barrier()
        destroy([own.process_group])
    return link


def test_measured_of_far_ranks(run):
    link, other = run(measure_far)
    assert other == link
    assert link.message_seconds == 0.005
    assert (link.num_at_once, link.without_hook.num_at_once) == (0, 2)
    assert {"plain_ddp", "all_reduce"} <= set(link.curves)
    assert link.curves["all_reduce"][-1].busy_seconds > 0


class JitteryClock:
    """Time passes when somebody sleeps, a few percent more than asked for."""

    def __init__(self):
        self.time = 100.0
        self._random = random.Random(0)

    def now(self):
        return self.time

    def cpu(self):
        return 0.0

    def sleep(self, seconds):
        self.time += seconds * (1 + 0.04 * self._random.random())


def measured_over(monkeypatch, link):
    """A link as it is measured, and how long that takes."""
    clock = JitteryClock()
    monkeypatch.setattr(
        measuring, "time", SimpleNamespace(perf_counter=clock.now, process_time=clock.cpu, sleep=clock.sleep)
    )
    group = emulated_group(Emulated(link, clock=clock), Counters(), CPU)
    found = measure_link(group)
    group.release()
    return found, clock.time - 100


@pytest.mark.parametrize("bandwidth", [1.25e6, 1.25e9])
@pytest.mark.parametrize(("latency", "most_seconds"), [(0.0001, 6), (0.003, 3), (0.01, 4), (0.1, 25)])
def test_latency_is_not_taken_for_size(monkeypatch, latency, bandwidth, most_seconds):
    """Of a large all-reduce it is only the bytes that say how fast the link is."""
    link = Link.given(bandwidth=bandwidth, latency=latency, world_size=2)
    found, seconds = measured_over(monkeypatch, link)
    assert found.latency == pytest.approx(link.latency + 256 / bandwidth, rel=0.05)
    assert found.bandwidth == pytest.approx(bandwidth, rel=0.25)
    for kind in ("all_reduce", "all_gather", "all_to_all"):
        for num_bytes in (2**18, 2**22):
            cost = link.cost(kind, num_bytes).seconds
            assert found.cost(kind, num_bytes).seconds == pytest.approx(cost, rel=0.25), (kind, num_bytes)
    assert seconds < most_seconds


def test_one_rank_has_no_link():
    with pytest.raises(ValueError, match=r"no link to measure among one rank; use Link.given"):
        measure_link(Group(None))
