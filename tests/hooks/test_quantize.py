"""`quantize_per_tensor` and `quantize_per_channel` against PyTorch's hooks, which do not run on gloo."""

import warnings

import pytest
import torch
from driver import attached, backward
from torch.distributed.algorithms.ddp_comm_hooks import quantization_hooks as stock

import lightning_commhooks as lc

SHAPES = {"weight": (41, 77)}
NUMEL = 41 * 77
SIZE = 512


def gradient(rank, scale):
    """Not around 0, and on one rank without 0 in its range."""
    return scale * (
        torch.randn(SHAPES["weight"], generator=torch.Generator().manual_seed(rank)) + (10 if rank == 1 else 0.5)
    )


def observed(observer, tensor):
    """What PyTorch's observer gives: scale and zero point."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated
        observer = getattr(torch.ao.quantization, observer)()
        observer(tensor)
        return observer.calculate_qparams()


def stock_mean(world, scale, per_channel):
    """What the ranks of PyTorch's hook compute, and the largest level of each number."""
    total, levels = torch.zeros(NUMEL), torch.zeros(NUMEL)
    for rank in range(world):
        flat = gradient(rank, scale).view(-1)
        if per_channel:
            rows = torch.nn.functional.pad(flat, (0, SIZE - NUMEL % SIZE)).view(-1, SIZE)
            s, z = observed("PerChannelMinMaxObserver", rows)
            decoded = stock._dequantize_per_channel_backend(stock._quantize_per_channel_backend(rows, s, z), s, z)
            decoded, level = decoded.view(-1)[:NUMEL], s.repeat_interleave(SIZE)[:NUMEL]
        else:
            s, z = observed("MinMaxObserver", flat)
            decoded = stock._dequantize_per_tensor_backend(stock._quantize_per_tensor_backend(flat, s, z), s, z)
            level = s
        total += decoded
        levels = torch.maximum(levels, level)
    return total / world, levels


def average(rank, world, hooks, scale):
    """Mean and bytes sent, by hook."""
    results = []
    for hook in hooks:
        with attached(hook, SHAPES, bucket_cap_mb=25) as (ddp, attachment):
            mean = backward(ddp, {"weight": gradient(rank, scale)})["weight"]
            results.append((mean.view(-1), attachment.metrics()))
    return results


def expected_bytes(world, per_channel, protocol):
    num_blocks, block_bytes = (7, 8 + SIZE) if per_channel else (1, 8 + NUMEL)
    if protocol == "all_gather" or world == 2:
        return (world - 1) * num_blocks * block_bytes
    # Each rank owns as many blocks, or a part of the only one.
    share = -(-num_blocks // world) * block_bytes if per_channel else 8 + -(-NUMEL // world)
    return 2 * (world - 1) * share


@pytest.mark.parametrize(("scale", "world"), [(1.0, 2), (1.0, 4), (1e-9, 4)])
def test_as_pytorchs_hooks(run, world, scale):
    if not hasattr(torch.ao.quantization, "PerChannelMinMaxObserver"):
        pytest.skip("this PyTorch has no observers")
    variants = [(per_channel, protocol) for per_channel in (False, True) for protocol in ("two_shot", "all_gather")]
    hooks = [
        (lc.QuantizePerChannel if kind else lc.QuantizePerTensor)(protocol=protocol) for kind, protocol in variants
    ]
    results = run(average, hooks, scale, world=world)
    exact = sum(gradient(rank, 1.0) for rank in range(world)).view(-1) / world
    for i, (per_channel, protocol) in enumerate(variants):
        mean, metrics = results[0][i]
        assert all(torch.equal(mean, other[i][0]) for other in results[1:])
        expected, level = stock_mean(world, 1.0, per_channel)
        errors = (mean / scale - expected).abs()
        assert (errors <= level * 1.001).all(), hooks[i]
        assert ((mean / scale - exact).abs() <= 2 * level).all(), hooks[i]
        if protocol == "all_gather" or world == 2:
            # Where a number is in the middle between two levels, it may be rounded to the other one, after it was
            # multiplied by 1e-9.
            assert (errors <= 1e-5).sum() >= NUMEL * (1 if scale == 1 else 0.99), hooks[i]
        assert metrics["bytes_sent"] == expected_bytes(world, per_channel, protocol)
        assert metrics["numel_compressed"] == NUMEL


def test_small_gradients_are_zeros_in_pytorchs_hooks_only():
    for per_channel in (False, True):
        assert not stock_mean(2, 1e-9, per_channel)[0].any()


def test_options_are_validated():
    for make, field, value, allowed in [
        (lc.QuantizePerTensor, "protocol", "ring", r"one of \('two_shot', 'all_gather'\)"),
        (lc.QuantizePerChannel, "protocol", None, r"one of \('two_shot', 'all_gather'\)"),
        *[(lc.QuantizePerChannel, "bucket_size", value, "positive multiple of 4") for value in (0, 6, "8", None)],
    ]:
        with pytest.raises(ValueError, match=f"{field} must be .*{allowed}.*, got {value!r}"):
            make(**{field: value})
