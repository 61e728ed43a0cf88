"""What wrappers of one hook have in common."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from lightning_commhooks.interface.averages_models import AveragesModels, averages_models, is_local
from lightning_commhooks.interface.bucket import Bucket
from lightning_commhooks.interface.hook import BoundHook, CommHook
from lightning_commhooks.interface.hook_state import is_readable
from lightning_commhooks.interface.models import OptimizerStep
from lightning_commhooks.interface.state import StateReader, StateWriter


class BoundAround(AveragesModels):
    """Does what the hook inside does; subclasses change what it gets to see.

    Args:
        inner: the hook inside.
    """

    def __init__(self, inner: BoundHook) -> None:
        super().__init__(inner.group)
        self.averages_models = averages_models(inner)
        self.average_buffers = averages_models(inner) and inner.average_buffers
        self.scales_gradients = inner.scales_gradients
        self.replaces_state = is_readable(inner)
        self._inner = inner

    @property
    def has_memory(self) -> bool:  # type: ignore[override]  # `Auto` may choose a hook without
        """Whether the hook inside has memory now."""
        return self._inner.has_memory

    def reduce(self, flat: Tensor, bucket: Bucket) -> Tensor | None:
        return self._inner.reduce(flat, bucket)

    def reduce_sparse(self, grad: Tensor, bucket: Bucket) -> Tensor:
        return self._inner.reduce_sparse(grad, bucket)

    def is_local(self, step: int) -> bool:
        return is_local(self._inner, step)

    def after_optimizer_step(self, stepped: OptimizerStep) -> None:
        if isinstance(self._inner, AveragesModels):
            self._inner.after_optimizer_step(stepped)

    def end_step(self, finite: Tensor) -> None:
        self._inner.end_step(finite)

    def drain_(self, flat: Tensor, bucket: Bucket) -> None:
        self._inner.drain_(flat, bucket)

    def owed(self) -> Iterator[Tensor]:
        return self._inner.owed()

    def not_begun(self, step: int) -> str | None:
        return self._inner.not_begun(step)

    def state_dict(self, writer: StateWriter) -> dict[str, Any]:
        return self._inner.state_dict(writer)

    def load_state_dict(self, state: dict[str, Any], reader: StateReader) -> None:
        self._inner.load_state_dict(state, reader)

    @property
    def chosen(self) -> CommHook | None:
        """What the hook inside has chosen to be, if it is one that chooses."""
        return getattr(self._inner, "chosen", None)

    @property
    def compression_stats(self) -> Any:
        """That of the hook inside, if it has any."""
        return getattr(self._inner, "compression_stats", None)

    def release(self) -> None:
        self._inner.release()
