"""Direct collectives against plain sums, and buckets that ranks go on with in different orders."""

import contextlib
import random
import time

import pytest
import torch
import torch.distributed as dist
from driver import SHAPES, attached, backward, distance, full_rank_gradients, mean_gradients, norm, same

import lightning_commhooks as lc
from lightning_commhooks.collectives import process_groups
from lightning_commhooks.collectives.counters import Timing
from lightning_commhooks.collectives.direct import (
    Direct,
    measure_latency,
    num_connections,
    num_pieces,
    takes_one_round,
)
from lightning_commhooks.collectives.group import Group
from lightning_commhooks.collectives.process_groups import own_group
from lightning_commhooks.collectives.steps import Wait, finish
from lightning_commhooks.runtime.engine import ThreadEngine
from lightning_commhooks.runtime.runtime import Runtime

CPU = torch.device("cpu")
NEAR, A_LITTLE, FAR = 5e-5, 3e-3, 40e-3
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.complex64]


def begin(steps):
    """Run a transport's collective to its first wait, as a group does; returns the rest."""

    def rest(waits):
        yield waits
        return (yield from steps)

    return rest(next(steps))


def numbers(rank, numel, dtype):
    own = torch.Generator().manual_seed(rank)
    return (
        torch.randint(-9, 9, (numel,), generator=own).to(dtype)
        if dtype != torch.uint8
        else torch.full((numel,), rank, dtype=dtype)
    )


@contextlib.contextmanager
def direct(latency):
    """Direct messages as among ranks that are so far away."""
    own = own_group(dist.group.WORLD, CPU)
    yield Direct(process_groups._backend_of(own.process_group, CPU), latency)
    dist.barrier()
    process_groups.destroy([own.process_group])


def sums(rank, world, latency):
    found = {}
    with direct(latency) as ranks:
        for dtype in DTYPES:
            for numel in (1, 2, 3, 5, 1000, 70_001):
                found[dtype, numel] = finish(ranks.sum_(numbers(rank, numel, dtype)))
        found["large"] = finish(ranks.sum_(torch.arange(1_500_000.0) * (rank + 1)))
        # Begun before others are finished, in another order than they are waited for.
        several = [begin(ranks.sum_(torch.full((n,), rank + 1.0))) for n in (5, 3000, 7)]
        found["several"] = [finish(several[i]) for i in (2, 0, 1)]
    return found


@pytest.mark.parametrize(("world", "latency"), [(2, NEAR), (4, NEAR), (4, A_LITTLE), (2, FAR), (4, FAR), (4, 0.0)])
def test_sums(run, world, latency):
    results = run(sums, latency, world=world)
    for (dtype, numel), total in ((key, value) for key, value in results[0].items() if isinstance(key, tuple)):
        expected = sum(numbers(rank, numel, dtype) for rank in range(world))
        assert total.dtype == dtype
        assert total.equal(expected), (dtype, numel)
    assert results[0]["large"].equal(torch.arange(1_500_000.0) * sum(range(1, world + 1)))
    assert [t.unique().tolist() for t in results[0]["several"]] == [[sum(range(1, world + 1))]] * 3
    for other in results[1:]:
        assert all(other[key].equal(value) for key, value in results[0].items() if key != "several")


def waits_for_a_late_rank(rank, world):
    with direct(0.0) as ranks:
        total = begin(ranks.sum_(torch.full((1_000_000,), rank + 1.0)))
        dist.barrier()
        if rank == world - 1:
            time.sleep(0.3)
        return finish(total).unique().tolist()


def test_sums_wait_for_all_shares(run):
    assert run(waits_for_a_late_rank, world=4) == [[10.0]] * 4


def rounded_once(rank, world):
    with direct(NEAR) as ranks:
        return finish(ranks.sum_(torch.randn(999, generator=torch.Generator().manual_seed(rank)).bfloat16()))


def test_16_bit_numbers_are_added_in_float32_and_rounded_once(run):
    results = run(rounded_once, world=4)
    halves = [torch.randn(999, generator=torch.Generator().manual_seed(rank)).bfloat16() for rank in range(4)]
    exact = sum(half.double() for half in halves)
    assert (results[0].double() - exact).abs().le(exact.abs() * 2**-8).all()
    assert all(result.equal(results[0]) for result in results)


def others(rank, world):
    with direct(FAR) as ranks:
        chunks = torch.arange(world * 3).view(world, 3) + 100 * rank
        own = torch.tensor([rank, 0.5], dtype=torch.float64)
        first, expected = begin(ranks.exchange(chunks)), ranks.expect(own)
        return finish(ranks.gather(own, expected)), finish(first)


@pytest.mark.parametrize("world", [2, 4])
def test_gathers_and_exchanges(run, world):
    for rank, (gathered, received) in enumerate(run(others, world=world)):
        assert gathered.tolist() == [[other, 0.5] for other in range(world)]
        assert received.equal(torch.stack([torch.arange(3 * rank, 3 * rank + 3) + 100 * i for i in range(world)]))


def test_what_is_chosen():
    assert takes_one_round(100, 2, NEAR)
    assert not takes_one_round(2**20, 2, NEAR)
    assert not takes_one_round(100, 4, FAR)
    assert [num_pieces(2**25, world) for world in (2, 4, 64)] == [32, 32, 2]
    assert num_pieces(10, 2) == 1
    assert [num_connections(latency) for latency in (NEAR, 10e-3, 40e-3, 1.0)] == [1, 1, 4, 4]


class Nobody:
    """A stand-in for a `ProcessGroupGloo` on the first of so many ranks."""

    def __init__(self, size):
        self.size, self.rank = (lambda: size), (lambda: 0)


def test_messages_of_channels_and_parts_have_numbers_of_their_own():
    everyone = Direct(Nobody(4))
    parts = [everyone, everyone.among([0, 1], 1), everyone.among([0, 2], 2)]
    channels = [part.channel(number) for part in parts for number in (0, 1, 2, 4095)]
    used = [channel.number() for channel in channels for _ in range(100)]
    assert len(set(used)) == len(used)
    assert 0 <= min(used) <= max(used) < 2**31
    assert everyone.channel(1).number() == everyone.channel(1).number(), "the same on all ranks"
    assert everyone.among([2, 0], 1).peers == [0]
    with pytest.raises(ValueError, match="31 divisions into subgroups at most"):
        everyone.among([0, 1], 32)


def latencies(rank, world):
    with pytest.MonkeyPatch.context() as patch, direct(0.0) as ranks:
        patch.delenv("COMMHOOKS_LATENCY_MS")  # see conftest.py
        return measure_latency(ranks)


def test_latency_is_equal_on_all_ranks(run):
    measured = run(latencies, world=4)
    assert len(set(measured)) == 1
    assert 0 < measured[0] < 1


def with_variable(rank, world, texts):
    with pytest.MonkeyPatch.context() as patch, direct(0.0) as ranks:
        if texts[rank] is None:
            patch.delenv("COMMHOOKS_LATENCY_MS")
        else:
            patch.setenv("COMMHOOKS_LATENCY_MS", texts[rank])
        try:
            return measure_latency(ranks)
        except ValueError as error:
            return str(error)


def test_latency_can_be_given(run):
    assert run(with_variable, ["40", "40"]) == [0.04, 0.04]
    assert run(with_variable, ["0", "0"]) == [0.0, 0.0]
    assert run(with_variable, ["7000", None]) == [7.0, 7.0]
    for texts in (["soon", "1"], ["-1", None], ["nan", "1"], ["inf", "1"]):
        errors = run(with_variable, texts)
        assert all("COMMHOOKS_LATENCY_MS must be a number of milliseconds of at least 0" in error for error in errors)
        assert repr(texts[0]) in errors[0]


def on_interfaces(rank, world, names, latency):
    """A sum, and whether aborting this rank's group ends what its peer waits for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", names)
        patch.setenv("COMMHOOKS_LATENCY_MS", latency)
        own = own_group(dist.group.WORLD, CPU)
        total = finish(Group.of(own, None, CPU).all_reduce_(torch.full((1_000_000,), rank + 1.0))).unique().tolist()
        begin = time.monotonic()
        if rank == 0:
            own.connections.abort()
        with pytest.raises(RuntimeError):
            finish(Group.of(own, None, CPU).all_reduce_(torch.ones(3)))
        seconds = time.monotonic() - begin
        connections = len(own.direct._backend.options._devices)
        dist.barrier()
        process_groups.destroy([own.process_group])
    return total, seconds, connections


@pytest.mark.parametrize(
    ("names", "latency", "num"), [("lo", "5", 1), ("lo,lo", "5", 2), ("lo", "40", 4), ("lo,lo", "40", 2)]
)
def test_several_connections_are_used_and_aborted(run, names, latency, num):
    for total, seconds, connections in run(on_interfaces, names, latency):
        assert total == [3.0]
        assert seconds < 10
        assert connections == num


# Several buckets at once ---------------------------------------------------------------------------------------

HOOKS = {
    "allreduce": lc.AllReduce(),
    "bf16": lc.BF16(),
    "int8": lc.Int8(min_bytes=0, block_size=16),
    "powersgd": lc.PowerSGD(start_powerSGD_iter=1, matrix_approximation_rank=2),
    "powersgd+half": lc.PowerSGD(start_powerSGD_iter=1, matrix_approximation_rank=2, num_iters_per_step=1),
    "int8(powersgd)": lc.Cast(lc.PowerSGD(start_powerSGD_iter=1, matrix_approximation_rank=2), "int8"),
    "schedule": lc.Schedule({0: lc.Int8(min_bytes=0, block_size=16), 3: lc.PowerSGD(start_powerSGD_iter=0)}),
}


@contextlib.contextmanager
def as_if(latency="40"):
    """Ranks seem so many milliseconds apart: with 40, direct messages over several connections."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMMHOOKS_LATENCY_MS", latency)
        yield


class Pause:
    """Something that takes its time."""

    def __init__(self, seconds):
        self.seconds = seconds

    def wait(self):
        time.sleep(self.seconds)


def late(steps, chance, seconds):
    """The same computation; it begins late, and whatever it waits for takes longer."""
    waits = Wait(())
    while True:
        yield Wait([*waits.works, Pause(chance.uniform(0, seconds))], waits.name)
        try:
            waits = next(steps)
        except StopIteration as done:
            return done.value


def averaged(rank, world, hook, latency, is_late):
    """Averaged gradients and counts of some steps; all ranks but the first wait longer for everything if `is_late`."""
    chance, reduce = random.Random(rank), Runtime._reduce
    with pytest.MonkeyPatch.context() as patch, as_if(latency):
        if is_late:
            seconds = 3e-3 if rank else 0.0
            patch.setattr(Runtime, "_reduce", lambda *args: late(reduce(*args), chance, seconds))
        with attached(hook, exact_state=True) as (ddp, attachment):
            means = [backward(ddp, full_rank_gradients(rank, step, SHAPES)) for step in range(6)]
            metrics = attachment.metrics()
            keys = ("bytes_sent", "collectives", "numel_compressed", "steps", "rounds")
            return means, {key: metrics[key] for key in keys}


@pytest.mark.parametrize(
    ("hook", "latency"),
    [
        *((hook, "40") for hook in ("allreduce", "int8", "powersgd+half", "int8(powersgd)", "schedule")),
        *((hook, "0") for hook in ("int8", "powersgd+half")),
    ],
)
def test_late_ranks_change_no_result(run, hook, latency):
    """Far ranks go on with their buckets in whatever order, each in another one."""
    in_time, delayed = (run(averaged, HOOKS[hook], latency, is_late, world=4) for is_late in (False, True))
    for (means, counts), (means_of_late, counts_of_late) in zip(in_time, delayed, strict=True):
        assert counts == counts_of_late
        for step, (mean, mean_of_late) in enumerate(zip(means, means_of_late, strict=True)):
            assert same(mean, mean_of_late), step
            assert same(mean, in_time[0][0][step]), step


NUM_BUCKETS = 12


def own_numbers(rank, number):
    return torch.full((1000 * (1 + number % 3),), float(2**rank * (1 + number)))


def mixed(number, ranks, subgroups):
    """All kinds of collectives of one bucket, some at once, among all ranks and in two divisions."""
    pairs, across = (ranks.split(subgroup) for subgroup in subgroups)
    x = own_numbers(ranks.rank, number)
    # From here on pairs number otherwise than all ranks.
    of_pair = yield from pairs.all_gather(x[: number + 1])
    total, of_all = ranks.all_reduce_(x.clone()), ranks.all_gather(x[: number + 2])
    sums = pairs.all_reduce_(x[:7].clone()), across.all_reduce_(x[:5].clone())
    swapped = yield from across.all_to_all(x[:4].view(2, 2))
    found = [of_pair, swapped, (yield from total), (yield from of_all), (yield from sums[0]), (yield from sums[1])]
    return torch.tensor([values for tensor in found for values in _of_rows(tensor)])


def _of_rows(tensor):
    """What each row consists of, which is one number."""
    rows = tensor.view(1, -1) if tensor.dim() == 1 else tensor
    assert all(row.eq(row[0]).all() for row in rows), tensor
    return [row[0].item() for row in rows]


def expected_of(rank, number):
    x = [2**other * (1 + number) for other in range(4)]
    pair, across = ([0, 1] if rank < 2 else [2, 3]), ([0, 2] if rank % 2 == 0 else [1, 3])
    in_pair, in_across = [x[other] for other in pair], [x[other] for other in across]
    return [*in_pair, *in_across, sum(x), *x, sum(in_pair), sum(in_across)]


SUBGROUPS = [[0, 1], [2, 3]], [[0, 2], [1, 3]]


def in_another_order(rank, world, is_late):
    """Each rank is handed its buckets in another order, and waits longer for some things than for others."""
    with as_if():
        own = own_group(dist.group.WORLD, CPU)
        group = Group.of(own, None, CPU)
        for subgroup in SUBGROUPS:
            group.split(subgroup)
        assert not group.is_ordered
        order, chance = list(range(NUM_BUCKETS)), random.Random(rank)
        chance.shuffle(order)
        engine = ThreadEngine(CPU, own.connections, Timing(), is_ordered=False)
        futures = {}

        def reduce(number):
            steps = mixed(number, group.for_bucket(1 + number), SUBGROUPS)
            return lambda: late(steps, chance, 0.02) if is_late else steps

        for number in order:
            futures[number] = engine.submit(reduce(number), CPU)
        found = [futures[number].wait().tolist() for number in range(NUM_BUCKETS)]
        dist.barrier()
        engine.close()
        process_groups.destroy([own.process_group])
    return found


@pytest.mark.parametrize("is_late", [False, True])
def test_there_is_no_order_between_buckets(run, is_late):
    for rank, found in enumerate(run(in_another_order, is_late, world=4)):
        for number, values in enumerate(found):
            assert values == expected_of(rank, number), number


def of_near_ranks(rank, world):
    own = own_group(dist.group.WORLD, CPU)
    group = Group.of(own, None, CPU)
    for subgroup in SUBGROUPS:
        group.split(subgroup)
    assert group.is_ordered
    assert not group.split(SUBGROUPS[0]).is_ordered
    found = [finish(mixed(number, group.for_bucket(1 + number), SUBGROUPS)).tolist() for number in range(3)]
    dist.barrier()
    own.connections.abort()
    process_groups.destroy([own.process_group])
    return found


def test_subgroups_of_near_ranks_send_directly(run):
    for rank, found in enumerate(run(of_near_ranks, world=4)):
        assert found == [expected_of(rank, number) for number in range(3)]


def alone_in_a_subgroup(rank, world):
    with as_if():
        own = own_group(dist.group.WORLD, CPU)
        group = Group.of(own, None, CPU)
        some = group.split([[0, 1, 2], [3]])
        total = finish(some.all_reduce_(torch.tensor([2.0**rank]))).item()
        dist.barrier()
        own.connections.abort()
        process_groups.destroy([own.process_group])
    return some.size, total


def test_a_far_rank_may_be_alone_in_its_subgroup(run):
    assert run(alone_in_a_subgroup, world=4) == [(3, 7.0)] * 3 + [(1, 8.0)]


def near_and_far(rank, world, hook):
    found = []
    for context in (contextlib.nullcontext(), as_if()):
        with context, attached(hook) as (ddp, attachment):
            means = [backward(ddp, full_rank_gradients(rank, step, SHAPES)) for step in range(3)]
            assert attachment.runtime._engine._is_ordered == attachment.bound.group.is_ordered
            found.append((means[-1], attachment.bound.group.is_ordered))
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_far_ranks_average_as_near_ones(run, world):
    exact = mean_gradients(full_rank_gradients, world, 2, SHAPES)
    for hook in ("allreduce", "int8"):
        for (near, is_ring), (far, is_ring_of_far) in run(near_and_far, HOOKS[hook], world=world):
            assert is_ring
            assert not is_ring_of_far
            assert distance(near, far) <= 1e-6 * norm(exact)


def rounds_of_a_step(rank, world, hook):
    with as_if(), attached(hook) as (ddp, attachment):
        for step in range(3):
            before = attachment.metrics()["rounds"]
            backward(ddp, full_rank_gradients(rank, step, SHAPES))
        return attachment.metrics()["rounds"] - before


@pytest.mark.parametrize("world", [2, 4])
def test_rounds_of_messages(run, world):
    hooks = ("allreduce", "bf16", "int8", "powersgd", "powersgd+half")
    found = {hook: run(rounds_of_a_step, HOOKS[hook], world=world) for hook in hooks}
    assert all(len(set(of_ranks)) == 1 for of_ranks in found.values())
    num_buckets = found["allreduce"][0] / (1 if world == 2 else 2)
    assert num_buckets > 1
    assert found["bf16"] == found["allreduce"]
    assert found["int8"] == found["allreduce"]  # what is not encoded travels beside
    assert found["powersgd"][0] == 2 * found["allreduce"][0]
    assert found["powersgd+half"] == found["allreduce"]


def in_flight(rank, world, latency):
    """How many buckets wait for others at once, at most; and whether two were ever computed at once."""
    _Counting.most = 0
    with as_if(latency), attached(_Counting()) as (ddp, _):
        for step in range(3):
            backward(ddp, full_rank_gradients(rank, step, SHAPES))
    return _Counting.most, _Counting.computed, _Counting.num_calls


class _Counting(lc.CommHook):
    name = "counting"
    now = most = computed = num_calls = 0

    def bind(self, group):
        return _BoundCounting(group)


class _BoundCounting(lc.BoundHook):
    def reduce(self, bucket, ranks):
        _Counting.now += 1
        _Counting.num_calls += 1
        _Counting.most = max(_Counting.most, _Counting.now)
        begin = _Counting.computed
        time.sleep(1e-3)
        _Counting.computed = begin + 1
        # Each rank waits for the other in turn.
        yield Wait([Pause(0.03 if (_Counting.num_calls + ranks.rank) % 2 else 0.0)])
        yield from ranks.all_reduce_mean_(bucket.flat)
        _Counting.now -= 1


@pytest.mark.parametrize("latency", ["0", "40"])
def test_several_buckets_are_under_way_and_one_is_computed(run, latency):
    for most, computed, num_calls in run(in_flight, latency, world=2):
        assert most > 1
        assert computed == num_calls
