"""`attach(model, hook)`, which attaches a hook to a model."""

from __future__ import annotations

import functools
import logging
import sys
import warnings
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_commhooks.collectives.agreement import ATTACH
from lightning_commhooks.collectives.counters import Counters
from lightning_commhooks.collectives.group import Group
from lightning_commhooks.collectives.process_groups import backend_for
from lightning_commhooks.interface.accumulation import is_positive
from lightning_commhooks.interface.checks import check_bool, check_integer
from lightning_commhooks.interface.hook import CommHook
from lightning_commhooks.interface.layout import unwrapped
from lightning_commhooks.interface.misplaced import explained
from lightning_commhooks.interface.python_code import code
from lightning_commhooks.interface.user_function import DDPHook, UserFunction, warn_if_broken_here
from lightning_commhooks.runtime.attachment import Attachment
from lightning_commhooks.runtime.optimizers import check_optimizer
from lightning_commhooks.runtime.runtime import Runtime
from lightning_commhooks.runtime.source import Source
from lightning_commhooks.sources.ddp import DDPSource
from lightning_commhooks.sources.ddp_model import checked_model, is_composable
from lightning_commhooks.wrappers.scale import Accumulation, accumulation_of, without_scale

logger = logging.getLogger(__name__)


@explained
def attach(
    model: nn.Module,
    hook: str | CommHook | DDPHook,
    *,
    hook_state: object = None,
    grad_scaler: torch.amp.GradScaler | None = None,
    exact_state: bool = False,
    optimizers: Iterable[Optimizer] | Callable[[], Iterable[Optimizer]] | None = None,
    accumulation: Accumulation = "framework",
    loss_divided_by: float | Callable[[], float] = 1,
    replicate_group: dist.ProcessGroup | None = None,
    shard_hook: str | CommHook | None = None,
    gather_hook: str | CommHook | None = None,
    gather_differences: bool = False,
    num_steps: int | None = None,
    manager: Any = None,
) -> Attachment:
    """Average the gradients of a model with a communication hook.

    Collective: every rank of the model's process group calls it before the first backward, and with FSDP before the
    first forward. The page "Use it" has a table of hooks and options by kind of model; an option for another kind is an
    error.

    Args:
        model: a `DistributedDataParallel`, a `FullyShardedDataParallel`, a module to which `fully_shard` was applied,
            or one that contains such modules, all of one kind. It may be compiled: `torch.compile(model)`.
        hook: a name (`available_hooks()`), a configured `CommHook`, or a function with the signature of
            `DistributedDataParallel.register_comm_hook`, stock or your own.
        hook_state: the `state` argument of such a function.
        grad_scaler: the scaler that multiplies the loss, so that the memory of the hook stays right when the scale
            changes.
        exact_state: whether `state_dict()` keeps the differences between ranks, such as residuals. A run then resumes
            bit by bit on CPU, and the state is as many times larger as there are ranks.
        optimizers: the optimizers of the model, for hooks that average models after their steps; or a function that
            returns them, called when they are needed. Not given: `Attachment.add_optimizer`. Empty: you call
            `Attachment.after_optimizer_step` yourself.
        accumulation: how to scale gradients that are accumulated over micro-batches: see
            [`ScaleByGradAccumulation`][].
        loss_divided_by: the number by which you, or a framework, divide the loss of each micro-batch; or a function
            that returns it, called in each synchronized backward. `accumulation` takes it into account.
        replicate_group: the ranks that hold the same shard of the model in different replicas, with equal weights. The
            hook averages over them. With a two-dimensional mesh, FSDP2 knows this group; if parameters have different
            groups, attach a hook for each group, and pass the group.
        shard_hook: the hook of the reduce-scatter within a replica. `None`: FSDP2's own reduce-scatter.
        gather_hook: the format in which parameters are gathered. All ranks compute with the rounded parameters; the
            shard of each rank stays exact. `None`: FSDP2's own format.
        gather_differences: whether all ranks keep a copy of the gathered parameters. A forward then gathers their
            changes since the last gather, in the format of `gather_hook`, and a backward gathers nothing. The first
            gather, and the first after `load_state_dict`, is exact.
        num_steps: the number of synchronized backwards of the whole training. Starts that are fractions, such as
            `start_powerSGD_iter=0.1`, are fractions of it. `"auto"`, the start of a hook that is chosen by its name, is
            a tenth of it, if that is sooner than the default. Checkpoints store it, and it stays the same in a run that
            resumes. `None`: unknown, or announced before the first backward by `Attachment.tell_forecast`.
        manager: a `torchft.Manager` with a `lightning_commhooks.torchft.ProcessGroupGloo` and `use_async_quorum=False`.
            The hook averages over the replicas of its present quorum, and the remaining replicas continue when one
            dies. There is one synchronized backward between the manager's `start_quorum` and `should_commit`; with
            [`DiLoCo`][] and [`PostLocalSGD`][], whose averages replicas vote on, the hook calls both. A joining replica
            gets the state that all replicas share; its residual is zero.

    Returns:
        a handle with which to read metrics, save and load state, and close the hook. In one process the hook leaves
        gradients as they are, with a warning, and its memory is still saved and loaded.

    Raises:
        HookError: another rank raised an error.
        ValueError: the hook is unknown, or a function that DDP refuses; the hook or an option does not fit the model;
            the model is neither DDP nor sharded, has a hook already, or had one that was closed (DDP), is on another
            device than CPU or CUDA, or on several, or runs under `torch.compile`'s `python_reducer`; the scaler is no
            `GradScaler`; an optimizer cannot step on one rank alone; `accumulation` is unknown, or given twice;
            `loss_divided_by` is not positive; ranks were given different hooks, options or `exact_state`.
    """
    options = {
        "hook_state": hook_state,
        "grad_scaler": grad_scaler,
        "exact_state": exact_state or None,
        "optimizers": optimizers,
        "accumulation": None if accumulation == "framework" else accumulation,
        "loss_divided_by": None if loss_divided_by == 1 else loss_divided_by,
        "replicate_group": replicate_group,
        "shard_hook": shard_hook,
        "gather_hook": gather_hook,
        "gather_differences": gather_differences or None,
    }
    model = cast("nn.Module", unwrapped(model))
    source = source_of(model, replicate_group) if manager is None else source_of_manager(manager, model)
    # Before anything is created that needs all ranks.
    with source.agreeing(ATTACH) as same:
        source.set_options({name: value for name, value in options.items() if value is not None})
        resolved = source.resolve_hook(hook)
        config = resolved if isinstance(resolved, CommHook) else UserFunction(resolved)
        check_values(num_steps, loss_divided_by, exact_state=exact_state)
        divided_by = _loss_divided_by(loss_divided_by, config)
        source.check(model)
        _check(source, config, grad_scaler)
        if config.is_uneven:
            _check_uneven(source, model, config, grad_scaler)
        is_scaled = grad_scaler is not None and grad_scaler.is_enabled()
        same |= {"hook": config, "exact_state": exact_state, "whether gradients are scaled by grad_scaler": is_scaled}
        same["whether num_steps is given"] = num_steps is not None
        same |= {name: source.hooks.get(name) for name in ("shard_hook", "gather_hook")}
        same["gather_differences"] = gather_differences
    with ExitStack() as on_failure:
        with source.agreeing(ATTACH):
            runtime = Runtime(config, source, grad_scaler, divided_by)
            on_failure.callback(runtime.close)
        attachment = Attachment(runtime, exact_state)
        with source.agreeing(ATTACH):
            if optimizers is not None and not callable(optimizers):
                if not isinstance(optimizers, Iterable):
                    raise ValueError(f"optimizers must be a list, [optimizer], got {type(optimizers).__name__}(...)")
                optimizers = list(optimizers)
                if attachment.averages_models:
                    # Before the model has the hook, because DDP cannot remove it.
                    for optimizer in optimizers:
                        check_optimizer(optimizer)
            runtime.connect(model)
            runtime.local.set_optimizers(optimizers)
        if num_steps is not None:
            runtime.expect(num_steps)
        on_failure.pop_all()
    if runtime.is_alone and not isinstance(config, UserFunction):
        # An outer optimizer, such as DiLoCo's, works in one process too.
        what = "averages" if attachment.averages_models else "does"
        warnings.warn(f"hook={runtime.name!r} {what} nothing: training runs in one process", stacklevel=3)
    name = runtime.name if isinstance(config, UserFunction) else code(config)
    logger.info("attached the communication hook %s to %s on %s", name, type(model).__name__, source.device)
    return attachment


def check_values(num_steps: object = None, loss_divided_by: object = 1, **flags: object) -> None:
    """Check options of [`attach`][] and of the adapters that need no model; each flag must be `True` or `False`.

    Raises:
        ValueError: names the option and its value.
    """
    for name, value in flags.items():
        check_bool(name, value)
    if num_steps is not None:
        check_integer("num_steps", num_steps, 1)
    if not callable(loss_divided_by) and not is_positive(loss_divided_by):
        raise ValueError(f"loss_divided_by must be a positive number or a function, got {loss_divided_by!r}")


def _check(source: Source, config: CommHook, grad_scaler: torch.amp.GradScaler | None) -> None:
    if grad_scaler is not None and not isinstance(grad_scaler, torch.amp.GradScaler):
        raise ValueError(f"grad_scaler must be a torch.amp.GradScaler, got {grad_scaler!r}")
    method = without_scale(config)
    if isinstance(method, UserFunction):
        warn_if_broken_here(method.function, backend_for(source.process_group, source.device))


def _check_uneven(source: Source, model: nn.Module, config: CommHook, grad_scaler: torch.amp.GradScaler | None) -> None:
    """Refuse whatever makes each step collective, for a hook that lets ranks take different numbers of steps."""
    reasons = {
        "a sharded model": not isinstance(source, DDPSource),
        "find_unused_parameters=True": getattr(model, "find_unused_parameters", False),
        "grad_scaler": grad_scaler is not None and grad_scaler.is_enabled(),
        "average_buffers=False, while DDP broadcasts buffers,": _broadcasts_buffers(model, config),
    }
    for what, is_so in reasons.items():
        if is_so:
            raise ValueError(
                f"{code(config)} lets ranks take different numbers of steps, and with {what} every step is collective"
            )


def _broadcasts_buffers(model: nn.Module, config: CommHook) -> bool:
    is_on = getattr(model, "broadcast_buffers", False) and not getattr(without_scale(config), "average_buffers", True)
    return is_on and next(model.buffers(), None) is not None


@functools.singledispatch
def source_of_manager(manager: object, model: nn.Module) -> Source:
    """Return the source of a model among a manager's ranks; `lightning_commhooks.torchft` registers its own."""
    raise ValueError(
        f"manager={manager!r} has no group of lightning_commhooks.torchft.ProcessGroupGloo, in which hooks communicate"
    )


def source_of(model: nn.Module, replicate_group: dist.ProcessGroup | None = None) -> Source:
    """Return the source of a model's buckets; raise a `ValueError` if the model is neither in DDP nor sharded."""
    # Importing FSDP takes half a second; code with such a model has imported it already.
    has_fsdp = "torch.distributed.fsdp" in sys.modules and isinstance(model, nn.Module)
    if has_fsdp and not isinstance(model, DistributedDataParallel) and not is_composable(model):
        from lightning_commhooks.sources import fsdp1, fsdp2, replicas

        version1, version2 = fsdp1.units(model), fsdp2.units(model)
        if version1 and version2:
            raise ValueError(
                "the model has FullyShardedDataParallel and fully_shard modules; shard it with one of them"
            )
        if version2 and (replicate_group is not None or replicas.replicas_of(model)):
            return replicas.Replicas(model, replicate_group)
        if version1 or version2:
            return fsdp1.FSDP1(model) if version1 else fsdp2.FSDP2(model)
    ddp = model if isinstance(model, DistributedDataParallel) else checked_model(model)
    source = DDPSource(ddp.process_group)
    # Ranks agree there; FSDP has moved its parameters to the current device.
    source.device = next((p.device for p in ddp.parameters()), source.device)
    return source


def _loss_divided_by(value: float | Callable[[], float], config: CommHook) -> Callable[[], float]:
    if callable(value):
        return value
    if value != 1 and accumulation_of(config) == "framework":
        warnings.warn(
            f"loss_divided_by={value} does nothing with accumulation='framework', which leaves gradients as they are: "
            "use accumulation='mean'",
            stacklevel=4,
        )
    return lambda: value


def attach_emulated(
    model: DistributedDataParallel,
    hook: CommHook,
    make_group: Callable[[Counters], Group],
    optimizers: Iterable[Optimizer] = (),
) -> Attachment:
    """Attach a hook to a model whose process group is this rank alone, with collectives other than that group's.

    `make_group` creates them; they count with the counters that it gets.
    """
    source = DDPSource(model.process_group)
    source.check(model)
    runtime = Runtime(hook, source, make_group=make_group)
    try:
        runtime.connect(model)
        runtime.local.set_optimizers(list(optimizers))
    except BaseException:
        runtime.close()
        raise
    return Attachment(runtime, exact_state=False)
