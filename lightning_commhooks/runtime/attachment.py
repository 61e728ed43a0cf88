"""`Attachment`: the interface to a hook that is attached to a model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import NoneType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_commhooks.collectives.errors import HookError
from lightning_commhooks.collectives.link import Link, check_ranks, measure_link
from lightning_commhooks.interface.averages_models import averages_models
from lightning_commhooks.interface.checks import check_integer
from lightning_commhooks.interface.error_sample import DEFAULT_NUMEL, ErrorSampler
from lightning_commhooks.interface.hook import BoundHook, CommHook
from lightning_commhooks.interface.layout import unwrapped
from lightning_commhooks.interface.state import PerRank
from lightning_commhooks.interface.user_function import DDPHook, UserFunction
from lightning_commhooks.runtime import checkpoint
from lightning_commhooks.runtime.forecast import Forecast
from lightning_commhooks.runtime.lone_rank import without_pass_on
from lightning_commhooks.runtime.runtime import Runtime
from lightning_commhooks.wrappers.scale import accumulation_of


class Attachment:
    """A hook that is attached to one model; created by [`attach`][].

    With FSDP a hook reduces gradients and has no memory. Methods that need state, whole gradients or the ranks' models
    then raise a `ValueError`, do nothing, or return zero, `None` or the available part. An attachment is not copied: a
    copy of an object that holds it gets `None`, since the hook stays with the model that it was attached to.

    Attributes:
        is_monitored: whether there is a [`Monitor`][] of it.
        steps_told: number of steps when its closing line was shown.
        runtime: the hook at work, for this library's own use.
    """

    def __init__(self, runtime: Runtime, exact_state: bool) -> None:
        self.runtime = runtime
        self._exact_state = exact_state
        self.is_monitored = False
        self.steps_told = 0

    def __repr__(self) -> str:
        hook = self.hook if isinstance(self.hook, CommHook) else self.name
        return f"Attachment(hook={hook!r}, steps={self.num_steps}{', closed' if self.is_closed else ''})"

    def __reduce__(self) -> tuple[Callable[..., None], tuple[()]]:
        return NoneType, ()

    @property
    def hook(self) -> CommHook | DDPHook:
        """The configuration: a `CommHook`, or a user's function.

        Starts are converted to steps once the length of the run is known.
        """
        config = self.runtime.config
        return config.function if isinstance(config, UserFunction) else config

    @property
    def bound(self) -> BoundHook | None:
        """The runtime object; `None` for a user's function, and for FSDP, which has one for each group of ranks."""
        return None if self.runtime.limits else without_pass_on(self.runtime.bound)

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called or the model no longer exists."""
        return self.runtime.is_closed

    @property
    def name(self) -> str:
        """Name of the hook, or `module.function` for a user's function."""
        return self.runtime.name

    @property
    def is_alone(self) -> bool:
        """Whether training runs in one process, where a hook that averages gradients does not change them."""
        return self.runtime.is_alone

    @property
    def num_steps(self) -> int:
        """Synchronized backwards since `attach`; unlike `metrics()`, this never synchronizes with a device."""
        return self.runtime.counters.steps

    def is_attached_to(self, model: nn.Module) -> bool:
        """Return whether the hook is attached to that model."""
        return self.runtime.model() is unwrapped(model)

    def metrics(self) -> dict[str, float]:
        """Return this rank's cumulative metrics. Times exclude a step whose optimizer step has not ended.

        Returns:
            numbers by name, since `attach`.

            Counts:

            * `steps`: synchronized backwards; with FSDP 1, including nested ones of reentrant activation checkpointing.
            * `bytes_sent`: payload bytes that this rank sent for training: gradients, and averages of models by the
              hook. Excludes FSDP's parameters, and bytes that FSDP2 itself sends between replicas.
            * `bytes_dense`: bytes that this rank would have sent without a hook; with FSDP, in float32.
            * `bytes_evaluation`: payload bytes that this rank sent for evaluation and saving: averages of models and of
              optimizer state, and the hook's state in checkpoints.
            * `compression_ratio`: `bytes_dense / bytes_sent`.
            * `bytes_sent_between_nodes`, `bytes_evaluation_between_nodes`, `bytes_dense_between_nodes`,
              `compression_ratio_between_nodes`: the same for bytes that leave the node, averaged over ranks; multiply
              by a node's number of ranks for its total. Nodes are determined as for `subgroup_size=None` of local SGD.
            * `collectives`: collectives for training.
            * `rounds`: consecutive rounds of messages for training, for each bucket; for NCCL's collectives, the rounds
              of a ring.
            * `numel_uncompressed`: gradient elements that were sent uncompressed, with all of their bytes.
            * `numel_compressed`: the remaining elements of all buckets that sent anything.
            * `numel_overflowed`: gradient elements of this rank that are finite, but overflow in the float16 they were
              sent in.
            * `nonfinite_steps`: steps that a hook with memory discarded because a gradient was inf or NaN on some rank,
              and local steps that all ranks skipped.
            * `averagings`: averages of the model, or of a fragment of it; averages of several optimizers count once.

            Milliseconds, summed over the `timed_steps`: all steps, on NCCL one in ten, and none on CUDA over gloo:

            * `exposed_ms`: time that the training thread, or its stream on NCCL, only waited for the hook, including
              waits for slower ranks.
            * `comm_ms`: time with at least one collective in flight, including waits for slower ranks. The backward may
              hide most of it.
            * `codec_ms`: time that the hook computed outside of collectives.
            * `overlap_ms`: time from the first bucket to the end of the backward, which can hide communication.
            * `waited_ms`, over all steps: the part of `exposed_ms` that this rank waited for the slowest rank at
              averages of models, and on CUDA for its own device; 0 with `delay`, since no rank waits when an average
              begins.

            After `sample_error`, `relative_error`: the error of the last sampled step; NaN before the first.

            With a `manager`:

            * `replicas`: current number of replicas.
            * `quorums`: number of quorums that included this replica.
            * `steps_not_committed`: steps that were discarded.
            * `lost_ms`: time from the last step before the discarded ones to the next step.

            Metrics that would always be 0 are omitted: bytes between nodes if there is one node, averages of models for
            hooks that average gradients, and `bytes_evaluation` for those that have no memory either. Bytes and times
            of a user's function are NaN. With FSDP, there are no times, and no metrics on nodes, evaluation, nonfinite
            steps or averages.
        """
        return self.runtime.metrics()

    def sample_error(self, every: int = 100, numel: int | None = DEFAULT_NUMEL) -> None:
        """Sample the error of averaged gradients periodically, as `metrics()["relative_error"]`. Collective.

        The error is `|averaged - mean| / |mean|` over all gradients of a step, with the mean of the same gradients in
        full precision. Error feedback sends the rest later, so even with an error near 1 a model may learn as well.
        Local steps have no error. Each sampled step costs an all-reduce of `numel` numbers, which is not counted. Call
        it outside of a backward.

        Args:
            every: sample steps whose number is a multiple of this value; 0: no steps.
            numel: number of elements in the estimate, drawn again in each sampled step; `None`: all.

        Raises:
            ValueError: a value is out of range or differs between ranks, or the hook is a user's function, or FSDP is
                used.
        """
        self._known("sample_error")
        self.runtime.begin_together("sample_error()")
        with self.runtime.source.agreeing("sample_error()") as same:
            check_integer("every", every, 0)
            check_integer("numel", 1 if numel is None else numel, 1)
            same |= {"every": every, "numel": numel}
        total = sum(map(math.prod, self.runtime.layout.shapes.values()))
        self.runtime.sampler = ErrorSampler(every, numel, total) if every else None

    def measure_link(self, budget: float = 1.5) -> Link:
        """Measure the cost of collectives between these ranks, in about `budget` seconds.

        Collective; call it outside of a backward. Raises a `ValueError` for one rank, a user's function, and FSDP.
        """
        bound = self._known("measure_link")
        check_ranks(bound.group)
        self.runtime.begin_together("measure_link()")
        return self.runtime.call(lambda: measure_link(bound.group, budget))

    def residual_norm(self) -> float:
        """Return the Euclidean norm of the residual, in units of unscaled gradients; 0 without error feedback.

        Makes a pass over the residual, and synchronizes on CUDA; call it outside of a backward.
        """
        bound = self.bound
        if bound is None:
            return math.nan
        self.runtime.clock.end()
        # In float32 the squares of 1e20 are infinite, and those of 1e-23 are zero.
        return self.runtime.call(
            lambda: math.hypot(*(residual.norm(dtype=torch.float64).item() for residual in bound.residuals()))
        )

    def steps_not_compressed(self) -> dict[str, int]:
        """Return the number of steps that sent at least as many bytes as plain DDP, by reason.

        Call it outside of a backward.
        """
        return self.runtime.forecaster.not_compressed()

    def forecast(self, num_steps: int | None = None) -> Forecast | None:
        """Forecast the bytes that training will send, from measured steps. Not collective.

        For hooks with error feedback, the forecast includes the error of one of the first compressed steps, as sampled
        by `sample_error`; on CUDA this synchronizes with the device.

        Args:
            num_steps: total number of synchronized backwards in training, including steps before a checkpoint; `None`:
                the number is unknown.

        Returns:
            the forecast, which prints as one line. `None` until a whole period was measured, which takes three steps,
            and again after each change, such as at `start_powerSGD_iter`. Also `None` for a user's function, with FSDP,
            in one process, and before `auto` has chosen. For hooks that average models, a period is the period of
            averaging times the number of optimizers.
        """
        if num_steps is not None:
            check_integer("num_steps", num_steps, 1)
        return self.runtime.forecaster.make(num_steps)

    def tell_forecast(self, say: Callable[[str], None] | None = None, num_left: int | None = None) -> None:
        """Show the forecast on the first rank, and warn there if the hook saves almost nothing or costs accuracy.

        Call it before each step on all ranks: it shows one line after the first steps, and one a few steps after each
        change of the hook. It warns once, and the warning is not repeated when training ends. The first call determines
        starts that depend on the length of the run, such as `start_powerSGD_iter=0.1`, unless `attach` knew it.

        Args:
            say: shows one line; `None`: warnings only.
            num_left: number of synchronized backwards left; `None`: the number is unknown.
        """
        if not self.is_closed:
            self.runtime.expect(None if num_left is None else self.runtime.clock.steps + num_left)
            self.runtime.forecaster.tell(say, num_left)

    def note_end(self, *, as_planned: bool) -> None:
        """State whether training has ended as planned; `close` gives advice on the next run only if it has.

        Call it before `close` if you know: for a run that its own rule stopped early, or that was never meant to be
        long. Otherwise `close` decides by the number of steps, if it knows the planned number.

        Args:
            as_planned: `True`: training ended as planned, regardless of the number of steps; `False`: it was
                interrupted, or was a trial.
        """
        self.runtime.ended = as_planned

    def compression_stats(self) -> tuple[float, int, int]:
        """Return `(rate, numel_before, numel_after)` since compression began, like `PowerSGDState.compression_stats`.

        Raises a `ValueError` if the hook does not have these statistics.
        """
        # By name: it is not a method of `BoundHook`, since only hooks that send factors count this.
        stats = getattr(self._known("compression_stats"), "compression_stats", None)
        if stats is None:
            raise ValueError(f"hook {self.name!r} keeps no compression_stats(); use metrics()")
        return cast("tuple[float, int, int]", stats())

    def _known(self, method: str) -> BoundHook:
        """Return the runtime object, or raise for a user's function and FSDP."""
        if self.runtime.limits:
            raise ValueError(f"{method}(): {self.runtime.limits}")
        return self.runtime.bound

    def _of_ddp(self, method: str) -> Runtime:
        """Return the runtime, or raise for FSDP."""
        if self.runtime.source.limits:
            raise ValueError(f"{method}(): {self.runtime.source.limits}")
        return self.runtime

    def state_dict(self) -> dict[str, Any]:
        """Return the hook's state as tensors and primitives, rank-uniform, on CPU.

        Collective; call it outside of a backward, and not after one that has raised. The state has the step count and
        the hook's memory. For memory that differs between ranks it has the mean, which is sufficient to resume, or with
        `exact_state` every rank's. For a user's function it has only the step count. With a `manager` it is not
        collective, and residuals are zero.
        """
        run = self._of_ddp("state_dict")
        if run.source.ranks_change:
            return checkpoint.save_alone(run, "joining")
        kind: PerRank = "exact" if self._exact_state else "mean"
        if self.has_state:
            run.begin_together("state_dict()")
        else:
            run.clock.end()

        def save() -> dict[str, Any]:
            run.local.count()
            return checkpoint.save(run, kind)

        return run.call(save)

    def shared_state_dict(self) -> dict[str, Any]:
        """Return only the step count, which a rank can save without its peers: after a failure, or in signal handlers.

        When it is loaded, the hook resumes from that step and resets its memory, with a warning. Raises a `HookError`
        if the attachment is closed.
        """
        if self.is_closed:
            raise HookError("the communication hook was closed; its state is gone")
        run = self._of_ddp("shared_state_dict")
        return checkpoint.save_steps(run)

    def load_state_dict(
        self, state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]], *, strict_state: bool = True
    ) -> None:
        """Load a state that `state_dict` returned, from any number of ranks.

        Collective: call it on every rank with the same state, outside of a backward.

        Args:
            state_dict: the state. For a sharded model, the state of this rank's `shard`, or a list of the states of all
                shards in order, whose number may differ from the current one.
            strict_state: whether entries that do not fit are an error. If not, they are reset, with a warning.

        Raises:
            StateError: raised on all ranks, and the hook is unchanged: the value is not a state, is truncated, or is
                from another hook, from a model with different parameters, or from options that change the sizes of the
                hook's memory.
        """
        self._of_ddp("load_state_dict").load(state_dict, strict_state)

    def reset_state(self) -> None:
        """Reset the hook to step 0, without memory. Collective.

        For models that are the same on all ranks. Averages weights and optimizer state if they still differ.
        """
        self._of_ddp("reset_state").reset()

    @property
    def shard(self) -> tuple[int, int]:
        """Index of this rank's shard of a sharded model with replicas, and number of shards; `(0, 1)`: not sharded."""
        shard = self.runtime.source.shard
        index = sum(one * math.prod(size for _, size in shard[i + 1 :]) for i, (one, _) in enumerate(shard))
        return index, math.prod(size for _, size in shard)

    @property
    def is_first_replica(self) -> bool:
        """Whether this rank should save the state, which is the same on all ranks with the same shard."""
        return self.runtime.source.process_group.rank() == 0

    @property
    def averages_models(self) -> bool:
        """Whether the hook has local steps and averages models."""
        return self.runtime.bound.averages_models

    @property
    def averages_when_asked(self) -> bool:
        """Whether averages can be shown at any time; with a `manager`, if the hook keeps the common model."""
        bound = self.runtime.bound
        return averages_models(bound) and (bound.keeps_common_model or not self.runtime.source.ranks_change)

    @property
    def models_differ(self) -> bool:
        """Whether this rank's own model is in place and may differ, as known without communication."""
        return self.runtime.local.models.differ

    @property
    def has_state(self) -> bool:
        """Whether `state_dict` has more than the step count."""
        self.runtime.commit()
        return self.runtime.bound.has_memory or self.averages_models

    def add_weight(self, weight: float | Tensor) -> None:
        """Set the weight of the current micro-batch for `accumulation="weighted"`, such as its number of tokens.

        Call it for each micro-batch before its backward; the weights of several calls add up. The loss must be a sum,
        not a mean, over the units that the weight counts. A weight is a number of at least 0, or a tensor of one
        element, which does not synchronize on CUDA. Raises a `ValueError` for other weights, or if the hook does not
        use weights.
        """
        if accumulation_of(self.runtime.config) != "weighted" or self.runtime.micro_batches is None:
            raise ValueError(
                f"add_weight() is for accumulation='weighted'; hook {self.name!r} was attached without: "
                f"ScaleByGradAccumulation(..., accumulation='weighted')"
            )
        self.runtime.micro_batches.add_weight(weight)

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Report each step of an optimizer to the hook, for hooks that average models.

        Like `attach(optimizers=)`, for an optimizer that is created later. Call it on all ranks; repeated calls do
        nothing. Raises a `ValueError` if the optimizer shards its state, averages models itself, or is not a
        `torch.optim.Optimizer`.
        """
        if self.averages_models:
            self.runtime.local.add(optimizer, self.runtime.clock.steps)

    def after_optimizer_step(self, optimizer: Optimizer) -> None:
        """Report a step of an optimizer that the hook does not know. Collective.

        Call it on all ranks, even if a scaler skipped the step, which is then not counted. Raises a `ValueError` if the
        optimizer reports its steps itself, or if `add_optimizer` would reject it.
        """
        if self.averages_models:
            self.runtime.local.after_step(optimizer)

    def average_weights(self, *, everything: bool = False) -> None:
        """Permanently average the parameters and buffers that differ between ranks. Collective, outside of a backward.

        Sends nothing if the ranks are equal. With `everything`, averages all parameters if any of them differs,
        including changes that no optimizer made. Needs memory for a copy of the model meanwhile. Does not average the
        state of optimizers: call `average_optimizer_state` before training continues with averaged gradients.
        """
        self.runtime.local.average(everything)

    def averaged_weights(self) -> AbstractContextManager[None]:
        """Replace each rank's own model by the average within a `with`, and restore it at the end.

        For validation and checkpoints. Collective; use it outside of a backward. It averages each time, except inside
        another such `with`, and needs memory for a copy of the model meanwhile. Weights that are loaded within the
        `with` stay; changes by `tensor.data` are not noticed. No optimizer may step within the `with`. A forward in
        eval mode outside of it warns once that it uses this rank's own model. With a `manager`, `DiLoCo` shows the
        common model of the last averages, which sends nothing; other hooks raise a `ValueError` between averages.
        """
        return self.runtime.local.averaged()

    def show_average(self) -> None:
        """Replace each rank's own model by the average until the next step, or forward with gradients enabled.

        Collective; for code without room for a `with`. If the attachment is closed meanwhile, the average stays.
        """
        self.runtime.local.show_average()

    def average_optimizer_state(self, optimizer: Optimizer, *, everything: bool = False) -> None:
        """Permanently average the floating-point state of an optimizer that differs between ranks. Collective.

        Sends nothing if no local step changed it. With `everything`, averages it in any case: after `move_to`, if ranks
        trained unfrozen parameters before, each with its own gradients.
        """
        self.runtime.local.average_state(optimizer, everything)

    def averaged_optimizer_state(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """Replace each rank's own state of an optimizer by the average within a `with`, like `averaged_weights`."""
        return self.runtime.local.averaged([optimizer], model=False)

    def averaged(
        self, optimizers: Iterable[Optimizer] = (), *, model: bool = True, permanently: bool = False
    ) -> AbstractContextManager[None]:
        """Replace each rank's own model and the state of optimizers by the averages within a `with`.

        Collective: see `averaged_weights`, `averaged_optimizer_state` and `average_weights`.

        Args:
            optimizers: the optimizers.
            model: whether to replace the model too.
            permanently: whether training continues from the averages, instead of from each rank's own model and state.
        """
        if not permanently:
            return self.runtime.local.averaged(optimizers, model=model)
        if model:
            self.average_weights()
        for optimizer in optimizers:
            self.average_optimizer_state(optimizer)
        return nullcontext()

    def unfrozen(self) -> list[str]:
        """Return names of parameters that are trained now but were frozen when the model was wrapped: see `move_to`."""
        return self.runtime.layout.unfrozen()

    def move_to(self, model: DistributedDataParallel) -> None:
        """Move the hook to another DDP wrapper of the same module, with memory, step count and metrics.

        For a model whose parameters were frozen or unfrozen: DDP averages the parameters that were trained when it was
        created, so the module has to be wrapped again, over the same process group. Keep the old wrapper until then:
        the attachment closes when it is deleted. Collective; call it outside of a backward.

        Raises:
            ValueError: `model` is not DDP or already has a hook; or the ranks' models differed when it was created, and
                DDP has overwritten them with rank 0's: call `average_weights()` before; or the memory format of a
                parameter has changed.
            HookError: the attachment is closed, or one of these errors occurred on another rank.
        """
        run = self._of_ddp("move_to")
        if self.is_closed:
            raise HookError("the communication hook was closed; keep the old DistributedDataParallel until move_to()")
        run.begin_together("move_to()")
        with run.source.agreeing("move_to()"):
            if self.has_state:
                run.layout.check_orders(run.layout.trained)
            if run.local.models.diverged:
                raise ValueError(
                    "the models of the ranks differed when the new DistributedDataParallel was made, which overwrote "
                    "them with rank 0's; call average_weights() before making it"
                )
            run.source.check(model)
            run.connect(cast("nn.Module", unwrapped(model)))

    def close(self) -> None:
        """Release the thread and the process group; metrics stay readable. Call it on all ranks.

        FSDP2 averages a later backward as without a hook. With DDP, FSDP 1 and a `manager`, which cannot remove a hook,
        a later backward raises a `HookError`, and so does any backward after a failure: wrap the model again to train
        without a hook. Another hook may be attached to an FSDP model.

        Waits up to a second for communication in flight, but not for a backward that has raised. Does nothing in a
        fork or when called again. Deleting the model also closes its attachment.

        Warns if training ended before the hook compressed anything, unless it ended by an exception, or after fewer
        steps than `num_steps` or `tell_forecast` announced: see `note_end`. After fewer than 10 steps there is no
        advice on starts and periods. Also warns if an optimizer whose state differs between ranks steps later.
        """
        self.runtime.close()
