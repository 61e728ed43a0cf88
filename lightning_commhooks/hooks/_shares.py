"""Each rank's share of averaged gradients, as sharded models need it: sent as they are, in 16 bit, or encoded."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_commhooks.codecs import Int8Codec
from lightning_commhooks.codecs.codec import Kernels, compiled
from lightning_commhooks.collectives.chunk import CHUNK_NUMEL
from lightning_commhooks.collectives.group import Group
from lightning_commhooks.collectives.steps import Steps, begun
from lightning_commhooks.interface.bucket import Bucket
from lightning_commhooks.interface.precision import num_overflowed


def reduce_scatter(
    bucket: Bucket, out: Tensor, ranks: Group, dtype: torch.dtype | None = None, in_float32: bool = False
) -> Steps[None]:
    """Divide, send, sum, divide: `fp16_compress_hook` and the like of FSDP's `default_hooks`, on CPU too.

    Differs from PyTorch's in that the first division comes before the cast to 16 bit and the second after the cast
    back, so that neither rounds or overflows.

    Error of one element, in units of the mean magnitude over ranks: 2^-11 in float16, 2^-8 in bfloat16, where sums are
    in float32. Sums in 16 bit round as much again up to w times. In float16, what is below 6e-5 times the first divisor
    has errors of up to 3e-8 times it.

    Args:
        bucket: gradients, shape `(w * n,)`, n elements for each rank in turn. They may be overwritten.
        out: shape `(n,)`, any floating-point dtype: for this rank's share of the average, times `bucket.scale`.
        ranks: the collectives for this bucket.
        dtype: of the numbers that are sent; `None`: that of the gradients.
        in_float32: whether 16-bit numbers are summed in float32. If not, it is up to the backend.
    """
    flat, factor = bucket.flat, bucket.scale / ranks.size
    before = predivide_factor(ranks.size)
    if ranks.size == 1 or dtype in (None, flat.dtype):
        # With a factor of 1, FSDP has divided by itself what needs it.
        before = 1 if factor == 1 else before
        sent = flat if before == 1 else flat.div_(before)
    else:
        sent = torch.empty_like(flat, dtype=dtype)
        torch.div(flat, before, out=sent)
        ranks.counters.numel_overflowed += num_overflowed(flat, sent)
    total = yield from ranks.reduce_scatter(sent.view(ranks.size, -1), in_float32)
    if out.element_size() < total.element_size():
        out.copy_(total.mul_(factor * before))
    else:
        out.copy_(total).mul_(factor * before)


def predivide_factor(size: int) -> int:
    """Return the divisor of gradients before they are summed over `size` ranks, so that 16 bit hold them and their sum.

    About the square root of `size`, a power of 2: `DefaultState._get_gradient_predivide_factor` of
    `torch.distributed.algorithms._comm_hooks.default_hooks`. What is left to divide by comes after the sum.
    """
    factor = 1
    while size % factor == 0 and size / factor > factor:
        factor *= 2
    return factor


class EncodedResidual:
    """What a rank has not sent yet of gradients that are reduced together, in 8 bits: LoCo, error feedback for shards.

    Xie et al. 2024, https://arxiv.org/abs/2407.04480, section 3. The residual is of the whole gradient, before it is
    sharded, and float32 would take what sharding saves. Differs from LoCo in that all of the residual is added to the
    next gradient, not a moving average of it; that it has a scale for each block; and that it is not reset now and
    then: a block with inf or NaN begins anew. What rounding the residual leaves out, at most its block's largest
    magnitude over 254, is lost.

    Args:
        block_size: elements with a common scale.
        device: of the gradients.
    """

    def __init__(self, block_size: int, device: torch.device) -> None:
        codec = Int8Codec(block_size=block_size)
        self._kernels = compiled(codec, device, {1}, feedback=False, says=False) or Kernels(codec)
        self._one = torch.ones((), device=device)
        # By the first block.
        self._payloads: dict[int, Tensor] = {}

    def at(self, start: int, blocks: Tensor) -> Tensor:
        """The residual of some blocks, shape and dtype of `blocks`."""
        own = torch.zeros_like(blocks)
        if start in self._payloads:
            self._kernels.decode_mean(self._payloads[start].unsqueeze(0), self._one, own)
        return own

    def keep(self, start: int, own: Tensor) -> None:
        """Remember what these blocks have left out."""
        own.nan_to_num_(0.0, 0.0, 0.0)
        self._payloads[start] = self._kernels.encode(own, None, self._one, self._kernels.seed(0, own.device))


def reduce_scatter_encoded(
    bucket: Bucket, out: Tensor, ranks: Group, kernels: Kernels, seed: int, residual: EncodedResidual | None = None
) -> Steps[None]:
    """Send blocks that a codec has encoded, decode them and sum in float32.

    The first of the two shots of `Group.average_encoded_`, as ZeRO++ does it (Wang et al. 2023,
    https://arxiv.org/abs/2306.10209, section 3.3). Each rank's share begins a block and is filled up with zeros.
    Encoding and decoding of some blocks go on while others are under way. Error of one element: the mean over ranks of
    the codec's largest error in its block; with int8, of the largest magnitude of the block over 254.

    Args:
        bucket: see `reduce_scatter`.
        out: see there.
        ranks: see there.
        kernels: of the same ranks, of a codec with a block size.
        seed: for random rounding, of this rank and bucket alone. Below 2^30.
        residual: of these gradients, for error feedback.
    """
    size = kernels.codec.block_size
    assert size is not None
    blocks = _in_blocks(bucket.flat.view(ranks.size, -1), size)
    total, one = torch.empty_like(blocks[0]), blocks.new_ones(())
    at_once = max(1, CHUNK_NUMEL // (ranks.size * size))
    starts = range(0, total.shape[0], at_once)
    sent = []
    for start in starts:
        some = blocks[:, start : start + at_once].reshape(-1, size)
        own = None if residual is None else residual.at(start, some)
        payload = kernels.encode(some, own, one, kernels.seed(seed + start, ranks.device))
        if residual is not None and own is not None:
            residual.keep(start, own)
        sent.append(begun(ranks.all_to_all(payload.view(ranks.size, -1))))
    for start, steps in zip(starts, sent, strict=True):
        place = total[start : start + at_once]
        kernels.decode_mean((yield from steps).view(ranks.size, place.shape[0], -1), one, place)
    out.copy_(total.view(-1)[: out.numel()].mul_(bucket.scale))


def _in_blocks(chunks: Tensor, size: int) -> Tensor:
    """Shape `(w, b, size)`, at least float32: a view where rows are whole blocks, or else a copy."""
    w, n = chunks.shape
    dtype = torch.promote_types(chunks.dtype, torch.float32)
    if n % size == 0 and dtype == chunks.dtype:
        return chunks.view(w, -1, size)
    blocks = chunks.new_zeros((w, -(-n // size) * size), dtype=dtype)
    blocks[:, :n] = chunks
    return blocks.view(w, -1, size)
