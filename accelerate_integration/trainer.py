"""Communication hooks for `transformers.Trainer`, and for an `Accelerator` with FSDP."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, cast, overload

from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, DistributedType
from torch.nn.parallel import DistributedDataParallel

from accelerate_integration.accelerator_events import AcceleratorEvents, replace_method
from accelerate_integration.kwargs import CommHookKwargs, FSDPCommHook, attach_to_prepared, sharded_hook, shown
from accelerate_integration.trackers import open_attachments, trainer_options
from lightning_commhooks.basics.announce import announce
from lightning_commhooks.interface.hook import CommHook
from lightning_commhooks.interface.misplaced import explained
from lightning_commhooks.monitoring import Monitor, MonitorOptions
from lightning_commhooks.runtime.attachment import Attachment
from lightning_commhooks.wrappers.scale import Accumulation


@overload
def use_comm_hook(
    trainer: Accelerator,
    hook: str | CommHook | None = None,
    *,
    exact_state: bool = False,
    resync: bool = False,
    shard_hook: str | CommHook | None = None,
    gather_hook: str | CommHook | None = None,
    gather_differences: bool = False,
) -> FSDPCommHook: ...


@overload
def use_comm_hook(
    trainer: Any,
    hook: str | CommHook | Callable[..., Any] | None = None,
    *,
    hook_state: object = None,
    exact_state: bool = False,
    strict_state: bool = True,
    resync: bool = False,
    accumulation: Accumulation = "framework",
    monitor: bool | Mapping[str, Any] = False,
    shard_hook: str | CommHook | None = None,
    gather_hook: str | CommHook | None = None,
    gather_differences: bool = False,
) -> CommHookKwargs | FSDPCommHook: ...


@explained
def use_comm_hook(
    trainer: Any,
    hook: str | CommHook | Callable[..., Any] | None = None,
    *,
    hook_state: object = None,
    exact_state: bool = False,
    strict_state: bool = True,
    resync: bool = False,
    accumulation: Accumulation = "framework",
    monitor: bool | Mapping[str, Any] = False,
    shard_hook: str | CommHook | None = None,
    gather_hook: str | CommHook | None = None,
    gather_differences: bool = False,
) -> CommHookKwargs | FSDPCommHook:
    """Attach a communication hook that averages the gradients of a `transformers.Trainer`.

    One line between the trainer's construction and `trainer.train()`. Checkpoints of the trainer have the hook's state,
    and `train(resume_from_checkpoint=...)` restores it. With hooks that average models, evaluation and checkpoints see
    the average, and the model is the average after `train()`.

    Also takes an `Accelerator` with an FSDP plugin, version 1 or 2: one line after `accelerator.prepare(...)`.

    Args:
        trainer: the trainer, with DDP or FSDP; the settings of its `TrainingArguments` hold. Alternatively, the
            accelerator.
        hook: see [`CommHookKwargs`][], and with FSDP [`attach`][].
        hook_state: see there.
        exact_state: see there.
        strict_state: see there.
        resync: see there.
        accumulation: see there. The trainer divides by the micro-batches that there are, also in a shorter last window,
            and where it can by their tokens instead (`num_items_in_batch`), so that `"mean"` has nothing to change.
            `"sum"` and `"weighted"` need a loss that it does not divide by tokens.
        monitor: whether to add the hook's metrics to the trainer's log, at `logging_steps` and when training ends, and
            to print a closing line. Alternatively, a dict with some of the options `error_every_n_steps`,
            `error_numel`, `closing_line` and `measure_link`: see [`CommHookTracker`][], which is also for an
            accelerator.

        shard_hook: with FSDP 2 and `ParallelismConfig(dp_replicate_size=2)` or more, where `hook` is the one between
            replicas, the hook of the reduce-scatter within a replica: see [`attach`][].
        gather_hook: with FSDP 2, the format in which parameters are gathered: see there.
        gather_differences: with FSDP 2, whether ranks gather changes of weights: see there.

    Returns:
        the handler, whose `attachments[-1].metrics()` report the bytes sent.

    Raises:
        ValueError: see `CommHookKwargs` and `attach`; `monitor` has other options; the trainer has a hook already;
            the accelerator does not shard models by FSDP, or has no model yet.
    """
    options: dict[str, Any] = {
        "hook_state": hook_state,
        "exact_state": exact_state,
        "strict_state": strict_state,
        "resync": resync,
        "accumulation": accumulation,
    }
    sharding: dict[str, Any] = {
        "shard_hook": shard_hook,
        "gather_hook": gather_hook,
        "gather_differences": gather_differences,
    }
    monitor_options = trainer_options(monitor) if monitor else None
    names = ("hook_state", "strict_state", "accumulation")
    of_ddp = [name for name in names if options[name] != getattr(CommHookKwargs, name)]
    of_fsdp = {"exact_state": exact_state, "resync": resync, **sharding}
    if isinstance(trainer, Accelerator):
        if monitor:
            raise ValueError("monitor is for a transformers.Trainer: CommHookTracker(accelerator, use_comm_hook(...))")
        return attach_to_prepared(trainer, hook, of_ddp, **of_fsdp)
    if not hasattr(trainer, "accelerator"):
        found = next((repr(one) for one in (trainer, hook) if isinstance(one, (str, CommHook))), "hook")
        raise ValueError(
            f"use_comm_hook(trainer, {found}) needs a transformers.Trainer or an Accelerator first, got "
            f"{type(trainer).__name__}"
        )
    before = getattr(trainer, "comm_hook_handler", None)
    if isinstance(before, (CommHookKwargs, FSDPCommHook)):
        raise ValueError(f"this trainer has the communication hook {before.hook!r} already")
    handler: CommHookKwargs | FSDPCommHook
    if trainer.accelerator.distributed_type == DistributedType.FSDP:
        sizes = getattr(trainer.accelerator.state, "parallelism_config", None)
        has_replicas = sizes is not None and sizes.dp_replicate_size > 1
        handler = sharded_hook(trainer.accelerator, hook, of_ddp, has_replicas, **of_fsdp)
    elif (of_shards := [name for name, value in sharding.items() if value]) and trainer.accelerator.num_processes > 1:
        raise ValueError(f"{of_shards[0]} is for a model that Accelerate shards by FSDP: leave it out")
    else:
        handler = CommHookKwargs(hook=hook, **options)
    trainer.comm_hook_handler = handler
    _TrainerEvents(trainer, handler, monitor_options)
    return handler


class CommHookTrainerMixin:
    """For a subclass of `transformers.Trainer`: `class MyTrainer(CommHookTrainerMixin, Trainer): comm_hook = "bf16"`.

    Attributes:
        comm_hook: name of a hook, or a configured one; by default what `COMMHOOKS_HOOK` names.
        comm_hook_options: further arguments of [`use_comm_hook`][].
    """

    comm_hook: str | CommHook | None = None
    comm_hook_options: dict[str, Any] = {}  # noqa: RUF012  # a constant of the subclass

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        use_comm_hook(self, self.comm_hook, **self.comm_hook_options)


class _TrainerEvents:
    """Where a trainer passes by. Its callbacks come too late for this: after evaluation and after saving."""

    def __init__(self, trainer: Any, handler: CommHookKwargs | FSDPCommHook, options: MonitorOptions | None) -> None:
        self._trainer = trainer
        self._handler = handler
        # `None`: without the hook's metrics in the log.
        self._options = options
        self._monitor: Monitor | None = None
        self._install()
        # A search of hyperparameters makes a new accelerator for each trial.
        replace_method(trainer, "create_accelerator_and_postprocess", self._recreate)
        replace_method(trainer, "_wrap_model", self._wrap_model)
        if isinstance(handler, CommHookKwargs) and handler.accumulation != "framework":
            replace_method(trainer, "training_step", self._training_step)
        replace_method(trainer, "_maybe_log_save_evaluate", self._save_and_evaluate)
        replace_method(trainer, "evaluation_loop", self._averaged)
        replace_method(trainer, "_save_checkpoint", self._averaged)  # also by callbacks, after a signal
        replace_method(trainer, "_save_optimizer_and_scheduler", self._save)
        replace_method(trainer, "_load_optimizer_and_scheduler", self._load)
        replace_method(trainer, "save_model", self._save_model)
        replace_method(trainer, "_load_best_model", self._finish)
        replace_method(trainer.callback_handler, "on_train_end", self._end)
        replace_method(trainer.callback_handler, "on_train_begin", self._begin)
        replace_method(trainer.callback_handler, "on_step_end", self._tell_forecast)

        if options is not None:
            replace_method(trainer, "log", self._log)

    def _install(self) -> None:
        accelerator, handler = self._trainer.accelerator, self._handler
        theirs = accelerator.ddp_handler
        if isinstance(handler, CommHookKwargs) and theirs is not handler:
            for field in dataclasses.fields(DistributedDataParallelKwargs) if theirs is not None else ():
                setattr(handler, field.name, getattr(theirs, field.name))
            accelerator.ddp_handler = handler
        handler.events(accelerator).tells_forecast = False  # this object does it, which knows the number of steps

    @property
    def _events(self) -> AcceleratorEvents:
        return self._handler.events(self._trainer.accelerator)

    def _recreate(self, original: Callable[[], None]) -> None:
        original()
        self._install()

    def _wrap_model(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        model = original(*args, **kwargs)
        # Some versions of transformers set their own handler there.
        self._install()
        return model

    def _attach(self) -> None:
        """Attach the hook to a model that FSDP has sharded, in the course of `train()`."""
        if isinstance(self._handler, FSDPCommHook):
            self._handler.attach(self._trainer.accelerator, [self._trainer.model_wrapped])

    def _begin(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._attach()
        attachments = self._last_open()
        if not attachments and self._trainer.accelerator.num_processes > 1:
            reason = (
                "train() has wrapped the model already; call use_comm_hook() before the first train()"
                if isinstance(self._trainer.model_wrapped, DistributedDataParallel)
                else "the model is not in DistributedDataParallel, so each rank would train its own. transformers does "
                "not wrap a model that trainer.evaluate() or predict() has used before train(): leave that out, or use "
                "TrainingArguments(eval_on_start=True)"
            )
            raise ValueError(f"use_comm_hook(hook={shown(self._handler.hook)}): {reason}")
        self._monitor = self._options.monitor(attachments[0]) if self._options and attachments else None
        return self._tell_forecast(original, *args, **kwargs)

    def _last_open(self) -> list[Attachment]:
        # Models of earlier trials of a search may still be there.
        return open_attachments(self._handler)[-1:]

    def _log(self, original: Callable[..., None], logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        # The logs of training and of its end; not those of evaluation.
        if self._monitor is not None and ("loss" in logs or "train_runtime" in logs) and self._monitor.num_new_steps:
            logs = {**logs, **self._monitor.values()}
        original(logs, *args, **kwargs)

    def _tell_forecast(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        state, accelerator = self._trainer.state, self._trainer.accelerator
        num_left = state.max_steps - state.global_step
        if getattr(accelerator.gradient_state, "sync_each_batch", False):
            num_left *= accelerator.gradient_accumulation_steps
        for attachment in self._last_open():
            attachment.tell_forecast(announce, num_left)
        return original(*args, **kwargs)

    def _training_step(
        self, original: Callable[..., Any], model: Any, inputs: Any, num_items_in_batch: Any = None
    ) -> Any:
        trainer, accumulation = self._trainer, cast("CommHookKwargs", self._handler).accumulation
        if accumulation in ("sum", "weighted") and _divides_by_tokens(trainer, num_items_in_batch):
            raise ValueError(
                f"accumulation={accumulation!r} cannot undo what the trainer divides the loss by, the tokens of all "
                "micro-batches (num_items_in_batch): use accumulation='framework', which is the mean over tokens"
            )
        # By tokens, or by the micro-batches: in both cases the sum over micro-batches is a mean.
        self._events.divided_before = float(trainer.current_gradient_accumulation_steps)
        return original(model, inputs, num_items_in_batch)

    def _save_and_evaluate(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not (self._trainer.control.should_save or self._trainer.control.should_evaluate):
            return original(*args, **kwargs)
        with self._events.attachments.averaged([]):
            return original(*args, **kwargs)

    def _averaged(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._events.attachments.averaged([]):
            return original(*args, **kwargs)

    def _save_model(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # By a callback of the user's. Not averaged here: perhaps only some ranks come by.
        self._events.warn_if_models_differ("let args.save_steps do it, or save after train()")
        return original(*args, **kwargs)

    def _save(self, original: Callable[..., Any], output_dir: str) -> None:
        with self._events.averaged():
            original(output_dir)
            self._events.write(output_dir)

    def _load(self, original: Callable[..., Any], checkpoint: str | None) -> None:
        original(checkpoint)
        if checkpoint is not None:
            self._attach()
            self._events.read(checkpoint)

    def _end(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = self._finish(original, *args, **kwargs)
        self._events.tell_what_was_sent()
        monitor, self._monitor = self._monitor, None
        if monitor is not None and self._options is not None and self._options.closing_line:
            self._events.tell([monitor.summary()])
        return result

    def _finish(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._events.attachments.average_for_good()
        for attachment in self._handler.attachments[-1:]:
            attachment.note_end(as_planned=True)
        return original(*args, **kwargs)


def _divides_by_tokens(trainer: Any, num_items_in_batch: Any) -> bool:
    """Whether a trainer's loss is divided by the number of tokens of all micro-batches, as in its `training_step`."""
    chosen = getattr(trainer, "loss_is_scaled_for_ga", None)
    if chosen is not None:
        return bool(chosen)
    by_model = trainer.model_accepts_loss_kwargs and num_items_in_batch is not None
    return bool(by_model or trainer.compute_loss_func is not None)
