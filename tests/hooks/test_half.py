"""16-bit averaging: no overflow, small numbers kept, and one rounding with accumulate_dtype."""

import pytest
import torch
from driver import attached, backward, distance, full_rank_gradients, mean_gradients, norm, outputs

import lightning_commhooks as lc

SHAPES = {"matrix": (24, 40), "vector": (7,)}


def constant(value):
    def make(rank, step, shapes, dtype=torch.float32):
        return {name: torch.full(shape, value, dtype=dtype) for name, shape in shapes.items()}

    return make


def constant_outputs(rank, world, hook, value, of_one=False):
    """The mean of gradients that are `value` on all ranks, or on one what makes up the mean, beyond float16."""
    own = value if not of_one else world * value if rank == 0 else 0.0
    return outputs(rank, world, hook, constant(own), 1, SHAPES)[0][0]


@pytest.mark.parametrize(("value", "of_one"), [(1e-6, False), (6e4, False), (5e4, True)])
@pytest.mark.parametrize("hook", [lc.FP16(), lc.FP16(accumulate_dtype="float32"), lc.BF16()], ids=repr)
def test_no_overflow_and_no_underflow(run, hook, value, of_one):
    for mean in run(constant_outputs, hook, value, of_one, world=4):
        for g in mean.values():
            torch.testing.assert_close(g, torch.full_like(g, value), rtol=0.07 if value < 1e-5 else 0.01, atol=0)


@pytest.mark.parametrize("value", [1e30, -1e-30])
def test_bfloat16_has_the_range_of_float32(run, value):
    for mean in run(constant_outputs, lc.BF16(), value):
        assert all(((g / value - 1).abs() < 0.01).all() for g in mean.values())


def full_rank_outputs(rank, world, hook):
    return outputs(rank, world, hook, full_rank_gradients, 1, SHAPES)[0][0]


@pytest.mark.parametrize(("hook_class", "unit"), [(lc.FP16, 2**-11), (lc.BF16, 2**-8)])
def test_sums_in_float32_round_less(run, hook_class, unit):
    expected = mean_gradients(full_rank_gradients, 4, 0, SHAPES)
    plain, accumulated = (
        distance(run(full_rank_outputs, hook, world=4)[0], expected) / norm(expected)
        for hook in (hook_class(), hook_class(accumulate_dtype="float32"))
    )
    assert accumulated < plain < 4 * unit
    assert accumulated < unit


@pytest.mark.parametrize("hook_class", [lc.FP16, lc.BF16])
@pytest.mark.parametrize("value", ["float64", torch.float32, True])
def test_accumulate_dtype_is_validated(hook_class, value):
    with pytest.raises(ValueError, match="accumulate_dtype must be None or 'float32', got"):
        hook_class(accumulate_dtype=value)


def _closing_text(rank, world, hook, dtype):
    with attached(hook, SHAPES, dtype) as (ddp, attachment):
        backward(ddp, full_rank_gradients(rank, 0, SHAPES, dtype))
        return attachment.bound.inactive_reason(1)


@pytest.mark.parametrize("label", ["fp16", "bf16"])
def test_gradients_that_are_in_16_bit_already_are_the_reason(run, label):
    for dtype in (torch.float16, torch.bfloat16):
        text = f"hook='{label}' compresses nothing, gradients are in 16 bit already; use hook='int8'"
        assert run(_closing_text, lc.get_hook(label), dtype) == [text] * 2
    assert run(_closing_text, lc.get_hook(label), torch.float32) == [None] * 2
