"""Local SGD under Accelerate in two real processes: trajectories, evaluation, checkpoints, refusals."""

import pytest
import torch
from local_sgd_accelerate_runner import PERIOD
from local_sgd_reference import Simulation
from safetensors.torch import load_file
from small_task import batch, loss, make_model
from torchrun import run_twice

OUTER = {"lr": 0.7, "momentum": 0.9, "nesterov": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("accelerate")


@pytest.fixture(scope="module")
def results(folder):
    """What each rank returned."""
    run_twice("local_sgd_accelerate_runner.py", folder)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def simulate(steps, accumulation=1, skipped=(), **options):
    """Parameters of both ranks after each step."""
    simulation = Simulation(
        make_model(),
        2,
        lambda model: [torch.optim.AdamW(model.parameters(), lr=0.02)],
        lambda model, x, _: loss(model, x),
        periods={PERIOD: 2},
        **options,
    )
    trajectory = []
    for step in range(steps):
        if step not in skipped:
            numbers = [100 * step + i for i in range(accumulation)]
            simulation.backward([[batch(rank, number) for number in numbers] for rank in range(2)], None)
            simulation.step(0)
        trajectory.append([{n: p.detach().clone() for n, p in m.named_parameters()} for m in simulation.models])
    return trajectory


def distance(a, b):
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


def mean(states):
    return {name: sum(state[name] for state in states) / len(states) for name in states[0]}


def of_trajectory(results, expected):
    return max(distance(mine[step], ranks[r]) for r, mine in enumerate(results) for step, ranks in enumerate(expected))


@pytest.mark.parametrize(
    ("hook", "options"),
    [
        ("post_localsgd", {}),
        ("diloco, delay", {"outer": OUTER, "delay": 3, "mixing": 0.5}),
    ],
)
def test_accumulated_steps_equal_the_simulation(results, hook, options):
    expected = simulate(10, accumulation=3, **options)
    assert of_trajectory([rank["trajectories"][hook] for rank in results], expected) < 1e-12


def test_overflow_on_one_rank_skips_the_step_everywhere_and_keeps_the_phase(results):
    runs = [rank["overflows"] for rank in results]
    assert runs[0]["skipped"] == runs[1]["skipped"] == [step in (2, 3, 7, 8) for step in range(12)]
    assert runs[0]["scales"] == runs[1]["scales"]
    expected = simulate(12, skipped=(2, 3, 7, 8))
    assert of_trajectory([run["trajectory"] for run in runs], expected) < 1e-12


@pytest.mark.parametrize("resync", [False, True])
def test_evaluation_sees_the_average(results, resync):
    runs = [rank["evaluations"][resync] for rank in results]
    average = mean([run["before"] for run in runs])
    assert distance(runs[0]["before"], runs[1]["before"]) > 1e-3, "in the middle of a period"
    model = make_model()
    model.load_state_dict(average)
    for run in runs:
        assert run["value"] == pytest.approx(loss(model, batch(9, 9)).item(), abs=1e-14)
        assert distance(run["during"], average) < 1e-15
        assert distance(run["end"], mean([run["after"][-1] for run in runs])) < 1e-15


def test_evaluation_does_not_disturb_training_unless_told_to(results):
    for rank in results:
        for resync in (False, True):
            whole = rank["undisturbed"]["trajectory"][6:]
            after = rank["evaluations"][resync]["after"]
            apart = [distance(a, b) for a, b in zip(whole, after, strict=True)]
            assert (max(apart) > 1e-4) == resync


def test_what_evaluation_and_checkpoints_send(results):
    model = 8 * sum(p.numel() for p in make_model().parameters())
    for rank in results:
        assert [rank["evaluations"][resync]["sent"] for resync in (False, True)] == [2 * model] * 2
        # Evaluated; saved, which after an evaluation with `resync=True` has AdamW's moments alone sent. Without, both
        # are sent; and with `exact_state=True` those of each rank as well.
        assert rank["states"][False]["post_localsgd"]["sent"] == (1 + 2) * model
        assert rank["states"][True]["post_localsgd"]["sent"] == (1 + 3 + 3) * model


def test_weights_of_one_rank_come_with_a_warning(results):
    for rank in results:
        assert any("wait_for_everyone()" in text for text in rank["undisturbed"]["warnings"])


def test_forward_of_evaluation_between_forward_and_backward_leaves_gradients_right(results):
    assert max(rank["within_a_step"] for rank in results) < 1e-15


@pytest.mark.parametrize("hook", ["post_localsgd", "diloco, delay"])
@pytest.mark.parametrize("exact", [False, True])
def test_resumed_from_the_middle_of_a_period(results, exact, hook):
    for rank in results:
        state = rank["states"][exact][hook]
        assert any(file.endswith("/lightning_commhooks.bin") for file in state["files"])
        apart = [distance(a, b) for a, b in zip(state["whole"], state["resumed"], strict=True)]
        assert max(apart) < (1e-300 if exact else 1e-12), apart


def test_checkpoint_has_averaged_weights(results, folder):
    saved = load_file(folder / "post_localsgd-True" / "model.safetensors")
    trajectories = [rank["undisturbed"]["trajectory"] for rank in results]
    assert distance(saved, mean([trajectory[5] for trajectory in trajectories])) < 1e-15


def test_checkpoint_in_a_single_process_evaluates_to_what_two_saw(results, folder, run_code):
    path = str(folder / "post_localsgd-True")
    stdout = run_code(f"import local_sgd_accelerate_runner as runner; print('value', runner.in_one_process({path!r}))")
    value = float(stdout.split("value")[1])
    for rank in results:
        assert rank["evaluations"][False]["value"] == pytest.approx(value, abs=1e-14)


def test_checkpoints_with_and_without_the_handler(results):
    for rank in results:
        assert rank["foreign_state"]["same"]
        assert any("no state of communication hooks" in text for text in rank["foreign_state"]["warnings"])


def test_file_that_one_rank_cannot_read_is_an_error_on_all(results):
    for rank in results:
        assert "is unreadable: " in rank["broken_on_one_rank"]
        assert "on rank 1" in rank["broken_on_one_rank"]


def test_optimizers_that_cannot_step_alone_are_refused_in_either_order(results):
    for rank in results:
        first, second = rank["refusals"]
        assert "PostLocalSGDOptimizer: it averages models itself" in first
        assert "ZeroRedundancyOptimizer: it keeps its state in shards" in second
