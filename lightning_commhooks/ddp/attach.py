"""`attach(ddp, hook)`: the way from a hook's name to a hook at work."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_commhooks.collectives.agreement import raise_on_all_ranks
from lightning_commhooks.collectives.counters import Counters
from lightning_commhooks.collectives.group import Group
from lightning_commhooks.collectives.process_groups import backend_for
from lightning_commhooks.ddp.attachment import Attachment
from lightning_commhooks.ddp.model import checked_model, device_of, unwrapped
from lightning_commhooks.ddp.optimizers import check_optimizer
from lightning_commhooks.ddp.runtime import Runtime
from lightning_commhooks.interface.accumulation import is_positive
from lightning_commhooks.interface.hook import CommHook
from lightning_commhooks.interface.registry import get_hook
from lightning_commhooks.interface.user_function import DDPHook, UserFunction, check_user_hook, warn_if_broken_here
from lightning_commhooks.wrappers.scale import Accumulation, ScaleByGradAccumulation, accumulation_of, unscaled

logger = logging.getLogger(__name__)


def resolve_hook(
    hook: object, hook_state: object = None, accumulation: Accumulation = "framework"
) -> CommHook | DDPHook:
    """Check what a user passed as `hook=`, `hook_state=` and `accumulation=` of [`attach`][], without a model."""
    resolved: Any = hook
    if isinstance(hook, (str, CommHook)) or (isinstance(hook, type) and issubclass(hook, CommHook)):
        resolved = get_hook(hook)  # type: ignore[arg-type]  # refuses a class, naming the call to make
        if hook_state is not None and not isinstance(unscaled(resolved), UserFunction):
            raise ValueError(
                f"hook_state={hook_state!r} belongs to a hook function (state, bucket); "
                f"{hook!r} keeps its own state: set its options instead"
            )
    else:
        check_user_hook(hook)
    if accumulation == "framework":
        return resolved  # type: ignore[no-any-return]
    if isinstance(resolved, ScaleByGradAccumulation):
        raise ValueError(f"accumulation={accumulation!r}: the hook has an accumulation already, {resolved!r}")
    return ScaleByGradAccumulation(resolved, accumulation)


def attach(
    model: DistributedDataParallel,
    hook: str | CommHook | DDPHook,
    *,
    hook_state: object = None,
    grad_scaler: torch.amp.GradScaler | None = None,
    exact_state: bool = False,
    optimizers: Iterable[Optimizer] | Callable[[], Iterable[Optimizer]] | None = None,
    accumulation: Accumulation = "framework",
    loss_divided_by: float | Callable[[], float] = 1,
) -> Attachment:
    """Let a communication hook average the gradients of a DDP model.

    Collective: every rank of the model's process group calls it, before the first backward.

    Args:
        model: the wrapped model, perhaps compiled: `torch.compile(DistributedDataParallel(module))`.
        hook: a name (`available_hooks()`), a configured `CommHook`, or a function with the signature of
            `DistributedDataParallel.register_comm_hook`, stock or your own.
        hook_state: the `state` argument of such a function.
        grad_scaler: the scaler that multiplies the loss, so that what the hook remembers stays right when the
            scale changes.
        exact_state: whether `state_dict()` keeps what differs between ranks for each of them. A run then resumes
            bit by bit on CPU, and the state is as many times larger as there are ranks.
        optimizers: what trains the model, for hooks that average models after their steps; or a function that
            returns them, called when they are needed. Not given: `Attachment.add_optimizer`. Empty: you call
            `Attachment.after_optimizer_step` yourself.
        accumulation: how gradients are scaled that are accumulated over micro-batches: see
            [`ScaleByGradAccumulation`][].
        loss_divided_by: what you, or a framework, divide the loss of each micro-batch by; or a function that returns
            it, called in each synchronized backward. What `accumulation` takes into account.

    Returns:
        a handle to metrics, state and the end of the hook.

    Raises:
        HookError: one of these, or whatever else, on another rank.
        ValueError: unknown name; a function that DDP would refuse; `hook_state` with a hook that is no
            function; a model that is not DDP, has a hook already or had one that was closed, is on another device than
            CPU or CUDA, or on several, or runs under `torch.compile`'s `python_reducer`; a scaler that is no
            `GradScaler`; an optimizer that cannot step on one rank alone; `accumulation` is none, or given twice;
            `loss_divided_by` is not positive; ranks were given different hooks, options or `exact_state`.
    """
    ddp = unwrapped(model)
    agreement: AbstractContextManager[dict[str, object]] = nullcontext({})
    if isinstance(ddp, DistributedDataParallel):
        agreement = raise_on_all_ranks(ddp.process_group, "attach()")
    # Before anything is made that takes all ranks.
    with agreement as same:
        resolved = resolve_hook(hook, hook_state, accumulation)
        config = resolved if isinstance(resolved, CommHook) else UserFunction(resolved)
        if not callable(loss_divided_by) and not is_positive(loss_divided_by):
            raise ValueError(f"loss_divided_by must be a positive number or a function, is {loss_divided_by!r}")
        divided_by = loss_divided_by if callable(loss_divided_by) else lambda: loss_divided_by
        model = checked_model(model)
        if grad_scaler is not None and not isinstance(grad_scaler, torch.amp.GradScaler):
            raise ValueError(f"grad_scaler must be a torch.amp.GradScaler, is {grad_scaler!r}")
        if not (callable(loss_divided_by) or loss_divided_by == 1 or accumulation_of(config) != "framework"):
            warnings.warn(
                f"loss_divided_by={loss_divided_by} does nothing with accumulation='framework', which leaves gradients "
                "as they are: use accumulation='mean'",
                stacklevel=2,
            )
        device = device_of(model)
        method = unscaled(config)
        if isinstance(method, UserFunction):
            warn_if_broken_here(method.function, backend_for(model.process_group, device))
        is_scaled = grad_scaler is not None and grad_scaler.is_enabled()
        same |= {"hook": config, "exact_state": exact_state, "whether gradients are scaled by grad_scaler": is_scaled}
    runtime = Runtime(config, model.process_group, device, hook_state, grad_scaler, divided_by)
    attachment = Attachment(resolved, runtime, exact_state)
    try:
        with raise_on_all_ranks(runtime.bound.group.process_group, "attach()"):
            if optimizers is not None and not callable(optimizers):
                optimizers = list(optimizers)
                if attachment.averages_models:
                    # Before the model has a hook, which DDP does not give back.
                    for optimizer in optimizers:
                        check_optimizer(optimizer)
            attachment._connect(model)
            attachment._set_optimizers(optimizers)
    except BaseException:
        (attachment._finalizer or runtime.close)()
        raise
    logger.info("attached %r to %s", resolved, type(model.module).__name__)
    return attachment


def attach_emulated(
    model: DistributedDataParallel,
    hook: CommHook,
    make_group: Callable[[Counters], Group],
    optimizers: Iterable[Optimizer] = (),
) -> Attachment:
    """Attach a hook to a model whose process group is this rank alone, with other collectives than that group's.

    `make_group` makes them, to count by the counters it gets.
    """
    model = checked_model(model)
    device = device_of(model)
    runtime = Runtime(hook, model.process_group, device, None, None, lambda: 1, make_group)
    attachment = Attachment(hook, runtime, exact_state=False)
    try:
        attachment._connect(model)
        attachment._set_optimizers(list(optimizers))
    except BaseException:
        runtime.close()
        raise
    return attachment
