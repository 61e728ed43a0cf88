"""A wrapper that runs a hook on 16-bit gradients, or with 8-bit factors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from lightning_commhooks.codecs import Int8Codec
from lightning_commhooks.codecs.codec import Codec
from lightning_commhooks.collectives.group import Group
from lightning_commhooks.collectives.steps import Steps
from lightning_commhooks.hooks.powersgd import LowRankConfig
from lightning_commhooks.interface.bucket import Bucket
from lightning_commhooks.interface.hook import BoundHook, CommHook
from lightning_commhooks.interface.precision import num_overflowed
from lightning_commhooks.interface.registry import get_hook, get_inner_hook
from lightning_commhooks.interface.wrapper import BoundAround
from lightning_commhooks.wrappers.hook_name import HookName

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
_CODECS = {"int8": Int8Codec(block_size=128)}


@dataclass(frozen=True)
class Cast(CommHook):
    """Run another hook on gradients in 16 bits and cast the result back, or send the hook's factors in 8 bits.

    Works like PyTorch's `fp16_compress_wrapper` and `bf16_compress_wrapper`, but on any device and with any hook. For
    example, `Cast("powersgd", "bf16")` halves the bytes of PowerSGD's factors, and `Cast("powersgd", "int8")` sends
    them as blocks of 8-bit integers, a quarter of the bytes; the rounding error becomes part of the residual. Gradients
    themselves are not cast to 8 bits: use `Int8` for that. Only gradients are cast, not models that a hook averages.
    The result is copied into the gradient's own memory, so a parameter that only some ranks use keeps its dtype
    (PyTorch's wrapper leaves it a float16 `.grad`).

    Args:
        hook: the hook to run, a name or a configured `CommHook`.
        dtype: `"fp16"` or `"bf16"`; gradients that have 16 bits already or are not floating-point numbers are passed
            on unchanged. Or `"int8"`, for `powersgd` and `batched_powersgd`.

    Raises:
        ValueError: the hook or dtype is unknown, or `dtype="int8"` is used with a hook that sends no factors.
    """

    name: ClassVar[str] = "cast"

    hook: CommHook | HookName
    dtype: Literal["fp16", "bf16", "int8"] = "bf16"

    def __post_init__(self) -> None:
        object.__setattr__(self, "hook", get_inner_hook(self.hook))
        if self.dtype not in {**_DTYPES, **_CODECS}:
            raise ValueError(f"dtype must be one of {sorted({**_DTYPES, **_CODECS})}, got {self.dtype!r}")
        if self.dtype in _CODECS and not _sends_factors(self.hook):
            raise ValueError(
                f"dtype={self.dtype!r} is for hooks that send factors, such as 'powersgd', but hook is "
                f"{get_hook(self.hook).name!r}. To send gradients in 8 bits, use hook='int8' instead of Cast"
            )

    @property
    def inner_hooks(self) -> tuple[CommHook, ...]:
        return (get_hook(self.hook),)

    def bind(self, group: Group) -> BoundHook:
        hook = get_hook(self.hook)
        if self.dtype in _CODECS:
            codec = _CODECS[self.dtype]
            return _BoundCast(hook, hook.bind(group.encoding(codec)), None, codec)
        return _BoundCast(hook, hook.bind(group), _DTYPES[self.dtype], None)


def _sends_factors(hook: CommHook | str) -> bool:
    config = get_hook(hook)
    return isinstance(config, LowRankConfig) or any(_sends_factors(inner) for inner in config.inner_hooks)


class _BoundCast(BoundAround):
    def __init__(self, hook: CommHook, inner: BoundHook, dtype: torch.dtype | None, codec: Codec | None) -> None:
        super().__init__(inner, hook)
        self.scales_gradients = dtype is not None or inner.scales_gradients
        self._dtype, self._codec = dtype, codec

    def change_inner(self, change: Callable[[BoundHook], BoundHook]) -> None:
        super().change_inner(change)
        self._dtype = None

    def reduce(self, bucket: Bucket, ranks: Group) -> Steps[Tensor | None]:
        flat = bucket.flat
        if not self._casts(flat):
            return (yield from self._reduce_scaled(bucket, bucket.scale, self._encoding(ranks)))
        half = torch.empty_like(flat, dtype=self._dtype)
        torch.mul(flat, bucket.scale, out=half)
        self.group.counters.numel_overflowed += num_overflowed(flat, half)
        finite = yield from self.inner.reduce(dataclasses.replace(bucket, flat=half, scale=1.0), ranks)
        flat.copy_(half)
        return finite

    def reduce_sparse(self, grad: Tensor, bucket: Bucket, ranks: Group) -> Steps[Tensor]:
        if not self._casts(grad):
            return (yield from self.inner.reduce_sparse(grad, bucket, ranks))
        half = grad.to(self._dtype)
        self.group.counters.numel_overflowed += num_overflowed(grad._values(), half._values())
        return (yield from self.inner.reduce_sparse(half, bucket, ranks)).to(grad.dtype)

    def _encoding(self, ranks: Group) -> Group:
        return ranks if self._codec is None else ranks.encoding(self._codec)

    def _casts(self, gradient: Tensor) -> bool:
        if self._dtype is None or not gradient.is_floating_point():
            return False
        return gradient.element_size() > self._dtype.itemsize
