"""`Attachment`: a hook at work on one model, for whoever trains it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_commhooks.collectives.agreement import raise_on_all_ranks
from lightning_commhooks.collectives.errors import HookError
from lightning_commhooks.collectives.link import Link
from lightning_commhooks.collectives.measure_link import check_ranks, measure_link
from lightning_commhooks.interface.averages_models import averages_models
from lightning_commhooks.interface.checks import check_integer
from lightning_commhooks.interface.error_sample import DEFAULT_NUMEL, ErrorSampler
from lightning_commhooks.interface.hook import BoundHook, CommHook
from lightning_commhooks.interface.layout import unwrapped
from lightning_commhooks.interface.state import PerRank
from lightning_commhooks.interface.user_function import DDPHook, UserFunction
from lightning_commhooks.runtime import checkpoint
from lightning_commhooks.runtime.copies import nothing
from lightning_commhooks.runtime.forecast import Forecast
from lightning_commhooks.runtime.runtime import Runtime
from lightning_commhooks.wrappers.scale import accumulation_of


class Attachment:
    """A hook at work on one model; made by [`attach`][].

    With FSDP a hook reduces gradients and keeps no memory: what asks for state, whole gradients or models of ranks says
    so in a `ValueError`, does nothing, or returns what there is, zero or `None`. Not copied: in a copy of what holds it
    there is `None`, since the hook stays with the model that it was attached to.

    Attributes:
        is_monitored: whether a [`Monitor`][] was made of it.
    """

    def __init__(self, runtime: Runtime, exact_state: bool) -> None:
        self._runtime = runtime
        self._exact_state = exact_state
        self.is_monitored = False

    def __repr__(self) -> str:
        hook = self.hook if isinstance(self.hook, CommHook) else self.name
        return f"Attachment(hook={hook!r}, steps={self.num_steps}{', closed' if self.is_closed else ''})"

    def __reduce__(self) -> tuple[Callable[..., None], tuple[()]]:
        return nothing, ()

    @property
    def hook(self) -> CommHook | DDPHook:
        """The configuration: a `CommHook`, whose starts are steps once training has begun; or a user's own function."""
        config = self._runtime.config
        return config.function if isinstance(config, UserFunction) else config

    @property
    def bound(self) -> BoundHook | None:
        """The runtime object; `None` for a user's own function, and for FSDP, which has one for each group of ranks."""
        return None if self._runtime.limits else self._runtime.bound

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called or the model has gone."""
        return self._runtime.is_closed

    @property
    def name(self) -> str:
        """Name of the hook, or `module.function` of a user's own."""
        return self._runtime.name

    @property
    def is_alone(self) -> bool:
        """Whether training runs in one process, where a hook that averages gradients leaves them as they are."""
        return self._runtime.is_alone

    @property
    def num_steps(self) -> int:
        """Synchronized backwards since `attach`; unlike `metrics()`, this never waits for a device."""
        return self._runtime.counters.steps

    def is_attached_to(self, model: nn.Module) -> bool:
        """Whether this is the hook of that model."""
        return self._runtime.model() is unwrapped(model)

    def metrics(self) -> dict[str, float]:
        """Cumulative counts of this rank. Times of a step that has not ended, with the optimizer's, are not included.

        Returns:
            `steps` (synchronized backwards since `attach`; with FSDP 1, also those within those of reentrant activation
            checkpointing), `bytes_sent` and `bytes_dense` (payload bytes this rank sent to train, gradients and the
            averages of models that the hook itself makes, and would have sent without a hook, FSDP in float32; not
            FSDP's parameters, and what FSDP2 sends between replicas by itself), `bytes_evaluation` (payload bytes it
            sent besides, to evaluate and to save: averages of models and optimizers' state that somebody looks at, and
            the hook's state in checkpoints), `compression_ratio` (dense over sent, of training alone, as the following
            are), `bytes_sent_between_nodes`, `bytes_evaluation_between_nodes`, `bytes_dense_between_nodes`,
            `compression_ratio_between_nodes` (what leaves the node, on the mean over ranks: times the number of its
            ranks, all of it; nodes are told as for `subgroup_size=None` of local SGD), `collectives`, `rounds` (of
            messages that were waited for one after another, for a bucket at a time; of NCCL's collectives those of a
            ring), `numel_uncompressed` (gradient elements that were sent as they are, with all of their bytes),
            `numel_compressed` (the remaining elements of buckets of which anything was sent), `numel_overflowed`
            (gradient elements of this rank that are finite, but not in the float16 they were sent in),
            `nonfinite_steps` (steps that a hook with memory disregarded, because a gradient was inf or NaN on some
            rank, or that ranks taking steps alone skip together), `averagings` (of the model, or a part of it).

            Milliseconds, summed over the `timed_steps` (all steps; on NCCL one in ten): `exposed_ms` (time that the
            training thread, or on NCCL its stream, had nothing to do but wait for the hook), `comm_ms` (time within
            collectives, one or several at once, most of which the backward may hide), `codec_ms` (time of the hook's
            work outside of collectives), `overlap_ms` (time from the first bucket to the end of the backward, which is
            there to hide communication in). Waiting for ranks that are slower is in `comm_ms`, and `exposed_ms`, too.
            `waited_ms`, of all steps: what of `exposed_ms` this rank waited at averages of models for the slowest one,
            and on CUDA for its own device; 0 with `delay`, where nobody waits when an average begins.

            `relative_error` of the last step that was sampled, after `sample_error`: NaN before the first one.

            With a `manager`: `replicas` that are there, `quorums` that this one was in, `steps_not_committed`, and
            `lost_ms`, the time from the last step before those to the next one.

            Left out is what would always be 0: what leaves the node where there is one, averages of models with hooks
            that average gradients, and `bytes_evaluation` if these have no memory either.

            NaN is what a user's own function sends, and how long it takes. With FSDP there are no times, and nothing of
            nodes, evaluation, steps with inf or NaN and averages.
        """
        return self._runtime.metrics()

    def sample_error(self, every: int = 100, numel: int | None = DEFAULT_NUMEL) -> None:
        """Estimate the error of averaged gradients now and then: `metrics()["relative_error"]`. Collective.

        It is `|averaged - mean| / |mean|` over all gradients of a step, with the mean of the same gradients in full
        precision. With error feedback, what is missing now is sent later, so a model may learn as well with an error
        near 1. Steps that ranks take alone have none. Costs an all-reduce of `numel` numbers in each sampled step,
        which is not counted. Call it outside of a backward.

        Args:
            every: sample steps whose number is a multiple of this; 0: none.
            numel: number of elements to estimate it from, drawn anew in each sampled step; `None`: all.

        Raises:
            ValueError: a value is out of range, or not the same on all ranks; a user's own function, or FSDP.
        """
        self._known("sample_error")
        self._runtime.begin_together("sample_error()")
        with self._runtime.source.agreeing("sample_error()") as same:
            check_integer("every", every, 0)
            check_integer("numel", 1 if numel is None else numel, 1)
            same |= {"every": every, "numel": numel}
        total = sum(map(math.prod, self._runtime.layout.shapes.values()))
        self._runtime.watch.sampler = ErrorSampler(every, numel, total) if every else None

    def measure_link(self, budget: float = 1.5) -> Link:
        """Measure what collectives cost between these ranks, in about `budget` seconds.

        Collective, outside of a backward. Raises a `ValueError` for one rank, a user's own function, and FSDP.
        """
        bound = self._known("measure_link")
        check_ranks(bound.group)
        self._runtime.begin_together("measure_link()")
        return self._runtime.call(lambda: measure_link(bound.group, budget))

    def residual_norm(self) -> float:
        """Euclidean norm of the residual of error feedback, in units of the loss's gradients; 0 for hooks without.

        Makes a pass over the residual, and on CUDA waits for it; call it outside of a backward.
        """
        bound = self.bound
        if bound is None:
            return math.nan
        self._runtime.clock.end()
        return self._runtime.call(lambda: math.hypot(*(residual.norm().item() for residual in bound.residuals())))

    def steps_not_compressed(self) -> dict[str, int]:
        """Number of steps that sent no fewer bytes than plain DDP, by reason; call it outside of a backward."""
        return self._runtime.watch.not_compressed()

    def forecast(self, num_steps: int | None = None) -> Forecast | None:
        """Forecast what training will send, by what was measured. Not collective.

        For hooks with error feedback it also tells the error of one of the first compressed steps, as `sample_error`
        estimates it; on CUDA that waits for the device.

        Args:
            num_steps: synchronized backwards that training has in all, from its beginning on, those before a checkpoint
                included; `None`: not known.

        Returns:
            the forecast, one line when it is printed; `None` before a whole period was measured, which takes three
            steps, and again after each change, as at `start_powerSGD_iter`; for a user's own function, with FSDP, in
            one process, and before `auto` has chosen. With hooks that average models a period is that between
            averagings, times the number of optimizers.
        """
        if num_steps is not None:
            check_integer("num_steps", num_steps, 1)
        return self._runtime.forecaster.make(num_steps)

    def tell_forecast(self, say: Callable[[str], None] | None = None, num_left: int | None = None) -> None:
        """Say on the first rank what training will do, and warn there if that is next to nothing, or costs accuracy.

        Call it before each step, on all ranks: it says one line after the first steps, and one a few steps after each
        change of the hook. It warns once, and that is not repeated when training ends. The first call determines the
        starts that depend on the length of the run, as `start_powerSGD_iter=0.1`, if `attach` did not know it.

        Args:
            say: shows one line; `None`: warnings only.
            num_left: synchronized backwards that are still to come; `None`: not known.
        """
        if not self.is_closed:
            self._runtime.expect(None if num_left is None else self._runtime.clock.steps + num_left)
            self._runtime.forecaster.tell(say, num_left)

    def note_end(self, *, as_planned: bool) -> None:
        """Say whether training has ended as planned, before `close`, which gives advice on the next run only then.

        Call it where you know: for the end of a run that was stopped early by its own rule, or of one that was never
        meant to be long. Otherwise `close` tells from the number of steps, if it knows how many were to be taken.

        Args:
            as_planned: `True`: whatever the number of steps; `False`: training broke off, or it was a trial.
        """
        self._runtime.ended = as_planned

    def compression_stats(self) -> tuple[float, int, int]:
        """`(rate, numel_before, numel_after)` since compression began, as `PowerSGDState.compression_stats`.

        Raises a `ValueError` if the hook keeps no such statistics.
        """
        # By name: it is no method of `BoundHook`, since only hooks that send factors count this.
        stats = getattr(self._known("compression_stats"), "compression_stats", None)
        if stats is None:
            raise ValueError(f"hook {self.name!r} keeps no compression_stats(); use metrics()")
        return cast("tuple[float, int, int]", stats())

    def _known(self, method: str) -> BoundHook:
        """The runtime object, for what is done neither with a user's own function nor with FSDP."""
        if self._runtime.limits:
            raise ValueError(f"{method}(): {self._runtime.limits}")
        return self._runtime.bound

    def _of_ddp(self, method: str) -> Runtime:
        """The runtime, for what is not done with FSDP."""
        if self._runtime.source.limits:
            raise ValueError(f"{method}(): {self._runtime.source.limits}")
        return self._runtime

    def state_dict(self) -> dict[str, Any]:
        """The hook's state as tensors and primitives, equal on all ranks, on CPU.

        Collective, outside of a backward, and not after one that has raised. Has the step count and what the hook
        remembers; of what differs between ranks the mean, which continues the run as well, or with `exact_state` all of
        it. Of a user's own function, the step count only. With a `manager` it is not collective, and residuals are
        zero.
        """
        run = self._of_ddp("state_dict")
        if run.source.ranks_change:
            return checkpoint.save_alone(run, run.local.models, "joining")
        kind: PerRank = "exact" if self._exact_state else "mean"
        if self.has_state:
            run.begin_together("state_dict()")
        else:
            run.clock.end()

        def save() -> dict[str, Any]:
            run.local.count()
            return checkpoint.save(run, run.local.models, kind)

        return run.call(save)

    def shared_state_dict(self) -> dict[str, Any]:
        """The step count, which one rank can save without the others: after a failure, or in a signal handler.

        Where it is loaded, the hook goes on from that step, and what it remembers begins anew, with a warning. Raises a
        `HookError` when the attachment is closed.
        """
        if self.is_closed:
            raise HookError("the communication hook was closed; its state is gone")
        run = self._of_ddp("shared_state_dict")
        return checkpoint.save_steps(run, run.local.models)

    def load_state_dict(
        self, state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]], *, strict_state: bool = True
    ) -> None:
        """Take over the state that `state_dict` returned, on this or another number of ranks.

        Collective: call it on every rank with the same state, outside of a backward.

        Args:
            state_dict: the state; of a sharded model that of this rank's `shard`, or a list of those of all shards in
                order, which may have been another number of them.
            strict_state: whether what does not fit is an error. If not, those entries begin anew, with a warning.

        Raises:
            StateError: on all ranks, and the hook is as it was before: it is no such state, truncated, of another hook,
                of a model with other parameters, or the hook's options give its memory other sizes.
        """
        self._of_ddp("load_state_dict").load(state_dict, strict_state)

    def reset_state(self) -> None:
        """Reset the hook to step 0, without memory. Collective.

        For models that are the same on all ranks. Averages weights and the state of optimizers if they still differ.
        """
        self._of_ddp("reset_state").reset()

    @property
    def shard(self) -> tuple[int, int]:
        """Which part of a sharded model with replicas this rank's state is of, and of how many: `(0, 1)`: all of it."""
        shard = self._runtime.source.shard
        index = sum(one * math.prod(size for _, size in shard[i + 1 :]) for i, (one, _) in enumerate(shard))
        return index, math.prod(size for _, size in shard)

    @property
    def is_first_replica(self) -> bool:
        """Whether this is one of the ranks that save a state, of which all ranks with the same shard have the same."""
        return self._runtime.source.process_group.rank() == 0

    @property
    def averages_models(self) -> bool:
        """Whether the hook lets ranks step alone and averages their models."""
        return averages_models(self._runtime.bound)

    @property
    def averages_when_asked(self) -> bool:
        """Whether it does so for evaluation, too; not with a `manager`, where each replica evaluates for itself."""
        return self.averages_models and not self._runtime.source.ranks_change

    @property
    def models_differ(self) -> bool:
        """Whether this rank has a model of its own in place now, as far as it knows without asking others."""
        return self._runtime.local.models.differ

    @property
    def has_state(self) -> bool:
        """Whether `state_dict` has more than the step count."""
        self._runtime.commit()
        return self._runtime.bound.has_memory or self.averages_models

    def add_weight(self, weight: float | Tensor) -> None:
        """With `accumulation="weighted"`, say how much the present micro-batch counts, as by its number of tokens.

        Call it for each micro-batch, before its backward; weights of several calls add up. The loss is to be a sum over
        what the weight counts, not a mean. A weight is a number of at least 0, or a tensor of one element; one on CUDA
        is not waited for. Raises a `ValueError` if it is not, or the hook does not use weights.
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
        Raises a `ValueError` if it keeps its state in shards, averages models itself, or is none of `torch.optim`.
        """
        if self.averages_models:
            self._runtime.local.add(optimizer, self._runtime.clock.steps)

    def after_optimizer_step(self, optimizer: Optimizer) -> None:
        """Tell the hook that an optimizer, which was not given to it, has stepped. Collective.

        Call it on all ranks, also when a scaler skipped the step, which does not count. Raises a `ValueError` if the
        optimizer reports its steps by itself, or is one that `add_optimizer` refuses.
        """
        if self.averages_models:
            self._runtime.local.after_step(optimizer)

    def average_weights(self, *, everything: bool = False) -> None:
        """Average what differs between ranks, parameters and buffers, for good. Collective, outside of a backward.

        Sends nothing when ranks are equal, or an average that was evaluated is kept: see `averaged_weights`. With
        `everything`, averages all parameters if any of them differs: others than optimizers have changed them. Needs
        memory for a copy of the model meanwhile. Leaves each rank the state of its optimizers: before training goes on
        with averaged gradients, call `average_optimizer_state`.
        """
        self._runtime.local.average(everything)

    def averaged_weights(self) -> AbstractContextManager[None]:
        """Have the average in place of each rank's own model within a `with`; then training goes on as if nothing was.

        For validation and checkpoints. Collective, outside of a backward. Needs memory for a copy of the model, in
        which the averages are kept until the next forward that trains or optimizer's step: looking again before, or
        `average_weights`, sends nothing, unless the model was changed on some rank, otherwise than by `tensor.data`. No
        optimizer may step meanwhile. A forward in eval mode outside of it warns once that it sees this rank's own
        model.
        """
        return self._runtime.local.averaged()

    def show_average(self) -> None:
        """Have the average in place of each rank's own model until the next step, or forward with gradients enabled.

        Collective; for where there is no place for a `with`. When the attachment is closed meanwhile, it stays.
        """
        self._runtime.local.show_average()

    def average_optimizer_state(self, optimizer: Optimizer) -> None:
        """Average floating-point state of an optimizer that differs between ranks, for good. Collective."""
        self._runtime.local.average_state(optimizer)

    def averaged_optimizer_state(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """Have the average in place of each rank's own state of an optimizer within a `with`, as `averaged_weights`."""
        return self._runtime.local.averaged_state(optimizer)

    def unfrozen(self) -> list[str]:
        """Names of parameters that are trained now, but were frozen when the model was wrapped: see `move_to`."""
        return self._runtime.layout.unfrozen()

    def move_to(self, model: DistributedDataParallel) -> None:
        """Go on with another DDP wrapper of the same module, with memory, step count and metrics.

        For a model whose parameters were frozen or unfrozen: DDP averages those that were trained when it was made, so
        the module has to be wrapped again, over the same process group. Keep the old wrapper until then: with it the
        attachment closes. Collective, outside of a backward.

        Raises:
            ValueError: `model` is not DDP or has a hook already; or ranks had stepped alone when it was made, and DDP
                has overwritten their models with rank 0's: `average_weights()` before.
            HookError: the attachment is closed; or one of these on another rank.
        """
        run = self._of_ddp("move_to")
        if self.is_closed:
            raise HookError("the communication hook was closed; keep the old DistributedDataParallel until move_to()")
        run.begin_together("move_to()")
        with raise_on_all_ranks(run.bound.group.process_group, "move_to()"):
            if run.local.models.diverged:
                raise ValueError(
                    "the models of the ranks differed when the new DistributedDataParallel was made, which overwrote "
                    "them with that of rank 0; call average_weights() before making it"
                )
            run.source.check(model)
            run.connect(cast("nn.Module", unwrapped(model)))

    def close(self) -> None:
        """Release thread and process group; metrics stay readable. Call it on all ranks alike.

        A later backward is averaged by FSDP2 as without a hook. With DDP, FSDP 1 and a `manager` it raises a
        `HookError`, since they keep a hook for good; so it does after a failure: wrap the model again to train without.

        Waits for what is under way, for a second at most; not for a backward that has raised. Does nothing in a fork.
        Warns when training ended before the hook compressed anything; but not when an exception has ended it, or when
        fewer steps were taken than `num_steps` or `tell_forecast` have told: see `note_end`. After fewer than 10 steps
        there is no advice on starts and periods. Warns, too, when an optimizer steps on later whose state differs
        between ranks. Closing twice does nothing. A model that goes out of use closes its attachment by itself. To an
        FSDP model another hook may be attached then.
        """
        self._runtime.close()
