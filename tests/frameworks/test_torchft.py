"""Hooks among the replicas of a torchft manager, with a real lighthouse: replicas are killed, stop, and come back."""

import os
import re
import signal
import types
from itertools import pairwise

import pytest

pytest.importorskip("torchft")

import torch
import torchft
from forks import PATIENCE
from fsdp_driver import leaving_no_groups
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn import parallel
from torchft.process_group import ProcessGroupDummy
from torchft_replica import HOOKS, PERIOD
from torchft_runs import (
    NAMES,
    LocalSimulation,
    Simulation,
    assert_equals_local_simulation,
    assert_equals_simulation,
    gap_after,
    run_docs,
    starting,
)

import lightning_commhooks as lc
from lightning_commhooks.collectives.errors import HookError
from lightning_commhooks.torchft import DistributedDataParallel
from lightning_commhooks.torchft.quorum import Quorum

ALONE = {"post_local_gradient_allreduce": False}


@pytest.fixture
def start(tmp_path):
    yield from starting("torchft_replica.py", tmp_path)


@pytest.mark.parametrize("hook", ["allreduce", "int8", "powersgd"])
def test_one_dies_and_comes_back(start, hook):
    divided_by = 3 if hook == "int8" else 0
    far = hook == "allreduce"
    run = start(hook=hook, divided_by=divided_by, far=far, of={"two": {"dies": [12, 1]}})
    run.wait_until_it_joins_again("two")
    printed = run.finish()
    assert "replica 'two' left at step 12: 2 go on" in printed["one"]
    assert "replica 'two' joined at step " in printed["three"]
    steps = [line["step"] for line in run.steps("two")]
    assert next(after for before, after in pairwise(steps) if after != before + 1) > 20, "it goes on where they are"
    for name in ("one", "three"):
        assert gap_after(run, name, 11) < 2 * PATIENCE, "seconds until the next step"
        metrics = run.end(name)["metrics"]
        assert metrics["replicas"] == 3
        assert metrics["steps_not_committed"] >= 1
        assert 0 < metrics["lost_ms"] < 2000 * PATIENCE
    # PowerSGD lets what is rounded in another order grow; with a wrong residual it is off by far more.
    growth = 1.12 if hook == "powersgd" else 1
    simulation = Simulation(HOOKS[hook], run.end("one")["buckets"])
    simulation.divided_by = divided_by
    assert_equals_simulation(run, simulation, lambda step: 1e-9 * growth**step)


@pytest.mark.parametrize("hook", ["allreduce", "powersgd"])
def test_one_of_several_processes_dies_and_its_replica_comes_back(start, hook):
    """Replicas are sharded: each process averages its share with the processes that have the same.

    A number that is inf is in the share of one of them, and the step is a bad one for both.
    """
    run = start(hook=hook, processes=2, bad=7, of={"two": {"dies": [12, 1]}, "one": {"spoils": hook != "allreduce"}})
    first, second = run.replicas["two"], *run.others["two"]
    run.wait_until(lambda: first.poll() is not None, may_fail="two")
    assert second.poll() == -signal.SIGKILL
    assert first.poll() == 1, "it cannot go on alone"
    run.wait_until_it_joins_again("two")
    printed = run.finish()
    assert printed["one"].count("replica 'two' left at step 12: 2 go on") == 1, printed
    for name in ("one", "three"):
        assert gap_after(run, name, 11) < 2 * PATIENCE, "seconds until the next step"
        metrics = run.end(name)["metrics"]
        assert metrics["replicas"] == 3
        assert metrics["steps_not_committed"] >= 1
    assert run.steps("one")[7]["skipped"] is (hook != "allreduce")
    growth = 1.12 if hook == "powersgd" else 1
    simulation = Simulation(HOOKS[hook], run.end("one")["buckets"], micros=2, num_shards=2)
    assert_equals_simulation(run, simulation, lambda step: 1e-9 * growth**step)


@pytest.mark.parametrize(
    ("hook", "processes"),
    [
        ("post_localsgd", 1),
        ("diloco in int8", 1),
        ("diloco", 2),
        ("diloco in fragments", 1),
        ("diloco in fragments", 2),
        ("diloco with a delay", 1),
        ("diloco with a delay", 2),
    ],
)
def test_one_dies_in_an_average_of_models_and_comes_back(start, hook, processes):
    run = start(hook=hook, processes=processes, of={"two": {"dies": [12]}})
    run.wait_until_it_is_back("two")
    printed = run.finish()
    assert "replica 'two' left at step 12: 2 go on" in printed["one"], printed["one"]
    num_fragments = getattr(HOOKS[hook], "fragments", 1)
    assert run.steps("one")[12]["local"] == PERIOD // num_fragments, "the average is repeated at once"
    lines, last = run.steps("two"), None
    if hook == "post_localsgd":  # without a common model, one that another replica has counts twice when it is back
        last = next(line["step"] for line in lines if line["process"] != lines[0]["process"]) - 1
    if hook != "diloco in int8":
        assert_equals_local_simulation(run, LocalSimulation(hook, processes), last=last)


def test_one_commits_an_average_that_others_lose(start):
    """It goes on by itself, and has their model when they meet again."""
    losing = {"loses": 5}
    run = start(hook="diloco", pause=0.1, join_timeout_ms=100, of={"one": losing, "two": losing})
    run.wait_until(lambda: all(len(run.steps(name)) > 15 for name in NAMES))
    hashes = run.hashes()
    # In between they may meet in twos, if they are late.
    assert [step for step, different in hashes.items() if len(different) > 1] in ([], [5])


@pytest.mark.parametrize(
    ("has_started", "took_part", "begins_at"),
    [(False, False, [10.0, 2.0]), (True, False, [13.0, 5.0]), (True, True, [10.0, 5.0])],
    ids=["joining", "late", "in the average"],
)
def test_changes_of_a_replica_that_receives_the_model_count_once(has_started, took_part, begins_at):
    """The others have averaged `a` meanwhile, and not `b`."""
    before, trained = torch.tensor([2.0]), {name: torch.zeros(1) for name in "ab"}
    models = types.SimpleNamespace(diverged={"a", "b"})
    quorum = object.__new__(Quorum)
    quorum._runtime = types.SimpleNamespace(
        local=types.SimpleNamespace(models=models, common_model=lambda: {"a": torch.tensor([10.0]), "b": before}),
        layout=types.SimpleNamespace(trained=trained),
    )
    quorum._own, quorum._took_part = {name: torch.tensor([5.0]) for name in "ab"}, took_part
    quorum._begin_at_common_model(dict.fromkeys("ab", before) if has_started else {})
    assert [p.item() for p in trained.values()] == begins_at
    assert models.diverged == {name for name, at in zip("ab", begins_at, strict=True) if at not in (10, 2)}


def test_replicas_with_other_weights_take_over_those_of_most():
    steps = []
    manager = types.SimpleNamespace(current_step=lambda: 7, batches_committed=lambda: 21, load_state_dict=steps.append)
    source = types.SimpleNamespace(shard=[])
    quorum = object.__new__(Quorum)
    quorum._manager, quorum._runtime = manager, types.SimpleNamespace(source=source)
    names, digests = ["one", "two", "three", "four"], [5, 6, 6, 0]
    for own in digests:
        with pytest.raises(HookError, match="at step 7 replica 'one' has other weights than 'two', and loads them"):
            quorum._compare_weights(names, digests, own)
    assert steps == [{"step": 6, "batches_committed": 21}], "the one that is given a state is behind"
    with pytest.raises(HookError, match="replica 'two' has other weights than 'one'"):
        quorum._compare_weights(names[:2], [5, 6], 5)
    assert len(steps) == 1
    quorum._compare_weights(names, [6, 6, 0, 6], 6)
    source.shard = [[0, 2]]
    with pytest.raises(
        ValueError, match=r"replica 'one' has other weights than 'two'\. Start all processes of replica 'one'"
    ):
        quorum._compare_weights(names, digests, 5)
    manager.current_step = lambda: 0
    with pytest.raises(ValueError, match="replicas begin with different weights"):
        quorum._compare_weights(names, digests, 6)


def test_an_average_that_fails_again_and_again_ends_the_replica(monkeypatch):
    quorum, tried = object.__new__(Quorum), []
    quorum._runtime = types.SimpleNamespace(bound=None)
    lost = types.SimpleNamespace(original_exception=ArithmeticError("out of numbers"))
    quorum._manager = types.SimpleNamespace(errored=lambda: None if len(tried) == 3 else lost)
    quorum._has_averaged = lambda average: tried.append(average)
    monkeypatch.setattr("lightning_commhooks.torchft.quorum.time.sleep", lambda seconds: None)
    with pytest.raises(HookError, match="failed 10 times in a row: out of numbers"):
        quorum.average(None, print)
    assert tried == [print] * 13, "it was not lost each time, but waited for others"


def test_parts_of_a_model_batch_norm_micro_batches_and_a_scaler(start):
    """Weights are alike after each step, also of what one replica has not used, and somebody dies meanwhile."""
    run = start(hook="powersgd", parts=True, of={"two": {"dies": [12, 0]}})
    run.wait_until(lambda: run.replicas["two"].poll() is not None)
    run.start("two")
    run.wait_until(lambda: len(run.steps("two")) > 30)
    run.finish()


def test_one_stops_and_goes_on(start):
    """As when the network drops everything: nobody hears of it, the others wait for their timeout."""
    run = start(hook="int8", processes=2, of={"three": {"stops": [12, 1]}})
    run.wait_until((run.folder / "three.ended").exists)
    run.wait_until(lambda: len(run.steps("one")) > 20)
    os.kill(run.others["three"][0].pid, signal.SIGCONT)
    run.wait_until(lambda: run.steps("three")[-1]["step"] > 20)
    printed = run.finish()
    assert "replica 'three' left at step 12: 2 go on" in printed["one"]
    # Two timeouts of 5 s, since shares are averaged one after another, and until the lighthouse misses it.
    assert gap_after(run, "one", 11) < 13 * PATIENCE


def test_another_hook_is_refused_where_it_joins(start):
    run = start(hook="int8", names=("one", "two"))
    run.wait_until(lambda: run.steps("one"))
    run.start("three", hook="bf16")
    run.wait_until(lambda: run.replicas["three"].poll() is not None, may_fail="three")
    with run.replicas.pop("three") as refused:
        refused.finish(10)
        assert refused.returncode == 1
        assert "replica 'one' differs from this one in its hook" in "".join(refused.printed())
    before = len(run.steps("one"))
    run.wait_until(lambda: len(run.steps("one")) > before + 5)
    run.finish()
    assert run.end("one")["metrics"]["steps_not_committed"] > 0


@pytest.mark.parametrize(
    ("of_one", "of_two", "message"),
    [
        ({"hook": "int8"}, {"hook": "bf16"}, "replica '(one|two)' differs from this one in its hook"),
        ({"hook": "diloco"}, {"hook": "diloco", "differs": True}, "replicas begin with different weights"),
    ],
)
def test_replicas_that_begin_differently_are_all_refused(start, of_one, of_two, message):
    run = start(names=("one", "two"), of={"one": of_one, "two": of_two})
    for name in ("one", "two"):
        with run.replicas.pop(name) as refused:
            refused.finish(30)
            assert refused.returncode == 1
            assert re.search(f"ValueError: {message}", "".join(refused.printed()))


def test_script_and_commands_of_the_docs(tmp_path):
    printed = run_docs("train_torchft.py", {name: ([name], {}) for name in "abc"}, "c", tmp_path)
    for name in "ab":
        assert "replica 'c' left at step " in printed[name]
        assert f"{name}: " in printed[name]


def test_script_and_commands_of_the_docs_for_replicas_of_several_processes(tmp_path):
    printed = run_docs("train_sharded_replica.py", {name: ([name], {}) for name in "abc"}, "c", tmp_path)
    for name in "ab":
        # It may be back before others have missed it.
        assert "replica 'c' left " in printed[name]
        assert "'c' joined at step " in printed[name]
    for name in "abc":
        ratios = re.findall(rf"{name}: (\d\.\d)x fewer bytes", printed[name])
        assert len(ratios) == 2, "each process ends well"
        assert min(map(float, ratios)) > 1, "the hook has begun to compress"


@pytest.mark.parametrize("hook", ["diloco", "diloco with a delay"])
def test_one_that_is_late_keeps_its_own_steps(start, hook):
    """It is stopped between two averages. The others go on, and what it has done until it meets them counts there."""
    run = start(hook=hook, of={"three": {"stops": [14, 0]}})
    run.wait_until((run.folder / "three.ended").exists)
    run.wait_until(lambda: len(run.steps("one")) > 20)
    os.kill(run.replicas["three"].pid, signal.SIGCONT)
    run.wait_until(lambda: run.steps("three")[-1]["step"] > 20)
    run.finish()
    steps = [line["step"] for line in run.steps("three")]
    assert any(after > before + 1 for before, after in pairwise(steps))
    assert len({line["process"] for line in run.steps("three")}) == 1
    assert_equals_local_simulation(run, LocalSimulation(hook))


# In this process ---------------------------------------------------------------------------------------------------


class Manager(torchft.Manager):
    """What `attach` looks at in a manager."""

    _use_async_quorum = False
    _group_world_size, _group_rank = 1, 0

    def __init__(self, members=True):
        self._pg = types.SimpleNamespace(**({"members": None} if members else {}))
        self.states = {}

    def errored(self):
        return None

    def should_commit(self):
        return True

    def wait_quorum(self):
        raise AssertionError("must call start_quorum before wait_quorum")

    def register_state_dict_fn(self, key, load, save):
        self.states[key] = save


def wrapped(manager, hook="int8", **options):
    return DistributedDataParallel(manager, torch.nn.Linear(2, 2), hook=hook, **options)


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        ("auto", "hook='auto' measures one group of ranks, and replicas come and go: choose a hook"),
        ("diloco", "hook='diloco': post_local_gradient_allreduce=True needs ranks that stay; .* set it to False"),
        (lc.DiLoCo(**ALONE, eager=True), "eager=True needs ranks that stay; with manager= set it to False"),
        (lc.DiLoCo(**ALONE, period_seconds=1), "period_seconds=1 needs ranks that stay; with manager= set it to None"),
        (lc.DiLoCo(**ALONE, period=4, delay=4), "with delay=4, the period, .* set it to at most 3"),
        (
            lc.DiLoCo(**ALONE, delay=2, pseudo_gradient="topk"),
            "delay=2 does not work with pseudo_gradient='topk' .* Set delay=0",
        ),
        (
            lc.DiLoCo(**ALONE, delay=2, pseudo_gradient="int8", error_feedback=True),
            "delay=2 does not work with pseudo_gradient='int8'",
        ),
        (lc.HierarchicalLocalSGD(period_group_size_dict={2: None}), "averages in subgroups"),
        (lc.Schedule({0: lc.DiLoCo(post_local_gradient_allreduce=False)}), "with manager= give that hook by itself"),
        ("powersdg", "did you mean 'powersgd'"),
        (
            default_hooks.fp16_compress_hook,
            "is a function for a process group that stays; among replicas use a CommHook",
        ),
    ],
)
def test_hooks_that_cannot_work_are_refused(hook, message):
    with pytest.raises(ValueError, match=message):
        wrapped(Manager(), hook)


def test_models_and_managers_that_cannot_work_are_refused():
    model = parallel.DistributedDataParallel(torch.nn.Linear(2, 2), process_group=ProcessGroupDummy(0, 1))
    with pytest.raises(ValueError, match="needs find_unused_parameters=True and no static_graph"):
        lc.attach(model, "int8", manager=Manager())
    with pytest.raises(ValueError, match=r"lightning_commhooks.torchft.ProcessGroupGloo"):
        wrapped(Manager(members=False))
    with pytest.raises(ValueError, match="exact_state keeps differences between ranks"):
        lc.attach(model, "int8", manager=Manager(), exact_state=True)
    manager = Manager()
    manager._group_world_size = 2
    with pytest.raises(ValueError, match=r"the manager has \{'world_size': 2, 'rank': 0\}, and the processes"):
        wrapped(manager)
    manager = Manager()
    manager._use_async_quorum = True
    with pytest.raises(ValueError, match="give it use_async_quorum=False"):
        wrapped(manager)


def refusals_of_several_processes(rank, world):
    with leaving_no_groups():
        manager = Manager()
        manager._group_world_size, manager._group_rank = world, rank
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicas", "shards"))
        both = {"manager": manager, "replicate_group": mesh.get_group(0)}
        differences = {"manager": manager, "gather_hook": "int4", "gather_differences": True}
        for model, options, message in (
            (parallel.DistributedDataParallel(torch.nn.Linear(2, 2)), {"manager": manager}, "apply fully_shard to the"),
            (
                FullyShardedDataParallel(torch.nn.Linear(2, 2), device_id=torch.device("cpu")),
                {"manager": manager},
                "apply fully_shard instead",
            ),
            (fully_shard(torch.nn.Linear(2, 2), mesh=mesh), {"manager": manager}, "on a mesh of one dimension"),
            (fully_shard(torch.nn.Linear(2, 2)), {"manager": Manager()}, "need {'world_size': 4"),
            (fully_shard(torch.nn.Linear(2, 2)), both, "replicate_group is for replicas that stay"),
            (fully_shard(torch.nn.Linear(2, 2)), differences, "needs ranks that all load weights when one does"),
            (fully_shard(torch.nn.Linear(2, 2)), {"manager": manager, "hook": "auto"}, "hook='auto' measures"),
        ):
            with pytest.raises(ValueError, match=message):
                lc.attach(model, **{"hook": "int8", **options})
        model = fully_shard(torch.nn.Linear(2, 2))
        with pytest.raises((ValueError, HookError), match="hook must be the same on all ranks"):
            lc.attach(model, "bf16" if rank else "int8", manager=manager)
        attachment = lc.attach(model, "int8", manager=manager)
        assert not attachment.runtime._ranks._connections, "which would end with a failure elsewhere"
        with pytest.raises(HookError, match=r"call manager.start_quorum\(\) before each forward"):
            model(torch.ones(2, 2)).sum().backward()
        attachment.close()
        model = fully_shard(torch.nn.Linear(2, 2))
        lc.attach(model, "int8", manager=manager).close()
        with pytest.raises(HookError, match="closed"):
            model(torch.ones(2, 2)).sum().backward()
        remembers = {"manager": manager, "shard_hook": lc.Int8(compress_1d=True)}
        with pytest.raises(ValueError, match="use_error_feedback"):
            lc.attach(fully_shard(torch.nn.Linear(2, 2)), "int8", **remembers)


def test_replicas_of_several_processes_that_cannot_work_are_refused(run):
    run(refusals_of_several_processes, world=4)


def test_a_second_model_is_refused():
    manager = Manager()
    first = wrapped(manager)
    with pytest.raises(ValueError, match="this manager has a model with a hook"):
        wrapped(manager)
    first.attachment.close()
    wrapped(manager).attachment.close()
    assert list(manager.states) == ["lightning_commhooks 1", "lightning_commhooks 2"]


def test_a_backward_without_a_quorum_is_refused():
    model = wrapped(Manager())
    with pytest.raises(HookError, match=r"call manager.start_quorum\(\) before each forward"):
        model(torch.ones(2, 2)).sum().backward()
    model.attachment.close()


def test_a_backward_without_a_vote_is_refused():
    manager = Manager()
    manager.wait_quorum = lambda: None
    manager.current_step = lambda: 0
    model = wrapped(manager, "allreduce")
    model(torch.ones(2, 2)).sum().backward()
    with pytest.raises(HookError, match=r"call manager.should_commit\(\) after each backward"):
        model(torch.ones(2, 2)).sum().backward()
    assert manager.should_commit()
    model.attachment.close()


def test_the_state_of_a_replica_has_no_residual():
    manager = Manager()
    model = wrapped(manager)
    assert list(manager.states) == ["lightning_commhooks 1"]
    assert model.attachment.state_dict()["per_rank"] == "joining"
    model.attachment.load_state_dict(model.attachment.state_dict())
    assert manager.should_commit(), "after the hook was closed too"
    model.attachment.close()
    assert manager.should_commit()
