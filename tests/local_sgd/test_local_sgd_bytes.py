"""What local SGD sends at each step; DiLoCo in 16 bit."""

import pytest
import torch
from local_sgd_driver import (
    ALONE,
    local,
    one_step,
    params,
    put,
    zero_lr,
)
from test_local_sgd import parameters

import lightning_commhooks as lc

SHAPES = dict.fromkeys("abcdefgh", (5, 4))
NUM_BYTES = 8 * 20 * 4


def sent(rank, world, hook, steps):
    """Bytes and collectives of each step."""
    model, gradients = params(SHAPES, torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    costs, previous = [], (0, 0)
    with local(model, hook, [optimizer]) as (ddp, attachment):
        for _ in range(steps):
            one_step(ddp, optimizer, {name: (rank + 1) * g for name, g in gradients.items()})
            now = tuple(attachment.metrics()[key] for key in ("bytes_sent", "collectives"))
            costs.append(tuple(a - b for a, b in zip(now, previous, strict=True)))
            previous = now
    return costs


def ring(world, num_bytes=NUM_BYTES):
    return 2 * (world - 1) / world * num_bytes


WARM_UP = {"start_localSGD_iter": 100, "post_local_gradient_allreduce": False}
SENT = {
    "post": (lc.PostLocalSGD(period=3, **ALONE), [(0, 0), (0, 0), (ring(4), 1)] * 2),
    "hierarchical": (
        lc.HierarchicalLocalSGD(period_group_size_dict={2: 2, 6: 4}, **ALONE),
        [(0, 0), (ring(2), 1), (0, 0), (ring(2), 1), (0, 0), (ring(4), 1)],
    ),
    "diloco": (lc.DiLoCo(period=3, **{**ALONE}), [(0, 0), (0, 0), (ring(4), 1)] * 2),
    "diloco_bf16": (
        lc.DiLoCo(period=3, pseudo_gradient="bf16", **ALONE),
        [(0, 0), (0, 0), (ring(4, NUM_BYTES / 2), 2)] * 2,
    ),
    "diloco_fragments": (lc.DiLoCo(period=4, fragments=4, **ALONE), [(ring(4, NUM_BYTES / 4), 1)] * 8),
    "diloco_two_fragments": (
        lc.DiLoCo(period=4, fragments=2, **ALONE),
        [(0, 0), (ring(4, NUM_BYTES / 2), 1)] * 4,
    ),
    "cast": (lc.Cast(lc.PostLocalSGD(period=3, **ALONE), "bf16"), [(0, 0), (0, 0), (ring(4), 1)] * 2),
}


@pytest.mark.parametrize("case", SENT)
def test_what_is_sent_at_each_step(run, case):
    hook, expected = SENT[case]
    assert run(sent, hook, len(expected), world=4) == [expected] * 4


def outer_step(rank, world, pseudo_gradient):
    """Values before and after two outer steps."""
    shapes = {"a": (5, 3), "b": (64,)}
    model, gradients = params(shapes, torch.float32)
    optimizer = zero_lr(model)
    hook = lc.DiLoCo(period=1, pseudo_gradient=pseudo_gradient, **ALONE)
    moves, values = [], []
    with local(model, hook, [optimizer]) as (ddp, _):
        for step in range(2):
            ddp(gradients).backward()
            generator = torch.Generator().manual_seed(10 * step + rank)
            move = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
            put(model, {name: p.detach() + move[name] for name, p in model.named_parameters()})
            optimizer.step()
            moves.append(move)
            values.append(parameters(model))
    return moves, values


def test_pseudo_gradient_in_bf16_is_off_by_its_rounding(run):
    results, exact = run(outer_step, "bf16", world=4), run(outer_step, "fp32", world=4)[0][1]
    bound = dict.fromkeys(exact[0], 0.0)
    for step in range(2):
        for name, value in results[0][1][step].items():
            assert all(torch.equal(value, values[step][name]) for _, values in results)
            # Each move is rounded once and their mean once more; 0.7 * (1 + 0.9 + 0.9**2) is what becomes of the first.
            sizes = sum(moves[step][name].abs() for moves, _ in results) / 4
            bound[name] = bound[name] + 0.7 * (1 + 0.9 + 0.9**2) * 2 * 2.0**-8 * 1.01 * sizes
            error = (value - exact[step][name]).abs()
            assert (error <= bound[name] + 1e-6).all()
            assert error.max() > 1e-5
