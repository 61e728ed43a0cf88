"""On a CUDA device, in one process: codecs, and that a wait for the device is seen."""

import pytest
import torch
from codec_reference import error_bound
from gpu_steps import needs_one

from lightning_commhooks.codecs import AffineCodec, FP8Codec, Int4Codec, Int8Codec
from lightning_commhooks.codecs.codec import Kernels, compiled

pytestmark = [pytest.mark.gpu, needs_one]
CODECS = [
    Int8Codec(),
    Int8Codec(rounding="stochastic"),
    Int4Codec(),
    Int4Codec(rotation="hadamard"),
    FP8Codec(),
    FP8Codec(format="e5m2", rounding="stochastic"),
    AffineCodec(),
    AffineCodec(block_size=None),
]


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_codec(codec):
    device = torch.device("cuda")
    size = codec.block_size or 2**16
    x = torch.randn(2**16, device=device).pow(3).view(-1, size)
    out, one, seed = torch.empty_like(x), torch.ones((), device=device), 7
    kernels = compiled(codec, device, {1}, feedback=False)
    assert kernels is not None
    for run in (kernels, Kernels(codec)):
        finite = run.decode_mean(run.encode(x, None, one, seed)[None], one, out)
        assert finite
        # Products may be rounded in fewer bits there.
        assert ((out - x).abs() <= error_bound(codec, x) * (1.05 if codec.block_size == 64 else 1) + 1e-6).all()


def test_a_step_that_waits_is_seen():
    """By the mode that `step_without_waiting` relies on."""
    value = torch.ones((), device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchronizing"):
            value.item()
    finally:
        torch.cuda.set_sync_debug_mode("default")
