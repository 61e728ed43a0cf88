"""PowerSGD on gradients that PyTorch's hook turns into NaN: zero, cancelling, tiny, huge, infinite, unused."""

import functools

import pytest
import torch
from driver import (
    attached,
    backward,
    distance,
    full_rank_gradients,
    low_rank_gradients,
    mean_gradients,
    norm,
    outputs,
    residuals_of,
)

import lightning_commhooks as lc
from lightning_commhooks.collectives.in_memory import groups_in_memory, run_together
from lightning_commhooks.interface.bucket import Bucket, Slot

SHAPES = {"first": (24, 40), "bias": (40,), "second": (40, 24), "conv": (16, 8, 3, 3)}
HOOK = lc.PowerSGD(matrix_approximation_rank=2, start_powerSGD_iter=0)
BAD_STEPS, STEPS = 4, 8


def one_row(rank, step, shapes, dtype=torch.float32):
    gradients = full_rank_gradients(rank, step, shapes, dtype)
    for name, shape in shapes.items():
        if len(shape) > 1:
            gradients[name][1:] = 0
    return gradients


def rank_one(rank, step, shapes, dtype=torch.float32):
    return low_rank_gradients(rank, step, shapes, dtype, rows=1)


def scaled(factor):
    def make(rank, step, shapes, dtype=torch.float32):
        return {name: factor * g for name, g in low_rank_gradients(rank, step, shapes, dtype).items()}

    return make


def cancelling(rank, step, shapes, dtype=torch.float32):
    sign = 1 - 2 * (rank % 2)
    return {name: sign * g for name, g in full_rank_gradients(0, step, shapes, dtype).items()}


KINDS = {
    "zero": scaled(0.0),
    "cancelling": cancelling,
    "one_row": one_row,
    "rank_one": rank_one,
    "1e-30": scaled(1e-30),
    "1e20": scaled(1e20),
    "1e30": scaled(1e30),
}


def degenerate_first(kind):
    """Gradients of that kind in the first steps, of rank 2 and ordinary size later."""

    def make(rank, step, shapes, dtype=torch.float32):
        return (KINDS[kind] if step < BAD_STEPS else low_rank_gradients)(rank, step, shapes, dtype)

    return make


def degenerate_outputs(rank, world, kind, *args):
    return outputs(rank, world, HOOK, degenerate_first(kind), STEPS, SHAPES, *args)


@pytest.mark.parametrize(("kind", "world"), [(kind, 2) for kind in KINDS])
def test_finite_exact_and_learns_again(run, world, kind):
    make = degenerate_first(kind)
    for means, _, _ in run(degenerate_outputs, kind, world=world):
        for step, mean in enumerate(means):
            assert all(g.isfinite().all() for g in mean.values())
            expected = mean_gradients(make, world, step, SHAPES)
            size = max(norm(make(rank, step, SHAPES)) for rank in range(world))
            # After huge gradients what rounding left of them is still owed.
            owed = {"1e20": 1e20, "1e30": 1e30}.get(kind, 1e-30) if step >= BAD_STEPS else 0
            assert distance(mean, expected) <= 1e-4 * max(size, norm(means[0]), owed)
        if kind not in ("1e20", "1e30"):
            expected = mean_gradients(make, world, STEPS - 1, SHAPES)
            assert distance(means[-1], expected) <= 1e-3 * norm(expected)


def one_dead_parameter(rank, step, shapes, dtype=torch.float32):
    gradients = low_rank_gradients(rank, step, shapes, dtype)
    if step < BAD_STEPS:
        gradients["first"].zero_()
    return gradients


@pytest.mark.parametrize("epsilon", [0, 1e-6])
def test_parameter_that_was_zero_for_a_while_learns_again(run, epsilon):
    hook = lc.PowerSGD(matrix_approximation_rank=2, start_powerSGD_iter=0, orthogonalization_epsilon=epsilon)
    means = run(outputs, hook, one_dead_parameter, STEPS, SHAPES)[0][0]
    for step, mean in enumerate(means):
        expected = mean_gradients(one_dead_parameter, 2, step, SHAPES)
        assert distance(mean, expected) <= 1e-3 * norm(expected)
        assert step >= BAD_STEPS or not mean["first"].any()


def infinite(rank, world, hook, value, step_of_value=2):
    """Outputs and mean residuals; in one step the first element of each gradient of rank 1 is `value`."""
    with attached(hook, SHAPES, find_unused_parameters=True) as (ddp, attachment):
        means = []
        for step in range(STEPS):
            gradients = full_rank_gradients(rank, step, SHAPES)
            if step == step_of_value and rank == 1:
                for g in gradients.values():
                    g.view(-1)[0] = value
            means.append(backward(ddp, gradients))
        return means, residuals_of(attachment)


@pytest.mark.parametrize("hook", [HOOK, lc.BatchedPowerSGD(start_powerSGD_iter=0)], ids=lambda hook: hook.name)
@pytest.mark.parametrize(("value", "world"), [(float("inf"), 2), (float("nan"), 4)])
def test_one_infinite_step_poisons_nothing(run, world, hook, value):
    results = run(infinite, hook, value, world=world)
    means, residuals = results[0]
    assert not any(g.isfinite().all() for name, g in means[2].items() if name in residuals)
    steps = [step for step in range(STEPS) if step != 2]
    for name, residual in residuals.items():
        assert all(torch.equal(means[step][name], others[step][name]) for others, _ in results for step in steps)
        steps = range(3, STEPS)
        expected = sum(mean_gradients(full_rank_gradients, world, step, SHAPES)[name] for step in steps)
        received = sum(means[step][name].double() for step in steps) + residual
        assert received.isfinite().all()
        # What was owed before that step is forgotten; what came after it is paid or owed.
        torch.testing.assert_close(received, expected, rtol=1e-4, atol=1e-4)


def reduced_in_memory(group, hook, flats, slots, scale=1.0):
    """What a hook makes of one flat bucket of this rank after another, and its verdicts."""
    bound, found = hook.bind(group), []
    for step, flat in enumerate(flats):
        bucket = Bucket(flat.clone(), 0, True, step, slots, scale=scale)
        finite = yield from bound.reduce(bucket, group.for_bucket(1))
        bound.end_step(finite)
        found.append((bucket.flat, bool(finite)))
    return found


@pytest.mark.parametrize("size", [1e-300, 1e-200, 1e-160, 1e160, 1e200, 1e300])
@pytest.mark.parametrize("rank", [1, 2])
def test_float64_whose_squares_are_out_of_range(rank, size):
    left, right = torch.randn(2, 40, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    hook, slots = lc.PowerSGD(matrix_approximation_rank=rank, start_powerSGD_iter=0), (Slot("w", (24, 40), 0),)
    gradient = left[:24].outer(right).view(-1) * size
    works = [functools.partial(reduced_in_memory, group, hook, 3 * [gradient], slots) for group in groups_in_memory(2)]
    for found in run_together(works):
        for mean, finite in found:
            assert finite
            torch.testing.assert_close(mean / size, gradient / size, rtol=1e-12, atol=1e-12)


def test_float64_that_decays_does_not_explode():
    """Without gradients the residual shrinks, until its squares are out of range."""
    first = torch.randn(4 * 40, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    flats = [first, *200 * [torch.zeros_like(first)]]
    hook, slots = lc.PowerSGD(matrix_approximation_rank=1, start_powerSGD_iter=0), (Slot("w", (4, 40), 0),)
    works = [functools.partial(reduced_in_memory, group, hook, flats, slots) for group in groups_in_memory(2)]
    for found in run_together(works):
        assert max(mean.abs().max() for mean, _ in found) <= 2 * first.abs().max()


def test_float16_of_a_vector_fits_if_its_mean_does():
    hook, slots = lc.PowerSGD(start_powerSGD_iter=0), (Slot("w", (24, 40), 0), Slot("bias", (40,), 960))
    flats = [torch.full((1000,), 30_000.0 * (rank == 0), dtype=torch.float16) for rank in range(4)]
    works = [
        functools.partial(reduced_in_memory, group, hook, [flat], slots, scale=4.0)
        for group, flat in zip(groups_in_memory(4), flats, strict=True)
    ]
    for ((mean, finite),) in run_together(works):
        assert finite
        assert mean[960:].eq(30_000).all()


def without_first_row_and_column(rank, step, shapes, dtype=torch.float32):
    """Nothing in the first step; then always the same matrix of rank 1, to which an arbitrary basis is orthogonal."""
    left, right = torch.arange(24.0), torch.arange(40.0)
    return {"first": (left.view(-1, 1) * right * (step > 0)).to(dtype)}


def test_a_factor_that_was_zero_is_drawn_anew(run):
    hook = lc.PowerSGD(matrix_approximation_rank=1, start_powerSGD_iter=0)
    for means, _, _ in run(outputs, hook, without_first_row_and_column, 3, {"first": (24, 40)}):
        for step in (1, 2):
            expected = mean_gradients(without_first_row_and_column, 2, step, {"first": (24, 40)})
            assert distance(means[step], expected) <= 1e-5 * norm(expected)
