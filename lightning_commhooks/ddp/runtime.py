"""The runtime of one attachment, between the buckets of DDP and a bound hook."""

# No `from __future__ import annotations`: DDP compares the annotations of the hooks that are made here.

import dataclasses
import itertools
import warnings
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from lightning_commhooks.codecs.ranges import named
from lightning_commhooks.collectives.backend import Backend
from lightning_commhooks.collectives.counters import Counters
from lightning_commhooks.collectives.errors import HookError
from lightning_commhooks.collectives.gloo_abort import AllConnections
from lightning_commhooks.collectives.group import Group
from lightning_commhooks.collectives.process_groups import backend_for, connections_of, destroy, own_group
from lightning_commhooks.collectives.steps import Steps
from lightning_commhooks.collectives.timing import DeviceTiming, NoTiming
from lightning_commhooks.ddp import checkpoint
from lightning_commhooks.ddp.compression import Watch
from lightning_commhooks.ddp.engine import CLOSED
from lightning_commhooks.ddp.finite_steps import FiniteSteps
from lightning_commhooks.ddp.forecast import Forecaster
from lightning_commhooks.ddp.local_steps import LocalSteps
from lightning_commhooks.ddp.micro_batches import MicroBatches
from lightning_commhooks.ddp.model import LocalPhase, Trampoline, Usage
from lightning_commhooks.ddp.running import RunningHook
from lightning_commhooks.ddp.stream_engine import StreamEngine
from lightning_commhooks.ddp.thread_engine import ThreadEngine
from lightning_commhooks.interface.averages_models import averages_models
from lightning_commhooks.interface.bucket import Bucket
from lightning_commhooks.interface.hook import BoundHook, CommHook
from lightning_commhooks.interface.layout import Layout
from lightning_commhooks.interface.state import StateError
from lightning_commhooks.interface.user_function import DDPHook, UserFunction
from lightning_commhooks.wrappers.scale import accumulation_of

T = TypeVar("T")


class Runtime(RunningHook):
    """A bound hook, its engine and its counts, on whatever DDP model they are attached to at present.

    Arguments are those of `attach`. `make_group` makes the collectives of the hook in place of those of
    `process_group`, to count by the counters that it gets.
    """

    def __init__(
        self,
        hook: CommHook,
        process_group: dist.ProcessGroup,
        device: torch.device,
        hook_state: object,
        grad_scaler: torch.amp.GradScaler | None,
        loss_divided_by: Callable[[], float],
        make_group: Callable[[Counters], Group] | None = None,
    ) -> None:
        super().__init__(hook, self._end_step)
        self.watch = Watch()
        self.hook_state = hook_state
        self.micro_batches = MicroBatches(loss_divided_by) if accumulation_of(hook) != "framework" else None
        self._grad_scaler = grad_scaler
        self._warned = False
        self.is_closed = False
        self._owned: dist.ProcessGroup | None = None
        # Of buckets that DDP has handed over, equal on all ranks.
        self._numbers = itertools.count()
        if isinstance(self.method, UserFunction):
            group = Group(Backend(process_group), self.counters, device, process_group)
            self.bound = hook.bind(group)
        else:
            group = self._start_engine(process_group, device, make_group)
            self._steps = FiniteSteps(self, grad_scaler)
        # That of the bound hook may be a part of it.
        self._group = group
        self.local = LocalSteps(self, group)
        self.forecaster = Forecaster(self, self.local)
        self._usage = Usage()

    def _start_engine(
        self, process_group: dist.ProcessGroup, device: torch.device, make_group: Callable[[Counters], Group] | None
    ) -> Group:
        connections = AllConnections()
        if device.type == "cuda":
            is_nccl = backend_for(process_group, device) == dist.Backend.NCCL
            self.counters.timing = DeviceTiming(device) if is_nccl else NoTiming()
        timing = self.counters.timing
        if isinstance(self.counters.timing, DeviceTiming):
            group = Group(Backend(process_group), self.counters, device, process_group, connections)
            group = make_group(self.counters) if make_group else group
            self._engine = StreamEngine(device, connections, timing, self.name)
        else:
            own = own_group(process_group, device)
            self._owned = own.process_group
            group = Group.of(own, self.counters, device, connections)
            group = make_group(self.counters) if make_group else group
            self._engine = ThreadEngine(device, connections, timing, self.name, group.is_ordered)
        try:
            group.nodes()  # so that bytes between them are counted
            self.bound = self._bind(group)
        except BaseException:
            self._engine.close()
            destroy([self._owned, *group.release()])
            raise
        if self._owned is None:
            # Not before: options that do not fit are no reason to take DDP's own group away.
            connections.append(connections_of(process_group))
        return group

    def reset(self) -> None:
        """Let the hook begin anew, at step 0, with the same model on all ranks. Collective."""
        self.clock.end()
        self.settle()
        self._begin_at(self._bind_again(), 0)
        self.local.models.restore([], {})

    def _bind_again(self) -> BoundHook:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the user got them when the hook was attached
            return self._bind(self._group)

    def _bind(self, group: Group) -> BoundHook:
        with self.aborting():
            try:
                return self.config.bind(group)
            except ValueError:
                raise  # options do not fit these ranks
            except Exception as error:
                raise self.failed(group, "in bind()", error) from error

    def _begin_at(self, fresh: BoundHook, steps: int) -> None:
        self.bound = fresh
        self.clock.steps = steps
        self.forecaster.restart()
        if self.micro_batches is not None:
            self.micro_batches.restart()

    def settle(self) -> None:
        if self._engine is not None and self._steps.has_pending:
            self._engine.aside(lambda: self._named(self._steps.settle))

    @property
    def layout(self) -> Layout:
        """Names of the model's parameters."""
        return self.local.models.layout

    def _end_step(self, in_time: bool, complete: bool) -> None:
        # A step that broke off ends when the next one has begun.
        if self.micro_batches is not None:
            self.micro_batches.end_step()
        if in_time:
            self._usage.begin()
            self.counters.timing.backward_done()
        if self._engine is not None:
            self._steps.end(in_time, complete)

    def load(self, state: object, strict: bool) -> list[str]:
        """Take over a saved state, on all ranks or none; returns what was left out because it does not fit.

        Raises:
            StateError: see `checkpoint.load`. The hook is as it was before.
        """
        self.clock.end()
        fresh = self._bind_again()
        loaded = self.call(lambda: self._load(state, fresh, strict))
        if isinstance(loaded, StateError):
            raise loaded
        steps, differences = loaded
        self._begin_at(fresh, steps)
        return differences

    def _load(self, state: object, fresh: BoundHook, strict: bool) -> tuple[int, list[str]] | StateError:
        try:
            return checkpoint.load(state, self.method, fresh, self.local.models, strict)
        except StateError as refusal:
            return refusal  # all ranks have agreed on it: no failure

    def trampoline(self, model: DistributedDataParallel) -> Trampoline:
        """The function that DDP calls for each bucket of `model`."""
        if self.micro_batches is not None:
            self.micro_batches.watch(model, self.layout.trained)
        may_be_unused = model.find_unused_parameters
        may_be_local = averages_models(self.bound)
        watches = may_be_unused and (may_be_local or self.bound.has_memory)
        self._usage.watch(self.layout.trained if watches else {})
        watched = LocalPhase(model, self.local, may_be_local)
        last_may_be_skipped = model.skip_all_reduce_unused_params
        if model.static_graph:
            self.clock.expect_static_graph()
        if isinstance(self.method, UserFunction):
            return self._counting(self.method.function, watched, last_may_be_skipped)
        engine, usage = self._engine, self._usage
        assert engine is not None

        # Nothing here may hold the model: the model holds this function through its C++ reducer.
        def trampoline(state: object, bucket: GradBucket) -> Future[Tensor]:
            with self.aborting():
                self.settle()
                flat = bucket.buffer()
                plain = self._plain(bucket, flat, last_may_be_skipped)
                is_late = watched.begin(self.bound, plain.step)
                if watches:
                    plain = dataclasses.replace(plain, unused=usage.unused(plain.slots))
                number = next(self._numbers)
                drains = plain.is_last or self.clock.is_first_of_static_graph
                return engine.submit(lambda: self._reduce(plain, number, is_late), flat.device, drains)

        return trampoline

    def _plain(self, bucket: GradBucket, flat: Tensor, last_may_be_skipped: bool) -> Bucket:
        slots = self.layout.slots(bucket.parameters(), flat.numel())
        index, is_last = bucket.index(), bucket.is_last()
        step = self._step_of(index, is_last, last_may_be_skipped)
        accumulated = None
        if self.micro_batches is not None:
            accumulated = self.micro_batches.of_step(step, is_last)
        scale = _current_scale(self._grad_scaler)
        self.forecaster.begin_step(step, flat.is_sparse)
        return Bucket(flat, index, is_last, step, slots, loss_scale=scale, accumulated=accumulated)

    def _reduce(self, bucket: Bucket, number: int, is_late: bool) -> Steps[Tensor]:
        # 0 is the channel of what is done between buckets.
        ranks = self._group.channel(1 + number)
        try:
            if not bucket.flat.is_sparse:
                _forget_infinities(bucket.flat, bucket)
            flat, finite = yield from self.watch.reduce(self.bound, bucket, ranks)
            reduced = flat._values() if flat.is_sparse else flat
            yield from self._steps.add(reduced, finite, bucket, is_late, ranks)
            return flat
        except Exception as error:
            names = ", ".join(bucket.names[:3]) + (", ..." if len(bucket.names) > 3 else "")
            where = f"at step {bucket.step}, bucket {bucket.index} ({names})"
            raise self.failed(ranks, where, error) from error

    def _counting(self, hook: DDPHook, watched: LocalPhase, last_may_be_skipped: bool) -> Trampoline:
        def trampoline(state: object, bucket: GradBucket) -> Future[Tensor]:
            if self.is_closed:
                raise HookError(CLOSED)
            flat = bucket.buffer()
            plain = self._plain(bucket, flat, last_may_be_skipped)
            watched.begin(self.bound, plain.step)
            _count_dense(self.bound.group, flat)
            group = self.bound.group
            if flat.is_sparse:
                bucket.set_buffer(group.finish(self.bound.reduce_sparse(flat, plain, group)))
            else:
                group.finish(self.bound.reduce(plain, group))
            with named(self.name, "reduce"):
                result: Future[Tensor] = hook(state, bucket)
            return result

        return trampoline

    def _step_of(self, index: int, is_last: bool, last_may_be_skipped: bool) -> int:
        # Once in a backward: there may be thousands of frozen parameters.
        if index == 0 and not self._warned and (names := self.layout.unfrozen()):
            self._warned = True
            warnings.warn(
                f"{len(names)} parameters are trained now that were frozen when the model was wrapped in "
                f"DistributedDataParallel, {names[0]!r} first: DDP does not average their gradients and ranks diverge. "
                "Wrap the module again and give the new wrapper to Attachment.move_to()",
                stacklevel=2,
            )
        return self.clock.step_of(index, is_last, last_may_be_skipped)

    def close(self) -> None:
        """Release thread, process group and memory; warn of what the user should know."""
        self.is_closed = True
        texts = self.local.close()
        self._usage.watch({})
        if self.micro_batches is not None:
            self.micro_batches.close()
        if self._engine is None:
            return
        self._engine.close()
        self._steps.drop()
        destroy([self._owned, *self._group.release()])
        self._owned = None  # with the last reference its connections close, and peers that wait for this rank fail
        # All ranks have the same to say. Last: where warnings are errors, nothing else may be left to do.
        texts = texts + self._not_begun() if self.bound.group.rank == 0 else []
        self.bound.release()
        for text in texts:
            warnings.warn(text, stacklevel=4)

    def _not_begun(self) -> list[str]:
        steps = self.clock.steps
        reason = self.bound.not_begun(steps - 1) if steps and not self.forecaster.has_warned else None
        return [f"training ended after {steps} steps, and {reason}"] if reason is not None else []


def _forget_infinities(flat: Tensor, bucket: Bucket) -> None:
    # Gradients of unused parameters are from an earlier backward, as in a GAN, whose two networks take turns.
    for slot in bucket.slots:
        if bucket.unused and slot.name in bucket.unused:
            slot.view(flat).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def _count_dense(group: Group, flat: Tensor) -> None:
    group.counters.bytes_dense += group.ring_bytes(flat._values() if flat.is_sparse else flat)


def _current_scale(grad_scaler: torch.amp.GradScaler | None) -> float | Tensor:
    # get_scale() would wait for the device. The scale is None as long as the scaler has scaled nothing.
    scale: Tensor | None = getattr(grad_scaler, "_scale", None)
    if scale is None:
        return 1.0
    return scale if scale.is_cuda else scale.item()
