"""Codecs in other methods: factors of PowerSGD in 8 bit, moves of DiLoCo in 8 and 4."""

import math

import pytest
import torch
from codec_reference import encoded_bytes
from driver import (
    SHAPES,
    attached,
    backward,
    distance,
    full_rank_gradients,
    low_rank_gradients,
    mean_gradients,
    mean_residuals,
    norm,
    outputs,
)
from local_sgd_driver import copied, local
from local_sgd_reference import Simulation
from test_local_sgd import OUTER, batch, loss, make_model

import lightning_commhooks as lc

OPTIONS = {"start_powerSGD_iter": 0, "matrix_approximation_rank": 2}
POWERSGD, BATCHED = lc.PowerSGD(**OPTIONS), lc.BatchedPowerSGD(**OPTIONS)
ONE_BUCKET = {"bucket_cap_mb": 25}


def test_only_hooks_that_send_factors_can_have_them_in_8_bit():
    for hook in ("allreduce", "bf16", "int8", "post_localsgd", lc.Schedule({0: "bf16", 5: "fp16"})):
        with pytest.raises(ValueError, match=r"dtype='int8' is for hooks that send factors.* use hook='int8'"):
            lc.Cast(hook, "int8")
    for hook in ("powersgd", BATCHED, lc.Schedule({0: "bf16", 5: POWERSGD}), lc.PerParameter({"*": POWERSGD})):
        lc.Cast(hook, "int8")
    with pytest.raises(ValueError, match=r"dtype must be one of \['bf16', 'fp16', 'int8'\], got 'int4'"):
        lc.Cast("powersgd", "int4")


LARGE = {"a": (300, 200), "b": (200, 300), "bias": (500,)}


def several(rank, world, hooks, shapes, dtype, steps, options):
    """Means, mean of what is owed, and metrics, by hook."""
    results = []
    for hook in hooks:
        means, state, metrics = outputs(rank, world, hook, low_rank_gradients, steps, shapes, dtype, options)
        results.append((means, mean_residuals(state, shapes), metrics))
    return results


def test_factors_have_a_quarter_of_the_bytes(run):
    hooks = [hook if not dtype else lc.Cast(hook, dtype) for hook in (POWERSGD, BATCHED) for dtype in ("", "int8")]
    ring = 2 * (4 - 1) / 4
    results = run(several, hooks, LARGE, torch.float32, 2, ONE_BUCKET, world=4)[0]
    for i, dense in ((0, 500), (2, 0)):
        plain, mine = (results[k][2]["bytes_sent"] / 2 for k in (i, i + 1))
        factors = plain - ring * 4 * dense
        # 132 bytes for 128 factors, each of P and Q filled up to whole blocks, and all of them for each rank.
        assert 0 <= mine - ring * 4 * dense - factors / 4 * 132 / 128 <= ring * (2 * 4 + 4) * 132


def test_powersgd_with_factors_in_8_bit_is_close_and_loses_nothing(run):
    hooks = [lc.Cast(POWERSGD, "int8"), lc.Cast(BATCHED, "int8"), POWERSGD]
    for make in (low_rank_gradients, full_rank_gradients):
        expected = [mean_gradients(make, 4, t, SHAPES) for t in range(5)]
        total = {name: sum(mean[name] for mean in expected) for name in SHAPES}
        results = [run(outputs, hook, make, 5, world=4) for hook in hooks]
        for hook, ranks in zip(hooks, results, strict=True):
            for means, _, _ in ranks[1:]:
                assert distance(means[-1], ranks[0][0][-1]) == 0
            means, state, _ = ranks[0]
            owed = mean_residuals(state, SHAPES)
            went = {name: owed[name] + sum(mean[name].double() for mean in means) for name in SHAPES}
            assert distance(went, total) <= 1e-6 * sum(norm(mean) for mean in expected), hook
        if make is low_rank_gradients:
            encoded, plain = results[0][0][0], results[2][0][0]
            for step in range(5):
                assert 1e-5 * norm(plain[step]) < distance(encoded[step], plain[step]) <= 0.05 * norm(plain[step])


def large_gradients(rank, step):
    """So large that a flag beside them in a block would be rounded to zero."""
    return {name: 1e4 * gradient for name, gradient in full_rank_gradients(rank, step, SHAPES).items()}


def unused(rank, world):
    """What came and went when a parameter is used by nobody, or by one rank alone; and what it was owed meanwhile."""
    sent, received, owed = dict.fromkeys(SHAPES, 0), dict.fromkeys(SHAPES, 0), []
    with attached(lc.Cast(POWERSGD, "int8"), find_unused_parameters=True, **ONE_BUCKET) as (ddp, attachment):
        for step in range(6):
            users = {2: [], 3: [world - 1]}.get(step, range(world))
            gradients = large_gradients(rank, step)
            mean = backward(ddp, {n: g for n, g in gradients.items() if n != "second" or rank in users})
            for name in SHAPES:
                received[name] = received[name] + mean.get(name, torch.zeros(())).double()
                ranks = users if name == "second" else range(world)
                sent[name] = sent[name] + sum(large_gradients(r, step)[name].double() for r in ranks) / world
            owed.append(mean_residuals(attachment.state_dict(), SHAPES))
    return {name: received[name] + owed[-1][name] for name in SHAPES}, sent, [own["second"] for own in owed]


def test_unused_parameters_lose_nothing(run):
    for received, sent, owed in run(unused, world=4):
        assert distance(received, sent) <= 1e-6 * norm(sent)
        assert (owed[2] - owed[1]).norm() <= 1e-6 * owed[1].norm()
        assert (owed[3] - owed[2]).norm() >= 0.1 * owed[2].norm()


# The model has not many parameters.
SMALL = {"block_size": 8, "compress_1d": True, "min_bytes": 0, "use_error_feedback": False}
SMALL_BLOCKS = {"int8": lc.Int8(**SMALL), "int4": lc.Int4(**SMALL)}


def train(rank, world, hook, steps):
    """Parameters after each step of SGD."""
    model, trajectory = make_model(), []
    with local(model, hook, optimizers=[]) as (ddp, attachment):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for step in range(steps):
            ddp.zero_grad()
            loss(ddp, batch(rank, step, "both"), "both").backward()
            optimizer.step()
            attachment.after_optimizer_step(optimizer)
            trajectory.append(copied(model.named_parameters()))
        return trajectory, attachment.metrics()


def simulate(world, steps):
    """Parameters of all ranks after each step, moves being sent as they are."""
    simulation = Simulation(
        make_model(),
        world,
        lambda m: [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9)],
        loss,
        periods={4: world},
        outer=OUTER,
    )
    trajectory = []
    for step in range(steps):
        simulation.backward([[batch(rank, step, "both")] for rank in range(world)], "both")
        simulation.step(0)
        trajectory.append([copied(model.named_parameters()) for model in simulation.models])
    return trajectory


@pytest.mark.parametrize(("name", "world"), [("int8", 2), ("int4", 4)])
def test_diloco_sends_moves_encoded(run, world, name):
    encoding, codec = SMALL_BLOCKS[name], SMALL_BLOCKS[name].codec
    hook = lc.DiLoCo(period=4, pseudo_gradient=encoding, post_local_gradient_allreduce=False)
    results = run(train, hook, 8, world=world)
    expected = simulate(world, 8)
    start = copied(make_model().named_parameters())
    for step in range(3):
        for rank, (trajectory, _) in enumerate(results):
            assert all((trajectory[step][n] - p).abs().max() <= 1e-12 for n, p in expected[step][rank].items())
    for trajectory, _ in results[1:]:
        for step in (3, 7):
            assert all(torch.equal(p, results[0][0][step][n]) for n, p in trajectory[step].items())
        assert not all(torch.equal(p, results[0][0][6][n]) for n, p in trajectory[6].items())
    # The first outer step, without momentum of an earlier one, moves by lr (1 + momentum) times the mean of the moves.
    # Before it ranks are where the simulation's are, and each of their moves has an error up to the codec's bound.
    flat = [torch.cat([(start[n] - results[rank][0][2][n]).view(-1) for n in start]) for rank in range(world)]
    moved = max(move.abs().max() for move in flat)
    gain = OUTER["lr"] * (1 + OUTER["momentum"])
    level = moved * (1 / 127 if name == "int8" else 1 / 7)
    differences = torch.cat([(results[0][0][3][n] - p).view(-1) for n, p in expected[3][0].items()])
    assert 1e-8 < differences.abs().max() <= 2 * gain * level
    numels = [p.numel() for p in start.values()]
    blocks = sum(-(-numel // codec.block_size) for numel in numels if numel >= codec.block_size)
    small = sum(numel for numel in numels if numel < codec.block_size)
    blocks = blocks if world == 2 else math.ceil(blocks / world) * world
    start_bytes = next(iter(start.values())).element_size()
    for _, metrics in results:
        sent = 2 * (world - 1) / world * (encoded_bytes(codec, blocks * codec.block_size) + small * start_bytes)
        # Twice; and something for agreeing on what is averaged.
        assert 2 * sent <= metrics["bytes_sent"] <= 2 * sent + 1000
