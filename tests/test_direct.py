"""Direct collectives against plain sums, and several buckets that are under way at once."""

import contextlib
import threading
import time

import pytest
import torch
import torch.distributed as dist
from driver import SHAPES, attached, backward, distance, full_rank_gradients, mean_gradients, norm, same

import lightning_commhooks as lc
from lightning_commhooks.collectives import process_groups
from lightning_commhooks.collectives.direct import (
    Direct,
    measure_latency,
    num_connections,
    num_pieces,
    takes_one_round,
)
from lightning_commhooks.collectives.group import Group
from lightning_commhooks.collectives.messages import Messages
from lightning_commhooks.collectives.process_groups import own_group
from lightning_commhooks.collectives.turns import Turns, in_lane, lane, waiting
from lightning_commhooks.ddp.thread_engine import ThreadEngine

CPU = torch.device("cpu")
NEAR, A_LITTLE, FAR = 5e-5, 3e-3, 40e-3
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.complex64]


def numbers(rank, numel, dtype):
    own = torch.Generator().manual_seed(rank)
    return (
        torch.randint(-9, 9, (numel,), generator=own).to(dtype)
        if dtype != torch.uint8
        else torch.full((numel,), rank, dtype=dtype)
    )


@contextlib.contextmanager
def messages(latency):
    """Direct messages as among ranks that are so far away."""
    own = own_group(dist.group.WORLD, CPU)
    yield Direct(Messages(own.process_group._get_backend(CPU)), latency)
    dist.barrier()
    process_groups.destroy([own.process_group])


def sums(rank, world, latency):
    found = {}
    with messages(latency) as ranks:
        for dtype in DTYPES:
            for numel in (1, 2, 3, 5, 1000, 70_001):
                found[dtype, numel] = ranks.sum_(numbers(rank, numel, dtype))()
        found["large"] = ranks.sum_(torch.arange(1_500_000.0) * (rank + 1))()
        # Begun before others are finished, in another order than they are waited for.
        several = [ranks.sum_(torch.full((n,), rank + 1.0)) for n in (5, 3000, 7)]
        found["several"] = [several[i]() for i in (2, 0, 1)]
    return found


@pytest.mark.parametrize("latency", [NEAR, A_LITTLE, FAR, 0.0])
@pytest.mark.parametrize("world", [2, 4])
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


def rounded_once(rank, world):
    with messages(NEAR) as ranks:
        return ranks.sum_(torch.randn(999, generator=torch.Generator().manual_seed(rank)).bfloat16())()


def test_16_bit_numbers_are_added_in_float32_and_rounded_once(run):
    results = run(rounded_once, world=4)
    halves = [torch.randn(999, generator=torch.Generator().manual_seed(rank)).bfloat16() for rank in range(4)]
    exact = sum(half.double() for half in halves)
    assert (results[0].double() - exact).abs().le(exact.abs() * 2**-8).all()
    assert all(result.equal(results[0]) for result in results)


def others(rank, world):
    with messages(FAR) as ranks:
        chunks = torch.arange(world * 3).view(world, 3) + 100 * rank
        first, second = ranks.exchange(chunks), ranks.gather(2, torch.float64)
        gathered = second(torch.tensor([rank, 0.5], dtype=torch.float64))
        return gathered(), first()


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


def latencies(rank, world):
    with pytest.MonkeyPatch.context() as patch, messages(0.0) as ranks:
        patch.delenv("COMMHOOKS_LATENCY_MS")  # see conftest.py
        return measure_latency(ranks._messages)


def test_latency_is_equal_on_all_ranks(run):
    measured = run(latencies, world=4)
    assert len(set(measured)) == 1
    assert 0 < measured[0] < 1


def with_variable(rank, world, texts):
    with pytest.MonkeyPatch.context() as patch, messages(0.0) as ranks:
        if texts[rank] is None:
            patch.delenv("COMMHOOKS_LATENCY_MS")
        else:
            patch.setenv("COMMHOOKS_LATENCY_MS", texts[rank])
        try:
            return measure_latency(ranks._messages)
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
        total = own.transport.sum_(torch.full((1_000_000,), rank + 1.0))().unique().tolist()
        begin = time.monotonic()
        if rank == 0:
            own.abort()
        with pytest.raises(RuntimeError):
            own.transport.sum_(torch.ones(3))()
        seconds = time.monotonic() - begin
        connections = len(own.transport._messages._backend.options._devices)
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
    "quantize_per_channel": lc.QuantizePerChannel(),
    "powersgd": lc.PowerSGD(start_powerSGD_iter=1, matrix_approximation_rank=2),
    "powersgd+half": lc.PowerSGD(start_powerSGD_iter=1, matrix_approximation_rank=2, num_iters_per_step=1),
    "int8(powersgd)": lc.Cast(lc.PowerSGD(start_powerSGD_iter=1, matrix_approximation_rank=2), "int8"),
    "schedule": lc.Schedule({0: lc.Int8(min_bytes=0, block_size=16), 3: lc.PowerSGD(start_powerSGD_iter=0)}),
    "per_parameter": lc.PerParameter({"first": "int8", "*": "allreduce"}),
    "weighted": lc.ScaleByGradAccumulation(lc.Int8(min_bytes=0), accumulation="mean"),
}


@contextlib.contextmanager
def as_if(num_lanes=4, latency="40"):
    """Ranks seem so many milliseconds apart: with 40, direct messages over several connections."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMMHOOKS_LATENCY_MS", latency)
        patch.setattr(process_groups, "NUM_LANES", num_lanes)
        yield


def steps(rank, world, hook, num_lanes, latency):
    with as_if(num_lanes, latency), attached(hook, exact_state=True) as (ddp, attachment):
        means = [backward(ddp, full_rank_gradients(rank, step, SHAPES)) for step in range(6)]
        metrics = attachment.metrics()
        keys = ("bytes_sent", "collectives", "numel_compressed", "steps", "rounds")
        return means, {key: metrics[key] for key in keys}, len(attachment._runtime._engine._executors)


@pytest.mark.parametrize("latency", ["0", "40"])
@pytest.mark.parametrize("hook", HOOKS)
def test_lanes_do_not_change_results(run, hook, latency):
    one, four = (run(steps, HOOKS[hook], num_lanes, latency, world=4) for num_lanes in (1, 4))
    assert [num_lanes for *_, num_lanes in (one[0], four[0])] == [1, 4]
    for (means, counts, _), (in_lanes, counts_in_lanes, _) in zip(one, four, strict=True):
        assert counts == counts_in_lanes
        for step, (mean, mean_in_lanes) in enumerate(zip(means, in_lanes, strict=True)):
            assert same(mean, mean_in_lanes), step
            assert same(mean, one[0][0][step]), step


def crosswise(rank, world, latency):
    """Each rank begins the collectives of lanes in another order."""
    with as_if(latency=latency):
        own = own_group(dist.group.WORLD, CPU)
        group = Group.of(own, None, CPU)
        waits = {}
        for place in range(8):
            number = (place + rank) % 4
            with in_lane(number):
                x = torch.full((1000 * (number + 1),), float(rank + place + number))
                waits[place, number] = group._begin_all_gather(x[:number].clone()), group._begin_all_reduce_(x)
        # In one thread: a sum goes on only while somebody waits for it.
        order = sorted(waits, key=lambda key: key[::-1])
        found = {key: [wait().unique().tolist() for wait in waits[key]] for key in order}
        dist.barrier()
        own.abort()
        process_groups.destroy([own.process_group])
    return found


@pytest.mark.parametrize("latency", ["0", "40"])
def test_there_is_no_order_between_lanes(run, latency):
    for rank, found in enumerate(run(crosswise, latency, world=4)):
        for (place, number), (gathered, total) in found.items():
            # The same lane has its turn earlier or later on other ranks, with the same two numbers.
            own = [sorted(p + other + number for p in range(8) if (p + other) % 4 == number) for other in range(4)]
            turn = own[rank].index(rank + place + number)
            values = [numbers_[turn] for numbers_ in own]
            assert total == [sum(values)], (place, number)
            assert gathered == sorted(set(values) if number else []), (place, number)


def near_and_far(rank, world, hook):
    found = []
    for context in (contextlib.nullcontext(), as_if()):
        with context, attached(hook) as (ddp, attachment):
            means = [backward(ddp, full_rank_gradients(rank, step, SHAPES)) for step in range(3)]
            found.append((means[-1], attachment.bound.group._transport is not None))
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_far_ranks_average_as_near_ones(run, world):
    exact = mean_gradients(full_rank_gradients, world, 2, SHAPES)
    for hook in ("allreduce", "int8"):
        for (near, is_direct), (far, is_far) in run(near_and_far, HOOKS[hook], world=world):
            assert is_far
            assert not is_direct
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
    """How many buckets wait for others at once, at most; without a wait in between nobody runs."""
    _Counting.most = 0
    with as_if(latency=latency), attached(_Counting()) as (ddp, _):
        for step in range(3):
            backward(ddp, full_rank_gradients(rank, step, SHAPES))
    return _Counting.most, _Counting.at_work, _Counting.num_calls


class _Counting(lc.CommHook):
    name = "counting"
    now = most = at_work = num_calls = 0

    def bind(self, group):
        return _BoundCounting(group)


class _BoundCounting(lc.BoundHook):
    def overlaps(self, step):
        return step > 0

    def reduce(self, flat, bucket):
        _Counting.now += 1
        _Counting.num_calls += 1
        _Counting.most = max(_Counting.most, _Counting.now)
        begin = _Counting.at_work
        # Each rank waits for the other in turn.
        time.sleep(0.03 if (_Counting.num_calls + self.group.rank) % 2 else 0.0)
        _Counting.at_work = begin + 1
        self.group.all_reduce_mean_(flat)
        _Counting.now -= 1


@pytest.mark.parametrize("latency", ["0", "40"])
def test_several_buckets_are_under_way(run, latency):
    for most, at_work, num_calls in run(in_flight, latency, world=2):
        assert most > 1
        assert at_work == num_calls


def fail_in_a_lane(rank, world, latency):
    with as_if(latency=latency), attached(_Failing()) as (ddp, _):
        for step in range(3):
            begin = time.monotonic()
            try:
                backward(ddp, full_rank_gradients(rank, step, SHAPES))
            except lc.HookError as error:
                return step, str(error), time.monotonic() - begin
    return None


class _Failing(lc.CommHook):
    name = "failing_in_a_lane"

    def bind(self, group):
        return _BoundFailing(group)


class _BoundFailing(lc.BoundHook):
    def overlaps(self, step):
        return True

    def reduce(self, flat, bucket):
        if bucket.step == 2 and bucket.index == 1 and self.group.rank == 0:
            raise ArithmeticError("out of numbers")
        self.group.all_reduce_mean_(flat)


@pytest.mark.parametrize("latency", ["0", "40"])
def test_a_failure_in_one_lane_ends_all_ranks_soon(run, latency):
    for step, error, seconds in run(fail_in_a_lane, latency, world=4):
        assert step == 2
        assert seconds < 20
        assert "out of numbers" in error or "failed on rank" in error


def test_a_turn_is_given_away_while_waiting():
    turns, order, may_end = Turns(), [], threading.Event()

    def first():
        with turns.turn(1):
            order.append(lane())
            with waiting():
                may_end.wait(10)
            order.append(lane())

    thread = threading.Thread(target=first)
    thread.start()
    while not order:
        time.sleep(0.001)
    with turns.turn(2):
        order.append(lane())
        may_end.set()
        time.sleep(0.05)
        order.append(lane())
    thread.join()
    assert order == [1, 2, 2, 1]
    assert lane() == 0


def test_what_does_not_overlap_is_alone():
    order, engine = [], ThreadEngine(CPU, num_lanes=3)

    def work(name, seconds):
        def run():
            order.append(f"{name} begins")
            with waiting():
                time.sleep(seconds)
            order.append(f"{name} ends")
            return torch.zeros(1)

        return run

    try:
        engine.submit(work("a", 0.2), CPU, 0, True)
        engine.submit(work("b", 0.1), CPU, 1, True)
        engine.submit(work("alone", 0.1), CPU, 2, False)
        engine.submit(work("c", 0.01), CPU, 0, True)
        assert engine.call(lambda: len(order)) == 8
    finally:
        engine.close()
    assert order.index("b begins") < order.index("a ends")
    assert order[4:6] == ["alone begins", "alone ends"]
