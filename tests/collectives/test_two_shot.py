"""Two-shot averages of encoded numbers against a plain reference, which has one rank after another."""

import itertools

import pytest
import torch
import torch.distributed as dist
from codec_reference import encoded_bytes, error_bound, there_and_back

from lightning_commhooks.codecs import AffineCodec, FP8Codec, Int4Codec, Int8Codec
from lightning_commhooks.codecs.codec import Chunk, Kernels
from lightning_commhooks.collectives.group import Backend, Group

CODECS = {
    "int8": Int8Codec(block_size=64),
    "int8+stochastic": Int8Codec(block_size=64, rounding="stochastic"),
    "int4": Int4Codec(),
    "int4+hadamard": Int4Codec(rotation="hadamard"),
    "fp8": FP8Codec(block_size=64),
    "affine": AffineCodec(block_size=64),
}
NUMELS = [1, 2, 63, 64, 65, 257, 4095, 40_000]
HUGE = 1_000_003


def numbers(rank, numel, step=0, dtype=torch.float32):
    """Those of one rank: around a mean that all share."""
    own, shared = (torch.Generator().manual_seed(seed) for seed in (1000 * step + rank, 1000 * step + 999))
    return torch.randn(numel, generator=own, dtype=dtype) + torch.randn(numel, generator=shared, dtype=dtype)


def group():
    """All ranks, with a count of bytes of its own."""
    return Group(Backend(dist.group.WORLD), process_group=dist.group.WORLD)


def filled(flat, unit):
    padded = flat.new_zeros(-(-flat.numel() // unit) * unit)
    padded[: flat.numel()] = flat
    return padded


def through(codec, flat, seed):
    """Encoded and decoded as a whole, computed in float64."""
    return there_and_back(codec, flat, seed).double()


def reference(codec, ranks):
    """Mean of the ranks' flat tensors: each encoded, summed by the owner of a share, encoded again."""
    world, numel = len(ranks), ranks[0].numel()
    unit = codec.block_size * (world if world > 2 else 1)
    decoded = [through(codec, filled(flat, unit), 0) for flat in ranks]
    mean = sum(decoded) / world
    if world > 2:
        shares = [through(codec, share.to(ranks[0].dtype), 2**30) for share in mean.chunk(world)]
        mean = torch.cat(shares)
    return mean[:numel]


def average_all(rank, world, numels, dtype):
    """Means and bytes, by codec and number of elements."""
    results = {}
    for (label, codec), numel in itertools.product(CODECS.items(), numels):
        ranks = group()
        mean = numbers(rank, numel, 0, dtype)
        ranks.finish(ranks.average_tensors_encoded_([mean], Kernels(codec)))
        results[label, numel] = mean, ranks.counters.bytes_sent
    return results


def bytes_sent(codec, numel, world):
    """Of each rank: two ranks send all to each other, more send shares of whole blocks."""
    num_blocks = -(-numel // codec.block_size)
    num_blocks = num_blocks if world == 2 else -(-num_blocks // world) * world
    return 2 * (world - 1) / world * encoded_bytes(codec, num_blocks * codec.block_size)


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_flat_average_is_that_of_the_reference(run, world, dtype):
    results = run(average_all, NUMELS, dtype, world=world)
    for (label, numel), (mean, num_bytes) in results[0].items():
        codec = CODECS[label]
        ranks = [numbers(rank, numel, 0, dtype) for rank in range(world)]
        expected = reference(codec, ranks)
        assert mean.dtype == dtype
        assert mean.shape == (numel,)
        largest = max(flat.abs().max() for flat in ranks).item()
        # Where a mean is between two levels of the second encoding, rounding may choose the other one.
        level = 2 * error_bound(codec, filled(expected, 64).view(-1, 64)).max().item() if world > 2 else 0
        errors = (mean - expected).abs()
        assert errors.max() <= level + 1e-6 * largest, (label, numel)
        is_close = errors <= (1e-6 if dtype == torch.float32 else 2e-7) * largest
        assert (~is_close).sum() <= 0.001 * numel * (64 if "hadamard" in label else 1), (label, numel)
        assert num_bytes == pytest.approx(bytes_sent(codec, numel, world)), (label, numel)
        for others in results[1:]:
            assert torch.equal(others[label, numel][0], mean), (label, numel)


def average_huge(rank, world):
    ranks, codec = group(), Int8Codec()
    mean = numbers(rank, HUGE)
    ranks.finish(ranks.average_tensors_encoded_([mean], Kernels(codec)))
    digest = torch.stack([mean.double().sum(), mean.double().norm()])
    return digest, (mean if rank == 0 else None), ranks.counters.bytes_sent, ranks.counters.collectives


def test_flat_average_of_several_parts(run, world):
    results = run(average_huge, world=world)
    ranks = [numbers(rank, HUGE) for rank in range(world)]
    digest, mean, num_bytes, _ = results[0]
    assert all(torch.equal(digest, other) for other, *_ in results)
    codec = Int8Codec()
    expected = reference(codec, ranks)
    assert ((mean - expected).abs() > 1e-5).sum() <= 1e-4 * HUGE
    assert (mean - expected).abs().max() <= 2 * 8 / 127
    # One filled up at the end.
    assert bytes_sent(codec, HUGE, world) <= num_bytes <= bytes_sent(codec, HUGE + 512 * world, world)


def one_part(ranks, flat, residual, seed, **options):
    """One average of a part; the residual, if there is one, is changed in place."""
    part = Chunk(flat.view(-1, 64).clone(), residual, seed=seed)
    finite = ranks.finish(ranks.average_encoded_([part], Kernels(options.pop("codec")), **options))
    return part.numbers, finite


def telescoping(rank, world, dtype, variants):
    """Of each variant: difference of what came and what went and is owed."""
    return [_telescoping(rank, world, dtype, *variant) for variant in variants]


def _telescoping(rank, world, dtype, label, two_shot, loss_scale):
    ranks, numel, codec = group(), 64 * world * 3, CODECS[label]
    residual = torch.zeros(numel // 64, 64, dtype=dtype)
    went = came = 0
    for step in range(10):
        flat = numbers(rank, numel, step, dtype) * loss_scale
        options = {"codec": codec, "loss_scale": loss_scale, "two_shot": two_shot}
        mean, finite = one_part(ranks, flat, residual, 7 * step + rank, **options)
        assert finite
        went = went + mean.double() / loss_scale
        came = came + sum(numbers(r, numel, step, dtype).double().view(-1, 64) for r in range(world)) / world
    owed = residual.double() / world
    dist.all_reduce(owed)
    assert owed.abs().max() > 1e-3
    return ((went + owed - came).abs().max() / came.abs().max()).item()


ODD_SCALE = ("int8+stochastic", True, 3.0)
VARIANTS = [("int8", True, 1.0), ("int4", True, 1024.0), ("fp8", False, 1.0), ("int4+hadamard", True, 1.0)]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=["64", "32"])
def test_error_feedback_at_both_ends_telescopes(run, world, dtype, tolerance):
    variants = [*VARIANTS, ODD_SCALE] if dtype == torch.float32 else VARIANTS
    for results in run(telescoping, dtype, variants, world=world):
        assert max(results) <= tolerance


@pytest.mark.parametrize(("world", "variants"), [(3, VARIANTS), (4, [ODD_SCALE])])
def test_float64_with_a_world_size_or_scale_whose_inverse_float32_rounds(run, world, variants):
    for results in run(telescoping, torch.float64, variants, world=world):
        assert max(results) <= 1e-12


def gathered(rank, world):
    """Mean and bytes of one part that all send to all, and whether a part with NaN is called finite."""
    ranks, codec = group(), CODECS["int8"]
    mean, finite = one_part(ranks, numbers(rank, 640), None, 0, codec=codec, two_shot=False)
    assert finite
    num_bytes = ranks.counters.bytes_sent
    bad = numbers(rank, 64 * world)
    if rank == 1:
        bad[70] = float("nan")
    both = [one_part(ranks, bad, None, 0, codec=codec, two_shot=two_shot) for two_shot in (True, False)]
    return mean, num_bytes, both


@pytest.mark.parametrize("world", [2, 3, 4])
def test_all_gather(run, world):
    codec = CODECS["int8"]
    expected = sum(through(codec, numbers(rank, 640), 0) for rank in range(world)) / world
    results = run(gathered, world=world)
    for mean, num_bytes, both in results:
        assert torch.equal(mean, results[0][0])
        assert (mean.view(-1) - expected).abs().max() <= 1e-6 * 8
        assert num_bytes == (world - 1) * 10 * 68
        for bad, finite in both:
            assert not finite
            assert torch.equal(bad.isnan().all(1), torch.arange(world) == 1), "the block with NaN, and no other"
            assert torch.equal(bad.isnan().any(1), torch.arange(world) == 1)
