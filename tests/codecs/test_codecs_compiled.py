"""Compiled codecs: the same bits as uncompiled ones, compiled once, and done without where that fails."""

import warnings

import pytest
import torch
from driver import attached, backward, full_rank_gradients, same
from pool import compiling
from torch._dynamo.utils import counters

import lightning_commhooks as lc
from lightning_commhooks.codecs import AffineCodec, FP8Codec, Int2Codec, Int4Codec, Int8Codec
from lightning_commhooks.codecs import codec as core

CPU = torch.device("cpu")
# With error feedback or without. The hook's test has Int8Codec itself.
CODECS = {
    "int8+stochastic": (Int8Codec(rounding="stochastic"), True),
    "int4": (Int4Codec(), True),
    "int4+hadamard": (Int4Codec(rotation="hadamard"), True),
    "int2": (Int2Codec(), True),
    "fp8": (FP8Codec(), True),
    "per_channel": (AffineCodec(), False),
    "per_tensor": (AffineCodec(block_size=None), False),
}


def num_compiled():
    return counters["stats"]["unique_graphs"]


def results(kernels, feedback, numel):
    """Payload, what is left out, and the mean of four payloads, of the same numbers each time."""
    size, generator = kernels.codec.block_size or numel, torch.Generator().manual_seed(numel)
    # Magnitudes differ from block to block, and some numbers are denormal.
    gradient, residual = (torch.randn(numel, generator=generator).pow(5).view(-1, size) for _ in range(2))
    gradient.view(-1)[::97] *= 1e-39
    mean = torch.empty_like(gradient)
    third, seed = torch.tensor(1 / 3), 12345
    payloads = [kernels.encode(gradient, residual if feedback else None, third, seed)]
    for k in (1, 2):
        payloads.append(kernels.encode(gradient * k, residual if feedback else None, third, seed))
    payloads.append(kernels.encode_mean(gradient * 3, residual if feedback else None, third, seed))
    finite = kernels.decode_mean(torch.stack(payloads), third, mean)
    return {"payloads": torch.stack(payloads), "mean": mean, "finite": finite, "left out": residual}


def differences(rank, world):
    """Of a part of the codecs for each rank, what differs when they are compiled; and the number compiled later."""
    found, later = [], 0
    for label in list(CODECS)[rank::world]:
        codec, feedback = CODECS[label]
        kernels = core.compiled(codec, CPU, {1, 4}, feedback)
        before = num_compiled()
        for numel in (102_400, 8192, 512 * 77):
            mine, plain = results(kernels, feedback, numel), results(core.Kernels(codec), feedback, numel)
            for name in plain:
                # No NaN is among them; and a sum of -0 may be 0 or -0, which are equal.
                a, b = mine[name], plain[name]
                if not torch.equal(a, b):
                    found.append(f"{label}: {name} of {numel}, in {(a != b).sum()} of {a.numel()} elements")
            assert mine["mean"].isfinite().all() == mine["finite"] == True  # noqa: E712
        later += num_compiled() - before
    return found, later


def test_compiled_is_uncompiled_bit_by_bit(run):
    """And compiled once for any number of blocks. Each rank compiles some codecs, which takes long."""
    results = run(differences, timeout=150)
    assert not [text for found, _ in results for text in found]
    assert [later for _, later in results] == [0, 0]


def fails(*_, **__):
    raise RuntimeError("no compiler\nhere")


@pytest.mark.parametrize("at_once", [True, False], ids=["at_once", "when_called"])
def test_one_warning_when_compiling_fails(monkeypatch, at_once):
    monkeypatch.setattr(torch, "compile", fails if at_once else lambda *_, **__: fails)
    core._warn.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for size in (16, 24):
            # No test compiles these.
            assert core.compiled(Int8Codec(block_size=size + 400 * at_once), CPU, {2}, True) is None
    (text,) = [str(warning.message) for warning in caught]
    for part in ("uncompiled", "RuntimeError: no compiler.", "C++ compiler", "TORCH_COMPILE_DISABLE=1"):
        assert part in text
    core._warn.cache_clear()


# Or DDP's buckets would be too small from the second step on.
INT8 = lc.Int8(min_bytes=0)
SHAPES = {"weight": (500, 600), "bias": (600,), "small": (30, 20)}


def gradients(rank, step):
    return full_rank_gradients(rank, step, SHAPES)


def run_steps(rank, hook, steps=4):
    """Means and state, and how many functions were compiled when it was attached and afterwards."""
    before = num_compiled()
    with attached(hook, SHAPES, exact_state=True) as (ddp, attachment):
        between = num_compiled()
        means = [backward(ddp, gradients(rank, step)) for step in range(steps)]
        entries = attachment.state_dict()["hook"]["state"]["entries"]
    return means, entries, between - before, num_compiled() - between


def compiled_and_not(rank, world):
    # The comm thread must not meet another mode than the one it was compiled for.
    with torch.autocast("cpu"), compiling():
        mine = run_steps(rank, INT8)
    means, entries, *numbers = run_steps(rank, INT8)
    assert all(same(a, b) for a, b in zip(mine[0], means, strict=True))
    assert all(same(mine[1][name], entry) for name, entry in entries.items())
    return set(entries), mine[2:], numbers, means


def test_hook_gives_the_same_bits_compiled_and_not(run):
    for names, (first, later), numbers, means in run(compiled_and_not, world=4, timeout=120):
        assert names == {"weight", "small"}
        # Encoding and decoding, also of the mean.
        assert 0 < first <= 4
        assert (later, numbers) == (0, [0, 0])
        expected = sum(gradients(rank, 0)["weight"] for rank in range(4)) / 4
        assert (means[0]["weight"] - expected).abs().max() <= 2 * 8 / 127


class Counting:
    """Stands for a compiled function, and counts its calls."""

    def __init__(self, function, **_):
        self.function = function

    def __call__(self, *args):
        Counting.calls += 1
        return self.function(*args)


def one_cannot_compile(rank, world, failing):
    """Means; calls of "compiled" functions when the hook was attached and afterwards; warnings."""
    core._kernels.cache_clear()
    core._warn.cache_clear()
    original, Counting.calls = torch.compile, 0
    torch.compile = (lambda *_, **__: fails) if rank == failing else Counting
    try:
        with compiling(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with attached("int8", SHAPES) as (ddp, _):
                first = Counting.calls
                means = [backward(ddp, gradients(rank, step)) for step in range(2)]
    finally:
        torch.compile = original
        core._kernels.cache_clear()
        core._warn.cache_clear()
    return means, first, Counting.calls - first, [str(warning.message) for warning in caught]


def test_all_ranks_do_without_when_one_cannot_compile(run):
    everywhere = run(one_cannot_compile, None)
    assert all(first > 0 < later for _, first, later, _ in everywhere)
    for rank, (means, first, later, texts) in enumerate(run(one_cannot_compile, 1)):
        assert all(same(a, b) for a, b in zip(means, everywhere[0][0], strict=True))
        assert (first > 0) == (rank != 1)
        assert later == 0, "what one rank cannot, none does"
        assert [("no compiler" in text) for text in texts] == [True] * (rank == 1)
