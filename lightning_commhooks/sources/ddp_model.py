"""`DistributedDataParallel` itself: what can be attached to, and how."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from lightning_commhooks.basics.copies import NotCopied, return_none
from lightning_commhooks.collectives.errors import raise_if_capturing
from lightning_commhooks.interface.layout import unwrapped

# Where that `replicate` is; the one of `replicate_with_fsdp` is sharding over one rank.
_COMPOSABLE = "torch.distributed._composable.replicate"

Trampoline = Callable[[object, GradBucket], Future[Tensor]]


def registered_name(model: DistributedDataParallel) -> str:
    """The name of the communication hook by DDP itself, empty for none."""
    return str(model._get_ddp_logging_data().get("comm_hook", ""))


def is_composable(model: object) -> bool:
    """Whether a model was given to the `replicate` that wraps it in a `DistributedDataParallel` of its own."""
    return any(base.__module__ == _COMPOSABLE for base in type(model).__mro__)


def checked_model(model: object) -> DistributedDataParallel:
    """The DDP model that a hook can be attached to, also inside of `torch.compile`."""
    model = unwrapped(model)
    if not isinstance(model, DistributedDataParallel):
        if is_composable(model):
            raise ValueError(
                "the model was given to replicate() of torch.distributed._composable, which keeps its "
                "DistributedDataParallel to itself: wrap the module instead, "
                "attach(DistributedDataParallel(module), hook)"
            )
        fix = "wrap the model first: attach(DistributedDataParallel(model), hook); or shard it by FSDP"
        for name, module in model.named_modules() if isinstance(model, torch.nn.Module) else ():
            if isinstance(module, DistributedDataParallel):
                fix = f"attach(model.get_submodule({name!r}), hook)"
        raise ValueError(
            f"hooks attach to torch.nn.parallel.DistributedDataParallel, not to {type(model).__name__}; {fix}"
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
    if model._delay_all_reduce_params:
        raise ValueError(
            "DistributedDataParallel(delay_all_reduce_named_params=...) averages these parameters by itself, without "
            "the hook, and does not wait for the result: ranks may differ. Leave the option out"
        )
    if getattr(model, "mixed_precision", None) is not None:
        raise ValueError(
            "DistributedDataParallel(mixed_precision=...) averages gradients by a hook of its own, and takes no other. "
            "Leave the option out, and use torch.autocast"
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


class LostHook:
    """Replaces the hook in a copy of a model: a forward pre-hook that warns, once, when the copy is trained."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._warned = False

    def __call__(self, model: DistributedDataParallel, inputs: object) -> None:
        """Warn in a forward that trains, unless the copy was given a hook of its own."""
        # Not by `model.training`, which Lightning leaves as it was.
        if self._warned or not torch.is_grad_enabled() or registered_name(model):
            return
        self._warned = True
        if dist.get_rank(model.process_group) == 0:
            warnings.warn(
                f"this DistributedDataParallel is a copy of one with the communication hook {self._name!r}, which is "
                "not copied: DDP averages gradients by itself. To train with a hook, attach it to the copy: "
                "attach(model, hook)",
                stacklevel=2,
            )


def register(
    model: DistributedDataParallel, state: object, trampoline: Trampoline, name: str, is_closed: Callable[[], bool]
) -> None:
    """Give DDP the function that it calls for each bucket, under the name of the hook."""
    # Without recording, which a backward with `create_graph=True` would do.
    registered = NotCopied(torch.no_grad()(trampoline), LostHook(name))
    # DDP refuses functions by the __name__ of its own bf16 hooks on CPU.
    names = {"__name__": "lightning_commhooks_trampoline", "__qualname__": f"lightning_commhooks:{name}"}
    vars(registered).update(names, is_closed=is_closed)
    model.register_comm_hook(state, registered)
    model.register_forward_pre_hook(NotCopied(return_none, LostHook(name)))
