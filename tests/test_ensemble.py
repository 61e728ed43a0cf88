"""Ranks that are threads, and errors that are measured among them: those of real ranks."""

import dataclasses
import threading
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from driver import SHAPES, SMALL_BUCKETS, Params, full_rank_gradients
from pool import ignoring
from torch._C._distributed_c10d import HashStore

import lightning_commhooks as lc
from lightning_commhooks.advice import errors
from lightning_commhooks.advice.candidates import Candidate
from lightning_commhooks.advice.ensemble import run_ranks
from lightning_commhooks.advice.errors import errors_among, num_averaged
from lightning_commhooks.advice.task import Task
from lightning_commhooks.codecs import Int8Codec
from lightning_commhooks.codecs.codec import Kernels
from lightning_commhooks.collectives.group import Group

CPU = torch.device("cpu")


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
        self.pair = group.split([[rank, rank + half] for rank in range(half)])
        self.across = group.split([list(range(half)), list(range(half, group.size))])
        self.owed, self.next = {}, {}

    def reduce(self, flat, bucket):
        owed = flat + self.owed.get(bucket.names, 0)
        unit = owed.abs().max() / 4
        sent = torch.round(owed / unit) * unit
        self.next[bucket.names] = owed - sent
        size = self.across.size
        padded = flat.new_zeros(-(-flat.numel() // size) * size)
        padded[: flat.numel()] = self.pair.all_reduce_(sent)
        share = self.across.all_to_all(padded.view(size, -1)).sum(dim=0) / self.group.size
        flat.copy_(self.across.all_gather(share.bfloat16().float()).view(-1)[: flat.numel()])

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
    task.further = iter([(gradients[(rank + i) % world],) for i in range(1, world)])
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
    alone = dist.new_group([rank], use_local_synchronization=True)
    with ignoring("hook=", "training ended", "Grad strides", "accumulation=4"):
        found = errors_among(world, world, task_of(rank, world), alone, CHOSEN)
        real = {label: real_errors(task_of(rank, world), hook) for label, hook in HOOKS.items() if label != "local"}
    dist.destroy_process_group(alone)
    return found, real


def test_errors_are_those_of_real_ranks(run):
    results = run(both, world=4, timeout=120)
    for found, real in results:
        assert found == results[0][0]
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


@pytest.fixture
def _uncompiled(monkeypatch):
    monkeypatch.setattr("lightning_commhooks.collectives.group.compiled", lambda codec, *_: Kernels(codec))


@pytest.mark.usefixtures("_alone", "_uncompiled")
class TestErrorsAmong:
    """In one process."""

    def test_a_hook_that_fits_no_fewer_ranks_gets_all(self):
        hook = Theirs(multiple_of=6)
        found = errors_among(4, 6, task_of(0, 4), dist.group.WORLD, [Candidate("theirs", hook, hook)])
        assert all(0.05 < error < 1 for error in found["theirs"])
        with pytest.raises(ValueError, match="hook theirs: needs a multiple of 6 ranks, there are 5"):
            errors_among(4, 5, task_of(0, 4), dist.group.WORLD, [Candidate("theirs", hook, hook)])

    def test_the_model_is_left_as_it_was(self):
        task = task_of(0, 2)
        batch, before = task.batch, [p.detach().clone() for p in task.module.parameters()]
        errors_among(2, 2, task, dist.group.WORLD, CHOSEN[:1])
        assert task.batch is batch
        assert all(map(torch.equal, before, task.module.parameters()))

    def test_a_batch_that_cannot_be_made(self):
        def further():
            yield task.batch
            raise ValueError("no more data")

        task = task_of(0, 2)
        task.further = further()
        with pytest.raises(ValueError, match="no more data"):
            errors_among(4, 4, task, dist.group.WORLD, [])


def test_number_of_ranks_that_are_averaged():
    assert num_averaged(2, 1, 0.01) == 2
    assert num_averaged(64, 1, 0.01) == 16
    assert num_averaged(64, 2**28, 0.01) == 8
    assert num_averaged(64, 1, 4.0) == 10
    assert num_averaged(64, 2**34, 100.0) == 4
    assert num_averaged(3, 2**34, 100.0) == 3


def exchanged(group):
    own = torch.arange(6.0) + 10 * group.rank
    pairs = group.split([[0, 2], [1, 3]])
    return {
        "sum": group.all_reduce_(own.clone()),
        "mean": pairs.all_reduce_mean_(own.clone()),
        "gathered": group.all_gather(own),
        "swapped": pairs.all_to_all(own.view(2, 3)),
        "nodes": group.nodes(),
        "place": (pairs.rank, pairs.size, pairs.global_rank),
        "encoded": group.encoding(Int8Codec()).size,
        "sent": group.counters.bytes_sent,
    }


def real_exchanged(rank, world):
    group = Group(dist.group.WORLD)
    group._nodes = [[0], [1], [2], [3]]
    return exchanged(group)


@pytest.mark.usefixtures("_uncompiled")
def test_exchanges_what_real_ranks_do(run):
    for real, among_threads in zip(run(real_exchanged, world=4), run_ranks(4, CPU, exchanged), strict=True):
        assert real.keys() == among_threads.keys()
        for key, value in real.items():
            torch.testing.assert_close(among_threads[key], value, msg=key)


def test_collectives_that_are_started_together():
    def work(group):
        waits = [group._begin_all_gather(torch.tensor([group.rank, i])) for i in range(3)]
        return [wait().tolist() for wait in reversed(waits)]

    assert run_ranks(2, CPU, work) == [[[[0, i], [1, i]] for i in (2, 1, 0)]] * 2


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (lambda group: group.rank or group.all_reduce_(torch.ones(2)), "rank 0 waits in all_reduce for ranks that"),
        (
            lambda group: group.all_gather(torch.ones(1)) if group.rank else group.all_reduce_(torch.ones(1)),
            "rank 1 calls all_gather with .* where rank 0 calls all_reduce",
        ),
        (lambda group: group.all_reduce_(torch.ones(1 + group.rank)), r"rank 1 calls .*\[2\] where rank 0 .*\[1\]"),
        (lambda group: group.process_group, "ranks are emulated here, so there is no process group"),
    ],
)
def test_ranks_that_disagree_fail_and_do_not_hang(work, message):
    with pytest.raises(RuntimeError, match=message):
        run_ranks(3, CPU, work)
    assert not [t for t in threading.enumerate() if t.name.startswith("rank ")]


def test_the_first_failure_is_the_one_that_is_raised():
    def work(group):
        group.all_reduce_(torch.ones(1))
        if group.rank == 1:
            raise KeyError("mine")
        group.all_reduce_(torch.ones(1))

    with pytest.raises(KeyError, match="mine"):
        run_ranks(4, CPU, work)
