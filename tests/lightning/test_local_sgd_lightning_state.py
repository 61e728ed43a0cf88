"""Local SGD with the real `Trainer`: validation, checkpoints, resuming, and how training ends."""

import copy
import functools

import pytest

pytest.importorskip("lightning")

import local_sgd_tasks as tasks
import torch
from forks import FOLDER
from local_sgd_reference import Simulation
from test_lightning import finish, start
from test_lightning import launch as launch_runner
from test_local_sgd_lightning import OPTIONS, assert_close, assert_same_trajectory, simulate_gan, simulate_regression

RUNNER = FOLDER / "local_sgd_lightning_state_runner.py"
launch = functools.partial(launch_runner, runner=RUNNER)
VALIDATED = ("3", "6", "11", "14")  # steps with a validation, none at the end of a period of 4


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    scenarios = ("watched", "save", "ends", "breaks", "tuned", "thaws", "averaged_over_time")
    return launch(tmp_path_factory.mktemp("saved"), *scenarios)


@pytest.fixture(scope="module")
def resumed(saved):
    return launch(saved.out, "resume")


@pytest.fixture(scope="module")
def one_process(saved):
    return launch(saved.out, "alone", "other_world", world=1)


@pytest.fixture(scope="module")
def four_processes(saved):
    return launch(saved.out, "other_world", "gan_on_four", world=4)


def states(results, label, rank, when="after"):
    return results(f"{label}-trajectory", rank)[when]


def checkpoint(results, name):
    return torch.load(results.out / f"{name}.ckpt", weights_only=True)


def task_of(results, name, norm=False):
    task = tasks.Regression(norm)
    state = checkpoint(results, name)["state_dict"]
    task.load_state_dict({key.removeprefix("task."): value for key, value in state.items()})
    return task.eval()


def mean(*models):
    return torch.tensor(models, dtype=torch.float64).mean(dim=0).tolist()


@pytest.mark.parametrize("label", ["watched", "exact"])
def test_evaluation_and_checkpoints_leave_training_alone(saved, label):
    for rank in (0, 1):
        assert states(saved, label, rank) == states(saved, "unwatched", rank)
        assert states(saved, label, rank, "before") == states(saved, "unwatched", rank, "before")
    assert saved.both(label)["params"] == saved("unwatched")["params"]
    assert saved(label)["metrics"]["averagings"] == saved("unwatched")["metrics"]["averagings"] == 4


def test_resync_goes_on_from_the_average(saved):
    mine, theirs = (states(saved, "resync", rank, "before") for rank in (0, 1))
    equal = [step for step in range(16) if mine[step] == theirs[step]]
    # At the start; after validations and checkpoints, those at 3, 6, 9, ... of `every_n_train_steps`; after periods.
    assert equal == sorted({0, *map(int, VALIDATED), 3, 6, 9, 12, 15, 4, 8})
    assert states(saved, "resync", 0, "before")[:4] != states(saved, "watched", 0, "before")[:4]
    assert saved.both("resync")["params"] != saved("watched")["params"]


@pytest.mark.parametrize("label", ["watched", "exact", "resync"])
def test_validated_and_saved_is_the_average(saved, label):
    data = tasks.rows(6, seed=6)
    metrics = saved(f"{label}-metrics")
    assert metrics == saved(f"{label}-metrics", 1)
    assert metrics["sanity"] == [states(saved, label, 0, "before")[0]]
    assert tuple(metrics["losses"]) == VALIDATED
    for step in VALIDATED:
        own = [states(saved, label, rank)[int(step) - 1] for rank in (0, 1)]
        assert own[0] != own[1] or label == "resync"
        assert_close(metrics["models"][step], mean(*own), step, 1e-15)
        task = task_of(saved, f"{label}-val-step={step}", norm=True)
        assert tasks.flat(task) == metrics["models"][step]
        assert task.loss(data).item() == pytest.approx(metrics["losses"][step], abs=1e-12, rel=0)
    for step in (3, 6, 9, 12, 15):
        own = [states(saved, label, rank)[step - 1] for rank in (0, 1)]
        assert_close(tasks.flat(task_of(saved, f"{label}-step={step}", norm=True)), mean(*own), step, 1e-15)


@pytest.mark.parametrize("label", ["watched", "exact", "resync"])
@pytest.mark.parametrize("name", ["val-step=6", "step=9"])
def test_a_module_adds_averages_to_a_checkpoint(saved, label, name):
    ckpt = checkpoint(saved, f"{label}-{name}")
    for key, value in ckpt["copied"].items():
        assert torch.equal(value, ckpt["state_dict"][f"task.{key}"]), key


def test_checkpoints_validate_the_same_in_one_process(saved, one_process):
    losses = one_process("alone")["losses"]
    assert len(losses) == 9
    for step in VALIDATED:
        logged = saved("watched-metrics")["losses"][step]
        assert losses[f"watched-val-step={step}.ckpt"] == pytest.approx(logged, abs=1e-12, rel=0)
        if step in ("3", "6"):
            assert losses[f"watched-step={step}.ckpt"] == pytest.approx(logged, abs=1e-12, rel=0)


def test_checkpoint_is_as_lightning_makes_it(saved):
    """With the versions of modules that `Module.load_state_dict` looks at, and optimizers that load."""
    ckpt = checkpoint(saved, "watched-val-step=6")
    assert ckpt["state_dict"]._metadata["task.net.1"] == {"version": 2}
    (state,) = ckpt["optimizer_states"]
    task = tasks.Regression(norm=True)
    optimizer = tasks.make_optimizer(task, "adamw")
    optimizer.load_state_dict(state)
    assert all(entry["step"] == 6 for entry in optimizer.state.values())
    assert ckpt["lightning_commhooks"]["hook"]["state"]["num_steps"] == {"task.net.0.weight": 6}


def test_end_of_training(saved):
    facts = saved("ends")
    assert saved.both("ends-1")["params"] == facts["params"] == saved("ends", 1)["params"]
    own = [states(saved, "ends-1", rank)[-1] for rank in (0, 1)]
    assert own[0] != own[1], "ended at the end of a period"
    assert_close(facts["params"], mean(*own), "end", 1e-15)
    assert tasks.flat(task_of(saved, "after")) == facts["params"]
    loss = tasks.Regression.loss(task_of(saved, "after"), tasks.rows(6, seed=6)).item()
    assert facts["validated"]["loss"] == facts["tested"]["loss"] == pytest.approx(loss, abs=1e-12, rel=0)
    after = checkpoint(saved, "after")
    assert after["lightning_commhooks"]["steps"] == facts["steps"] == 10
    momenta = [saved("ends", rank)["momentum"] for rank in (0, 1)]
    assert momenta[0] == momenta[1]
    assert tasks.flat_state(after["optimizer_states"][0]["state"]) == momenta[0]


def test_callbacks_monitor_the_average(saved):
    facts, metrics = saved("ends"), saved("ends-metrics")
    assert facts["steps"] == 10, "EarlyStopping, at the third validation"
    data = tasks.rows(6, seed=6)
    assert facts["best_score"] == metrics["losses"]["3"]
    assert task_of(saved, "best").loss(data).item() == pytest.approx(facts["best_score"], abs=1e-12, rel=0)


def test_strategy_and_trainer_are_used_again(saved):
    facts, losses = saved("ends"), saved("ends-metrics")["losses"]
    fresh = tasks.Regression()
    assert facts["start"] == tasks.flat(fresh), "validating alone changes nothing"
    assert facts["first"]["loss"] == pytest.approx(fresh.loss(tasks.rows(6, seed=6)).item(), abs=1e-12, rel=0)
    assert facts["restored"] == [True, True]
    for rank in (0, 1):
        assert states(saved, "ends-2", rank) == states(saved, "ends-1", rank)
    assert [losses[step] for step in ("13", "16", "20")] == [losses[step] for step in ("3", "6", "10")]
    expected = simulate_regression(OPTIONS["post"], batches=7, epochs=2)[:10]
    for rank in (0, 1):
        assert_close(states(saved, "ends-1", rank), [models[rank] for models in expected], rank)


RESUMED = 8  # steps


@pytest.mark.parametrize("kind", ["exact", "mean", "resync"])
@pytest.mark.parametrize("name", ["short", "diloco-beside"])
def test_resumes_in_the_middle_of_a_period(saved, resumed, name, kind):
    """Exactly, or as a run that went on from the average."""
    whole = f"{name}-exact" if kind == "exact" else f"{name}-resync"
    for rank in (0, 1):
        assert states(resumed, f"{name}-{kind}-resumed", rank) == states(saved, whole, rank)[RESUMED:]
    assert resumed.both(f"{name}-{kind}-resumed")["params"] == saved(whole)["params"]
    assert resumed(f"{name}-{kind}-resumed")["global_step"] == 16
    at_save = [states(saved, f"{name}-exact", rank)[RESUMED - 1] for rank in (0, 1)]
    assert at_save[0] != at_save[1]
    assert states(saved, f"{name}-exact", 0)[RESUMED:] != states(saved, f"{name}-resync", 0)[RESUMED:]


def test_resumes_exactly_from_a_checkpoint_after_validation(saved, resumed):
    for rank in (0, 1):
        assert states(saved, "validated", rank) == states(saved, "short-exact", rank)
        assert states(resumed, "validated-resumed", rank) == states(saved, "validated", rank)[RESUMED:]


def simulate_resumed(ckpt, world):
    """What `world` ranks do with the average that a checkpoint has."""
    start = tasks.Regression()
    start.load_state_dict({key.removeprefix("task."): value for key, value in ckpt["state_dict"].items()})
    options = {"periods": {3: world}}
    simulation = Simulation(start, world, lambda m: [tasks.make_optimizer(m)], tasks.Regression.loss, **options)
    for (optimizer,) in simulation.optimizers:
        optimizer.load_state_dict(copy.deepcopy(ckpt["optimizer_states"][0]))
    simulation.num_steps = [RESUMED]
    data = tasks.rows(8)
    for _ in range(2):
        for k in range(8 // world):
            simulation.backward([[tasks.batch_of(data, rank, world, k)] for rank in range(world)], 1)
            simulation.step(0)
            yield [tasks.flat(m) for m in simulation.models]


@pytest.mark.parametrize("kind", ["exact", "mean"])
@pytest.mark.parametrize("world", [1, 4])
def test_resumes_on_another_number_of_ranks(saved, request, world, kind):
    results = request.getfixturevalue({1: "one_process", 4: "four_processes"}[world])
    expected = list(simulate_resumed(checkpoint(saved, f"short-{kind}-epoch=1"), world))
    for rank in range(world):
        label = f"short-{kind}-on-{world}"
        assert_close(states(results, label, rank), [models[rank] for models in expected], f"rank {rank}")
        assert_close(results(label, rank)["params"], mean(*expected[-1]), "end")


def test_two_optimizers_on_four_ranks(four_processes):
    expected = simulate_gan(OPTIONS["hierarchical"], 12, world=4)
    assert_same_trajectory(four_processes, "gan-hierarchical", expected, world=4)


@pytest.mark.parametrize("rank", [0, 1])
def test_sharded_optimizer_is_refused(saved, rank):
    error = saved("error-sharded", rank)
    assert error["type"] == "MisconfigurationException"
    assert "ZeroRedundancyOptimizer" in error["text"]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("where", ["validation", "training", "tuner"])
def test_exceptions_are_passed_on(saved, where, rank):
    assert saved(f"error-{where}", rank) == {"type": "RuntimeError", "text": "broken on purpose"}


def test_average_stays_after_a_broken_validation(saved):
    mine, theirs = (saved("validation-broken", rank) for rank in (0, 1))
    assert mine["model"] == theirs["model"] == mine["after"] == theirs["after"]


def test_checkpoint_of_an_exception_has_the_model_of_rank_0(saved):
    own = saved("unbroken-trajectory")["after"][5]
    assert tasks.flat(task_of(saved, "exception-step=6")) == own
    assert "the checkpoint has the model of rank 0, which was not averaged" in saved.stderr


def test_learning_rate_finder_leaves_no_trace(saved):
    assert saved("tuned-callbacks") == {"restored": True}
    for rank in (0, 1):
        assert states(saved, "tuned", rank) == states(saved, "unbroken", rank)


def test_layers_that_a_callback_unfreezes(saved):
    """They join the optimizer's period; the model is averaged when DDP wraps it again."""
    last = {"periods": {4: 2}}
    simulation = Simulation(
        tasks.Regression(), 2, lambda m: [tasks.make_optimizer(m.net[2])], tasks.Regression.loss, **last
    )
    data = tasks.rows(12)
    expected = []
    for epoch in (0, 1):
        if epoch:
            simulation._average(lambda m: list(m.parameters()), 2)
            for model, (optimizer,) in zip(simulation.models, simulation.optimizers, strict=True):
                optimizer.add_param_group({"params": list(model.net[0].parameters()), "lr": 0.05})
        for k in range(6):
            simulation.backward([[tasks.batch_of(data, rank, 2, k)] for rank in (0, 1)], 1)
            simulation.step(0)
            expected.append([tasks.flat(m) for m in simulation.models])
    for rank in (0, 1):
        assert_close(states(saved, "thaws", rank), [models[rank] for models in expected], rank)


@pytest.mark.parametrize("label", ["swa", "ema"])
def test_ranks_are_equal_after_callbacks_that_average_over_time(saved, label):
    assert saved(f"{label}-after") == saved(f"{label}-after", 1)
    own = [states(saved, label, rank)[-1] for rank in (0, 1)]
    assert saved(f"{label}-after")["model"] != mean(*own), "the callback did nothing"


ENDS = {"raise_on_1": "broken on purpose", "interrupt_0": "KeyboardInterrupt"}


@pytest.mark.parametrize("scenario", ENDS)
def test_exception_on_one_rank_ends_the_run(tmp_path, scenario):
    process = start(tmp_path, scenario, runner=RUNNER)
    stderr = finish(process, timeout=60)
    assert process.returncode != 0
    assert ENDS[scenario] in stderr
    assert not list(tmp_path.glob("never*")), "no rank got to the end"
