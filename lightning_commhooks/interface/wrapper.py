"""Base of the wrappers of hooks."""

from __future__ import annotations

import dataclasses
import functools
import types
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from lightning_commhooks.collectives.group import Group
from lightning_commhooks.collectives.steps import Steps
from lightning_commhooks.interface.accumulation import Number, scale_
from lightning_commhooks.interface.averages_models import AveragesModels, averages_models
from lightning_commhooks.interface.bucket import Bucket
from lightning_commhooks.interface.hook import BoundHook, CommHook
from lightning_commhooks.interface.hook_state import load_hook, save_hook
from lightning_commhooks.interface.models import OptimizerStep
from lightning_commhooks.interface.state import StateReader, StateWriter


class BoundWrapper(AveragesModels):
    """A hook made of hooks: the common part of wrappers of one hook and of several hooks.

    Args:
        inner: the hooks inside.
        hooks: their configurations by key in a state; empty: the state of the only hook inside is the wrapper's state.

    Attributes:
        mixes_averages: whether it averages, in one step, gradients of some parameters and models of other parameters.
    """

    mixes_averages: bool

    def __init__(self, inner: Sequence[BoundHook], hooks: Mapping[int, CommHook] = types.MappingProxyType({})) -> None:
        super().__init__(inner[0].group)
        self._all_inner = inner
        self._parts = {str(key): (hook, bound) for (key, hook), bound in zip(hooks.items(), inner, strict=False)}
        averaging = [hook for hook in inner if averages_models(hook)]
        self.averages_models = bool(averaging)
        self.from_start = next((hook.from_start for hook in averaging if hook.from_start), None)
        self.mixes_averages = any(isinstance(hook, BoundWrapper) and hook.mixes_averages for hook in inner)

    @property
    def has_memory(self) -> bool:  # type: ignore[override]  # `Auto` may choose a hook without
        """Whether any hook inside has memory now."""
        return any(hook.has_memory for hook in self._all_inner)

    @abstractmethod
    def _at_work(self) -> Sequence[BoundHook]:
        """The hooks inside that reduce gradients at present."""

    @abstractmethod
    def change_inner(self, change: Callable[[BoundHook], BoundHook]) -> None:
        """Reduce gradients with the changed hooks; the state is still that of the hooks inside."""

    def end_step(self, finite: Tensor) -> None:
        for hook in self._all_inner:
            hook.end_step(finite)

    def begin_backward(self, step: int, num_steps: Mapping[str, int]) -> None:
        for hook in self._all_inner:
            if isinstance(hook, AveragesModels):
                hook.begin_backward(step, num_steps)

    def communicates_after(self, stepped: OptimizerStep) -> bool:
        return any(averages_models(hook) and hook.communicates_after(stepped) for hook in self._all_inner)

    def flush_(self, bucket: Bucket) -> None:
        for hook in self._all_inner:
            hook.flush_(bucket)

    def residuals(self) -> Iterator[Tensor]:
        for hook in self._all_inner:
            yield from hook.residuals()

    @property
    def compression_stats(self) -> Any:
        """The method of the first hook at work that has it; by name, since only hooks that send factors have it."""
        found = (getattr(hook, "compression_stats", None) for hook in self._at_work())
        return next((stats for stats in found if stats is not None), None)

    def _has(self, key: str, name: str) -> bool:
        """Whether a parameter is one of the hook with that key in a state."""
        return True

    def state_dict(self, writer: StateWriter) -> dict[str, Any]:
        if not self._parts:
            return self._all_inner[0].state_dict(writer)
        parts = {key: save_hook(hook, bound, writer) for key, (hook, bound) in self._parts.items()}
        return {**super().state_dict(writer), "hooks": parts}

    def load_state_dict(self, state: dict[str, Any], reader: StateReader) -> None:
        if not self._parts:
            self._all_inner[0].load_state_dict(state, reader)
            return
        super().load_state_dict(state, reader)
        saved = reader.section(state, "hooks")
        for key in sorted(saved.keys() ^ self._parts.keys()):
            self._part_differs(key, "then" if key in saved else "now", reader)
        for key, (hook, bound) in self._parts.items():
            if key in saved:
                load_hook(saved[key], hook, bound, reader, functools.partial(self._has, key))

    def _part_differs(self, key: str, when: str, reader: StateReader) -> None:
        reader.differs(f"the hook {key} of {type(self).__name__} is there {when} only")

    def averages_gradients(self, step: int) -> bool:
        return any(hook.averages_gradients(step) for hook in self._at_work())

    def release(self) -> None:
        for hook in self._all_inner:
            hook.release()


class BoundAround(BoundWrapper):
    """Forwards all calls to the hook inside, `inner`; subclasses change the input of that hook."""

    def __init__(self, inner: BoundHook, hook: CommHook | None = None) -> None:
        super().__init__([inner], {} if hook is None else {0: hook})
        self.average_buffers = averages_models(inner) and inner.average_buffers
        self.keeps_common_model = averages_models(inner) and inner.keeps_common_model
        self.scales_gradients = inner.scales_gradients
        self.inner = inner

    def change_inner(self, change: Callable[[BoundHook], BoundHook]) -> None:
        self.inner = change(self.inner)

    def _at_work(self) -> Sequence[BoundHook]:
        return self._all_inner

    def reduce(self, bucket: Bucket, ranks: Group) -> Steps[Tensor | None]:
        return self.inner.reduce(bucket, ranks)

    def _reduce_scaled(self, bucket: Bucket, factor: Number, ranks: Group) -> Steps[Tensor | None]:
        """Reduce gradients times `factor` with the hook inside, which multiplies in a pass of its own if it can."""
        if self.inner.scales_gradients:
            return self.inner.reduce(dataclasses.replace(bucket, scale=factor), ranks)
        scale_(bucket.flat, factor)
        return self.inner.reduce(dataclasses.replace(bucket, scale=1.0), ranks)

    def reduce_sparse(self, grad: Tensor, bucket: Bucket, ranks: Group) -> Steps[Tensor]:
        return self.inner.reduce_sparse(grad, bucket, ranks)

    def is_local(self, step: int) -> bool:
        return self.inner.is_local(step)

    def after_optimizer_step(self, stepped: OptimizerStep) -> None:
        if isinstance(self.inner, AveragesModels):
            self.inner.after_optimizer_step(stepped)

    def applies_average_after(self, stepped: OptimizerStep) -> bool:
        return averages_models(self.inner) and self.inner.applies_average_after(stepped)

    def common_model(self) -> Mapping[str, Tensor]:
        return self.inner.common_model() if averages_models(self.inner) else {}

    def inactive_reason(self, step: int) -> str | None:
        return self.inner.inactive_reason(step)

    @property
    def chosen(self) -> CommHook | None:
        """The hook that the one inside has chosen to be; by name, since only `Auto` chooses, which imports this."""
        return getattr(self.inner, "chosen", None)


def after_optimizer_step(hook: BoundHook, stepped: OptimizerStep) -> None:
    """Average models with a hook, including models that diverged between ranks in an earlier phase of a schedule."""
    if isinstance(hook, AveragesModels):
        hook.after_optimizer_step(stepped)
    if ends_local_steps(hook, stepped):
        # Equal weights are not equal any more after a step with other momenta.
        stepped.models.average_(stepped.parameters)
        stepped.models.average_state_(stepped)


def ends_local_steps(hook: BoundHook, stepped: OptimizerStep) -> bool:
    """Whether gradients are averaged again, and ranks have parameters or momenta of their own from before."""
    if not stepped.num_steps or stepped.step < 0 or hook.is_local(stepped.step):
        return False
    is_same = stepped.models.diverged.isdisjoint(stepped.parameters)
    return not is_same or stepped.models.state_diverged(stepped)
