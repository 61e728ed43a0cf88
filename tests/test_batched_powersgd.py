"""Batched PowerSGD against a plain float64 reference."""

import pytest
import torch
from driver import SHAPES, attached, backward, distance, full_rank_gradients, norm
from reference import batched_powersgd

import lightning_commhooks as lc


def with_buckets(rank, world, hook, steps):
    # With find_unused_parameters DDP keeps its buckets.
    with attached(hook, dtype=torch.float64, find_unused_parameters=True) as (ddp, attachment):
        means = [backward(ddp, full_rank_gradients(rank, step, SHAPES, torch.float64)) for step in range(steps)]
        return means, list(attachment.bound._plans), attachment.compression_stats()


@pytest.mark.parametrize("matrix_rank", [1, 3])
@pytest.mark.parametrize("feedback", [False, True], ids=["no_feedback", "feedback"])
@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_equal_to_reference(run, world, matrix_rank, feedback, warm):
    if world == 4 and not (feedback and warm):
        pytest.skip("2 ranks suffice")
    hook = lc.BatchedPowerSGD(
        matrix_approximation_rank=matrix_rank, start_powerSGD_iter=1, use_error_feedback=feedback, warm_start=warm
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
        assert after == 5 * sum(2 * (-(-side // 1)) * min(matrix_rank, -(-side // 1)) for side in sides)
