"""Random rounding, where its random numbers come from, and rotation."""

import math
import random

import pytest
import torch
from codec_reference import encode, error_bound, there_and_back
from test_codecs import CODECS, STOCHASTIC

from lightning_commhooks.codecs import FP8Codec, Int4Codec
from lightning_commhooks.codecs.codec import Kernels
from lightning_commhooks.codecs.formats import hadamard, uniform


def test_random_rounding_uses_no_global_state():
    for label, codec in CODECS.items():
        flat = torch.randn(1000)
        before = torch.get_rng_state(), random.getstate()
        a, again, b = (there_and_back(codec, flat, seed) for seed in (1, 1, 2))
        assert torch.equal(before[0], torch.get_rng_state()), label
        assert before[1] == random.getstate(), label
        assert torch.equal(a, again), label
        assert torch.equal(a, b) == ("stochastic" not in label), label


# Of each: P(|mean - expectation| > t) <= 2 exp(-2 n t^2) for n independent numbers in [0, 1] (Hoeffding 1963), so a
# false alarm has a probability below 1e-6 for each codec, in all: half of it in the 64 numbers, half in their mean.
SEEDS = 1500
EACH = math.sqrt(math.log(2 * 64 / 5e-7) / (2 * SEEDS))
ALL = math.sqrt(math.log(2 / 5e-7) / (2 * SEEDS * 64))


@pytest.mark.parametrize("label", STOCHASTIC)
def test_stochastic_rounding_has_no_bias(label):
    codec = STOCHASTIC[label]
    flat = torch.randn(64, generator=torch.Generator().manual_seed(5))
    if isinstance(codec, FP8Codec):
        # It has no smaller exponent for these.
        flat[::8] *= 2.0**-15 if "e4m3" in label else 2.0**-31
    decoded = torch.stack([there_and_back(codec, flat, seed) for seed in range(SEEDS)]).double()
    lower, upper = decoded.min(0).values, decoded.max(0).values
    assert ((decoded == lower) | (decoded == upper)).all(), "one of two neighbours"
    assert (lower <= flat + 1e-5).all()
    assert (flat - 1e-5 <= upper).all()
    if isinstance(codec, FP8Codec):
        bounds = [encode(codec, bound.float())[4:] & 127 for bound in (lower, upper)]
        assert ((bounds[0].int() - bounds[1].int()).abs() <= 1).all(), "there is none between them"
    level = torch.where(upper > lower, upper - lower, 1)
    errors = (decoded - flat) / level
    assert errors.mean(0).abs().max() <= EACH
    assert errors.mean().abs() <= ALL
    assert errors.abs().mean() > 0.15, "to the nearest, numbers would have a smaller error"


def test_stochastic_rounding_of_a_rotated_block_has_no_bias():
    codec = Int4Codec(rotation="hadamard", rounding="stochastic")
    flat = torch.randn(64, generator=torch.Generator().manual_seed(5))
    mean = sum(there_and_back(codec, flat, seed).double() for seed in range(SEEDS)) / SEEDS
    # An error is the sum of 64 independent ones, each of a level at most: as above, with a false alarm of 1e-6.
    level = error_bound(codec, flat.view(1, -1)).item() / 64
    assert (mean - flat).abs().max() <= math.sqrt(math.log(2 * 64 / 1e-6) * 64 / (2 * SEEDS)) * level


def test_uniform_is_uniform():
    """Chi-square of 100 bins: above 202.5 with a probability below 1e-8 (99 degrees of freedom)."""
    like = torch.empty(200_000)
    at_position = torch.stack([uniform(torch.empty(10), torch.tensor(seed))[7] for seed in range(5_000)])
    streams = [uniform(like, torch.tensor(seed, dtype=torch.int32)) for seed in (0, 1, 12345, 2**31 - 1)]
    for numbers in [*streams, at_position, (streams[0] - streams[1]) % 1, (streams[2][1:] - streams[2][:-1]) % 1]:
        assert numbers.dtype == torch.float32
        assert numbers.min() >= 0
        assert numbers.max() < 1
        counts = torch.bincount((numbers * 100).long(), minlength=100).double()
        expected = numbers.numel() / 100
        assert ((counts - expected).square() / expected).sum() < 202.5
    pairs = (streams[0][::2] * 10).long() * 10 + (streams[0][1::2] * 10).long()
    counts = torch.bincount(pairs, minlength=100).double()
    assert ((counts - 1000).square() / 1000).sum() < 202.5


def test_hadamard_matrix_is_orthogonal():
    for size in (1, 2, 8, 64, 512):
        matrix = hadamard(size, torch.empty(0, dtype=torch.float64))
        assert matrix.dtype == torch.float64
        assert (matrix.abs() == 1).all()
        assert torch.equal(matrix @ matrix.t(), size * torch.eye(size, dtype=torch.float64))
        assert torch.equal(matrix, hadamard(size, matrix))
        if size > 8:
            # Without random signs equal numbers become one.
            assert matrix.sum(0).abs().max() <= size / 2


def test_rotation_helps_blocks_with_an_outlier():
    blocks = torch.randn(500, 64, generator=torch.Generator().manual_seed(0))
    blocks[:, 11] = 20
    plain, rotated = (
        (there_and_back(Int4Codec(rotation=rotation), blocks.view(-1)) - blocks.view(-1)).norm()
        for rotation in (None, "hadamard")
    )
    assert rotated < plain / 3


def test_a_block_that_is_too_large_before_its_rotation_is_nan():
    codec = Int4Codec(rotation="hadamard")
    for value in (1.01 * 2**126, -3e38):
        one = torch.zeros(64)
        one[7] = value
        assert there_and_back(codec, one).isnan().all()
        assert there_and_back(codec, torch.full((64,), value)).isnan().all()


def test_a_rotated_block_that_overflows_is_not_called_finite():
    """Its largest element has an error with the sign of the element itself in all 64 numbers that it is made of."""
    codec = Int4Codec(rotation="hadamard")
    matrix = hadamard(64, torch.empty(0, dtype=torch.float64))
    rotated = torch.full((64,), 0.51 / 7, dtype=torch.float64)
    rotated[0] = 1
    blocks = ((rotated * matrix[3]) @ matrix.t()).view(1, 64)
    blocks = (blocks / blocks.abs().max() * 2.0**127.5).float()
    one, out = torch.ones(()), torch.empty_like(blocks)
    kernels = Kernels(codec)
    payload = kernels.encode(blocks, None, one, 0)
    finite = kernels.decode_mean(payload.unsqueeze(0), one, out)
    assert blocks.isfinite().all()
    assert finite == out.isfinite().all()
