"""The runtime of one attachment, which connects the buckets of a source to a bound hook."""

from __future__ import annotations

import itertools
import math
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.futures import Future

from lightning_commhooks.collectives.agreement import Notes, num_waits, wait_for_all_ranks
from lightning_commhooks.collectives.counters import Counters
from lightning_commhooks.collectives.errors import HookError, raise_if_fork_of
from lightning_commhooks.collectives.group import Backend, Group, counted
from lightning_commhooks.collectives.process_groups import timeout_of
from lightning_commhooks.collectives.steps import Steps, checked
from lightning_commhooks.interface.averages_models import averages_models
from lightning_commhooks.interface.bucket import Bucket, Slot
from lightning_commhooks.interface.error_sample import ErrorSampler
from lightning_commhooks.interface.hook import ANY_LATER_STEP, BoundHook, CommHook, reduce_with
from lightning_commhooks.interface.layout import Layout
from lightning_commhooks.interface.start import depends_on_length, late_starts, started, text_of_steps
from lightning_commhooks.interface.state import StateError
from lightning_commhooks.interface.user_function import UserFunction
from lightning_commhooks.runtime import checkpoint
from lightning_commhooks.runtime.engine import Engine, ThreadEngine
from lightning_commhooks.runtime.finite_steps import FiniteSteps
from lightning_commhooks.runtime.forecast import FEWEST_STEPS, Forecaster
from lightning_commhooks.runtime.local_steps import LocalSteps
from lightning_commhooks.runtime.lone_rank import pass_on
from lightning_commhooks.runtime.micro_batches import MicroBatches
from lightning_commhooks.runtime.passes import Passes, StepClock
from lightning_commhooks.runtime.ranks import Ranks
from lightning_commhooks.runtime.source import Source
from lightning_commhooks.wrappers.scale import accumulation_of, without_scale

T = TypeVar("T")

# A run with less than this fraction of the planned steps was interrupted; a loader may have slightly fewer batches than
# it reports.
_COMPLETE = 0.9
_UNKNOWN_OF_FUNCTIONS = (
    "bytes_sent",
    "bytes_sent_between_nodes",
    "bytes_evaluation_between_nodes",
    "bytes_dense_between_nodes",
    "compression_ratio",
    "compression_ratio_between_nodes",
    "exposed_ms",
    "codec_ms",
    "comm_ms",
    "overlap_ms",
)


class Runtime:
    """A hook at run time: bound to ranks, with an engine, a step count and counters.

    A bucket passes through `bucket`, `submit` and, on the engine, `_reduce`. A step passes through `_begin_step` and
    `_end_step`. The arguments are those of `attach`. `make_group`, if given, creates the hook's collectives in place of
    the source, with these counters.

    Attributes:
        bound: the hook, bound to its ranks.
        config: the configuration, with starts as steps once they are known.
        source: where its buckets come from.
        model: returns the model, or `None` if it is gone.
        is_alone: whether there are no other ranks to train with, and there will be none.
        num_steps: of the run, by which starts were determined that depend on it: `None` before, 0 if it is not known.
        ended: whether training ended as planned; `None`: unknown.
        is_closed: whether the hook is no longer used.
        counters: counts of bytes, gradients and averages, and durations.
        clock: counts the steps.
        passes: follows each forward of the model to its backwards.
        micro_batches: counts the micro-batches of a step; `None`: the framework divides gradients by their number.
        sampler: estimates errors; `None`: errors are not measured.
        local: reports the steps of optimizers to the hook, and averages models.
        forecaster: measures the traffic for forecasts.
    """

    bound: BoundHook
    # None for a user's own function.
    _ranks: Ranks | None = None
    _engine: Engine | None = None

    def __init__(
        self,
        hook: CommHook,
        source: Source,
        grad_scaler: torch.amp.GradScaler | None = None,
        loss_divided_by: Callable[[], float] = lambda: 1,
        make_group: Callable[[Counters], Group] | None = None,
    ) -> None:
        self.source = source
        self._process = os.getpid()
        # As given, with starts that may depend on the length of the run.
        self._original = self.config = hook
        self.num_steps: int | None = None
        # The number of steps of the run as last announced.
        self._planned: int | None = None
        self.ended: bool | None = None
        self.model: Callable[[], nn.Module | None] = lambda: None
        self._close_with_model: weakref.finalize[Any, Any] | None = None
        self.is_closed = False
        is_whole = source.process_group.size() == 1 and all(size == 1 for _, size in source.shard)
        self.is_alone = is_whole and make_group is None and not source.ranks_change
        self.counters = Counters()
        self.sampler: ErrorSampler | None = None
        self.clock = StepClock(self.counters, self._end_step, self._break_off)
        self.passes = Passes(self.clock)
        is_counted = accumulation_of(hook) != "framework"
        self.micro_batches = MicroBatches(loss_divided_by, self.passes) if is_counted else None
        self._grad_scaler = grad_scaler
        # Warnings that the hook gave when it was last bound.
        self._binding_warnings: list[warnings.WarningMessage] = []
        self._notes = Notes(source.process_group, f"hook {num_waits(source.process_group)}")
        # Numbers of the buckets that the source hands over, equal on all ranks.
        self._numbers = itertools.count()
        # Number of the last backward that has begun.
        self._last_backward = -1
        if isinstance(self.method, UserFunction):
            group = Group(Backend(source.process_group), self.counters, source.device, source.process_group)
            self.bound = hook.bind(group)
        else:
            self.run_among(ranks := Ranks.of_source(self, make_group))
            group = ranks.group
            self._steps = FiniteSteps(self, grad_scaler)
        if isinstance(self._engine, ThreadEngine) and self.is_even:
            tell, wait_note = self._notes.tell, _wait_note(source.process_group.rank())
            self._engine.tell_wait = lambda turn: tell(wait_note, str(turn))
        self.local = LocalSteps(self, group, grad_scaler is not None and grad_scaler.is_enabled())
        self.local.models.average_buffers = averages_models(self.bound) and self.bound.average_buffers
        if self._ranks is not None:
            self.local.models.begin = self._ranks.background.begin
        self.forecaster = Forecaster(self, self.local)

    @property
    def method(self) -> CommHook:
        """The configuration that users and checkpoints know, without the division of accumulated gradients."""
        return without_scale(self.config)

    @property
    def name(self) -> str:
        """Name of the hook, or `module.function` of a user's own."""
        return self.method.name

    @property
    def group(self) -> Group:
        """The ranks that the hook runs among at present."""
        return self.bound.group if self._ranks is None else self._ranks.group

    @property
    def layout(self) -> Layout:
        """Names of the model's parameters."""
        return self.local.models.layout

    @property
    def is_even(self) -> bool:
        """Whether all ranks are known and take the same number of steps."""
        return not (self.source.ranks_change or self.method.is_uneven)

    @property
    def limits(self) -> str:
        """Why the hook does nothing but reduce gradients; empty if it does more."""
        if isinstance(self.method, UserFunction):
            return f"{self.name} is not a hook of this library: it has no group of ranks and no state to ask for"
        return self.source.limits

    def run_among(self, ranks: Ranks, compare: Callable[[Group], None] = lambda group: None) -> None:
        """Bind the hook to new ranks, after `compare` among them. Collective."""
        if self._ranks is not None:
            self._ranks.close(drains=False)
            self._ranks.release()
        self._ranks, self._engine = ranks, ranks.engine
        self._numbers = itertools.count()  # a rank that joins begins with 0
        try:
            ranks.group.nodes()  # so that bytes between them are counted
            compare(ranks.group)
            self.bound = self._bind(ranks.group)
        except BaseException:
            ranks.engine.close()
            ranks.release()
            self._give_warnings()
            raise
        ranks.connect(self)

    def connect(self, model: nn.Module) -> None:
        """Take the buckets of a model that the source has checked, until the model no longer exists. Collective."""
        self.local.models.layout = self.source.layout
        texts = self.config.check_parameters(list(self.layout.trained))
        if self.micro_batches is not None:
            self.micro_batches.watch(self.layout.trained)
        self.source.connect(model, self)
        self.model = weakref.ref(model)
        if self._close_with_model is not None:
            self._close_with_model.detach()
        self._close_with_model = weakref.finalize(model, self._close)
        # Only after all ranks have connected: a warning may be raised as an error.
        self._give_warnings()
        if self.speaks and not self.is_alone:
            for text in texts:
                warnings.warn(text, stacklevel=4)

    @property
    def speaks(self) -> bool:
        """Whether this rank shows what all ranks know: of the first replica, the first shard."""
        return self.bound.group.rank == 0 and self.source.is_first_shard

    def bucket(
        self, flat: Tensor, slots: tuple[Slot, ...], index: int, is_last: bool, step: int, unused: frozenset[str] | None
    ) -> Bucket:
        """Make a bucket, with the loss scale and accumulation of its gradients, which the source does not know."""
        self.commit()
        accumulated = None
        if self.micro_batches is not None:
            accumulated = self.micro_batches.of_step(step, is_last)
        if step != self._last_backward:
            self._begin_step(step)
        scale = _current_scale(self._grad_scaler)
        return Bucket(flat, index, is_last, step, slots, unused, scale, accumulated=accumulated)

    def _begin_step(self, step: int) -> None:
        """Called with the first bucket of each backward."""
        if self._last_backward < 0:
            self._check_starts()
        self._last_backward = step
        if self.bound.averages_models:
            self.local.begin_backward(step)
        self.forecaster.begin_step(step)

    def submit(self, bucket: Bucket, is_late: bool) -> Future[Tensor]:
        """Average whole gradients with the hook, among the source's ranks, and prepare the end of the step.

        `is_late` says whether gradients cannot be changed any more when the step ends.
        """
        is_last = bucket.is_last or self.clock.is_first_of_static_graph
        return self.run(bucket, self.group, lambda ranks: self._reduce(bucket, is_late, ranks), is_last)

    def run(
        self, bucket: Bucket, group: Group, reduce: Callable[[Group], Steps[Tensor]], is_last: bool = True
    ) -> Future[Tensor]:
        """Reduce a bucket among some ranks on the engine, in a channel of its own.

        `reduce` creates the computation, for the ranks in that channel. `is_last` says whether no other bucket of this
        backward follows, as far as is known; equal on all ranks.
        """
        number = next(self._numbers)

        def explained() -> Steps[Tensor]:
            # Channel 0 is for work between buckets.
            ranks = group.for_bucket(1 + number)
            try:
                return (yield from reduce(ranks))
            except Exception as error:
                names = ", ".join(bucket.names[:3]) + (", ..." if len(bucket.names) > 3 else "")
                where = f"at step {bucket.step}, bucket {bucket.index} ({names})"
                raise self.failed(ranks, where, error) from error

        assert self._engine is not None
        return self._engine.submit(explained, bucket.flat.device, is_last)

    def _reduce(self, bucket: Bucket, is_late: bool, ranks: Group) -> Steps[Tensor]:
        bound, flat, finite = self.bound, bucket.flat, None
        ranks_step_alone = bound.averages_models and bound.is_local(bucket.step)
        if flat.is_sparse:
            flat = flat.coalesce()
        else:
            _forget_infinities(flat, bucket)
        numbers = flat._values() if flat.is_sparse else flat
        if bucket.slots:  # a rank may have no share of any of these gradients
            # In local steps, the gradients are not meant to be the mean.
            samplers = () if ranks_step_alone else (self.sampler, self.forecaster.sampler)
            samples = [(each, each.take(bucket.flat, bucket)) for each in samplers if each is not None]
            with counted(numbers, ranks, dense=ranks.dense_bytes(flat)):
                if flat.is_sparse:
                    flat = yield from checked(bound.reduce_sparse(flat, bucket, ranks), bound, "reduce_sparse")
                    numbers = flat._values()
                else:
                    finite = yield from reduce_with(bound, bucket, ranks)
            for sampler, taken in samples:
                if taken is not None:
                    yield from sampler.compare(taken, flat, bucket, ranks)
        if bound.has_memory or ranks_step_alone:
            yield from self._steps.add(numbers, finite, bucket, ranks_step_alone, is_late, ranks)
        return flat

    def wait_for(self, reduced: Future[Tensor]) -> None:
        """Wait until a bucket is reduced, on CUDA on the current stream; raises a `HookError` if that failed."""
        assert self._engine is not None
        self._engine.wait_for(reduced)

    def _end_step(self, in_time: bool) -> None:
        """Called once for each step, by the step clock."""
        if self.micro_batches is not None:
            self.micro_batches.end_step()
        if in_time:
            self.source.end_step()
            self.counters.timing.backward_done()
        if self._engine is None:
            return
        quorum = self.source.quorum
        with nullcontext() if quorum is None else quorum.reporting():
            self.call(lambda: self._steps.end(in_time), True)
            if not in_time:
                self.commit()

    def commit(self) -> None:
        """Tell the hook whether its last step was finite, before its state is read: see `FiniteSteps.commit`."""
        if self._engine is not None and self._steps.pending is not None and not self.is_forked:
            self._engine.run_inline(lambda: self._named(self._steps.commit))

    def decide(self, committed: bool) -> None:
        """Commit or discard a step that ranks have voted on."""
        self.clock.abandon()
        with torch.no_grad():
            self._steps.decide(committed)

    def call(self, function: Callable[[], T], in_step: bool = False) -> T:
        """Run a function in turn with the hook, after its last step has ended. Whatever it raises ends all ranks.

        `in_step` says whether it is a part of a step, which all ranks take. Raises a `HookError` if the function, or
        earlier work, failed.
        """
        if self._engine is None:
            self.raise_if_forked()
            return function()
        if self._steps.pending is not None:
            self._engine.raise_if_unusable()
            self.commit()
        return self._engine.call(lambda: self._named(function), in_step)

    @contextmanager
    def aborting(self) -> Iterator[None]:
        """For work of this thread while peers may already wait for it: an exception in it ends all ranks.

        With a user's own function nothing can be aborted: its collectives are the user's.
        """
        if self._engine is None:
            self.raise_if_forked()
            yield
            return
        self._engine.raise_if_unusable()
        with self._engine.aborting():
            yield

    def _named(self, function: Callable[[], T]) -> T:
        try:
            return function()
        except HookError:
            raise
        except Exception as error:
            raise self.failed(self.bound.group, f"after {text_of_steps(self.clock.steps)}", error) from error

    def failed(self, group: Group, where: str, error: Exception) -> HookError:
        """The error that a user sees for one of the hook."""
        reason = self._notes.of("why")
        text = f"communication hook {self.name!r} failed on rank {group.global_rank} {where}: "
        return HookError(f"{text}{reason} ({error})" if reason else f"{text}{error}")

    def _break_off(self) -> None:
        """End all ranks, whose collectives would not match this rank's any more, after a backward that has raised."""
        if self._engine is None or self._engine.has_failed:
            return
        text = (
            f"communication hook {self.name!r}: the backward of step {self.clock.steps - 1} broke off on rank "
            f"{self.bound.group.global_rank} before all gradients were handed to the hook, and other ranks may have "
            "handed over more: wrap the model again, on all ranks, and attach a hook to that"
        )
        self._notes.tell("why", text)
        self._engine.break_off(HookError(text))

    @property
    def is_forked(self) -> bool:
        """Whether this process is a fork of the one that the hook was attached in."""
        return os.getpid() != self._process

    def raise_if_forked(self) -> None:
        """Raise a `HookError` in a fork of the process that the hook was attached in."""
        raise_if_fork_of(self._process)

    def begin_together(self, what: str) -> None:
        """End the last step, and wait until all ranks have called their next joint operation. Collective.

        A rank that waits for this one in a backward, or in an average after an optimizer's step, will not call it: then
        both get a `HookError`.
        """
        self.clock.end()
        # With uneven numbers of steps, a rank cannot tell which ranks will not come: each average compares operations.
        if self._engine is None or not self.is_even or self.is_closed:
            return
        with self.aborting():
            try:
                timeout = timeout_of(self.source.process_group, self.source.device).total_seconds()
                wait_for_all_ranks(self.source.process_group, what, self._why_not_here, timeout)
            except HookError as failure:
                self._notes.tell("why", str(failure))
                raise

    def _why_not_here(self, missing: list[int]) -> str | None:
        assert self._engine is not None
        if self._engine.has_lost_a_peer:
            return "not called it, and a connection is closed: a rank has ended, or has closed its hook"
        turns = self._engine.num_turns
        if turns is None:
            return None
        for rank in missing:
            told = self._notes.of(_wait_note(rank))
            if told and int(told) >= turns:
                return "gone on to a backward or an optimizer's step, waiting there for this rank"
        return None

    def expect(self, num_steps: int | None) -> None:
        """Determine the starts that depend on the length of the run, once. Collective.

        `num_steps` counts synchronized backwards from the beginning of training to its end; `None`: unknown.
        """
        self.ended = None
        if num_steps is not None:
            self._planned = num_steps
        if self.num_steps is not None or not any(depends_on_length(start) for *_, start in late_starts(self._original)):
            return
        self.begin_together("tell_forecast()")
        self.num_steps = self.call(lambda: self._shortest(num_steps or 0))
        if self.num_steps:
            self.config = started(self._original, self.num_steps)
            self.begin_at(self.bind_again(), self.clock.steps, self.local.models.num_steps)

    def _shortest(self, num_steps: int) -> int:
        told = self.bound.group.all_gather_quietly([num_steps])
        return int(self.source.smallest(torch.tensor(min(own for (own,) in told), device=self.source.device)))

    def _check_starts(self) -> None:
        starts = [*late_starts(self.config)]
        if self.num_steps is None and any(depends_on_length(start) for *_, start in starts):
            self.num_steps = 0
        for owner, name, start in starts:
            if isinstance(start, float):
                raise HookError(
                    f"{type(owner).__name__}({name}={start}) is a fraction of the run, and the number of training "
                    f"steps is unknown: write {name}=100, num_steps=1000 next to hook=, or Trainer(max_steps=1000)"
                )

    def reset(self) -> None:
        """Reset the hook to step 0, with the same model on all ranks. Collective."""
        self.begin_together("reset_state()")
        self.call(self.local.models.average_what_differs_)
        self.source.weights_replaced()
        self.begin_at(self.bind_again(), 0, {})
        self.local.models.restore([], {})

    def bind_again(self) -> BoundHook:
        """Return a new runtime object of the hook, among the same ranks; drop its warnings. Collective."""
        bound = self._bind(self.group)
        self._binding_warnings = []
        return bound

    def _give_warnings(self) -> None:
        warned, self._binding_warnings = self._binding_warnings, []
        for warning in warned:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)

    def _bind(self, group: Group) -> BoundHook:
        with self.aborting(), warnings.catch_warnings(record=True) as self._binding_warnings:
            warnings.simplefilter("always")
            try:
                bound = self.source.bind(self.config, group)
                return pass_on(bound) if self.is_alone and not self.source.is_awaited else bound
            except ValueError:
                raise  # options do not fit these ranks
            except Exception as error:
                raise self.failed(group, "in bind()", error) from error

    def begin_at(self, fresh: BoundHook, steps: int, num_steps: Mapping[str, int]) -> None:
        """Continue with another runtime object, after `steps` steps; see `LocalSteps.begin_at`."""
        self.forecaster.end_step()
        self.bound = fresh
        self.clock.steps, self._last_backward = steps, -1
        self.local.begin_at(steps, num_steps)
        self.forecaster.restart()
        if self.micro_batches is not None:
            self.micro_batches.restart()

    def load(self, state: object, strict: bool) -> None:
        """Load a saved state, on all ranks or none; warn of entries that are left out because they do not fit.

        After a `StateError`, see `checkpoint.load`, the hook is as it was before.
        """
        self.begin_together("load_state_dict()")
        before = self.config
        num_steps = checkpoint.num_steps_of(state)
        if num_steps is not None:
            self.config = started(self._original, num_steps) if num_steps else self._original
        fresh = self.bind_again()
        loaded = self.call(lambda: self._load(state, fresh, strict))
        if isinstance(loaded, StateError):
            self.config = before
            raise loaded
        self.num_steps = num_steps if num_steps is not None else self.num_steps
        steps, num_steps_by_optimizer, differences = loaded
        self.begin_at(fresh, steps, num_steps_by_optimizer)
        if differences and fresh.group.rank == 0:
            more = f" and {len(differences) - 5} more" if len(differences) > 5 else ""
            warnings.warn(
                f"strict_state=False: not taken over by hook {self.name!r} from the state: "
                f"{'; '.join(differences[:5])}{more}. Its memory of these is reset",
                stacklevel=3,
            )

    def _load(
        self, state: object, fresh: BoundHook, strict: bool
    ) -> tuple[int, dict[str, int], list[str]] | StateError:
        try:
            return checkpoint.load(state, self, fresh, strict)
        except StateError as refusal:
            return refusal  # all ranks have agreed on it: no failure

    def metrics(self) -> dict[str, float]:
        """See `Attachment.metrics`."""
        self.commit()
        metrics = {**self.counters.as_dict(), **self.counters.timing.totals(), **self.source.metrics()}
        if self.source.quorum is not None:
            metrics.update(self.source.quorum.metrics())
        if self.sampler is not None:
            metrics["relative_error"] = self.sampler.relative_error
        if isinstance(self.method, UserFunction):
            metrics.update(dict.fromkeys(_UNKNOWN_OF_FUNCTIONS, math.nan))
        not_counted = tuple(self._not_counted())
        return {name: value for name, value in metrics.items() if not name.endswith(not_counted)}

    def _not_counted(self) -> Iterator[str]:
        """Yield endings of the names of metrics that are unknown, or always 0, with this hook or on these nodes."""
        if self.source.is_awaited:
            # They are about several steps, about whole gradients, or about the nodes of each of FSDP's groups.
            yield from ("_ms", "timed_steps", "nonfinite_steps", "between_nodes", "bytes_evaluation", "averagings")
            return
        if isinstance(self.method, UserFunction):
            return
        if len(self.bound.group.nodes()) == 1:
            yield "between_nodes"
        if not self.bound.averages_models:
            yield from ("averagings", "waited_ms")
            if not self.bound.has_memory:
                yield "bytes_evaluation"

    @property
    def has_failed(self) -> bool:
        """Whether the hook has failed, here or on another rank."""
        return self._engine is not None and self._engine.has_failed

    def close(self) -> None:
        """Release thread, process group and memory; issue the closing warnings. Once."""
        if self._close_with_model is not None:
            self._close_with_model()
        elif not self.is_closed:
            self._close()

    def _close(self) -> None:
        self.is_closed = True
        if self.is_forked:
            return  # everything to release belongs to the parent
        self.forecaster.close()
        texts = self.local.close()
        is_broken_off = self._is_broken_off()
        self.source.close()
        self.passes.close()
        if self.micro_batches is not None:
            self.micro_batches.close()
        if self._ranks is None:
            return
        self._ranks.close()
        self._notes.forget(_wait_note(self.source.process_group.rank()))
        self._steps.drop()
        # All ranks have the same warnings, so only rank 0 gives them.
        texts = [] if is_broken_off or self.bound.group.rank else texts + self._closing_advice()
        self._ranks.release()
        self.bound.release()
        # Last: where warnings are errors, nothing else may be left to do.
        for text in texts:
            warnings.warn(text, stacklevel=5)

    def _is_broken_off(self) -> bool:
        """Whether an error or a signal has ended training; an uncaught one is known when Python exits."""
        return self.has_failed or sys.exc_info()[0] is not None or getattr(sys, "last_type", None) is not None

    def _closing_advice(self) -> list[str]:
        """Return why the last step was not compressed, if training has ended as planned."""
        # Unlike the clock's, the forecast's last step stays when a state is loaded; FSDP has no forecast.
        ran, steps = self.counters.steps, self.forecaster.last_step + 1 or self.clock.steps
        if not ran or not steps or self.is_alone or self.forecaster.has_warned or self.ended is False:
            return []
        if self.ended is None and self._planned is not None and steps < _COMPLETE * self._planned:
            return []
        reason = self.bound.inactive_reason(steps - 1)
        if reason is not None and max(steps, ran) < FEWEST_STEPS:
            reason = self.bound.inactive_reason(ANY_LATER_STEP)
        # After a state is loaded, the count in this process differs.
        here = "" if steps == ran else f" ({ran:,} in this process)"
        return [] if reason is None else [f"training ended after {text_of_steps(steps)}{here}, and {reason}"]


def _wait_note(rank: int) -> str:
    """Name of the note by which a rank tells its peers of a wait that lasts."""
    return f"wait/{rank}"


def _forget_infinities(flat: Tensor, bucket: Bucket) -> None:
    # Gradients of unused parameters are from an earlier backward, as in a GAN, whose two networks take turns.
    for slot in bucket.slots:
        if bucket.unused and slot.name in bucket.unused:
            slot.view(flat).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def _current_scale(grad_scaler: torch.amp.GradScaler | None) -> float | Tensor:
    # get_scale() would wait for the device. The scale is None until the scaler has scaled a loss.
    scale: Tensor | None = getattr(grad_scaler, "_scale", None)
    if scale is None:
        return 1.0
    return scale if scale.is_cuda else scale.item()
