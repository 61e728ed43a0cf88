"""Batched PowerSGD against a plain float64 reference."""

import pytest
import torch
from driver import SHAPES, attached, backward, distance, full_rank_gradients, mean_gradients, mean_residuals, norm
from reference import batched_powersgd

import lightning_commhooks as lc


def with_buckets(rank, world, hook, steps):
    # With find_unused_parameters DDP keeps its buckets.
    with attached(hook, dtype=torch.float64, find_unused_parameters=True) as (ddp, attachment):
        means = [backward(ddp, full_rank_gradients(rank, step, SHAPES, torch.float64)) for step in range(steps)]
        return means, list(attachment.bound.plans), attachment.compression_stats()


@pytest.mark.parametrize("matrix_rank", [1, 3])
@pytest.mark.parametrize("feedback", [False, True], ids=["no_feedback", "feedback"])
@pytest.mark.parametrize(("start", "world"), [("cold", 2), ("warm", 4), ("half", 2)])
def test_equal_to_reference(run, world, matrix_rank, feedback, start):
    hook = lc.BatchedPowerSGD(
        matrix_approximation_rank=matrix_rank,
        start_powerSGD_iter=1,
        use_error_feedback=feedback,
        warm_start=start != "cold",
        num_iters_per_step=1 if start == "half" else 2,
    )
    results = run(with_buckets, hook, 6, world=world)
    buckets = results[0][1]
    assert sorted(name for names in buckets for name in names) == sorted(SHAPES)
    expected = batched_powersgd(hook, full_rank_gradients, world, 6, SHAPES, buckets)
    for means, _, (rate, before, after) in results:
        for a, b in zip(means, expected, strict=True):
            assert distance(a, b) <= 1e-9 * norm(b)
        numel = sum(torch.Size(shape).numel() for shape in SHAPES.values())
        assert before == 5 * numel
        assert rate == before / after
        sides = [sum(torch.Size(SHAPES[name]).numel() for name in names) ** 0.5 for names in buckets]
        assert after == 5 * hook.num_iters_per_step * sum(
            (-(-side // 1)) * min(matrix_rank, -(-side // 1)) for side in sides
        )


def of_shapes(rank, world, shapes):
    """What is missing of the gradients of some steps: what was sent and what is owed are all of them."""
    hook = lc.BatchedPowerSGD(start_powerSGD_iter=0)
    with attached(hook, shapes, find_unused_parameters=True) as (ddp, attachment):
        means = [backward(ddp, full_rank_gradients(rank, step, shapes)) for step in range(3)]
        owed = mean_residuals(attachment.state_dict(), shapes)
        assert attachment.residual_norm() > 0
    produced = [mean_gradients(full_rank_gradients, world, step, shapes) for step in range(3)]
    return [
        (sum(mean[name].double() for mean in means) + owed[name] - sum(mean[name] for mean in produced)).norm().item()
        for name in shapes
    ]


@pytest.mark.parametrize(
    "shapes",
    [{"a": (9, 4)}, {"a": (16,)}, {"a": (4, 4), "b": (0, 3)}, {"a": (4, 4)}],
    ids=str,
)
def test_buckets_that_fill_a_square(run, shapes):
    for missing in run(of_shapes, shapes):
        assert max(missing) <= 1e-5
