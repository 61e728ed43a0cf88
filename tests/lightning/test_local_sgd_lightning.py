"""Local SGD with the real `Trainer`: trajectories against the float64 simulation."""

import functools

import pytest

pytest.importorskip("lightning")

import local_sgd_tasks as tasks
import torch
from forks import FOLDER, ROOT
from local_sgd_reference import Simulation
from test_lightning import launch as launch_runner

launch = functools.partial(launch_runner, runner=FOLDER / "local_sgd_lightning_runner.py")
OUTER = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
OPTIONS = {
    "post": {"periods": {4: 2}},
    "warmup": {"periods": {3: 2}, "warmup": 5},
    "hierarchical": {"periods": {2: 2, 4: 4}},
    "diloco": {"periods": {4: 2}, "outer": OUTER},
    "beside": {"periods": {4: 2}, "outer": OUTER, "fragments": 2, "delay": 2, "mixing": 0.5},
    "short": {"periods": {3: 2}},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return launch(tmp_path_factory.mktemp("trained"), "auto", "gan", "overflows", "costs")


def assert_close(mine, theirs, what, tolerance=1e-12):
    difference = (torch.tensor(mine, dtype=torch.float64) - torch.tensor(theirs, dtype=torch.float64)).abs().max()
    assert difference <= tolerance, f"{what}: {difference}"


def assert_same_trajectory(results, label, expected, world=2):
    """Steps of each rank as simulated, and the mean of the last ones on all ranks at the end."""
    for rank in range(world):
        states = results(f"{label}-trajectory", rank)["after"]
        assert len(states) == len(expected)
        for step, (mine, theirs) in enumerate(zip(states, expected, strict=True)):
            assert_close(mine, theirs[rank], f"{label}, step {step}, rank {rank}")
        mean = torch.tensor(expected[-1], dtype=torch.float64).mean(dim=0).tolist()
        assert_close(results(label, rank)["params"], mean, f"{label}, end, rank {rank}")
        assert results(label, rank)["params"] == results(label)["params"]
    assert any(theirs[0] != theirs[1] for theirs in expected), "ranks never stepped alone"


def simulate_regression(options, *, batches, epochs=1, window=1, clip=None, world=2):
    """Parameters of all ranks after each batch."""
    simulation = Simulation(
        tasks.Regression(), world, lambda m: [tasks.make_optimizer(m)], tasks.Regression.loss, **options
    )
    data = tasks.rows(batches * world)
    trajectory = []
    for _ in range(epochs):
        for first in range(0, batches, window):
            numbers = range(first, min(first + window, batches))
            for _ in numbers[:-1]:
                trajectory.append([tasks.flat(m) for m in simulation.models])
            micro_batches = [[tasks.batch_of(data, rank, world, k) for k in numbers] for rank in range(world)]
            # Lightning divides the loss by the length of a whole window, also in a shorter one.
            simulation.backward(micro_batches, len(numbers) / window)
            if clip is not None:
                norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), clip) for m in simulation.models]
                assert all(norm > clip for norm in norms)
            simulation.step(0)
            trajectory.append([tasks.flat(m) for m in simulation.models])
    return trajectory


@pytest.mark.parametrize("name", ["post", "beside"])
def test_automatic_optimization(trained, name):
    assert_same_trajectory(trained, f"auto-{name}", simulate_regression(OPTIONS[name], batches=14))


def test_accumulation_counts_optimizer_steps(trained):
    expected = simulate_regression(OPTIONS["post"], batches=8, epochs=4, window=3)
    assert_same_trajectory(trained, "auto-accumulate", expected)
    assert trained("auto-accumulate")["metrics"]["averagings"] == 3  # in 12 steps


def test_gradient_clipping_is_each_ranks_own(trained):
    assert_same_trajectory(trained, "auto-clip", simulate_regression(OPTIONS["post"], batches=14, clip=0.1))


def simulate_gan(options, batches, world=2, overflows=()):
    """Parameters of all ranks after each step of an optimizer, those included that a scaler skips."""
    simulation = Simulation(tasks.Pair(), world, tasks.make_optimizers, tasks.Pair.loss, **options)
    data = tasks.rows(batches * world)
    trajectory = []
    for number, (k, part, i) in enumerate(tasks.schedule(batches)):
        simulation.backward([[tasks.batch_of(data, rank, world, k)] for rank in range(world)], part)
        if number not in overflows:
            simulation.step(i)
        trajectory.append([tasks.flat(m) for m in simulation.models])
    return trajectory


@pytest.mark.parametrize("name", ["post", "warmup", "diloco"], ids=["post-wrapped", "warmup-raw", "diloco-toggled"])
def test_each_optimizer_counts_its_own_steps(trained, name):
    assert_same_trajectory(trained, f"gan-{name}", simulate_gan(OPTIONS[name], 18))


def split(states):
    """`(discriminator, generator)` of each state."""
    size = sum(p.numel() for p in tasks.Pair().generator.parameters())
    return [(state[size:], state[:size]) for state in states]


def assert_in_phase(results, label, batches, period, warmup=0, overflows=()):
    """After each period of an optimizer its network is the same on both ranks, bit by bit, and at no other time."""
    mine, theirs = (split(results(f"{label}-trajectory", rank)["after"]) for rank in (0, 1))
    taken, num_steps = [0, 0], [0, 0]
    for number, (_, _, i) in enumerate(tasks.schedule(batches)):
        is_local = any(num_steps) or min(taken) >= warmup
        taken[i] += number not in overflows
        num_steps[i] += is_local and number not in overflows
        for part in (0, 1):
            is_same = mine[number][part] == theirs[number][part]
            assert is_same == (num_steps[part] % period == 0), f"step {number}, network {part}"
    assert min(num_steps) >= 2 * period


def test_networks_are_equal_after_each_period_of_their_own_optimizer(trained):
    assert_in_phase(trained, "gan-post", 18, 4)
    assert_in_phase(trained, "gan-warmup", 18, 3, warmup=5)
    assert_in_phase(trained, "gan-diloco", 18, 4)


def skipped_steps(style, overflows, batches):
    """Those that all ranks skip: with "wrapped", also the generator's while the discriminator's gradients are bad.

    The generator's backward adds to the gradients of the discriminator, which clears them before its own step only.
    """
    skipped, is_left_over = [], False
    for number, (_, part, _) in enumerate(tasks.schedule(batches)):
        is_bad = number in overflows or (part == "generator" and is_left_over)
        is_left_over = is_bad and style == "wrapped"
        skipped += [number] if is_bad else []
    return tuple(skipped)


@pytest.mark.parametrize("style", ["wrapped", "toggled", "zeroed"])
def test_overflow_on_one_rank_keeps_phase_and_scale(trained, style):
    overflows = skipped_steps(style, (5, 9, 10, 16), 18)
    assert len(overflows) == (6 if style == "wrapped" else 4)
    assert_same_trajectory(trained, f"overflows-{style}", simulate_gan(OPTIONS["short"], 18, overflows=overflows))
    assert_in_phase(trained, f"overflows-{style}", 18, 3, overflows=overflows)
    scale, growth = 2.0**10, 0
    for number in range(len(list(tasks.schedule(18)))):
        growth = 0 if number in overflows else growth + 1
        scale = scale / 2 if number in overflows else scale
        if growth == 6:
            scale, growth = 2 * scale, 0
    label = f"overflows-{style}-scale"
    assert trained(label) == trained(label, 1) == {"scale": scale}


def test_standalone_package(tmp_path):
    pytest.importorskip("pytorch_lightning")
    results = launch(tmp_path, "validation", package="pytorch_lightning")
    assert results.both("validated")["strategy"] == "CompressedDDPStrategyPL"
    assert_same_trajectory(results, "validated", simulate_regression(OPTIONS["post"], batches=5))
    own = [results("validated-trajectory", rank)["after"][2] for rank in (0, 1)]
    assert_close(results("validating")["model"], torch.tensor(own, dtype=torch.float64).mean(dim=0).tolist(), "average")


@pytest.mark.parametrize(
    ("label", "every", "row"),
    [
        ("post-3", 3, "| every 3 steps | 2.8 kB | 19.8 kB |"),
        ("post-4", 4, "| every 4 steps | 2.8 kB | 11.1 kB, all of it AdamW's state |"),
        ("averaged-4", 4, '| every 4 steps, `optimizer_state="average"` | 7.5 kB | 0 |'),
    ],
)
def test_what_evaluation_and_checkpoints_send(trained, label, every, row):
    """In 12 steps with averages after 4, 8 and 12: saved, validated, and saved within that."""
    model = 8 * len(trained(f"costs-{label}")["params"])
    whole, moments = model + 8 * 16, 2 * model  # with the statistics of BatchNorm
    times = 2 * (12 // every)
    # What was just averaged is not sent. The optimizer's state is also sent at the end.
    sent = {3: (times - 2) * whole + (times + 1) * moments, 4: (times + 1) * moments}[every]
    training = 3 * whole + (3 * moments if label == "averaged-4" else 0)
    for rank in (0, 1):
        metrics = trained(f"costs-{label}", rank)["metrics"]
        assert metrics["bytes_sent"] == training
        assert metrics["bytes_evaluation"] == (0 if label == "averaged-4" else sent)
    assert row in (ROOT / "docs" / "local_sgd.md").read_text()
    assert row.split(" | ")[1:2] == [f"{training / 1000:.1f} kB"]
    assert label == "averaged-4" or f" {sent / 1000:.1f} kB" in row


def test_sigterm_ends_all_ranks_after_the_next_average(tmp_path):
    results = launch(tmp_path, "sigterm")
    for label in ("sigterm-first", "sigterm-second", "sigterm-all"):
        for rank in (0, 1):
            ended = results(label, rank)
            assert (ended["steps"], ended["error"]) == (8, "SIGTERMException"), (label, rank)


def test_no_waiting_for_rank_0_in_local_steps(tmp_path):
    results = launch(tmp_path, "waits", "pickled")
    # Before the first of 16 batches, and after each average but the one after the last batch.
    assert results("post-calls")["calls"] == [1] * 4
    # Before each of five batches of warm-up, and after the averages of eight, eleven and fourteen batches.
    assert results("warmup-calls")["calls"] == [1] * (5 + 3)
    assert results("post-calls")["left"] == []
    assert results("pickled")["name"] == "_broadcast_sigterm_tensor"
