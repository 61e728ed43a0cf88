"""The buckets of `DistributedDataParallel`'s reducer."""

# No `from __future__ import annotations`: DDP compares the annotations of the hooks that are made here.

import warnings
import weakref
from collections.abc import Mapping
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from lightning_commhooks.basics.copies import NotCopied
from lightning_commhooks.basics.ranges import named
from lightning_commhooks.collectives.errors import HookError
from lightning_commhooks.interface.averages_models import AveragesModels
from lightning_commhooks.interface.bucket import Bucket
from lightning_commhooks.interface.hook import CommHook
from lightning_commhooks.interface.layout import Layout
from lightning_commhooks.interface.misplaced import given_beside
from lightning_commhooks.interface.python_code import code
from lightning_commhooks.interface.registry import get_hook
from lightning_commhooks.interface.user_function import DDPHook, UserFunction, check_user_hook
from lightning_commhooks.runtime.engine import CLOSED
from lightning_commhooks.runtime.runtime import Runtime
from lightning_commhooks.runtime.source import Source
from lightning_commhooks.sources.ddp_model import Trampoline, checked_model, device_of, register
from lightning_commhooks.wrappers.scale import Accumulation, ScaleByGradAccumulation, without_scale

_MANY_FORWARDS = 1024


def resolve_hook(
    hook: object, hook_state: object = None, accumulation: Accumulation = "framework"
) -> CommHook | DDPHook:
    """Check the arguments `hook=`, `hook_state=` and `accumulation=` of `attach`, without a DDP model."""
    resolved: Any = hook
    if isinstance(hook, (str, CommHook)) or (isinstance(hook, type) and issubclass(hook, CommHook)):
        resolved = get_hook(resolved)  # refuses a class, naming the call to make
        if hook_state is not None and not isinstance(without_scale(resolved), UserFunction):
            raise ValueError(
                f"hook_state={hook_state!r} belongs to a hook function (state, bucket); {hook!r} keeps its own state: "
                + ("set its options instead" if not isinstance(hook_state, Mapping) else given_beside(hook, hook_state))
            )
    else:
        check_user_hook(hook)
    if accumulation == "framework":
        return resolved  # type: ignore[no-any-return]
    if isinstance(resolved, ScaleByGradAccumulation):
        raise ValueError(f"accumulation={accumulation!r}: the hook has an accumulation already, {resolved!r}")
    return ScaleByGradAccumulation(resolved, accumulation)


def check_even(hook: CommHook | DDPHook, framework: str) -> None:
    """Refuse a hook that lets ranks take different numbers of steps, if a framework makes them wait for others."""
    if isinstance(hook, CommHook) and hook.is_uneven:
        raise ValueError(
            f"{code(hook)} lets ranks take different numbers of steps, and {framework} makes all wait for each other "
            "after the same number; use attach(), or Fabric, and a loop that ends by metrics()['averagings']"
        )


def hook_name(hook: CommHook | DDPHook) -> str:
    """Return the name of a configured hook, or `module.function` for a DDP hook function."""
    return without_scale(hook if isinstance(hook, CommHook) else UserFunction(hook)).name


class DDPSource(Source):
    """The reducer of a DDP model, which accepts one hook and cannot remove it.

    Attributes:
        wraps_again: advice for parameters that are unfrozen later.
    """

    refused: ClassVar[Mapping[str, str]] = {
        "replicate_group": "is for fully_shard: DistributedDataParallel averages over its own process_group",
        "gather_hook": "is for fully_shard: DistributedDataParallel gathers nothing",
        "gather_differences": "is for fully_shard: DistributedDataParallel gathers nothing",
        "shard_hook": "is for fully_shard: DistributedDataParallel shards nothing",
    }
    kept = ("hook_state", "accumulation")
    wraps_again = "Wrap the module again and give the new wrapper to Attachment.move_to()"

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        super().__init__(process_group)
        # Parameters that got gradients on this rank since the last synchronized backward, with `no_sync()` or not. DDP
        # knows them, but tells only when hooks have run. `None`: they are not watched.
        self._used: set[str] | None = None
        self._handles: list[RemovableHandle] = []
        self._has_frozen = False
        self._num_forwards = 0
        self._warned: set[str] = set()

    def resolve_hook(self, hook: object) -> CommHook | DDPHook:
        return resolve_hook(hook, self.options.get("hook_state"), self.options.get("accumulation", "framework"))

    def check(self, model: nn.Module) -> None:
        ddp = checked_model(model)
        device = device_of(ddp)
        if self.layout.shapes and device != self.device:
            raise ValueError(
                f"the model is on {device}, and the hook was attached to one on {self.device}: attach another"
            )
        self.device, self.layout = device, Layout(ddp.module, ddp.parameters_to_ignore)
        self._has_frozen = any(not p.requires_grad for p in ddp.module.parameters())

    def connect(self, model: nn.Module, runtime: Runtime) -> None:
        assert isinstance(model, DistributedDataParallel)
        function = self.trampoline(runtime, model)
        register(model, self.options.get("hook_state"), function, runtime.name, lambda: runtime.is_closed)
        runtime.passes.watch(
            model,
            self.layout.trained,
            synchronizes=lambda model: self._synchronizes(model, runtime),
            not_synchronized=lambda: self._warn_of_second(runtime),
        )

    def trampoline(self, runtime: Runtime, model: DistributedDataParallel) -> Trampoline:
        """Return the function that DDP calls for each bucket of `model`."""
        needs_usage = runtime.bound.averages_models or runtime.bound.has_memory or self.ranks_change
        watches = model.find_unused_parameters and needs_usage
        self._watch_usage(self.layout.trained if watches else {})
        if runtime.bound.averages_models:
            model.register_forward_pre_hook(NotCopied(torch.compiler.disable(self._before_forward)))
        self._ddp, self._broadcasts_buffers, self._local = weakref.ref(model), model.broadcast_buffers, runtime.local
        runtime.local.models.broadcasts_buffers = model.broadcast_buffers and not self.ranks_change
        self._skips_last = model.skip_all_reduce_unused_params
        # In the first step of a static graph, DDP hands the gradients on before the step's end, too early to change
        # them there.
        self._late_step = -1 if model.static_graph else None
        if model.static_graph:
            runtime.clock.expect_static_graph()
        if isinstance(runtime.method, UserFunction):
            return self._counting(runtime.method.function, runtime)

        # Nothing here may hold the model: the model holds this function through its C++ reducer.
        def trampoline(state: object, bucket: GradBucket) -> Future[Tensor]:
            with runtime.aborting():
                plain = self._make_bucket(bucket, runtime)
                return runtime.submit(plain, is_late=plain.step == self._late_step)

        return trampoline

    def _counting(self, hook: DDPHook, runtime: Runtime) -> Trampoline:
        def trampoline(state: object, bucket: GradBucket) -> Future[Tensor]:
            runtime.raise_if_forked()
            if runtime.is_closed:
                raise HookError(CLOSED)
            plain = self._make_bucket(bucket, runtime)
            flat, group = plain.flat, runtime.bound.group
            group.counters.bytes_dense += group.dense_bytes(flat)
            if flat.is_sparse:
                bucket.set_buffer(group.finish(runtime.bound.reduce_sparse(flat, plain, group)))
            else:
                group.finish(runtime.bound.reduce(plain, group))
            with named(runtime.name, "reduce"):
                result: Future[Tensor] = hook(state, bucket)
            return result

        return trampoline

    def _make_bucket(self, bucket: GradBucket, runtime: Runtime) -> Bucket:
        flat, index, is_last = bucket.buffer(), bucket.index(), bucket.is_last()
        slots = self.layout.slots(bucket.parameters(), flat.numel())
        if index == 0 and self._has_frozen:
            self.warn_of_unfrozen()
        step = runtime.clock.step_of(index, is_last, self._skips_last)
        unused = None
        if self._used is not None:
            unused = frozenset(slot.name for slot in slots if slot.name not in self._used)
        plain = runtime.bucket(flat, slots, index, is_last, step, unused)
        if self._late_step == -1:
            self._late_step = step
        self._check_local(runtime, step)
        return plain

    def _check_local(self, runtime: Runtime, step: int) -> None:
        """Check `join()`, and switch off DDP's broadcast of buffers during local steps if the hook averages buffers."""
        model = self._ddp()
        assert model is not None
        if model._join_config.enable and not getattr(model, "_divide_by_initial_world_size", True):
            self._warn_of_join()
        if not runtime.bound.averages_models:
            return
        bound = cast("AveragesModels", runtime.bound)
        is_local = bound.is_local(step)
        if is_local and model._join_config.enable:
            raise HookError(
                "join() does not work while ranks step alone: ranks that have run out of data take no optimizer "
                "steps, after which models are averaged. Give all ranks the same number of batches"
            )
        # This takes effect in the next forward.
        model.broadcast_buffers = self._broadcasts_buffers and not (is_local and bound.average_buffers)

    def _before_forward(self, model: DistributedDataParallel, inputs: object) -> None:
        if self._local.keeps_own_buffers:
            model.broadcast_buffers = False  # needed in the first forward of a wrapper, when training resumes
        self._local.before_forward(model.training)

    def _synchronizes(self, model: DistributedDataParallel, runtime: Runtime) -> bool:
        """Return whether the next backward averages gradients; warn if none of many does."""
        self._num_forwards += not model.require_backward_grad_sync
        is_many = self._num_forwards >= _MANY_FORWARDS and not runtime.counters.steps
        if is_many and "unsynchronized" not in self._warned:
            self._warned.add("unsynchronized")
            warnings.warn(
                f"hook {runtime.name!r} has not run yet, after {_MANY_FORWARDS} forwards in no_sync(), where "
                "DistributedDataParallel averages no gradients. For local SGD write hook='post_localsgd' instead",
                stacklevel=2,
            )
        return model.require_backward_grad_sync

    def _warn_of_join(self) -> None:
        if "join" not in self._warned and self.process_group.rank() == 0:
            warnings.warn(
                f"join(divide_by_initial_world_size=False) does nothing with a communication hook, PyTorch's own "
                f"included: gradients are divided by {self.process_group.size()}, the number of all ranks, also when "
                "some have run out of data. Leave it out",
                stacklevel=2,
            )
        self._warned.add("join")

    def _warn_of_second(self, runtime: Runtime) -> None:
        averages = runtime.bound.averages_gradients(runtime.clock.steps - 1)
        if "second" in self._warned or not averages or self.process_group.size() == 1:
            return
        self._warned.add("second")
        warnings.warn(
            "a second backward ran after DistributedDataParallel had averaged the gradients of this step. Its "
            "gradients are not averaged over ranks, so ranks differ from now on. Sum the losses and call backward "
            "once; or put all backwards but the last, with their forwards, in no_sync()",
            stacklevel=2,
        )

    def warn_of_unfrozen(self) -> None:
        """Warn once of trained parameters that DDP does not know."""
        # Called once per backward, because there may be thousands of frozen parameters.
        if "unfrozen" not in self._warned and (names := self.layout.unfrozen()):
            self._warned.add("unfrozen")
            warnings.warn(
                f"{len(names)} parameters are trained now that were frozen when the model was wrapped in "
                f"DistributedDataParallel, {names[0]!r} first: DDP does not average their gradients and ranks diverge. "
                f"{self.wraps_again}",
                stacklevel=2,
            )

    def _watch_usage(self, parameters: Mapping[str, Tensor]) -> None:
        """Watch which of these parameters get gradients; costs a call for each parameter and backward."""
        for handle in self._handles:
            handle.remove()
        used: set[str] = set()
        self._used = used if parameters else None
        self._handles = [
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: used.add(name))
            for name, parameter in parameters.items()
        ]

    def end_step(self) -> None:
        if self._used is not None:
            self._used.clear()

    def close(self) -> None:
        self._watch_usage({})
        super().close()
