"""PyTorch's two quantization hooks: 8-bit levels from the smallest to the largest gradient."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from torch import Tensor

from lightning_commhooks.codecs import AffineCodec
from lightning_commhooks.codecs.codec import Chunk
from lightning_commhooks.codecs.formats import check_block_size
from lightning_commhooks.collectives.group import Group
from lightning_commhooks.collectives.steps import Steps
from lightning_commhooks.hooks.quantized import Place, places_of
from lightning_commhooks.interface.bucket import Bucket, Slot
from lightning_commhooks.interface.hook import BoundHook, CommHook
from lightning_commhooks.interface.precision import to_gradient, work_dtype
from lightning_commhooks.interface.registry import register

Protocol = Literal["two_shot", "all_gather"]
PROTOCOLS = get_args(Protocol)


@dataclass(frozen=True, kw_only=True)
class _Quantize(CommHook):
    protocol: Protocol = "two_shot"

    def __post_init__(self) -> None:
        if self.protocol not in PROTOCOLS:
            raise ValueError(f"protocol must be one of {PROTOCOLS}, got {self.protocol!r}")
        self.codec  # noqa: B018  # refuses its own options

    @property
    @abstractmethod
    def codec(self) -> AffineCodec:
        """The codec of gradients."""

    def bind(self, group: Group) -> BoundHook:
        return _BoundQuantize(group, self.codec, two_shot=self.protocol == "two_shot")


@register
@dataclass(frozen=True, kw_only=True)
class QuantizePerTensor(_Quantize):
    """Average gradients as 8-bit numbers that divide the range of a bucket evenly.

    PyTorch's `quantization_pertensor_hook` with its numerics, on CPU too. Differs from it in that it sends a quarter of
    float32's bytes at any number of ranks, not w/8 times them, unless asked to; in that range and levels travel
    together; and in that small gradients do not become zero because the scale has a lower limit (see `AffineCodec`). No
    error feedback: `Int8` has it, and divides gradients into blocks, so that one large gradient does not use up the
    levels of all the rest.

    Args:
        protocol: `"two_shot"`: each rank receives its share of all gradients, sums it and sends it on; with more than
            two ranks, each share has its own range, and the mean is rounded once more. `"all_gather"`: each rank sends
            all to all, as PyTorch's.

    Raises:
        ValueError: `protocol` is something else.
    """

    name: ClassVar[str] = "quantize_per_tensor"

    @property
    def codec(self) -> AffineCodec:
        return AffineCodec(block_size=None)


@register
@dataclass(frozen=True, kw_only=True)
class QuantizePerChannel(_Quantize):
    """Average gradients as 8-bit numbers that divide the range of each `bucket_size` of them evenly.

    PyTorch's `quantization_perchannel_hook`; as `QuantizePerTensor` otherwise.

    Args:
        bucket_size: elements with a common range, a multiple of 4. Sends `1 + 8 / bucket_size` bytes for a number.
        protocol: see `QuantizePerTensor`.

    Raises:
        ValueError: a value is out of range.
    """

    name: ClassVar[str] = "quantize_per_channel"

    bucket_size: int = 512

    @property
    def codec(self) -> AffineCodec:
        check_block_size(self.bucket_size, 4, "bucket_size")
        return AffineCodec(block_size=self.bucket_size)


class _BoundQuantize(BoundHook):
    def __init__(self, group: Group, codec: AffineCodec, two_shot: bool) -> None:
        super().__init__(group)
        self._two_shot = two_shot
        self._kernels = group.kernels(codec, feedback=False, two_shot=two_shot)
        self._places: dict[int, list[Place]] = {}

    def reduce(self, bucket: Bucket, ranks: Group) -> Steps[None]:
        flat = bucket.flat
        if not flat.is_floating_point() or not flat.numel():
            yield from ranks.all_reduce_mean_(flat)
            return
        places = self._places_of(flat)
        dtype = work_dtype(flat.dtype)
        parts = [Chunk(place.gather(flat, dtype), None, seed=0) for place in places]
        yield from ranks.average_encoded_(parts, self._kernels, two_shot=self._two_shot)
        for place, mean in zip(places, parts, strict=True):
            place.scatter(mean.numbers if dtype == flat.dtype else to_gradient(mean.numbers, flat.dtype), flat)

    def _places_of(self, flat: Tensor) -> list[Place]:
        numel = flat.numel()
        if numel not in self._places:
            # PyTorch's hooks take no notice of parameters.
            whole = [Slot("", (numel,), 0)]
            size, num_owners = self._kernels.codec.block_size, self.group.num_owners(self._two_shot)
            self._places[numel] = places_of(whole, size, num_owners, flat.device)
        return self._places[numel]
