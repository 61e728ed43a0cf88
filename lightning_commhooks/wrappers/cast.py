"""Run a hook on 16-bit gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from lightning_commhooks.core.collectives import Group
from lightning_commhooks.core.hook import BoundHook, Bucket, CommHook
from lightning_commhooks.core.registry import get_hook
from lightning_commhooks.hooks import HookName

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Cast(CommHook):
    """Cast gradients to 16 bit, run another hook on them, cast the result back.

    PyTorch's `fp16_compress_wrapper` and `bf16_compress_wrapper`, on any device and around any hook. For
    example `Cast("powersgd", "bf16")` halves the bytes of PowerSGD's factors. The result is copied into the
    gradient's own memory, so a parameter that only some ranks use keeps its dtype (PyTorch's wrapper leaves it
    a float16 `.grad`).

    Args:
        hook: the hook to run, a name or a configured `CommHook`.
        dtype: `"fp16"` or `"bf16"`. Gradients that are in 16 bit already, or no floating-point numbers, are
            passed on as they are.

    Raises:
        ValueError: unknown hook or dtype.
    """

    name: ClassVar[str] = "cast"

    hook: HookName | CommHook
    dtype: Literal["fp16", "bf16"] = "bf16"

    def __post_init__(self) -> None:
        object.__setattr__(self, "hook", get_hook(self.hook))
        if self.dtype not in _DTYPES:
            raise ValueError(f"dtype must be one of {sorted(_DTYPES)}, is {self.dtype!r}")

    def bind(self, group: Group) -> BoundHook:
        return _BoundCast(get_hook(self.hook).bind(group), _DTYPES[self.dtype])


class _BoundCast(BoundHook):
    def __init__(self, inner: BoundHook, dtype: torch.dtype) -> None:
        super().__init__(inner.group)
        self.inner = inner
        self._dtype = dtype

    def reduce(self, flat: Tensor, bucket: Bucket) -> None:
        half = self._cast(flat)
        self.inner.reduce(half, bucket)
        if half is not flat:
            flat.copy_(half)

    def reduce_sparse(self, grad: Tensor, bucket: Bucket) -> Tensor:
        return self.inner.reduce_sparse(self._cast(grad), bucket).to(grad.dtype)

    def _cast(self, gradient: Tensor) -> Tensor:
        passed_on = not gradient.is_floating_point() or gradient.element_size() <= self._dtype.itemsize
        return gradient if passed_on else gradient.to(self._dtype)

    def drain_(self, flat: Tensor, bucket: Bucket) -> None:
        self.inner.drain_(flat, bucket)

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.inner.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state["inner"])

    def compression_stats(self) -> tuple[float, int, int]:
        return self.inner.compression_stats()

    def closing_warnings(self, steps: int) -> list[str]:
        return self.inner.closing_warnings(steps)

    def release(self) -> None:
        self.inner.release()
