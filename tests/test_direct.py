"""Direct collectives against plain sums, and buckets of far ranks, several of which are under way at once."""

import contextlib
import threading
import time

import pytest
import torch
import torch.distributed as dist
from driver import SHAPES, attached, backward, full_rank_gradients, mean_gradients, norm, same

import lightning_commhooks as lc
from lightning_commhooks.collectives import direct
from lightning_commhooks.collectives.direct import (
    Direct,
    goes_direct,
    measure_latency,
    num_connections,
    num_pieces,
    takes_one_round,
)
from lightning_commhooks.collectives.process_groups import own_group
from lightning_commhooks.collectives.turns import Turns, lane, waiting
from lightning_commhooks.ddp.engine import ThreadEngine

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
    yield Direct(own.process_group._get_backend(CPU), latency)
    dist.barrier()
    dist.destroy_process_group(own.process_group)


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
    assert goes_direct(100, 4, NEAR)
    assert not goes_direct(2**25, 4, NEAR)
    assert goes_direct(2**25, 4, FAR)
    assert [num_pieces(2**25, 4, latency) for latency in (NEAR, FAR)] == [1, 32]
    assert num_pieces(2**25, 64, FAR) == 2
    assert [num_connections(latency) for latency in (NEAR, 10e-3, 40e-3, 1.0)] == [1, 1, 4, 4]


def latencies(rank, world):
    with messages(0.0) as ranks:
        return measure_latency(ranks._backend)


def test_latency_is_equal_on_all_ranks(run):
    measured = run(latencies, world=4)
    assert len(set(measured)) == 1
    assert 0 < measured[0] < 1


# Several buckets at once ---------------------------------------------------------------------------------------

HOOKS = {
    "allreduce": lc.AllReduce(),
    "bf16": lc.BF16(),
    "int8": lc.Int8(min_bytes=0, block_size=16),
    "quantize_per_channel": lc.QuantizePerChannel(),
    "powersgd": lc.PowerSGD(start_powerSGD_iter=1, matrix_approximation_rank=2),
    "int8(powersgd)": lc.Cast(lc.PowerSGD(start_powerSGD_iter=1, matrix_approximation_rank=2), "int8"),
    "schedule": lc.Schedule({0: lc.Int8(min_bytes=0, block_size=16), 3: lc.PowerSGD(start_powerSGD_iter=0)}),
    "per_parameter": lc.PerParameter({"first": "int8", "*": "allreduce"}),
    "weighted": lc.ScaleByGradAccumulation(lc.Int8(min_bytes=0), accumulation="mean"),
}


@contextlib.contextmanager
def as_if_far(is_far):
    """Ranks seem far from each other, however near they are: several lanes, connections and pieces."""
    before = direct.FAR, direct._LATENCY_PER_CONNECTION
    if is_far:
        direct.FAR, direct._LATENCY_PER_CONNECTION = -1.0, 1e-9
    else:
        direct.FAR = 1e9
    try:
        yield
    finally:
        direct.FAR, direct._LATENCY_PER_CONNECTION = before


def steps(rank, world, hook, is_far):
    with as_if_far(is_far), attached(hook, exact_state=True) as (ddp, attachment):
        means = [backward(ddp, full_rank_gradients(rank, step, SHAPES)) for step in range(6)]
        engine = attachment._runtime._engine
        counts = {key: attachment.metrics()[key] for key in ("bytes_sent", "collectives", "numel_compressed", "steps")}
        return means, counts, len(engine._executors), attachment.state_dict()["hook"]


@pytest.mark.parametrize("hook", HOOKS)
def test_lanes_do_not_change_results(run, hook):
    near, far = (run(steps, HOOKS[hook], is_far, world=4) for is_far in (False, True))
    assert near[0][2] == 1
    assert far[0][2] > 1
    for (means, counts, _, _), (far_means, far_counts, _, _) in zip(near, far, strict=True):
        assert counts == far_counts
        for step, (mean, far_mean) in enumerate(zip(means, far_means, strict=True)):
            # Of a few numbers even sums are the same.
            assert same(mean, far_mean), step
            assert same(far_mean, far[0][0][step]), step
    exact = mean_gradients(full_rank_gradients, 4, 5, SHAPES)
    assert norm(exact) > 0


def in_flight(rank, world):
    """How many buckets wait for others at once, at most; without a wait in between nobody runs."""
    with as_if_far(True), attached(_Counting()) as (ddp, _):
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
        time.sleep(0.01)
        _Counting.at_work = begin + 1
        self.group.all_reduce_mean_(flat)
        _Counting.now -= 1


def test_several_buckets_are_under_way(run):
    for most, at_work, num_calls in run(in_flight, world=2):
        assert most > 1
        assert at_work == num_calls


def fail_in_a_lane(rank, world):
    with as_if_far(True), attached(_Failing()) as (ddp, _):
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


def test_a_failure_in_one_lane_ends_all_ranks_soon(run):
    for step, error, seconds in run(fail_in_a_lane, world=4):
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
