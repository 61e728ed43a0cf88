"""`DistributedDataParallel` itself: what can be attached to, how, and what changes while ranks step alone."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from lightning_commhooks.core.engine import HookError
from lightning_commhooks.core.hook import BoundHook, Slot
from lightning_commhooks.core.local_steps import LocalSteps


def check_model(model: object) -> None:
    """Refuse what a hook cannot be attached to.

    Raises:
        ValueError: no DDP model, one with a hook, or one under `torch.compile`'s `python_reducer`.
    """
    if not isinstance(model, DistributedDataParallel):
        raise ValueError(
            f"hooks attach to torch.nn.parallel.DistributedDataParallel, not to {type(model).__name__}; "
            "wrap the model first: attach(DistributedDataParallel(model), hook)"
        )
    if model._comm_hooks or registered_name(model):
        raise ValueError(
            f"the model has the communication hook {registered_name(model)!r} already, and DDP takes one; compose "
            "hooks with Cast or Schedule, or attach to a newly wrapped model"
        )
    if getattr(model, "_use_python_reducer", False):
        raise ValueError(
            "torch._dynamo.config.optimize_ddp='python_reducer' passes single gradients instead of buckets to "
            "hooks; set it to 'ddp_optimizer' (the default) to use a communication hook"
        )


def register(model: DistributedDataParallel, state: object, trampoline: Callable[..., object], name: str) -> None:
    """Give DDP the function that it calls for each bucket, under the name of the hook."""
    label = f"lightning_commhooks:{name}"
    trampoline.__qualname__ = label
    # DDP refuses functions by the __name__ of its own bf16 hooks on CPU.
    trampoline.__name__ = "lightning_commhooks_trampoline"
    model.register_comm_hook(state, trampoline)


def registered_name(model: DistributedDataParallel) -> str:
    """What DDP itself says its communication hook is, empty for none."""
    return str(model._get_ddp_logging_data().get("comm_hook", ""))


class Usage:
    """Which parameters got gradients on this rank since the last synchronized backward, with `no_sync()` or not.

    DDP knows, but tells only when hooks have run. Costs a call for each parameter and backward.

    Args:
        arrived: called for each gradient.
    """

    def __init__(self, arrived: Callable[[], None]) -> None:
        self._arrived = arrived
        self._used: set[str] = set()
        self._handles: list[RemovableHandle] = []

    def watch(self, parameters: Mapping[str, Tensor]) -> None:
        """Watch these parameters, by name, instead of others."""
        for handle in self._handles:
            handle.remove()
        arrived, used = self._arrived, self._used

        def note(name: str) -> None:
            used.add(name)
            arrived()

        self._handles = [
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: note(name))
            for name, parameter in parameters.items()
        ]

    def begin(self) -> None:
        """Forget, when a synchronized backward has ended."""
        self._used.clear()

    def unused(self, slots: Sequence[Slot]) -> frozenset[str]:
        """Names of those that were not used."""
        return frozenset(slot.name for slot in slots if slot.name not in self._used)


class LocalPhase:
    """Looks after a DDP wrapper while its ranks step alone.

    Args:
        model: the wrapper.
        local: what its optimizers and evaluation have to do with the hook.
        averages_models: whether the hook ever lets ranks step alone.
    """

    def __init__(self, model: DistributedDataParallel, local: LocalSteps, averages_models: bool) -> None:
        self._model = weakref.ref(model)
        self._local = local
        self._broadcasts_buffers = model.broadcast_buffers
        # In the first step of a static graph DDP gives gradients away before anything can be done at its end.
        self._late_step = -1 if model.static_graph else None
        if averages_models:
            model.register_forward_pre_hook(torch.compiler.disable(self._before_forward))

    def _before_forward(self, model: DistributedDataParallel, inputs: object) -> None:
        if model is not self._model():
            return  # a copy of it
        if self._local.keeps_own_buffers:
            model.broadcast_buffers = False  # also in the first forward of a wrapper, when training resumes
        if torch.is_grad_enabled():
            self._local.hide_average()
            self._local.awaits_backward = model.training
        elif not model.training:
            self._local.evaluate()
        if model.training:
            self._local.buffers_change()

    def begin(self, bound: BoundHook, step: int) -> bool:
        """Called for each bucket; returns whether the gradients cannot be changed any more when the step ends.

        Raises:
            HookError: ranks cannot step alone like this.
        """
        if self._late_step == -1:
            self._late_step = step
        if bound.averages_models:
            model, is_local = self._model(), bound.is_local(step)
            assert model is not None
            if is_local and model._join_config.enable:
                raise HookError(
                    "join() does not work while ranks step alone: ranks that have run out of data take no optimizer "
                    "steps, after which models are averaged. Give all ranks the same number of batches"
                )
            if is_local:
                self._local.check_optimizers()
            # From the next forward on.
            model.broadcast_buffers = self._broadcasts_buffers and not (is_local and bound.average_buffers)
        return step == self._late_step
