"""Gradients in 8, 4 or 2 bits: `int8`, `fp8`, `int4` and `int2`, with error feedback."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import ClassVar, Literal

import torch
from torch import Tensor

from lightning_commhooks.codecs import FP8Codec, Int2Codec, Int4Codec, Int8Codec
from lightning_commhooks.codecs.codec import Chunk, Codec, Kernels, chunk_numel, compiled
from lightning_commhooks.codecs.formats import Rounding
from lightning_commhooks.collectives.group import Group
from lightning_commhooks.collectives.steps import Steps
from lightning_commhooks.hooks.allreduce import reduce_scatter
from lightning_commhooks.interface.bucket import Bucket, Slot
from lightning_commhooks.interface.checks import check_bool, check_integer
from lightning_commhooks.interface.error_feedback import ErrorFeedback
from lightning_commhooks.interface.hierarchy import Hierarchy, bind_by_node, check_hierarchy
from lightning_commhooks.interface.hook import NEXT_TO_NOTHING, BoundHook, CommHook
from lightning_commhooks.interface.precision import all_finite, to_gradient, work_dtype
from lightning_commhooks.interface.registry import register
from lightning_commhooks.interface.state import Shapes

# On CPU, gradients with fewer elements are copied into common chunks.
_SEPARATE_NUMEL = 2**17


@dataclass(frozen=True, kw_only=True)
class CodecConfig(CommHook):
    """Options of hooks that encode gradients and have error feedback.

    In a two-shot all-reduce (`Group.average_encoded_`), gradients are encoded once and their mean once more, unless
    there are two ranks.

    Args:
        use_error_feedback: add the encoding errors, including errors of the mean, to the next step's gradients. Needs
            memory of the size of the gradients, at least float32.
        compress_1d: also encode biases and other one-dimensional parameters. They have few elements, and those of
            normalization layers are sensitive. Gradients with fewer elements than a block are never encoded.
        min_bytes: buckets with fewer bytes of gradients to encode are averaged uncompressed, which is faster.
        random_seed: seed of stochastic rounding. The global random state is not touched.
        hierarchy: `"node"`: average gradients in full within each node and compress between nodes, so that a node sends
            as much as one rank would. Each node needs the same number of ranks. `None`: among all ranks.
    """

    # Its options are options of the hook.
    codec_class: ClassVar[type[Codec]]

    use_error_feedback: bool = True
    compress_1d: bool = False
    min_bytes: int = 2**17
    random_seed: int = 0
    hierarchy: Hierarchy = None

    def __post_init__(self) -> None:
        for field in ("use_error_feedback", "compress_1d"):
            check_bool(field, getattr(self, field))
        check_integer("min_bytes", self.min_bytes, 0)
        check_integer("random_seed", self.random_seed)
        check_hierarchy(self.hierarchy)
        self.codec  # noqa: B018  # raises if its options are invalid

    @property
    def codec(self) -> Codec:
        """The codec of gradients."""
        names = (field.name for field in fields(self.codec_class))  # type: ignore[arg-type]  # a dataclass
        return self.codec_class(**{name: getattr(self, name) for name in names})

    def compresses(self, shape: Sequence[int]) -> bool:
        """Whether a gradient of that shape is encoded."""
        # A block is sent as a whole, however little of it a gradient fills.
        fills_block = math.prod(shape) >= (self.codec.block_size or 1)
        return fills_block and (self.compress_1d or len(shape) > 1)

    def bind(self, group: Group) -> BoundHook:
        return bind_by_node(self.hierarchy, group, lambda ranks: CodecFeedback(ranks, self))


@register
@dataclass(frozen=True, kw_only=True)
class Int8(CodecConfig):
    """Average gradients as blocks of 8-bit integers with a scale each, with error feedback.

    Sends a quarter of the bytes of float32, for any number of ranks. For levels and errors, see `Int8Codec`.

    Args:
        block_size: number of elements that share a scale, a multiple of 8. Sends `1 + 4 / block_size` bytes per
            element.
        rounding: `"nearest"`, or `"stochastic"`, whose error is 0 on average; useful without error feedback.

    Raises:
        ValueError: a value is out of range.
    """

    name: ClassVar[str] = "int8"
    codec_class: ClassVar[type[Codec]] = Int8Codec

    block_size: int = 512
    rounding: Rounding = "nearest"


@register
@dataclass(frozen=True, kw_only=True)
class Int4(CodecConfig):
    """Average gradients as blocks of 4-bit integers with a scale each, with error feedback.

    Sends a seventh of the bytes of float32, for any number of ranks. For levels and errors, see `Int4Codec`.

    Args:
        block_size: number of elements that share a scale, a multiple of 8. Sends `1/2 + 4 / block_size` bytes per
            element.
        rounding: `"nearest"`, or `"stochastic"`, whose error is 0 on average; useful without error feedback.
        rotation: `"hadamard"`: rotate blocks first, which spreads outliers; `block_size` must then be a power of 2.

    Raises:
        ValueError: a value is out of range.
    """

    name: ClassVar[str] = "int4"
    codec_class: ClassVar[type[Codec]] = Int4Codec

    block_size: int = 64
    rounding: Rounding = "nearest"
    rotation: Literal["hadamard"] | None = None


@register
@dataclass(frozen=True, kw_only=True)
class FP8(CodecConfig):
    """Average gradients as blocks of 8-bit floating-point numbers with a scale each, with error feedback.

    Like `Int8`, with as many bytes. Small gradients next to large ones are more precise, and large ones are less
    precise. See `FP8Codec`.

    Args:
        format: `"e4m3"`, 4 significant bits, or `"e5m2"`, 3 of them and a wider range.
        block_size: number of elements that share a scale, a multiple of 8. Sends `1 + 4 / block_size` bytes per
            element.
        rounding: `"nearest"`, or `"stochastic"`, whose error is 0 on average; useful without error feedback.

    Raises:
        ValueError: a value is out of range.
    """

    name: ClassVar[str] = "fp8"
    codec_class: ClassVar[type[Codec]] = FP8Codec

    format: Literal["e4m3", "e5m2"] = "e4m3"
    block_size: int = 512
    rounding: Rounding = "nearest"


@register
@dataclass(frozen=True, kw_only=True)
class Int2(CodecConfig):
    """Average gradients as signs and one of two magnitudes, with error feedback.

    Sends a fourteenth of the bytes of float32, for any number of ranks. For levels and errors, see `Int2Codec`. Meant
    for the pseudo-gradients of [`DiLoCo`][], which are sent rarely.

    Args:
        block_size: number of elements that share the magnitudes, a multiple of 8. Sends `1/4 + 8 / block_size` bytes
            per element.
        random_seed: has no effect, since nothing is random.

    Raises:
        ValueError: a value is out of range.
    """

    name: ClassVar[str] = "int2"
    codec_class: ClassVar[type[Codec]] = Int2Codec

    block_size: int = 256


class CodecFeedback(ErrorFeedback):
    """Error feedback for both encodings of a two-shot average.

    The encoding error of a rank's payload is its residual. The encoding error of the mean is multiplied by the number
    of ranks and added to the residual of the rank that sends it, so that the next mean includes it. DoubleSqueeze has a
    second memory for it (Tang et al. 2019, https://arxiv.org/abs/1905.05957, algorithm 1).
    """

    hook: CodecConfig

    def __init__(self, group: Group, hook: CodecConfig) -> None:
        super().__init__(group, hook)
        self._kernels = group.kernels(hook.codec, feedback=hook.use_error_feedback, two_shot=True)
        self.has_memory = hook.use_error_feedback
        # Without error feedback, nothing is added to gradients before they are encoded.
        self.scales_gradients = hook.use_error_feedback

    def average_(self, residual: Tensor | None, bucket: Bucket, ranks: Group) -> Steps[Tensor | None]:
        flat, plan, dtype = bucket.flat, self.plan(bucket), work_dtype(bucket.flat.dtype)
        dense = bucket.gather(plan.rest).div_(self.group.size / bucket.scale)
        averaging = ranks.all_reduce_(dense)
        parts = []
        for place in plan.places:
            own = None if residual is None else place.gather(residual, dtype)
            parts.append(Chunk(place.gather(flat, dtype), own, self._seed(bucket, place.name)))
        finite = yield from ranks.average_encoded_(
            parts, self._kernels, loss_scale=bucket.loss_scale, scale=bucket.scale
        )
        for place, part in zip(plan.places, parts, strict=True):
            mean = part.numbers if dtype == flat.dtype else to_gradient(part.numbers, flat.dtype)
            place.scatter(mean, flat)
            if residual is not None and part.residual is not None:
                if dtype != flat.dtype:
                    part.residual.add_((part.numbers - mean.to(dtype)) / bucket.loss_scale)
                place.scatter(part.residual, residual)
        yield from averaging
        bucket.scatter_(plan.rest, dense)
        # The product with the scale may be infinite where the mean is not.
        return finite & all_finite(dense) if isinstance(bucket.loss_scale, float) and bucket.loss_scale == 1 else None

    def reduce_scatter(
        self, bucket: Bucket, out: Tensor, ranks: Group, residual: EncodedResidual | None = None
    ) -> Steps[None]:
        """Write this rank's share of the average to `out`: see `allreduce.reduce_scatter`."""
        flat = bucket.flat
        if ranks.size == 1 or not self._kernels.fills_block(out) or flat.nbytes < self.hook.min_bytes:
            return reduce_scatter(bucket, out, ranks)
        seed = self._seed(bucket, bucket.slots[0].name)
        return reduce_scatter_encoded(bucket, out, ranks, self._kernels, seed, residual)

    def _seed(self, bucket: Bucket, name: str) -> int:
        seed = f"{self.hook.random_seed}:{bucket.step}:{self.group.rank}:{name}"
        return zlib.crc32(seed.encode()) % 2**30

    def compressed(self, bucket: Bucket) -> Sequence[Slot] | None:
        plan = self.plan(bucket)
        return plan.slots if plan.num_bytes >= max(1, self.hook.min_bytes) else None

    def lay_out(self, bucket: Bucket) -> _Plan:
        slots = [slot for slot in bucket.slots if self.hook.compresses(slot.shape)]
        rest = [slot for slot in bucket.slots if not self.hook.compresses(slot.shape)]
        size, owners = self.hook.codec.block_size, self.group.num_owners()
        places = places_of(slots, size, owners, bucket.flat.device)
        return _Plan(slots, rest, places, sum(slot.numel for slot in slots) * bucket.flat.element_size())

    def kept(self, shapes: list[tuple[int, ...]]) -> Shapes:
        return {"residual": shapes[0]} if self.has_residuals and self.hook.compresses(shapes[0]) else {}

    def inactive_reason(self, step: int) -> str | None:
        config, plans = self.hook, [plan for _, plan in self.plans.values()]
        if not plans:
            return None
        encoded = [slot for plan in plans if plan.num_bytes >= config.min_bytes for slot in plan.slots]
        numel = sum(slot.numel for slots, _ in self.plans.values() for slot in slots)
        share = sum(slot.numel for slot in encoded) / max(1, numel)
        if share > NEXT_TO_NOTHING:
            return None
        which = "" if config.compress_1d else "in two dimensions "
        how_much = f"only {share:.2%}, few buckets have" if share else "nothing, no bucket has"
        largest = max((plan.num_bytes for plan in plans), default=0)
        lower = "lower block_size"
        if not share and largest:
            lower = f"the largest has {largest}: lower min_bytes to that"
        elif share:
            lower = "lower min_bytes or block_size"
        return (
            f"hook={config.name!r} compresses {how_much} min_bytes={config.min_bytes} bytes of gradients with "
            f"block_size={config.codec.block_size} elements or more {which}(compress_1d={config.compress_1d}); "
            f"{lower}, or use hook='bf16'"
        )


@dataclass(frozen=True)
class Place:
    """Contiguous parts of gradients that are encoded and sent together, each padded with zeros to whole blocks.

    Attributes:
        name: the gradient of the first part, and the part's first element in it.
        parts: for each part, its first element in the bucket, its number of elements, and its offset in the chunk.
        shape: `(b, s)`: b blocks of s elements. b is a multiple of the number of owners.
    """

    name: str
    parts: tuple[tuple[int, int, int], ...]
    shape: tuple[int, int]

    def gather(self, flat: Tensor, dtype: torch.dtype) -> Tensor:
        """Return gradients or residuals, shape `(b, s)`: a view of `flat` if layout and dtype fit, else a copy."""
        first, num, _ = self.parts[0]
        if num == self.shape[0] * self.shape[1] and flat.dtype == dtype:
            return flat[first : first + num].view(self.shape)
        ends = [offset + num for _, num, offset in self.parts]
        begins = [*(offset for _, _, offset in self.parts[1:]), self.shape[0] * self.shape[1]]
        gaps = [begin - end for begin, end in zip(begins, ends, strict=True)]
        zeros = flat.new_zeros(max(gaps))
        pieces = [flat[first : first + num] for first, num, _ in self.parts]
        padded = [piece for own, gap in zip(pieces, gaps, strict=True) for piece in (own, zeros[:gap])]
        return torch.cat(padded).to(dtype).view(self.shape)

    def scatter(self, numbers: Tensor, flat: Tensor) -> None:
        """Write `numbers`, shape `(b, s)`, to `flat`, if they are not there already."""
        if numbers.data_ptr() != flat[self.parts[0][0] :].data_ptr():
            numbers = numbers.view(-1)
            own = [flat[first : first + num] for first, num, _ in self.parts]
            torch._foreach_copy_(own, [numbers[offset : offset + num] for _, num, offset in self.parts])


@dataclass(frozen=True)
class _Plan:
    """The gradients of a bucket to encode, their places and their number of bytes; and the remaining gradients."""

    slots: list[Slot]
    rest: list[Slot]
    places: list[Place]
    num_bytes: int


def places_of(slots: Sequence[Slot], block_size: int | None, num_owners: int, device: torch.device) -> list[Place]:
    """Divide gradients into chunks, and return the place of each chunk.

    Each gradient begins a new block, so that the content of a block does not depend on the bucket. If `block_size` is
    `None`, all gradients together form one block for each owner. Every chunk can be divided into `num_owners` parts
    with equally many blocks each.
    """
    size = block_size or -(-sum(slot.numel for slot in slots) // num_owners)
    unit = size * num_owners
    numel = max(unit, chunk_numel(device) // unit * unit)
    # On a GPU, starting an encoder takes longer than copying gradients into one chunk.
    separate_numel = _SEPARATE_NUMEL if device.type == "cpu" else numel
    places: list[Place] = []
    # The common chunk of small gradients and ends of gradients.
    parts: list[tuple[int, int, int]] = []
    name, filled = "", 0
    for slot in slots:
        # The elements that fill whole chunks or units.
        whole = slot.numel // unit * unit if slot.numel >= separate_numel else 0
        for first in range(0, whole, numel):
            num = min(numel, whole - first)
            places.append(Place(f"{slot.name}:{first}", ((slot.offset + first, num, 0),), (num // size, size)))
        if (left := slot.numel - whole) > 0:
            name = name if parts else f"{slot.name}:{whole}"
            parts.append((slot.offset + whole, left, filled))
            filled += left if block_size is None else -(-left // size) * size
        if filled >= numel or (parts and slot is slots[-1]):
            places.append(Place(name, tuple(parts), (-(-filled // unit) * num_owners, size)))
            parts, filled = [], 0
    return places


class EncodedResidual:
    """A rank's residual of gradients that are reduced together, in 8 bits: LoCo, error feedback for shards.

    Xie et al. 2024, https://arxiv.org/abs/2407.04480, section 3. The residual covers the whole gradient, before it is
    sharded, and in float32 it would take the memory that sharding saves. Differs from LoCo in that the whole residual
    is added to the next gradient, not a moving average of it; that it has a scale for each block; and that it is not
    reset now and then: only a block with inf or NaN is reset. The rounding error of the residual, at most its block's
    largest magnitude over 254, is lost.
    """

    def __init__(self, block_size: int, device: torch.device) -> None:
        codec = Int8Codec(block_size=block_size)
        self._kernels = compiled(codec, device, {1}, feedback=False, is_told=False) or Kernels(codec)
        self._one = torch.ones((), device=device)
        # The encoded residual, by the number of its first block.
        self._payloads: dict[int, Tensor] = {}

    def at(self, start: int, blocks: Tensor) -> Tensor:
        """Return the residual of some blocks, in the shape and dtype of `blocks`."""
        own = torch.zeros_like(blocks)
        if start in self._payloads:
            self._kernels.decode_mean(self._payloads[start].unsqueeze(0), self._one, own)
        return own

    def keep(self, start: int, own: Tensor) -> None:
        """Store the encoding error of these blocks."""
        own.nan_to_num_(0.0, 0.0, 0.0)
        self._payloads[start] = self._kernels.encode(own, None, self._one, 0)


def reduce_scatter_encoded(
    bucket: Bucket, out: Tensor, ranks: Group, kernels: Kernels, seed: int, residual: EncodedResidual | None = None
) -> Steps[None]:
    """Send blocks that a codec has encoded, decode them and sum them in float32: see `allreduce.reduce_scatter`.

    The first of the two shots of `Group.average_encoded_`, as ZeRO++ does it (Wang et al. 2023,
    https://arxiv.org/abs/2306.10209, section 3.3). Each rank's share begins a new block and is padded with zeros. Some
    blocks are encoded and decoded while other blocks are in flight. The error of an element is at most the mean over
    ranks of the codec's largest error in its block, which for int8 and nearest rounding is the block's largest
    magnitude divided by 254.

    The seed of stochastic rounding, below 2^30, is different for each rank and bucket.
    """
    size = kernels.codec.block_size
    assert size is not None
    blocks = _in_blocks(bucket.flat.view(ranks.size, -1), size)
    total, one = torch.empty_like(blocks[0]), blocks.new_ones(())
    rows = max(1, chunk_numel(blocks.device) // (ranks.size * size))
    starts = range(0, total.shape[0], rows)
    sent = []
    for start in starts:
        some = blocks[:, start : start + rows].reshape(-1, size)
        own = None if residual is None else residual.at(start, some)
        payload = kernels.encode(some, own, one, seed + start)
        if residual is not None and own is not None:
            residual.keep(start, own)
        sent.append(ranks.all_to_all(payload.view(ranks.size, -1)))
    for start, steps in zip(starts, sent, strict=True):
        place = total[start : start + rows]
        kernels.decode_mean((yield from steps).view(ranks.size, place.shape[0], -1), one, place)
    out.copy_(total.view(-1)[: out.numel()].mul_(bucket.scale))


def gather_encoded(
    share: Tensor, out: Tensor, ranks: Group, kernels: Kernels, kept: Tensor | None = None
) -> Steps[None]:
    """Send this rank's share of the weights in blocks that a codec has encoded, and decode the shares of all ranks.

    Quantized weight communication of ZeRO++ (Wang et al. 2023, https://arxiv.org/abs/2306.10209, section 3.1), whose
    blocks are larger. With `kept`, quantization on weight differences of SDP4Bit (Jia et al. 2024,
    https://arxiv.org/abs/2410.15526, section 3.1): ranks send the difference of their share from the weights that all
    ranks keep, and all ranks, the sender included, add what was sent to these weights. So the encoding error of a
    difference is part of the next one, and errors do not add up.

    Args:
        share: shape `(n,)`, this rank's, perhaps a row of `out`.
        out: shape `(w, n)`, where to write the shares of all ranks, equal on all of them.
        ranks: the ranks.
        kernels: the kernels of these ranks for a codec with a block size.
        kept: shape `(w, n)`, dtype of `share`, the weights that all ranks keep, which are replaced by the new ones.
            `None`: send the weights themselves.
    """
    size, numel = kernels.codec.block_size, share.numel()
    assert size is not None
    numbers = share if kept is None else share.to(work_dtype(share.dtype)) - kept[ranks.rank]
    blocks = _in_blocks(numbers.view(1, -1), size)[0]
    one = blocks.new_ones(())
    payload = kernels.encode(blocks, None, one, 0)
    gathered = yield from ranks.all_gather(payload.view(-1))
    decoded = blocks.new_empty((ranks.size * payload.shape[0], size))
    kernels.decode_mean(gathered.view(1, decoded.shape[0], -1), one, decoded)
    shares = decoded.view(ranks.size, -1)[:, :numel]
    out.copy_(shares if kept is None else kept.add_(shares))


def _in_blocks(chunks: Tensor, size: int) -> Tensor:
    """Return `chunks` in shape `(w, b, size)`, at least float32: a view if rows are whole blocks, otherwise a copy."""
    w, n = chunks.shape
    dtype = torch.promote_types(chunks.dtype, torch.float32)
    if n % size == 0 and dtype == chunks.dtype:
        return chunks.view(w, -1, size)
    blocks = chunks.new_zeros((w, -(-n // size) * size), dtype=dtype)
    blocks[:, :n] = chunks
    return blocks.view(w, -1, size)
