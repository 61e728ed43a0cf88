"""`CompressedDDPFabricStrategy` for `lightning.fabric`."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

try:
    from lightning.fabric.strategies.ddp import DDPStrategy
    from lightning.fabric.wrappers import _FabricModule
except ImportError as error:
    raise ImportError(
        "CompressedDDPFabricStrategy needs Lightning: pip install 'lightning-commhooks[lightning]'"
    ) from error

from lightning_commhooks.interface.hook import CommHook
from lightning_commhooks.lightning.ddp import CHECKPOINT_KEY
from lightning_commhooks.lightning.refusals import check_options, needs_hook, options_of, refusals_of
from lightning_commhooks.runtime.attachment import Attachment
from lightning_commhooks.runtime.attachments import Attachments, attachment_of
from lightning_commhooks.sources.attach import attach, check_values
from lightning_commhooks.sources.ddp import resolve_hook
from lightning_commhooks.wrappers.hook_name import HookName
from lightning_commhooks.wrappers.scale import Accumulation


class CompressedDDPFabricStrategy(DDPStrategy):
    """Fabric's `DDPStrategy` with a communication hook, on CPU and GPU.

    `Fabric(strategy=CompressedDDPFabricStrategy(hook="powersgd"))`. Checkpoints by `fabric.save` have the hook's state
    if they have a model, and `fabric.load` restores it. With hooks that average models, the average is in place in
    `fabric.save` and after `fabric.barrier()`; each rank's own model is back in the next forward with gradients.

    Args:
        hook: see [`CompressedDDPStrategy`][].
        hook_state: see there.
        exact_state: see there.
        strict_state: see there.
        resync: whether ranks continue from the average after they saw it, instead of from their own models.
        accumulation: divisor of gradients that are accumulated with `fabric.no_backward_sync`: see
            [`ScaleByGradAccumulation`][].
        loss_divided_by: what you divide the loss of each micro-batch by before `fabric.backward`, which divides by
            nothing; or a function that returns it.
        num_steps: optimizer steps that training has in all: see [`attach`][].
        **kwargs: arguments of Fabric's `DDPStrategy` and of `DistributedDataParallel`.

    Attributes:
        attachments: one for each module set up so far, in order, for `metrics()`.

    Raises:
        MisconfigurationException: unknown hook, or an option out of range; in `setup`, an optimizer that cannot step on
            one rank alone; in `load`, hook state that does not fit.
    """

    @needs_hook("powersgd")
    def __init__(
        self,
        hook: CommHook | HookName | Callable[..., Any],
        hook_state: object | None = None,
        exact_state: bool = False,
        strict_state: bool = True,
        resync: bool = False,
        accumulation: Accumulation = "framework",
        loss_divided_by: float | Callable[[], float] = 1,
        num_steps: int | None = None,
        **kwargs: Any,
    ) -> None:
        known = options_of(DDPStrategy, DistributedDataParallel)
        check_options(self, kwargs, known, hook, "DistributedDataParallel")
        with refusals_of(self):
            check_values(num_steps, loss_divided_by, exact_state=exact_state, strict_state=strict_state, resync=resync)
            self._hook = resolve_hook(hook, hook_state, accumulation)
        self._loss_divided_by = loss_divided_by
        self._num_steps = num_steps
        self._hook_state = hook_state
        self._exact_state = exact_state
        self.attachments: list[Attachment] = []
        self._registry = Attachments(resync=resync, strict_state=strict_state)
        # Weak references: the user may have replaced a model and its optimizer.
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._has_just_saved = False
        super().__init__(**kwargs)

    @property
    def hook(self) -> CommHook | Callable[..., Any]:
        """The hook's configuration, with a name resolved, or a DDP hook function."""
        return self._hook

    def setup_module(self, module: Module) -> DistributedDataParallel:
        """Wrap a module in DDP and register the hook."""
        model = super().setup_module(module)
        with refusals_of(self):
            attachment = attach(
                model,
                self._hook,
                hook_state=self._hook_state,
                grad_scaler=getattr(self.precision, "scaler", None),
                exact_state=self._exact_state,
                loss_divided_by=self._loss_divided_by,
                num_steps=self._num_steps,
            )
            self.attachments.append(attachment)
            self._registry.add(attachment, self._living_optimizers())
        return model

    def add_weight(self, weight: float | Tensor, model: Module | None = None) -> None:
        """With `accumulation="weighted"`, say how much the present micro-batch counts, as by its number of tokens.

        Before its `fabric.backward`: `fabric.strategy.add_weight(num_tokens)`. See `Attachment.add_weight`.

        Args:
            weight: a number of at least 0.
            model: what `fabric.setup` returned; not needed for one model.

        Raises:
            MisconfigurationException: see `Attachment.add_weight`; or several models, and none given.
        """
        wrapped = model._forward_module if isinstance(model, _FabricModule) else model
        with refusals_of(self):
            attachment_of(wrapped, self.attachments).add_weight(weight)

    def backward(self, tensor: Tensor, module: Module | None, *args: Any, **kwargs: Any) -> None:
        """The backward; before the one after the first steps, warn if a hook will compress next to nothing."""
        self._has_just_saved = False
        for attachment in self._registry.open():
            attachment.tell_forecast()
        super().backward(tensor, module, *args, **kwargs)

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Set an optimizer up, and register it with hooks that average models."""
        optimizer = super().setup_optimizer(optimizer)
        with refusals_of(self):
            self._registry.add_optimizer(optimizer)
        self._optimizers.append(weakref.ref(optimizer))
        return optimizer

    def _living_optimizers(self) -> list[Optimizer]:
        return [one for ref in self._optimizers if (one := ref()) is not None]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "attachments": [], "_optimizers": []}

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks; show the average then, since models are evaluated or saved after a barrier.

        Not in the barrier that ends `fabric.save`: the checkpoint has the average already.
        """
        super().barrier(*args, **kwargs)
        if not self._has_just_saved:
            self._registry.show_average()
        self._has_just_saved = False

    def save_checkpoint(self, path: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Save averages, and the hooks' state."""
        # Before anything can fail on one rank only: all ranks skip the same average.
        self._has_just_saved = True
        with self._registry.averaged(self._living_optimizers()):
            attachments = self._registry.by_name(_models(state))
            if attachments:
                state = {**state, CHECKPOINT_KEY: {name: one.state_dict() for name, one in attachments.items()}}
            super().save_checkpoint(path, state, *args, **kwargs)

    def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load, and after the models the hooks' state."""
        rest = super().load_checkpoint(path, state, *args, **kwargs)
        if isinstance(state, dict) and (models := _models(state)):
            with refusals_of(self):
                states = rest.pop(CHECKPOINT_KEY, None)
                self._registry.load_by_name(self._registry.by_name(models), states, str(path))
        return rest


def _models(state: dict[str, Any]) -> dict[str, DistributedDataParallel]:
    return {key: value for key, value in state.items() if isinstance(value, DistributedDataParallel)}
