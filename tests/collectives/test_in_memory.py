"""Ranks in one process: they do what real ones do, and errors that are measured among them are those of real ranks."""

import dataclasses
import functools
import math
import random
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from driver import HOOKS as AVERAGING
from driver import SHAPES, SMALL_BUCKETS, Params, attached, backward, full_rank_gradients
from pool import ignoring
from torch._C._distributed_c10d import HashStore

import lightning_commhooks as lc
from lightning_commhooks.advice import errors
from lightning_commhooks.advice.candidates import Candidate
from lightning_commhooks.advice.errors import errors_among, num_averaged
from lightning_commhooks.advice.task import Task
from lightning_commhooks.codecs import Int8Codec
from lightning_commhooks.codecs.codec import Kernels
from lightning_commhooks.collectives.group import Group
from lightning_commhooks.collectives.in_memory import StuckError, groups_in_memory, run_together
from lightning_commhooks.collectives.process_groups import destroy, own_group
from lightning_commhooks.interface.precision import all_finite

CPU = torch.device("cpu")


def among(size, work, seed=0):
    """What `work(group)` returns of each of so many ranks."""
    return run_together([functools.partial(work, group) for group in groups_in_memory(size)], seed)


@pytest.fixture
def _uncompiled(monkeypatch):
    monkeypatch.setattr("lightning_commhooks.collectives.group.compiled", lambda codec, *_: Kernels(codec))


# Collectives -----------------------------------------------------------------------------------------------------

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 16])
def test_sums(size, dtype):
    def work(group):
        found = []
        for numel in (0, 1, 2, 37):
            found.append((yield from group.all_reduce_(numbers(group.rank, numel).to(dtype))))
        return found

    for found in among(size, work):
        for total in found:
            expected = sum(numbers(rank, total.numel()).to(dtype) for rank in range(size))
            assert total.dtype == dtype
            assert total.equal(expected)


@pytest.mark.parametrize("size", [1, 3])
def test_sums_of_several_tensors_by_one_collective_for_a_dtype(size):
    dtypes = torch.float32, torch.float64, torch.float32, torch.bfloat16, torch.float32, torch.float64
    shapes = (2, 3), (5,), (), (4, 1), (0, 7), (1, 2, 2)

    def tensors(rank):
        made = [numbers(rank, math.prod(shape)).to(dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
        return [tensor.view(shape) for tensor, shape in zip(made, shapes, strict=True)]

    def work(group):
        sums = yield from group.all_reduce_coalesced(tensors(group.rank))
        assert group.counters.collectives == (3 if size > 1 else 0)
        return sums

    every = [tensors(rank) for rank in range(size)]
    for sums in among(size, work):
        for total, own in zip(sums, zip(*every, strict=True), strict=True):
            assert (total.dtype, total.shape) == (own[0].dtype, own[0].shape)
            assert total.equal(sum(own))


def numbers(rank, numel):
    return torch.randint(0, 10, (numel,), generator=torch.Generator().manual_seed(rank))


def exchanged(group):
    own = torch.arange(6.0) + 10 * group.rank
    pairs = group.split([[0, 2], [1, 3]])
    return {
        "sum": (yield from group.all_reduce_(own.clone())),
        "mean": (yield from pairs.all_reduce_mean_(own.clone())),
        "gathered": (yield from group.all_gather(own)),
        "swapped": (yield from pairs.all_to_all(own.view(2, 3))),
        "nodes": group.nodes(),
        "place": (pairs.rank, pairs.size, pairs.global_rank),
        "encoded": group.encoding(Int8Codec()).size,
        "sent": group.counters.bytes_sent,
        "rounds": group.counters.rounds,
    }


def real_exchanged(rank, world):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMMHOOKS_LATENCY_MS", "40")
        own = own_group(dist.group.WORLD, CPU)
        group = Group.of(own, None, CPU)
        group._nodes = [[0], [1], [2], [3]]
        found = group.finish(exchanged(group))
        dist.barrier()
        own.connections.abort()
        destroy([own.process_group])
    return found


@pytest.mark.usefixtures("_uncompiled")
def test_exchanges_what_real_ranks_do(run):
    for real, in_memory in zip(run(real_exchanged, world=4), among(4, exchanged), strict=True):
        assert real.keys() == in_memory.keys()
        for key, value in real.items():
            if key != "rounds":  # two far ranks take one for a mean
                torch.testing.assert_close(in_memory[key], value, msg=key)
        assert in_memory["rounds"] == real["rounds"] + 1


def test_collectives_begin_when_they_are_called():
    def work(group):
        begun = [group.all_gather(torch.tensor([group.rank, i])) for i in range(3)]
        assert group.counters.collectives == 3
        found = []
        for steps in reversed(begun):
            found.append((yield from steps).tolist())
        return found

    assert among(2, work) == [[[[0, i], [1, i]] for i in (2, 1, 0)]] * 2


# Any order -------------------------------------------------------------------------------------------------------

NUM_BUCKETS = 3


def bucket(group, number):
    """Collectives of one bucket among all ranks and in two divisions, some at once."""
    ranks = group.for_bucket(1 + number)
    halves, parities = (ranks.split(subgroups) for subgroups in divisions(group.size))
    x = torch.full((40,), 1.0 + group.rank + 100 * number)
    of_half = yield from halves.all_gather(x[:3])
    # From here on halves number otherwise than the others.
    total, of_parity = ranks.all_reduce_(x.clone()), parities.all_reduce_(x[:5].clone())
    in_half = halves.all_reduce_(x[:37].clone())
    mean = yield from ranks.all_reduce_mean_(x[:2].clone())
    chunks = torch.arange(group.size).view(-1, 1) + 1000.0 * group.rank + number
    return {
        "of_half": of_half[:, 0],
        "received": (yield from ranks.all_to_all(chunks)).view(-1),
        "of_parity": (yield from of_parity),
        "total": (yield from total),
        "in_half": (yield from in_half),
        "mean": mean,
    }


def divisions(size):
    half = size // 2
    return [list(range(half)), list(range(half, size))], [list(range(first, size, 2)) for first in range(2)]


@pytest.mark.parametrize(("size", "num_seeds"), [(2, 20), (4, 20), (16, 5), (64, 1)])
def test_ranks_may_go_on_with_their_buckets_in_any_order(size, num_seeds):
    for seed in range(num_seeds):
        places = [(rank, number) for rank in range(size) for number in range(NUM_BUCKETS)]
        groups = groups_in_memory(size)
        for group in groups:
            for subgroups in divisions(size):
                group.split(subgroups)
        random.Random(seed).shuffle(places)
        found = run_together([functools.partial(bucket, groups[rank], number) for rank, number in places], seed)
        for (rank, number), values in zip(places, found, strict=True):
            every = torch.arange(1.0, 1.0 + size) + 100 * number
            half, parity = (every[next(ranks for ranks in subgroups if rank in ranks)] for subgroups in divisions(size))
            assert values["of_half"].equal(half)
            assert values["total"].eq(every.sum()).all()
            assert values["in_half"].eq(half.sum()).all()
            assert values["of_parity"].eq(parity.sum()).all()
            assert values["mean"].eq(every.mean()).all()
            assert values["received"].equal(torch.arange(size) * 1000.0 + rank + number)


def test_the_same_seed_is_the_same_order():
    def order_of(seed):
        order = []

        def work(group):
            for i in range(5):
                order.append((group.rank, i))
                yield from group.all_reduce_(torch.ones(3))

        among(4, work, seed)
        return order

    assert order_of(1) == order_of(1)
    assert len({tuple(order_of(seed)) for seed in range(10)}) > 1


# Ranks that disagree ---------------------------------------------------------------------------------------------


def skip(group):
    yield from group.all_reduce_(torch.ones(2))
    if group.rank != 1:
        yield from group.all_gather(torch.ones(5))


def call_another(group):
    if group.rank == 1:
        yield from group.all_gather(torch.ones(3))
    else:
        yield from group.all_reduce_(torch.ones(3))


def send_another_size(group):
    yield from group.all_gather(torch.ones(1 + group.rank))


def send_another_dtype(group):
    yield from group.all_gather(torch.ones(1, dtype=torch.float32 if group.rank else torch.float64))


def use_another_channel(group):
    yield from group.for_bucket(1 + group.rank % 2).all_reduce_(torch.ones(3))


def block(group):
    yield from group.all_reduce_(torch.ones(3))
    group.finish(group.all_reduce_(torch.ones(3)))


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (skip, "rank 0 waits for 5 elements of torch.float32 from rank 1; rank 2 waits for 5 .* from rank 1$"),
        (call_another, "rank . waits for . elements of torch.float32 from rank ., which sends . of torch.float32"),
        (send_another_size, r"rank \d waits for \d elements of torch.float32 from rank \d, which sends \d of"),
        (send_another_dtype, r"rank \d waits for 1 elements of torch.float\d\d from rank \d, which sends 1 of torch"),
        (
            use_another_channel,
            "rank 0 waits for 1 elements of torch.float32 from rank 1; rank 1 waits for 1 .* from rank 2;",
        ),
        (block, "rank . waits for . elements .* from rank ., in a call that blocks: `yield from` collectives"),
    ],
)
@pytest.mark.parametrize("seed", range(5))
def test_ranks_that_disagree_fail_and_do_not_hang(work, message, seed):
    with pytest.raises(StuckError, match=message):
        among(3, work, seed)


def test_the_first_failure_is_the_one_that_is_raised():
    def work(group):
        yield from group.all_reduce_(torch.ones(1))
        if group.rank == 1:
            raise KeyError("mine")
        yield from group.all_reduce_(torch.ones(1))

    with pytest.raises(KeyError, match="mine"):
        among(4, work)


def test_there_is_no_process_group():
    with pytest.raises(RuntimeError, match="these ranks have no process group"):
        _ = groups_in_memory(2)[0].process_group


# Hooks -----------------------------------------------------------------------------------------------------------

LATER = {"start_localSGD_iter": 1000, "post_local_gradient_allreduce": False}
ALL = {
    **AVERAGING,
    "fp8": lc.FP8(min_bytes=0),
    # Models are averaged beside the buckets.
    "hierarchical_localsgd": lc.HierarchicalLocalSGD(period_group_size_dict={2: None}, **LATER),
    "diloco": lc.DiLoCo(**LATER),
}
NUM_STEPS = 5


def test_all_registered_hooks_are_here():
    """But for one that chooses by the clock."""
    assert {*lc.available_hooks()} - {hook.name for hook in ALL.values()} == {"auto"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Keeping(lc.CommHook):
    """Keeps each bucket as it comes from DDP."""

    name: ClassVar[str] = "keeping"
    kept: list

    def bind(self, group):
        return BoundKeeping(group, self.kept)


class BoundKeeping(lc.BoundHook):
    def __init__(self, group, kept):
        super().__init__(group)
        self.kept = kept

    def reduce(self, bucket, ranks):
        slots = tuple(dataclasses.replace(slot, parameter=None) for slot in bucket.slots)
        self.kept.append(dataclasses.replace(bucket, flat=bucket.flat.clone(), slots=slots))
        return
        yield


def real_steps(rank, world):
    """Buckets of some steps, and what they are averaged to by each hook."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMMHOOKS_LATENCY_MS", "40")
        kept, averages = [], {}
        for label, hook in {"": Keeping(kept=kept), **ALL}.items():
            with attached(hook) as (ddp, attachment):
                means = [backward(ddp, full_rank_gradients(rank, step, SHAPES)) for step in range(NUM_STEPS)]
                averages[label] = means, attachment.metrics()["bytes_sent"]
    return kept, averages


def steps_in_memory(hook, buckets, group):
    """Averaged gradients by name, of each step."""
    bound, means = hook.bind(group), []
    for step in range(NUM_STEPS):
        means.append({})
        finite = []
        for recorded in (recorded for recorded in buckets if recorded.step == step):
            own = dataclasses.replace(recorded, flat=recorded.flat.clone())
            is_finite = yield from bound.reduce(own, group.for_bucket(1 + own.index))
            finite.append(all_finite(own.flat) if is_finite is None else is_finite)
            means[-1].update({slot.name: slot.view(own.flat) for slot in own.slots})
        bound.end_step(torch.stack(finite).all())
    return means, group.counters.bytes_sent


@pytest.mark.usefixtures("_uncompiled")
@pytest.mark.filterwarnings("ignore:hook=")
def test_hooks_do_what_they_do_over_processes(run):
    world = 4
    results = run(real_steps, world=world, timeout=120)
    for label, hook in ALL.items():
        works = [functools.partial(steps_in_memory, hook, kept) for kept, _ in results]
        groups = groups_in_memory(world)
        found = run_together([functools.partial(work, group) for work, group in zip(works, groups, strict=True)])
        for (means, sent), (_, averages) in zip(found, results, strict=True):
            real, really_sent = averages[label]
            assert sent == pytest.approx(really_sent), label
            for step, (mean, real_mean) in enumerate(zip(means, real, strict=True)):
                assert mean.keys() == real_mean.keys()
                for name, value in real_mean.items():
                    assert mean[name].equal(value), (label, step, name)


# Errors ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Theirs(lc.CommHook):
    """A stranger's: rounds coarsely with error feedback, sums within pairs, then in two shots of its own."""

    name: ClassVar[str] = "theirs"
    multiple_of: int = 1

    def bind(self, group):
        if group.size % self.multiple_of:
            raise ValueError(f"needs a multiple of {self.multiple_of} ranks, there are {group.size}")
        return BoundTheirs(group)


class BoundTheirs(lc.BoundHook):
    has_memory = True

    def __init__(self, group):
        super().__init__(group)
        half = group.size // 2
        self.pairs = [[rank, rank + half] for rank in range(half)]
        self.halves = [list(range(half)), list(range(half, group.size))]
        group.split(self.pairs), group.split(self.halves)
        self.owed, self.next = {}, {}

    def reduce(self, bucket, ranks):
        pair, across = ranks.split(self.pairs), ranks.split(self.halves)
        flat = bucket.flat
        owed = flat + self.owed.get(bucket.names, 0)
        unit = owed.abs().max() / 4
        sent = torch.round(owed / unit) * unit
        self.next[bucket.names] = owed - sent
        padded = flat.new_zeros(-(-flat.numel() // across.size) * across.size)
        padded[: flat.numel()] = yield from pair.all_reduce_(sent)
        share = (yield from across.all_to_all(padded.view(across.size, -1))).sum(dim=0) / ranks.size
        flat.copy_((yield from across.all_gather(share.bfloat16().float())).view(-1)[: flat.numel()])

    def end_step(self, finite):
        self.owed, self.next = (self.next if finite else self.owed), {}


HOOKS = {
    "bf16": lc.BF16(),
    "bf16+float32": lc.BF16(accumulate_dtype="float32"),
    "int8": lc.Int8(min_bytes=0, block_size=128),
    "int4": lc.Int4(min_bytes=0, block_size=128),
    "quantize": lc.QuantizePerTensor(),
    "allgather": lc.AllGather(),
    "powersgd": lc.PowerSGD(start_powerSGD_iter=0, matrix_approximation_rank=2),
    "cast": lc.Cast(lc.PowerSGD(start_powerSGD_iter=0, matrix_approximation_rank=2), "int8"),
    "scaled": lc.ScaleByGradAccumulation("int8", 4),
    "local": lc.PostLocalSGD(start_localSGD_iter=0, post_local_gradient_allreduce=False),
    "theirs": Theirs(),
}
CHOSEN = [Candidate(label, hook, hook) for label, hook in HOOKS.items()]


def task_of(rank, world):
    module = Params(SHAPES)
    gradients = [full_rank_gradients(other, 0, SHAPES) for other in range(world)]
    options = {"bucket_cap_mb": SMALL_BUCKETS}
    task = Task(module, (gradients[rank],), None, [torch.optim.SGD(module.parameters(), lr=0.1)], options, CPU)
    task.later_batches = iter([(gradients[(rank + i) % world],) for i in range(1, world)])
    task.save()
    return task


def complex_task(batch):
    module = torch.nn.Linear(16, 24, dtype=torch.complex64)
    task = Task(module, batch, lambda y: y.abs().sum(), [torch.optim.SGD(module.parameters(), lr=0.1)], {}, CPU)
    task.later_batches = iter([batch.flip(0).roll(1, 1)])
    task.save()
    return task


def real_errors(task, hook):
    """Of the same steps between real ranks, which each take them with their own gradients."""
    model = task.wrap()
    attachment = lc.attach(model, hook, optimizers=[])
    attachment.sample_error(every=1, numel=None)
    found = []
    for _ in range(errors._STEPS + 1):  # in the first one DDP has other buckets
        task.gradients(model)
        found.append(attachment.metrics()["relative_error"])
    attachment.close()
    return found[-1]


def both(rank, world):
    with pytest.MonkeyPatch.context() as patch, ignoring("hook=", "training ended", "Grad strides", "accumulation=4"):
        # Far, for they add up in the same way. Gloo's ring rounds 16-bit sums at each rank.
        patch.setenv("COMMHOOKS_LATENCY_MS", "40")
        patch.setattr(errors, "_BUCKET_BYTES", SMALL_BUCKETS * 2**20)
        found = errors_among(world, task_of(rank, world), CHOSEN)
        real = {label: real_errors(task_of(rank, world), hook) for label, hook in HOOKS.items() if label != "local"}
    return found, real


def test_errors_are_those_of_real_ranks(run):
    (found, real), *others = run(both, world=4, timeout=120)
    assert all(other == ({}, real) for other in others)
    assert found["local"] == []
    for label, error in real.items():
        assert found[label][-1] == pytest.approx(error, rel=0.1, abs=1e-6), label
    assert found["int8"][-1] < 0.05
    assert 0.05 < found["theirs"][-1] < 1


@pytest.fixture
def _alone():
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_alone", "_uncompiled")
class TestErrorsAmong:
    """In one process."""

    def test_a_hook_that_fits_no_fewer_ranks_gets_all(self):
        hook = Theirs(multiple_of=18)
        found = errors_among(18, task_of(0, 16), [Candidate("theirs", hook, hook)])
        assert all(0.05 < error < 1 for error in found["theirs"])
        with pytest.raises(ValueError, match="hook theirs among 17 ranks: needs a multiple of 18 ranks, there are 17"):
            errors_among(17, task_of(0, 16), [Candidate("theirs", hook, hook)])

    def test_the_model_is_left_as_it_was(self):
        task = task_of(0, 2)
        batch, before = task.batch, [p.detach().clone() for p in task.module.parameters()]
        errors_among(2, task, CHOSEN[:1])
        assert task.batch is batch
        assert all(map(torch.equal, before, task.module.parameters()))

    def test_complex_gradients_have_errors(self):
        found = errors_among(2, complex_task(torch.randn(4, 16, dtype=torch.complex64)), CHOSEN)
        assert all(0 < found[label][-1] < 0.3 for label in ("bf16", "int8", "int4"))

    def test_gradients_that_are_not_finite(self):
        with pytest.raises(ValueError, match="gradients of the model are inf or NaN"):
            errors_among(2, complex_task(torch.full((4, 16), torch.nan, dtype=torch.complex64)), CHOSEN[:1])

    def test_a_batch_that_cannot_be_made(self):
        def further():
            yield task.batch
            raise ValueError("no more data")

        task = task_of(0, 2)
        task.later_batches = further()
        with pytest.raises(ValueError, match="no more data"):
            errors_among(4, task, [])


def test_number_of_ranks_that_are_averaged():
    assert num_averaged(2, 1) == 2
    assert num_averaged(64, 1) == 16
    assert num_averaged(64, 2**28) == 8
    assert num_averaged(64, 2**34) == 4
    assert num_averaged(3, 2**34) == 3


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", ["all_reduce_", "all_gather", "all_to_all"])
def test_tensors_stay_on_their_device(name, dtype, size):
    tensor = torch.ones((size, 1000) if name == "all_to_all" else 1000, dtype=dtype, device="meta")
    works = [functools.partial(getattr(group, name), tensor.clone()) for group in groups_in_memory(size, "meta")]
    assert {result.device.type for result in run_together(works)} == {"meta"}
