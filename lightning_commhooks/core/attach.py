"""`attach(ddp, hook)`: the only file that knows `DistributedDataParallel` and `GradBucket`."""

# No `from __future__ import annotations`: DDP compares the annotations of the hook that is registered here.

import logging
import math
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from lightning_commhooks.core.collectives import Group
from lightning_commhooks.core.engine import Engine, HookError, StreamEngine, ThreadEngine, call_at_end_of_backward
from lightning_commhooks.core.groups import backend_for, destroy, own_group
from lightning_commhooks.core.hook import BoundHook, Bucket, CommHook
from lightning_commhooks.core.layout import Layout
from lightning_commhooks.core.metrics import Counters
from lightning_commhooks.core.registry import get_hook
from lightning_commhooks.core.user_hook import DDPHook, check_user_hook, warn_if_broken_here

logger = logging.getLogger(__name__)

STATE_FORMAT = 1

Trampoline = Callable[[object, GradBucket], Future[Tensor]]


class Attachment:
    """A hook at work on one DDP model; made by [`attach`][].

    Attributes:
        hook: the configuration: a `CommHook`, or the user's own DDP hook function.
        bound: the runtime object; `None` for a user's own function.
    """

    def __init__(
        self,
        hook: CommHook | DDPHook,
        bound: BoundHook | None,
        counters: Counters,
        clock: "_StepClock",
        engine: Engine | None,
        close: Callable[[], None],
    ) -> None:
        self.hook = hook
        self.bound = bound
        self._counters = counters
        self._clock = clock
        self._engine = engine
        self._close = close

    @property
    def name(self) -> str:
        """Name of the hook, or `module.function` of a user's own."""
        return hook_name(self.hook)

    def metrics(self) -> dict[str, float]:
        """Cumulative counts of this rank.

        Returns:
            `steps` (synchronized backwards since `attach`), `bytes_sent` and `bytes_dense` (payload bytes this rank
            sent, and would have sent with a plain all-reduce), `compression_ratio` (dense over sent), `collectives`,
            `numel_compressed` and `numel_uncompressed` (gradient elements that a compressing hook did and did
            not compress). What a user's own function sends is unknown: NaN.
        """
        metrics = self._counters.as_dict()
        if self.bound is None:
            metrics.update(bytes_sent=math.nan, compression_ratio=math.nan)
        return metrics

    def compression_stats(self) -> tuple[float, int, int]:
        """`(rate, numel_before, numel_after)` since compression began, as `PowerSGDState.compression_stats`.

        Raises:
            ValueError: the hook keeps no such statistics.
        """
        if self.bound is None:
            raise ValueError(f"{self.name} is not a hook of this library; ask its own state")
        return self.bound.compression_stats()

    def state_dict(self) -> dict[str, Any]:
        """The hook's state as tensors and primitives, equal on all ranks.

        Collective: call it on every rank, outside of a backward. Of a user's own function, the step count only.
        """
        state = {} if self.bound is None or self._engine is None else self._engine.call(self.bound.state_dict)
        return {"format": STATE_FORMAT, "hook": self._signature(), "steps": self._clock.steps, "state": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the state that `state_dict` of the same hook returned.

        Raises:
            ValueError: the state is of another hook, of the same with other options, or of another format.
        """
        if state_dict.get("format") != STATE_FORMAT:
            raise ValueError(f"not the state of a communication hook: format is {state_dict.get('format')!r}")
        if state_dict["hook"] != self._signature():
            raise ValueError(f"the state is of {state_dict['hook']}, but the attached hook is {self._signature()}")
        bound = self.bound
        if bound is not None and self._engine is not None:
            self._engine.call(lambda: bound.load_state_dict(state_dict["state"]))
        self._clock.restart_at(state_dict["steps"])

    def _signature(self) -> str:
        return repr(self.hook) if isinstance(self.hook, CommHook) else self.name

    def close(self) -> None:
        """Release thread and process group; metrics stay readable, a later backward raises `HookError`.

        Warns when training ended before the hook compressed anything. Closing twice does nothing. A model
        that goes out of use closes its attachment by itself. A user's own function has nothing to release.
        """
        self._close()


class _StepClock:
    """Counts synchronized backwards from the order in which DDP hands over its buckets.

    A step ends with its backward. Outside of one (`join()`, the first step of a static graph) an index that does
    not rise begins a new step. `is_last` alone would not do: `skip_all_reduce_unused_params=True` can skip the
    last bucket of every backward.
    """

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._previous_index: int | None = None
        self.steps = 0

    def restart_at(self, steps: int) -> None:
        self.steps = steps
        self._end_step()

    def step_of(self, index: int, is_last: bool) -> int:
        if self._previous_index is None or index <= self._previous_index:
            self.steps += 1
            self._counters.steps += 1
            call_at_end_of_backward(self._end_step)
        self._previous_index = None if is_last else index
        return self.steps - 1

    def _end_step(self) -> None:
        self._previous_index = None


def hook_name(hook: CommHook | DDPHook) -> str:
    """Name of a configuration, or `module.function` of a DDP hook function."""
    if isinstance(hook, CommHook):
        return hook.name
    return f"{getattr(hook, '__module__', '')}.{getattr(hook, '__qualname__', type(hook).__qualname__)}"


def resolve_hook(hook: object, hook_state: object = None) -> CommHook | DDPHook:
    """Check what a user passed as `hook=` and `hook_state=`, without a model.

    Raises:
        ValueError: see [`attach`][].
    """
    if isinstance(hook, (str, CommHook)) or (isinstance(hook, type) and issubclass(hook, CommHook)):
        if hook_state is not None:
            raise ValueError(
                f"hook_state={hook_state!r} belongs to a hook function (state, bucket); "
                f"{hook!r} keeps its own state: set its options instead"
            )
        return get_hook(hook)  # type: ignore[arg-type]  # refuses a class, naming the call to make
    check_user_hook(hook)
    return hook  # type: ignore[return-value]  # checked to be callable


def attach(model: DistributedDataParallel, hook: str | CommHook | DDPHook, *, hook_state: object = None) -> Attachment:
    """Let a communication hook average the gradients of a DDP model.

    Collective: every rank of the model's process group calls it, before the first backward.

    Args:
        model: the wrapped model.
        hook: a name (`available_hooks()`), a configured `CommHook`, or a function with the signature of
            `DistributedDataParallel.register_comm_hook`, stock or your own.
        hook_state: the `state` argument of such a function.

    Returns:
        a handle to metrics, state and the end of the hook.

    Raises:
        ValueError: unknown name; a function that DDP would refuse; `hook_state` with a hook that is no
            function; a model that is not DDP, has a hook already, is on another device than CPU or CUDA, or
            runs under `torch.compile`'s `python_reducer`.
    """
    resolved = resolve_hook(hook, hook_state)
    _check_model(model)
    counters = Counters()
    clock = _StepClock(counters)
    device = next(p.device for p in model.module.parameters() if p.requires_grad)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"communication hooks run on CPU and CUDA devices, the model is on {device}")
    if not isinstance(resolved, CommHook):
        warn_if_broken_here(resolved, backend_for(model.process_group, device))
        _register(model, hook_state, _counting(resolved, clock, Group(model.process_group, counters)), resolved)
        return Attachment(resolved, None, counters, clock, None, lambda: None)

    owned, engine = _engine(model.process_group, device)
    group = Group(owned or model.process_group, counters, device)
    try:
        bound = resolved.bind(group)
        _register(model, None, _trampoline(resolved, bound, engine, clock, model), resolved)
    except BaseException:
        engine.close()
        destroy(owned, group)
        raise
    finalizer = weakref.finalize(model, _close, engine, bound, clock, owned)
    logger.info("attached %r to %s", resolved, type(model.module).__name__)
    return Attachment(resolved, bound, counters, clock, engine, finalizer)


def _check_model(model: object) -> None:
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


def _register(model: DistributedDataParallel, state: object, trampoline: Trampoline, hook: CommHook | DDPHook) -> None:
    label = f"lightning_commhooks:{hook_name(hook)}"
    trampoline.__qualname__ = label
    # DDP refuses functions by the __name__ of its own bf16 hooks on CPU.
    trampoline.__name__ = "lightning_commhooks_trampoline"
    model.register_comm_hook(state, trampoline)


def registered_name(model: DistributedDataParallel) -> str:
    """What DDP itself says its communication hook is, empty for none."""
    return str(model._get_ddp_logging_data().get("comm_hook", ""))


def _engine(process_group: dist.ProcessGroup, device: torch.device) -> tuple[dist.ProcessGroup | None, Engine]:
    """What runs the hook, and the group made for it, if any."""
    if device.type == "cuda" and backend_for(process_group, device) == dist.Backend.NCCL:
        return None, StreamEngine(device)
    owned, abort = own_group(process_group, device)
    return owned, ThreadEngine(abort)


def _trampoline(
    hook: CommHook, bound: BoundHook, engine: Engine, clock: _StepClock, model: DistributedDataParallel
) -> Trampoline:
    # Nothing here may hold the model: the model holds this function through its C++ reducer.
    layout = Layout(model.module)
    group = bound.group
    may_be_unused = model.find_unused_parameters

    def trampoline(state: object, bucket: GradBucket) -> Future[Tensor]:
        flat = bucket.buffer()
        slots = layout.slots(bucket.parameters(), flat.numel())
        index, is_last = bucket.index(), bucket.is_last()
        plain = Bucket(index, is_last, clock.step_of(index, is_last), slots, may_be_unused)

        def work() -> Tensor:
            try:
                _count_dense(group, flat)
                if flat.is_sparse:
                    return bound.reduce_sparse(flat, plain)
                bound.reduce(flat, plain)
                return flat
            except Exception as error:
                raise HookError(
                    f"communication hook {hook.name!r} failed on rank {group.global_rank} at step {plain.step}, "
                    f"bucket {index} ({', '.join(plain.names[:3])}{', ...' if len(slots) > 3 else ''}): {error}"
                ) from error

        return engine.submit(work, flat.device)

    return trampoline


def _counting(hook: DDPHook, clock: _StepClock, group: Group) -> Trampoline:
    def trampoline(state: object, bucket: GradBucket) -> Future[Tensor]:
        clock.step_of(bucket.index(), bucket.is_last())
        _count_dense(group, bucket.buffer())
        result: Future[Tensor] = hook(state, bucket)
        return result

    return trampoline


def _count_dense(group: Group, flat: Tensor) -> None:
    group.counters.bytes_dense += group.ring_bytes(flat._values() if flat.is_sparse else flat)


def _close(engine: Engine, bound: BoundHook, clock: _StepClock, owned: dist.ProcessGroup | None) -> None:
    engine.close()
    destroy(owned, bound.group)
    # All ranks have the same to say. Last: where warnings are errors, nothing else may be left to do.
    texts = bound.closing_warnings(clock.steps) if bound.group.global_rank == 0 else []
    bound.release()
    for text in texts:
        warnings.warn(text, stacklevel=3)
