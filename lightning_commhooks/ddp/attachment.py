"""`Attachment`: a hook at work on one DDP model, for whoever trains it."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_commhooks.collectives.agreement import raise_on_all_ranks
from lightning_commhooks.collectives.errors import HookError
from lightning_commhooks.collectives.link import Link
from lightning_commhooks.collectives.measure_link import check_ranks, measure_link
from lightning_commhooks.ddp import checkpoint
from lightning_commhooks.ddp.copies import nothing
from lightning_commhooks.ddp.forecast import Forecast
from lightning_commhooks.ddp.model import checked_model, device_of, register, unwrapped
from lightning_commhooks.ddp.runtime import Runtime
from lightning_commhooks.interface.averages_models import averages_models
from lightning_commhooks.interface.checks import check_integer
from lightning_commhooks.interface.error_sample import DEFAULT_NUMEL, ErrorSampler
from lightning_commhooks.interface.hook import BoundHook, CommHook
from lightning_commhooks.interface.layout import Layout
from lightning_commhooks.interface.state import PerRank
from lightning_commhooks.interface.user_function import DDPHook, UserFunction
from lightning_commhooks.wrappers.scale import accumulation_of, unscaled

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


class Attachment:
    """A hook at work on one DDP model; made by [`attach`][].

    Not copied: by `copy.deepcopy` or `pickle` of what holds it there is `None` in its place, since the hook stays with
    the model that it was attached to.

    Attributes:
        hook: the configuration: a `CommHook`, or the user's own DDP hook function.
    """

    def __init__(self, hook: CommHook | DDPHook, runtime: Runtime, exact_state: bool) -> None:
        self.hook = hook
        self._runtime = runtime
        self._exact_state = exact_state
        self._finalizer: weakref.finalize[Any, Any] | None = None
        self._model: Callable[[], DistributedDataParallel | None] = lambda: None

    def __repr__(self) -> str:
        hook = self.hook if isinstance(self.hook, CommHook) else self.name
        return f"Attachment(hook={hook!r}, steps={self.num_steps}{', closed' if self.is_closed else ''})"

    def __reduce__(self) -> tuple[Callable[..., None], tuple[()]]:
        return nothing, ()

    @property
    def bound(self) -> BoundHook | None:
        """The runtime object; `None` for a user's own function."""
        return None if isinstance(self._runtime.method, UserFunction) else self._runtime.bound

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called or the model has gone."""
        return self._runtime.is_closed

    @property
    def name(self) -> str:
        """Name of the hook, or `module.function` of a user's own."""
        return self._runtime.name

    @property
    def num_steps(self) -> int:
        """Synchronized backwards since `attach`; unlike `metrics()`, this never waits for a device."""
        return self._runtime.counters.steps

    def is_attached_to(self, model: DistributedDataParallel) -> bool:
        """Whether this is the hook of that model."""
        return self._model() is unwrapped(model)

    def metrics(self) -> dict[str, float]:
        """Cumulative counts of this rank. Of a step that has not ended yet, with the optimizer's, no times are taken.

        Returns:
            `steps` (synchronized backwards since `attach`), `bytes_sent` and `bytes_dense` (payload bytes this rank
            sent to train, gradients and the averages of models that the hook itself makes, and would have sent with a
            plain all-reduce), `bytes_evaluation` (payload bytes it sent besides, to evaluate and to save: averages of
            models and optimizers' state that somebody looks at, and the hook's state in checkpoints),
            `compression_ratio` (dense over sent, of training alone, as the following are),
            `bytes_sent_between_nodes`, `bytes_evaluation_between_nodes`, `bytes_dense_between_nodes` and
            `compression_ratio_between_nodes` (the same of what leaves this rank's node, on the mean over ranks: all
            ranks of a node together send that times their number; nodes are told as for `subgroup_size=None` of local
            SGD), `collectives`,
            `rounds` (of messages that were waited for one after another, for a bucket at a time; of NCCL's collectives
            those of a ring),
            `numel_compressed` and `numel_uncompressed` (gradient elements that a compressing hook did and did
            not compress), `numel_overflowed` (gradient elements of this rank that are finite, but not in the float16
            they were sent in), `nonfinite_steps` (steps that a hook with memory disregarded, because a gradient was
            inf or NaN on some rank; also those that ranks taking steps alone skip together), `averagings` (times that
            the model, or a part of it, was averaged).

            Milliseconds, summed over the `timed_steps` (all steps; on NCCL one in ten): `exposed_ms` (time that the
            training thread, or on NCCL its stream, had nothing to do but wait for the hook), `comm_ms` (time within
            collectives, one or several at once, most of which the backward may hide), `codec_ms` (time of the hook's
            work outside of collectives), `overlap_ms` (time from the first bucket to the end of the backward, which is
            there to hide communication in). Waiting for ranks that are slower is in `comm_ms`, and `exposed_ms`, too.

            `relative_error` of the last step that was sampled, after `sample_error`: NaN before the first one.

            What a user's own function sends, and how long it takes, is unknown: NaN.
        """
        self._runtime.settle()
        metrics = {**self._runtime.counters.as_dict(), **self._runtime.counters.timing.totals()}
        if self._runtime.watch.sampler is not None:
            metrics["relative_error"] = self._runtime.watch.sampler.relative_error
        if self.bound is None:
            metrics.update(dict.fromkeys(_UNKNOWN_OF_FUNCTIONS, math.nan))
        return metrics

    def sample_error(self, every: int = 100, numel: int | None = DEFAULT_NUMEL) -> None:
        """Estimate the error of averaged gradients now and then: `metrics()["relative_error"]`.

        That is `|averaged - mean| / |mean|` over all gradients of a step, with the mean of the same gradients in full
        precision. With error feedback, what is missing now is sent later, so a model may learn as well with an error
        near 1. Of steps in which ranks step alone there is none. Costs an all-reduce of `numel` numbers in each sampled
        step, which is not counted in `bytes_sent`. Collective: call it on all ranks with the same arguments, outside of
        a backward.

        Args:
            every: sample steps whose number is a multiple of this; 0: none.
            numel: number of elements to estimate it from, drawn anew in each sampled step; `None`: all.

        Raises:
            ValueError: a value is out of range, or not the same on all ranks; the hook is a user's own function.
        """
        if self.bound is None:
            raise ValueError(f"{self.name} is not a hook of this library: its error cannot be sampled")
        problem = ""
        for name, value, lowest in (("every", every, 0), ("numel", 1 if numel is None else numel, 1)):
            if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
                problem = problem or f"{name} must be an integer of at least {lowest}, is {value!r}"
        group, own = self.bound.group, [-1, -1] if problem else [every, -1 if numel is None else numel]
        self._runtime.clock.end()
        asked = self._runtime.call(lambda: group.all_gather_quietly(own))
        if problem:
            raise ValueError(problem)
        if any(one != own for one in asked):
            raise ValueError(f"sample_error(every, numel) must be the same on all ranks, is {asked}")
        total = sum(parameter.numel() for parameter in self._runtime.layout.trained.values())
        self._runtime.watch.sampler = ErrorSampler(every, numel, total) if every else None

    def measure_link(self, budget: float = 1.5) -> Link:
        """Measure what collectives cost between these ranks. Collective, outside of a backward.

        Args:
            budget: seconds, about.

        Raises:
            ValueError: there is one rank only, or the hook is a user's own function.
        """
        bound = self.bound
        if bound is None:
            raise ValueError(f"{self.name} is not a hook of this library: it has no process group to measure")
        check_ranks(bound.group)
        self._runtime.clock.end()
        return self._runtime.call(lambda: measure_link(bound.group, budget))

    def residual_norm(self) -> float:
        """Euclidean norm of what this rank has not sent yet, for error feedback, in units of the loss's gradients.

        0 for hooks without. Makes a pass over the memory, and on CUDA waits for it; call it outside of a backward.
        """
        bound = self.bound
        if bound is None:
            return math.nan
        self._runtime.clock.end()
        return self._runtime.call(lambda: math.hypot(*(owed.norm().item() for owed in bound.owed())))

    def steps_not_compressed(self) -> dict[str, int]:
        """Number of steps that sent no fewer bytes than plain DDP, by reason; call it outside of a backward."""
        return self._runtime.watch.not_compressed()

    def forecast(self, num_steps: int | None = None) -> Forecast | None:
        """What training will send, by what was measured so far. Neither collective nor waits for a device.

        Of what the hook does after a later change, as `start_powerSGD_iter`, only the step is known: ask again then.

        Args:
            num_steps: synchronized backwards that training has in all, from its beginning on, those before a checkpoint
                included; `None`: not known.

        Returns:
            the forecast, one line when it is printed; `None` before a whole period was measured, which takes three
            steps, and again after each change; for a user's own function, for sparse gradients, in one process, and
            before `auto` has chosen. Of hooks that average models a period is that between averagings, times the
            number of optimizers.
        """
        if num_steps is not None:
            check_integer("num_steps", num_steps, 1)
        return self._runtime.forecaster.make(num_steps)

    def tell_forecast(
        self,
        say: Callable[[str], None] | None = None,
        num_left: int | None = None,
        *,
        steps: tuple[int, float] | None = None,
    ) -> None:
        """Say on the first rank what training will do, and warn there if next to nothing will be compressed.

        Says one line after the first steps, and one a few steps after each change of the hook, so call it after each
        step, on all ranks. It warns once, and that is not repeated when training ends.

        Args:
            say: shows one line; `None`: warnings only.
            num_left: synchronized backwards that are still to come; `None`: not known.
            steps: instead of `num_left`, for a framework whose steps have perhaps several synchronized backwards: how
                many of its steps there were, and will have been when training ends; infinite or below 0: not known.
        """
        if not self.is_closed:
            self._runtime.forecaster.tell(say, num_left, steps)

    def compression_stats(self) -> tuple[float, int, int]:
        """`(rate, numel_before, numel_after)` since compression began, as `PowerSGDState.compression_stats`.

        Raises:
            ValueError: the hook keeps no such statistics.
        """
        if self.bound is None:
            raise ValueError(f"{self.name} is not a hook of this library; ask its own state")
        # By name: it is no method of `BoundHook`, since only hooks that send factors count this.
        stats = getattr(self.bound, "compression_stats", None)
        if stats is None:
            raise ValueError(f"hook {self.name!r} keeps no compression_stats(); use metrics()")
        counted: tuple[float, int, int] = stats()
        return counted

    def state_dict(self) -> dict[str, Any]:
        """The hook's state as tensors and primitives, equal on all ranks, on CPU.

        Collective: call it on every rank, outside of a backward. Has the step count and what the hook remembers;
        of what differs between ranks the mean, which continues the run as well, or with `exact_state` all of it.
        Of a user's own function, the step count only.
        """
        run = self._runtime
        kind: PerRank = "exact" if self._exact_state else "mean"
        run.clock.end()
        return run.call(lambda: checkpoint.save(run, run.local.models, kind))

    def shared_state_dict(self) -> dict[str, Any]:
        """What one rank can save without the others: the step count.

        Not collective, and allowed at any time: after a failure, or in a signal handler in the middle of a step. Where
        it is loaded, the hook goes on from that step, and what it remembers begins anew, with a warning.

        Raises:
            HookError: the attachment is closed.
        """
        if self.is_closed:
            raise HookError("the communication hook was closed; its state is gone")
        return checkpoint.save_steps(self._runtime, self._runtime.local.models)

    def load_state_dict(self, state_dict: Mapping[str, Any], *, strict_state: bool = True) -> None:
        """Take over the state that `state_dict` returned, on this or another number of ranks.

        Collective: call it on every rank with the same state, outside of a backward.

        Args:
            state_dict: the state.
            strict_state: whether what does not fit is an error. If not, those entries begin anew, with a warning.

        Raises:
            StateError: it is no such state, truncated, of another hook, of a model with other parameters, or the
                hook's options give its memory other sizes. Raised on all ranks if it is so on one; the hook is
                as it was before, then.
        """
        differences = self._runtime.load(state_dict, strict_state)
        if differences and self._runtime.bound.group.rank == 0:
            more = f" and {len(differences) - 5} more" if len(differences) > 5 else ""
            warnings.warn(
                f"strict_state=False: not taken over from the state of hook {self.name!r}: "
                f"{'; '.join(differences[:5])}{more}. Its memory of these begins anew",
                stacklevel=2,
            )

    def reset_state(self) -> None:
        """Let the hook begin anew, at step 0, without memory; for models that are the same on all ranks. Collective."""
        self._runtime.reset()

    @property
    def averages_models(self) -> bool:
        """Whether the hook lets ranks step alone and averages their models."""
        return averages_models(self._runtime.bound)

    @property
    def models_differ(self) -> bool:
        """Whether each rank has a model of its own in place now; the same on all ranks."""
        return self._runtime.local.models.differ

    @property
    def has_state(self) -> bool:
        """Whether `state_dict` has more than the step count."""
        self._runtime.settle()
        return self._runtime.bound.has_memory or self.averages_models

    def add_weight(self, weight: float | Tensor) -> None:
        """With `accumulation="weighted"`, say how much the present micro-batch counts, as by its number of tokens.

        Call it for each micro-batch, before its backward; weights of several calls add up. The loss is to be a sum
        over what the weight counts, not a mean.

        Args:
            weight: a number of at least 0, or a tensor of one element; one on CUDA is not waited for.

        Raises:
            ValueError: no such number, or the hook does not use weights.
        """
        if accumulation_of(self._runtime.config) != "weighted" or self._runtime.micro_batches is None:
            raise ValueError(
                f"add_weight() is for accumulation='weighted'; hook {self.name!r} was attached without: "
                f"ScaleByGradAccumulation(..., accumulation='weighted')"
            )
        self._runtime.micro_batches.add_weight(weight)

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Let the hook know of each step of an optimizer; of use to hooks that average models.

        As `attach(optimizers=)`, for an optimizer that is made later. On all ranks alike. Adding twice does nothing.

        Raises:
            ValueError: the optimizer keeps its state in shards, averages models itself, or is none of `torch.optim`.
        """
        if self.averages_models:
            self._runtime.local.add(optimizer)

    def after_optimizer_step(self, optimizer: Optimizer) -> None:
        """Tell the hook that an optimizer, which was not given to it, has stepped. Collective.

        Call it on all ranks, also when a scaler skipped the step.

        Raises:
            ValueError: the optimizer reports its steps by itself, or is one that `add_optimizer` refuses.
        """
        if self.averages_models:
            self._runtime.local.after_step(optimizer)

    def average_weights(self, *, everything: bool = False) -> None:
        """Average what differs between ranks, parameters and buffers, for good. Collective, outside of a backward.

        Does nothing, and sends nothing, when ranks are equal: with hooks that average gradients, and just after an
        averaging; nor when an average that was looked at is kept: see `averaged_weights`.

        Args:
            everything: average all parameters if any of them differs, because others than optimizers have changed them
                on each rank.
        """
        self._runtime.local.average(everything)

    def averaged_weights(self) -> AbstractContextManager[None]:
        """Have the average in place of each rank's own model within a `with`; then training goes on as if nothing was.

        For validation and checkpoints. Collective, outside of a backward. As cheap as `average_weights`, and needs
        memory for a copy of the model. No optimizer may step meanwhile.

        The averages are kept, in that memory, until the next forward that trains or optimizer's step: looking again
        before, or `average_weights`, sends nothing. Who changes the model in between, otherwise than by `tensor.data`,
        has it averaged anew. A forward in eval mode outside of it warns once that it sees this rank's own model.
        """
        return self._runtime.local.averaged()

    def show_average(self) -> None:
        """Have the average in place of each rank's own model until the next forward that trains, or step. Collective.

        For whoever looks at the model where there is no place for a `with`. A forward trains when gradients are
        enabled in it. When the attachment is closed meanwhile, the average stays.
        """
        self._runtime.local.show_average()

    def average_optimizer_state(self, optimizer: Optimizer) -> None:
        """Average floating-point state of an optimizer that differs between ranks, for good. Collective."""
        self._runtime.local.average_state(optimizer)

    def averaged_optimizer_state(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """Have the average in place of each rank's own state of an optimizer within a `with`. Collective.

        It is kept as that of the model is: see `averaged_weights`.
        """
        return self._runtime.local.averaged_state(optimizer)

    def unfrozen(self) -> list[str]:
        """Names of parameters that are trained now, but were frozen when the model was wrapped: see `move_to`."""
        return self._runtime.layout.unfrozen()

    def move_to(self, model: DistributedDataParallel) -> None:
        """Go on with another DDP wrapper of the same module, with memory, step count and metrics.

        For a model whose parameters were frozen or unfrozen: DDP averages those that were trained when it was
        made, so the module has to be wrapped again. Keep the old wrapper until then: with it the attachment closes.
        Collective, outside of a backward.

        Args:
            model: the new wrapper, over the same process group and without a hook.

        Raises:
            ValueError: `model` is not DDP or has a hook already; or ranks had stepped alone when it was made, and DDP
                has overwritten their models with rank 0's: `average_weights()` before.
            HookError: the attachment is closed; or one of these on another rank.
        """
        if self.is_closed:
            raise HookError("the communication hook was closed; keep the old DistributedDataParallel until move_to()")
        self._runtime.clock.end()
        with raise_on_all_ranks(self._runtime.bound.group.process_group, "move_to()"):
            if self._runtime.local.models.drifted:
                raise ValueError(
                    "the models of the ranks differed when the new DistributedDataParallel was made, which overwrote "
                    "them with that of rank 0; call average_weights() before making it"
                )
            self._connect(model)

    def _connect(self, model: DistributedDataParallel) -> None:
        model = checked_model(model)
        device, before = device_of(model), self._runtime.bound.group.device
        if device != before:
            raise ValueError(f"the model is on {device}, and the hook was attached to one on {before}: attach another")
        layout = Layout(model.module, model.parameters_to_ignore)
        names = list(layout.trained)
        texts = self._runtime.config.check_parameters(names)
        self._runtime.local.models.layout = layout
        trampoline = self._runtime.trampoline(model)
        register(model, self._runtime.hook_state, trampoline, self.name, lambda: self._runtime.is_closed)
        if self._finalizer is not None:
            self._finalizer.detach()
        self._finalizer = weakref.finalize(model, self._runtime.close)
        self._model = weakref.ref(model)
        if self._runtime.bound.group.rank == 0:
            for text in texts:
                warnings.warn(text, stacklevel=3)

    def _set_optimizers(self, optimizers: Collection[Optimizer] | Callable[[], Iterable[Optimizer]] | None) -> None:
        local = self._runtime.local
        bound = self._runtime.bound
        local.models.average_buffers = averages_models(bound) and bound.average_buffers
        if callable(optimizers):
            local.find_optimizers = optimizers
        elif optimizers is not None:
            local.reported_by_user = not optimizers
            for optimizer in optimizers:
                self.add_optimizer(optimizer)

    def close(self) -> None:
        """Release thread and process group; metrics stay readable, a later backward raises `HookError`.

        Waits for what is under way, for a second at most: a backward that broke off may wait for other ranks for ever.

        Warns when training ended before the hook compressed anything. Closing twice does nothing. A model
        that goes out of use closes its attachment by itself. A user's own function has nothing to release.
        """
        if self._finalizer is not None:
            self._finalizer()


def hook_name(hook: CommHook | DDPHook) -> str:
    """Name of a configuration, or `module.function` of a DDP hook function."""
    return unscaled(hook if isinstance(hook, CommHook) else UserFunction(hook)).name
