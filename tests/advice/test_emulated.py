"""Ranks that are not there: the bytes of real ones, and the time of a link."""

import contextlib
import functools
import gc
import threading
import time

import pytest
import torch
import torch.distributed as dist
from driver import HOOKS, SHAPES, SMALL_BUCKETS, Params, full_rank_gradients
from pool import ignoring
from torch.nn.parallel import DistributedDataParallel

import lightning_commhooks as lc
from lightning_commhooks.advice.emulated import Emulated, Network, emulated_group
from lightning_commhooks.codecs import Int8Codec
from lightning_commhooks.codecs.codec import Chunk, Kernels
from lightning_commhooks.collectives.counters import Counters
from lightning_commhooks.collectives.steps import finish
from lightning_commhooks.sources.attach import attach_emulated

LOCAL = {
    "post_localsgd": lc.PostLocalSGD(start_localSGD_iter=1, period=2, subgroup_size=2, optimizer_state="average"),
    "hierarchical": lc.HierarchicalLocalSGD(
        start_localSGD_iter=0, period_group_size_dict={1: 2, 2: None}, post_local_gradient_allreduce=False
    ),
    "diloco": lc.DiLoCo(period=2, fragments=2, post_local_gradient_allreduce=False, pseudo_gradient="int8"),
    "allgather": lc.AllGather(),
    "fp8": lc.FP8(min_bytes=0),
}
ALL = {**HOOKS, **LOCAL}
CPU = torch.device("cpu")
# Of time, which differs from run to run, and of nodes, of which emulated ranks have one each.
TIMES = {"waited_ms", "exposed_ms", "codec_ms", "comm_ms", "overlap_ms", "timed_steps", "relative_error"}


def train(process_group, attach, rank):
    """Metrics of a few steps."""
    ddp = DistributedDataParallel(Params(SHAPES), bucket_cap_mb=SMALL_BUCKETS, process_group=process_group)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    attachment = attach(ddp, optimizer)
    for step in range(5):
        ddp.zero_grad(set_to_none=True)
        ddp(full_rank_gradients(rank, step, SHAPES)).backward()
        optimizer.step()
    metrics = attachment.metrics()
    attachment.close()
    return {key: value for key, value in metrics.items() if key not in TIMES and "nodes" not in key}


def both(rank, world):
    """Metrics with real ranks, and with emulated ones, by hook."""
    return {label: of_hook(rank, world, hook) for label, hook in ALL.items()}


def of_hook(rank, world, hook):
    alone = dist.new_group([rank], use_local_synchronization=True)
    make_group = functools.partial(emulated_group, Emulated(Network(1e15, 0.0, world), rank), device=CPU)

    def attach_really(ddp, optimizer):
        return lc.attach(ddp, hook, optimizers=[optimizer])

    def attach_to_nobody(ddp, optimizer):
        return attach_emulated(ddp, hook, make_group, [optimizer])

    with ignoring("hook=", "training ended", "Grad strides"):
        real, emulated = (train(*pair, rank) for pair in ((None, attach_really), (alone, attach_to_nobody)))
    dist.destroy_process_group(alone)
    return real, emulated


def test_sends_what_real_ranks_send(run):
    for by_label in run(both, world=4, timeout=120):
        assert by_label.keys() == ALL.keys()
        for label, (real, emulated) in by_label.items():
            assert emulated == real, label


class FakeClock:
    """Time passes when somebody sleeps."""

    def __init__(self):
        self.time = 100.0
        self.slept = []

    def perf_counter(self):
        return self.time

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.time += seconds


@contextlib.contextmanager
def emulated(bandwidth, latency, world_size, **options):
    """`(group, clock)`."""
    clock = FakeClock()
    network = Network(bandwidth, latency, world_size)
    group = emulated_group(Emulated(network, clock=clock, **options), Counters(), CPU)
    yield group, clock
    group.release()


def spent(clock, collective):
    """Seconds that a collective takes."""
    begin = clock.time
    finish(collective())
    return clock.time - begin


@contextlib.contextmanager
def at_the_same_time(group):
    """What is begun within begins at one moment."""
    go = threading.Event()
    group.transport._wire._executor.submit(go.wait)
    yield
    go.set()


def test_takes_the_time_of_the_network():
    """Of gloo's ring, in each round of which messages take 2.5 latencies, and of a stream, where they take one."""
    with emulated(1000, 0.002, 4) as (group, clock):
        x = torch.ones(1000)  # 4000 bytes, of which a rank sends 6000
        assert spent(clock, lambda: group.all_reduce_(x)) == pytest.approx(6 + 6 * 0.005)
        assert x.eq(4).all()
        gathered = finish(group.all_gather(torch.arange(100.0)))
        assert gathered.equal(torch.arange(100.0).expand(4, 100))
        assert spent(clock, lambda: group.all_gather(x[:100])) == pytest.approx(1.2 + 3 * 0.005)
        chunks = torch.arange(400.0).view(4, 100)
        assert finish(group.all_to_all(chunks)).equal(chunks[:1].expand(4, 100))
        assert spent(clock, lambda: group.all_to_all(chunks)) == pytest.approx(1.2 + 0.005)


@pytest.mark.parametrize(("world", "messages"), [(2, 2), (4, 3), (64, 3)])
def test_far_ranks_send_directly(world, messages):
    """As many messages whatever their number; without a hook they go around the ring."""
    with emulated(1000, 0.5, world) as (group, clock):
        assert not group.is_ordered
        sending = 2 * (world - 1) / world * 4
        assert spent(clock, lambda: group.all_reduce_(torch.ones(1000))) == pytest.approx(sending + messages * 0.5)
        assert spent(clock, lambda: group.all_gather(torch.ones(100))) == pytest.approx((world - 1) * 0.4 + 2 * 0.5)
        # Announced a message's time before, it takes that much less.
        begin, expected = clock.time, group.expect_all_gather(torch.ones(100))
        clock.sleep(2.0)
        finish(group.all_gather(torch.ones(100), expected))
        assert clock.time - begin == pytest.approx(2.0 + (world - 1) * 0.4 + 0.5)
    with emulated(1000, 0.5, world, has_hook=False) as (group, clock):
        assert group.is_ordered
        assert spent(clock, lambda: group.all_reduce_(torch.ones(1000))) == pytest.approx(
            sending + 2 * (world - 1) * 1.25
        )


def test_rounds_of_far_ranks_are_counted():
    with emulated(1000, 0.5, 4) as (group, _):
        finish(group.all_reduce_(torch.ones(1000)))
        finish(group.all_gather(torch.ones(100)))
        assert (group.counters.collectives, group.counters.rounds) == (2, 3)


def test_collectives_that_are_begun_follow_one_another():
    with emulated(1000, 0, 2) as (group, clock):
        begin = clock.time
        gathers = [group.for_bucket(number).all_gather(torch.ones(250)) for number in range(3)]
        finish(group.all_reduce_(torch.ones(250)))
        assert clock.time - begin == pytest.approx(4.0)
        assert [finish(steps).shape for steps in gathers] == [(2, 250)] * 3


@pytest.mark.parametrize(("has_hook", "end"), [(True, 2.0 + 6.0), (False, 3 * 5.0 + 4.0)])
def test_latencies_pass_at_once(has_hook, end):
    """Of all buckets of a hook, whose bytes follow one another, and of two of plain DDP."""
    with emulated(1000, 1.0, 2, has_hook=has_hook) as (group, clock):
        with at_the_same_time(group):
            sums = [group.for_bucket(number).all_reduce_(torch.ones(250)) for number in range(6)]
        for steps in sums:
            finish(steps)
        assert sum(clock.slept) == pytest.approx(end)


def test_parts():
    with emulated(1000, 0, 4, rank=3) as (group, clock):
        assert group.nodes() == [[0], [1], [2], [3]]
        inside, across = group.split([[0, 1], [2, 3]]), group.split([[0, 2], [1, 3]])
        assert (inside.size, inside.rank, across.size, across.rank) == (2, 1, 2, 1)
        assert spent(clock, lambda: inside.all_reduce_(torch.ones(250))) == pytest.approx(1.0)
        assert group.split([[0, 1, 2, 3]]) is group
        assert group.counters.bytes_sent == 1000


@pytest.mark.parametrize("latency", [0.0, 0.005])
@pytest.mark.parametrize("world", [2, 4])
def test_encoded_averages_are_finite(monkeypatch, world, latency):
    """Those of equal ranks between two; in two shots every emulated rank owns the same share."""
    monkeypatch.setattr("lightning_commhooks.collectives.group.compiled", lambda codec, *_: Kernels(codec))
    gradient = torch.linspace(-1, 1, 4096)
    with emulated(1e15, latency, world) as (group, _):
        blocks = gradient.clone().view(8, 512)
        assert finish(group.average_encoded_([Chunk(blocks, None, seed=0)], Kernels(Int8Codec())))
        assert blocks.abs().max() <= 1.02
        if world == 2:
            assert blocks.view(-1).sub(gradient).abs().max() < 0.02
        assert finish(group.all_reduce_in_float32(gradient.bfloat16())).shape == gradient.shape


def test_there_is_no_process_group():
    with (
        emulated(1e15, 0.0, 4) as (group, _),
        pytest.raises(RuntimeError, match="these ranks have no process group: they are a subgroup, or emulated"),
    ):
        _ = group.process_group


def test_the_thread_of_the_network_ends_with_its_group():
    with emulated(1e15, 0.0, 4) as (group, _):
        finish(group.all_reduce_(torch.ones(3)))
    del group, _
    gc.collect()
    deadline = time.monotonic() + 5
    while any("_wire" in thread.name for thread in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any("_wire" in thread.name for thread in threading.enumerate())
