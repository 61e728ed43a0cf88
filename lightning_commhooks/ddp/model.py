"""`DistributedDataParallel` itself: what can be attached to, how, and what changes while ranks step alone."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from lightning_commhooks.collectives.errors import HookError, raise_if_capturing
from lightning_commhooks.ddp.copies import LostHook, NotCopied, nothing, registered_name
from lightning_commhooks.ddp.local_steps import LocalSteps
from lightning_commhooks.interface.averages_models import averages_models
from lightning_commhooks.interface.bucket import Slot
from lightning_commhooks.interface.hook import BoundHook

# Where `replicate` is, in its two versions.
_COMPOSABLE = "torch.distributed._composable.replicate"

Trampoline = Callable[[object, GradBucket], Future[Tensor]]


def unwrapped(model: object) -> object:
    """The module in what `torch.compile(module)` returns, or the model itself."""
    return getattr(model, "_orig_mod", model)


def checked_model(model: object) -> DistributedDataParallel:
    """The DDP model that a hook can be attached to, also inside of `torch.compile`."""
    model = unwrapped(model)
    if not isinstance(model, DistributedDataParallel):
        if any(base.__module__.startswith(_COMPOSABLE) for base in type(model).__mro__):
            raise ValueError(
                "the model was given to replicate() of torch.distributed._composable, which keeps its "
                "DistributedDataParallel to itself: wrap the module instead, "
                "attach(DistributedDataParallel(module), hook)"
            )
        raise ValueError(
            f"hooks attach to torch.nn.parallel.DistributedDataParallel, not to {type(model).__name__}; "
            "wrap the model first: attach(DistributedDataParallel(model), hook)"
        )
    if model._comm_hooks and getattr(model._comm_hooks[-1][0], "is_closed", bool)():
        raise ValueError(
            f"the communication hook {registered_name(model)!r} of this model was closed, and DDP takes no other: wrap "
            "the module again, attach(DistributedDataParallel(model.module), hook)"
        )
    if any(hasattr(p, "_in_backward_optimizers") for p in model.module.parameters()):
        raise ValueError(
            "_apply_optimizer_in_backward() was used on parameters of the model: DDP averages their gradients by a "
            "hook of its own, and takes no other. Use an optimizer that steps after the backward"
        )
    # Not its list of hooks: in a copy of a model they are not at work.
    if registered_name(model):
        raise ValueError(
            f"the model has the communication hook {registered_name(model)!r} already, and DDP takes one; compose "
            "hooks with Cast or Schedule, or attach to a newly wrapped model"
        )
    if getattr(model, "_use_python_reducer", False):
        raise ValueError(
            "torch._dynamo.config.optimize_ddp='python_reducer' passes single gradients instead of buckets to "
            "hooks; set it to 'ddp_optimizer' (the default) to use a communication hook"
        )
    return model


def device_of(model: DistributedDataParallel) -> torch.device:
    """Where the gradients are."""
    devices: dict[str, torch.device] = {str(p.device): p.device for p in model.module.parameters() if p.requires_grad}
    if len(devices) > 1:
        raise ValueError(
            f"the model has parameters on {' and '.join(sorted(devices))}: a communication hook averages gradients of "
            "one device in each process. Start a process for each device, or leave the hook out"
        )
    (device,) = devices.values()
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"communication hooks run on CPU and CUDA devices, the model is on {device}")
    raise_if_capturing(device)
    return device


class _Registered(NotCopied):
    """Function that DDP calls for each bucket, under the name of the hook."""

    def __init__(self, trampoline: Trampoline, name: str, is_closed: Callable[[], bool]) -> None:
        # Without recording, which a backward with `create_graph=True` would do.
        super().__init__(torch.no_grad()(trampoline), LostHook(name))
        self.is_closed = is_closed
        self.__qualname__ = f"lightning_commhooks:{name}"
        # DDP refuses functions by the __name__ of its own bf16 hooks on CPU.
        self.__name__ = "lightning_commhooks_trampoline"


def register(
    model: DistributedDataParallel, state: object, trampoline: Trampoline, name: str, is_closed: Callable[[], bool]
) -> None:
    """Give DDP the function that it calls for each bucket, under the name of the hook."""
    model.register_comm_hook(state, _Registered(trampoline, name, is_closed))
    model.register_forward_pre_hook(NotCopied(nothing, LostHook(name)))


class Usage:
    """Which parameters got gradients on this rank since the last synchronized backward, with `no_sync()` or not.

    DDP knows, but tells only when hooks have run. Costs a call for each parameter and backward.
    """

    def __init__(self) -> None:
        self._used: set[str] = set()
        self._handles: list[RemovableHandle] = []

    def watch(self, parameters: Mapping[str, Tensor]) -> None:
        """Watch these parameters, by name, instead of others."""
        for handle in self._handles:
            handle.remove()
        used = self._used
        self._handles = [
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: used.add(name))
            for name, parameter in parameters.items()
        ]

    def begin(self) -> None:
        """Forget, when a synchronized backward has ended."""
        self._used.clear()

    def unused(self, slots: Sequence[Slot]) -> frozenset[str]:
        """Names of those that were not used."""
        return frozenset(slot.name for slot in slots if slot.name not in self._used)


class LocalPhase:
    """Looks after a DDP wrapper while its ranks step alone, if the hook ever lets them."""

    def __init__(self, model: DistributedDataParallel, local: LocalSteps, may_be_local: bool) -> None:
        self._model = weakref.ref(model)
        self._local = local
        self._broadcasts_buffers = model.broadcast_buffers
        # In the first step of a static graph DDP gives gradients away before anything can be done at its end.
        self._late_step = -1 if model.static_graph else None
        self._warned = False
        if may_be_local:
            model.register_forward_pre_hook(NotCopied(torch.compiler.disable(self._before_forward)))

    def _before_forward(self, model: DistributedDataParallel, inputs: object) -> None:
        if self._local.keeps_own_buffers:
            model.broadcast_buffers = False  # also in the first forward of a wrapper, when training resumes
        self._local.before_forward(model.training)

    def begin(self, bound: BoundHook, step: int) -> bool:
        """Called for each bucket; returns whether the gradients cannot be changed any more when the step ends."""
        if self._late_step == -1:
            self._late_step = step
        model = self._model()
        assert model is not None
        self._warn_of_join(model)
        if averages_models(bound):
            is_local = bound.is_local(step)
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

    def _warn_of_join(self, model: DistributedDataParallel) -> None:
        if self._warned or not model._join_config.enable or getattr(model, "_divide_by_initial_world_size", True):
            return
        self._warned = True
        if dist.get_rank(model.process_group) == 0:
            warnings.warn(
                "join(divide_by_initial_world_size=False) does nothing with a communication hook, PyTorch's own "
                f"included: gradients are divided by {dist.get_world_size(model.process_group)}, the number of all "
                "ranks, also when some have run out of data. Leave it out",
                stacklevel=2,
            )
