"""The part that the DDP strategies of `lightning`, `pytorch_lightning` and Ray Train share."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, cast

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_commhooks.interface.hook import CommHook
from lightning_commhooks.lightning.averaging import AveragesModelsMixin, handles_signal
from lightning_commhooks.lightning.refusals import (
    REPLACED,
    check_options,
    misconfigured,
    needs_hook,
    options_of,
    refusals_of,
)
from lightning_commhooks.runtime.attachment import Attachment
from lightning_commhooks.sources.attach import attach, check_values
from lightning_commhooks.sources.ddp import DDPSource, check_even, hook_name, resolve_hook
from lightning_commhooks.torchft.fault_tolerance import FaultTolerance, check_fault_tolerance
from lightning_commhooks.wrappers.hook_name import HookName
from lightning_commhooks.wrappers.scale import Accumulation

if TYPE_CHECKING:
    from lightning_commhooks.torchft.trainer import TrainerReplica

logger = logging.getLogger(__name__)

CHECKPOINT_KEY = "lightning_commhooks"


class CompressedDDPMixin(AveragesModelsMixin):
    """Lightning's `DDPStrategy` with a communication hook, on CPU and GPU.

    `Trainer(strategy=CompressedDDPStrategy(hook="powersgd"))`.

    Args:
        hook: name of a hook (`lightning_commhooks.available_hooks()`), a configured hook such as
            `PowerSGD(matrix_approximation_rank=4)`, or a DDP hook function `(state, bucket)`.
        hook_state: the state of such a function.
        exact_state: save the state of every rank where it differs between ranks, so that a run resumes bit for bit on
            CPU. Checkpoints then grow by the size of the gradients once per rank, instead of once in all.
        strict_state: whether hook state in a checkpoint that does not fit the model or the hook is an error. If not,
            the state that does not fit is reset, with a warning.
        resync: with hooks that take local steps, validation and checkpoints use the average of the ranks' models. If
            true, training also continues from that average, on all ranks, and a run resumed from a checkpoint is the
            same as an uninterrupted one. If not, each rank continues from its own model, as it was before.
        accumulation: divisor of gradients that are accumulated over batches. `"framework"`: `accumulate_grad_batches`,
            also in the last window of an epoch, which may be shorter, and none in manual optimization. `"mean"`: the
            actual number of batches. `"sum"`, an integer or `"weighted"`: see [`ScaleByGradAccumulation`][].
        fault_tolerance: make this Trainer, which has one process, one of several replicas. Some of them may die and
            come back while the rest continue. Every replica runs the same command, with its own number. See
            [`FaultTolerance`][] and "Replicas that fail". Sets `find_unused_parameters=True`.
        **kwargs: arguments of `DDPStrategy` and of `torch.nn.parallel.DistributedDataParallel`, without
            `ddp_comm_state`, `ddp_comm_hook`, `ddp_comm_wrapper` and `model_averaging_period`.

    Raises:
        MisconfigurationException: the hook is unknown or a function that DDP would refuse, or one of the arguments is
            among those that `hook` replaces.
    """

    _replaced: ClassVar[Mapping[str, str]] = REPLACED

    @needs_hook("powersgd")
    def __init__(
        self,
        hook: CommHook | HookName | Callable[..., Any],
        hook_state: object | None = None,
        exact_state: bool = False,
        strict_state: bool = True,
        resync: bool = False,
        accumulation: Accumulation = "framework",
        fault_tolerance: FaultTolerance | None = None,
        **kwargs: Any,
    ) -> None:
        for argument, replacement in self._replaced.items():
            if kwargs.get(argument) is not None:
                raise misconfigured(
                    self, f"{type(self).__name__} does not take {argument}={kwargs[argument]!r}: {replacement}"
                )
        # Lightning passes unknown arguments on to DDP, but only when training begins.
        bases = type(self).__mro__[type(self).__mro__.index(CompressedDDPMixin) + 1 :]
        known = options_of(*bases, DistributedDataParallel)
        check_options(self, kwargs, known, hook, "DistributedDataParallel")
        with refusals_of(self):
            check_values(exact_state=exact_state, strict_state=strict_state, resync=resync)
            check_fault_tolerance(fault_tolerance)
            self._hook = resolve_hook(hook, hook_state, accumulation)
            check_even(self._hook, "the Trainer")
            if fault_tolerance is not None:
                from lightning_commhooks.torchft.manager import check_options as check_replica

                check_replica(self._hook, {**kwargs, "exact_state": exact_state, "resync": resync})
                # Otherwise the buckets of a replica that joins later would differ. A given value is replaced, because
                # the CLI passes the default of every option.
                kwargs["find_unused_parameters"] = True
        self._hook_state = hook_state
        self._exact_state = exact_state
        self._strict_state = strict_state
        self._fault_tolerance = fault_tolerance
        self._replica: TrainerReplica | None = None
        self._init_averaging(resync)
        # The hook's state, for checkpoints that Lightning writes after it has taken the model out of DDP.
        self._last_state: dict[str, Any] | None = None
        # Whether that state has the hook's memory, and after how many steps it was saved.
        self._last_is_whole, self._saved_at = True, -1
        super().__init__(**kwargs)

    @property
    def hook(self) -> CommHook | Callable[..., Any]:
        """The hook's configuration, with a name resolved, or a DDP hook function."""
        return self._hook

    @property
    def attachment(self) -> Attachment | None:
        """The attachment of the last `fit` in this process, for example for its `metrics()`; `None` before the first.

        With `start_method` "spawn", "fork" or "forkserver" training happens in other processes: read the attachment
        there, in a callback or the module.
        """
        return self._attachment

    @property
    def manager(self) -> Any:
        """With `fault_tolerance`, the `torchft.Manager` during a fit; `None` before and after."""
        return None if self._replica is None else self._replica.manager

    def add_weight(self, weight: float | Tensor) -> None:
        """With `accumulation="weighted"`, set the weight of the current batch, such as its number of tokens.

        In `training_step`: `self.trainer.strategy.add_weight(num_tokens)`, before `manual_backward` if there is one;
        the loss must be a sum over tokens. See `Attachment.add_weight`.

        Raises:
            MisconfigurationException: the weight is not a number of at least 0, the strategy has another
                `accumulation`, or training has not begun.
        """
        if self._attachment is None:
            raise misconfigured(self, f"{type(self).__name__}.add_weight() is for a training_step; no fit has begun")
        with refusals_of(self):
            self._attachment.add_weight(weight)

    def _loss_divided_by(self) -> float:
        module = self.lightning_module
        return float(module.trainer.accumulate_grad_batches) if module.automatic_optimization else 1.0

    def _register_ddp_hooks(self) -> None:
        # Lightning forgets to reset this: a second fit with static_graph and manual optimization would not
        # synchronize at all.
        self._pl_static_graph_delay_done = False
        self._last_state, self._saved_at, self._last_is_whole = None, -1, True
        model = self.model
        if self._fault_tolerance is not None:
            if self.world_size > 1:
                raise misconfigured(
                    self,
                    "with fault_tolerance= a Trainer is one process, and the other replicas are other Trainers: set "
                    "devices=1 and num_nodes=1",
                )
            from lightning_commhooks.torchft.trainer import TrainerReplica

            with refusals_of(self):
                self._replica = TrainerReplica(self._fault_tolerance, self)
        assert isinstance(model, DistributedDataParallel)
        with refusals_of(self):
            self._attachment = attach(
                model,
                self._hook,
                hook_state=self._hook_state,
                grad_scaler=getattr(self.precision_plugin, "scaler", None),
                exact_state=self._exact_state,
                optimizers=lambda: self.optimizers,
                loss_divided_by=self._loss_divided_by,
                **({} if self._replica is None else self._replica.attach_options),
            )
        cast("DDPSource", self._attachment.runtime.source).wraps_again = (
            "The next training_step averages them if they require gradients when it begins: unfreeze them before it, "
            "such as in on_train_batch_start()"
        )

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The share of the data that this rank trains on."""
        options = self._fault_tolerance
        if options is None or self._replica is None:
            return super().distributed_sampler_kwargs
        return {"num_replicas": options.num_replica_groups, "rank": options.replica_rank}

    def setup_optimizers(self, trainer: Any) -> None:
        """Make the optimizers; with `fault_tolerance`, check that all replicas step in the same way."""
        super().setup_optimizers(trainer)
        if self._replica is not None:
            with refusals_of(self):
                self._replica.check()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """With `fault_tolerance`, meet the other replicas before a step, if the hook averages gradients."""
        super().on_train_batch_start(batch, batch_idx)
        if self._replica is not None:
            with refusals_of(self):
                self._replica.begin_batch()

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        """Take the optimizer's step; with `fault_tolerance` and averaged gradients, after the replicas' vote."""
        if self._replica is not None:
            closure = self._replica.committed(optimizer, closure)
        return super().optimizer_step(optimizer, closure, *args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Wrap the model again if parameters were unfrozen, since DDP would not average them; then take the step.

        Before the step, once the first steps are over, report the hook's expected effect on this run.
        """
        if self._attachment is not None and not self._attachment.is_closed:
            if self._attachment.unfrozen():
                self._wrap_again()
            self._show_forecast(self._attachment)
        return super().training_step(*args, **kwargs)

    def post_backward(self, closure_loss: Tensor) -> None:
        """Warn of parameters that `training_step` has unfrozen for this backward only."""
        super().post_backward(closure_loss)
        if self._attachment is not None and not self._attachment.is_closed:
            cast("DDPSource", self._attachment.runtime.source).warn_of_unfrozen()

    def _wrap_again(self) -> None:
        assert self._attachment is not None
        unfrozen = self._attachment.unfrozen()
        if self._replica is not None:
            raise misconfigured(
                self,
                f"{unfrozen[0]!r} was unfrozen; with fault_tolerance= the trained parameters stay the same from the "
                "first step: require its gradients from the beginning, with a learning rate of 0",
            )
        # DDP gives all ranks the model of rank 0.
        self._attachment.average_weights()
        self._pl_static_graph_delay_done = False
        model = self._setup_model(self.lightning_module)
        self._attachment.move_to(model)
        self.model = model
        # Parameters that were unfrozen within a step have been trained with each rank's own gradients.
        for optimizer in () if self._attachment.averages_models else self.optimizers:
            self._attachment.average_optimizer_state(optimizer, everything=True)
        logger.info("wrapped the model again: %d parameters were unfrozen, %r first", len(unfrozen), unfrozen[0])

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Add the hook's state to a checkpoint that training can resume from, and write it."""
        if "optimizer_states" in checkpoint and (state := self._state(str(filepath))) is not None:
            checkpoint[CHECKPOINT_KEY] = state
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def _state(self, filepath: str) -> dict[str, Any] | None:
        if self._attachment is None and getattr(self, "_start_method", None) != "popen":
            warnings.warn(
                f"{filepath} has no state of hook {hook_name(self._hook)!r}: training ran in other processes. Save it "
                "there, with ModelCheckpoint",
                stacklevel=3,
            )
        if self._attachment is None or self._attachment.is_closed:
            if not self._last_is_whole and self._last_state is not None and self._attachment is not None:
                self._warn_of_reset(filepath, "; with Trainer(enable_checkpointing=True) it has all")
            return self._last_state
        if self._may_be_elsewhere():
            self._warn_of_reset(filepath)
            return self._attachment.shared_state_dict()
        if self._has_saved_this_step() and not self._attachment.averages_models:
            return self._last_state
        if self._replica is not None and self._replica.is_between_averages:
            logger.warning(
                "the checkpoint %s is between averages, and no run with replicas can resume from it. Save after a "
                "multiple of the hook's period of steps",
                filepath,
            )
        state = self._attachment.state_dict()
        # Reused for another checkpoint, or one after training, if no step comes before it.
        self._saved_at, self._last_is_whole = self._attachment.num_steps, True
        self._last_state = state if self.is_global_zero else None
        return state

    def _warn_of_reset(self, filepath: str, fix: str = "") -> None:
        assert self._attachment is not None
        # Not `has_state`, which may wait for a step's verdict: this is called in signal handlers.
        has_memory = self._attachment.runtime.bound.has_memory or self._attachment.averages_models
        if not self.is_global_zero or not has_memory:
            return
        logger.warning(
            "the checkpoint %s has only the step count of hook %r: its memory is reset%s",
            filepath,
            self._attachment.name,
            fix,
        )

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks, except in Lightning's handler of SLURM's signal, where other ranks may wait elsewhere."""
        if not handles_signal():
            super().barrier(*args, **kwargs)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the state of optimizers and of the hook, when a fit resumes or Lightning's tuner restores them."""
        super().load_optimizer_state_dict(checkpoint)
        self._load(checkpoint.get(CHECKPOINT_KEY, {}))

    def _load(self, state: Mapping[str, Any]) -> None:
        attachment, self._saved_at = self._attachment, -1
        if attachment is None:
            raise misconfigured(
                self,
                f"{type(self).__name__} has no hook to load the checkpoint's state: the model is not in "
                "DistributedDataParallel. A subclass with its own configure_ddp() must call super().configure_ddp()",
            )
        if state:
            with refusals_of(self):
                attachment.load_state_dict(state, strict_state=self._strict_state)
            return
        attachment.reset_state()
        if attachment.has_state and self.is_global_zero:
            warnings.warn(
                f"the checkpoint has no state of hook {attachment.name!r}: it was saved with another strategy, or with "
                "save_weights_only=True. The hook starts at step 0",
                stacklevel=2,
            )

    def on_train_end(self) -> None:
        """Keep the hook's state for a `Trainer.save_checkpoint()` after training."""
        super().on_train_end()
        if self._attachment is not None and not self._attachment.is_closed and not self._has_saved_this_step():
            # Averaging state that differs between ranks takes as long as a step without a hook.
            saves = self.lightning_module.trainer.checkpoint_callbacks
            state = self._attachment.state_dict() if saves else self._attachment.shared_state_dict()
            self._last_state = state if self.is_global_zero else None
            self._last_is_whole = bool(saves)

    def teardown(self) -> None:
        """Close the hook, leave the other replicas, and tear the strategy down."""
        try:
            super().teardown()
        finally:
            if self._replica is not None:
                self._replica.close()
                self._replica = None

    def _has_saved_this_step(self) -> bool:
        return self._attachment is not None and self._saved_at == self._attachment.num_steps
