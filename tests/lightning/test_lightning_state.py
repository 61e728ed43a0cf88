"""Hook state in Lightning: checkpoints, other world sizes, mismatches, unfrozen layers, loss scale."""

import functools

import pytest

pytest.importorskip("lightning")

import torch
from forks import FOLDER
from test_lightning import launch as launch_runner

SAVED = 2
launch = functools.partial(launch_runner, runner=FOLDER / "lightning_state_runner.py")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return launch(tmp_path_factory.mktemp("state"), "save")


@pytest.fixture(scope="module")
def resumed(saved):
    return launch(saved.out, "resume")


@pytest.fixture(scope="module")
def mismatched(saved):
    return launch(saved.out, "mismatches")


def checkpoint(results, name):
    return torch.load(results.out / f"{name}.ckpt", weights_only=True)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("name", ["powersgd", "schedule"])
def test_resumed_in_new_processes_as_if_uninterrupted(saved, resumed, name, exact):
    label = f"{name}-{exact}"
    whole, parts = saved.both(label), resumed.both(f"{label}-resumed")
    assert whole["global_step"] == parts["global_step"] == 28
    assert parts["metrics"]["steps"] == 20
    if exact or name != "powersgd":
        assert whole["params"] == parts["params"]
    else:
        assert saved.distance(label, f"{label}-resumed") <= 1e-10


def test_state_is_in_the_checkpoint_once(saved):
    state = checkpoint(saved, f"powersgd-False-epoch={SAVED - 1}")["lightning_commhooks"]
    assert state["steps"] == 8
    entries = state["hook"]["state"]["entries"]
    assert {name: tuple(entry["residual"].shape) for name, entry in entries.items()} == {
        "net.0.weight": (32, 16),
        "net.2.weight": (32, 32),
    }
    exact = checkpoint(saved, f"powersgd-True-epoch={SAVED - 1}")["lightning_commhooks"]
    assert exact["hook"]["state"]["entries"]["net.2.weight"]["residual"].shape == (2, 32, 32)


def test_state_is_in_a_checkpoint_saved_after_the_fit_but_not_with_weights_only(saved, mismatched):
    after = checkpoint(saved, "powersgd-False-after")["lightning_commhooks"]
    assert after["steps"] == 28
    assert "lightning_commhooks" not in checkpoint(saved, "powersgd-False-weights")
    assert mismatched("after")["global_step"] == 32


def test_state_is_averaged_only_to_be_saved(saved):
    """At the end of a fit not, when it writes no checkpoint, or has just written one."""
    sent = saved("evaluated")
    assert sent["unsaved"] == 0
    (told,) = sent["unsaved told"]
    assert "has only the step count of hook 'powersgd': its memory is reset" in told
    assert told.endswith("with Trainer(enable_checkpointing=True) it has all")
    alone = checkpoint(saved, "unsaved-after")["lightning_commhooks"]
    assert (alone["steps"], alone["num_tensors"]) == (8, 0)
    assert checkpoint(saved, "saved-after")["lightning_commhooks"]["num_tensors"] > 0
    assert sent["saved told"] == []
    # Once for each of two epochs: 4 bytes of each element of a residual, on two ranks.
    numel = sum(
        entry["residual"].numel()
        for entry in checkpoint(saved, "saved-after")["lightning_commhooks"]["hook"]["state"]["entries"].values()
    )
    assert sent["saved"] == 2 * 4 * numel


@pytest.fixture(scope="module")
def on_four(saved):
    return launch(saved.out, "other_world", world=4)


@pytest.mark.parametrize("exact", [False, True])
def test_resumed_on_another_number_of_ranks(on_four, exact):
    label = f"powersgd-{exact}-on-4"
    ranks = [on_four(label, rank) for rank in range(4)]
    assert all(rank["params"] == ranks[0]["params"] for rank in ranks)
    assert ranks[0]["world_size"] == 4
    assert ranks[0]["metrics"]["compression_ratio"] > 2
    assert 0 < on_four.distance(label, f"powersgd-{exact}") < 0.2
    line = "INFO:lightning_commhooks.runtime.checkpoint:state of hook 'powersgd': saved on 2 ranks, loaded on 4"
    assert on_four.stderr.count(line) == 2, "once for each of the two fits"


@pytest.mark.parametrize(
    ("label", "text"),
    [
        ("hook", "it is of hook 'powersgd', not of 'bf16'"),
        ("rank", "(matrix_approximation_rank was 2, is 1)"),
    ],
)
def test_mismatch_is_an_error_on_every_rank(mismatched, label, text):
    for rank in (0, 1):
        error = mismatched(f"error-{label}", rank)
        assert error["type"] == "MisconfigurationException"
        assert text in error["text"]
        assert "strict_state=False" in error["text"]
    assert mismatched.both(f"loose-{label}")["global_step"] == 28
    assert "strict_state=False: not taken over by hook" in mismatched.stderr


def test_checkpoints_of_other_strategies(mismatched):
    assert mismatched.both("from-dense")["metrics"]["steps"] == 20
    assert mismatched.stderr.count("the checkpoint has no state of hook 'powersgd'") == 1
    assert mismatched.both("to-dense")["comm_hook"] == ""
    assert (mismatched.out / "validated.1.json").exists()


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    scenarios = "finetuning", "unfrozen_in_step", "frozen_between_steps", "mixed", "other_model", "tuned"
    return launch(tmp_path_factory.mktemp("others"), *scenarios)


def test_layers_that_a_callback_unfreezes_are_averaged(others):
    dense = others.both("finetuning-allreduce")
    assert others.both("finetuning-powersgd")["metrics"]["steps"] == dense["metrics"]["steps"] == 12
    assert others.stderr.count("wrapped the model again: 4 parameters were unfrozen, 'net.0.weight' first") == 6
    assert others.distance("finetuning-powersgd", "finetuning-allreduce") < 0.05


def test_layers_that_a_step_unfreezes_are_averaged_with_their_optimizer_state(others):
    assert others.both("unfrozen-in-step")["metrics"]["steps"] == 12


def test_layers_that_a_step_unfreezes_have_a_warning(others):
    """In a step before the model is wrapped again, and in all steps that freeze them again; on two ranks."""
    advice = "first: DDP does not average their gradients and ranks diverge. The next training_step averages them if"
    assert others.stderr.count(f"'net.0.weight' {advice}") == 4
    assert "move_to" not in others.stderr


def test_mixed_precision_supplies_its_scaler(others):
    dense, powersgd = others.both("mixed-allreduce"), others.both("mixed-powersgd")
    assert powersgd["metrics"]["nonfinite_steps"] == 1
    assert powersgd["metrics"]["steps"] == dense["metrics"]["steps"] == 16
    assert others("scale-mixed-powersgd") == others("scale-mixed-powersgd", 1) == others("scale-mixed-allreduce")
    assert others("scale-mixed-powersgd")["scale"] != 2.0**16
    assert others.distance("mixed-powersgd", "mixed-allreduce") < 0.05


def test_second_model_in_the_same_trainer(others):
    assert others.both("first-model")["params"] != others.both("second-model")["params"]
    assert others("second-model")["params"] == others("second-model-alone")["params"]


def test_learning_rate_finder_leaves_no_trace(others):
    assert others.both("tuned")["params"] == others("untuned")["params"]
