"""An `Accelerator` as one replica of several, of which some may die: its steps are those that the replicas vote for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderShard, prepare_data_loader
from accelerate.utils import DistributedType
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accelerate_integration.accelerator_events import AcceleratorEvents, replace_method
from lightning_commhooks.basics.copies import NotCopied
from lightning_commhooks.collectives.errors import HookError
from lightning_commhooks.runtime.attachment import Attachment
from lightning_commhooks.torchft.fault_tolerance import FaultTolerance


class AcceleratorReplica(AcceleratorEvents):
    """The object that replaces methods of one `Accelerator`: replicas meet before each step, and vote on it afterwards.

    A step that they do not commit is skipped, as one with an overflow in float16: `optimizer_step_was_skipped`, and
    schedulers stand still. The next batch is the next try. With a hook that averages models each replica steps for
    itself, and the hook has them vote on averages.

    `options` say which replica it is. `wrap` makes a `torchft.DistributedDataParallel` of this library from a manager
    and a module.

    Attributes:
        manager: the `torchft.Manager`; `None` before a model is prepared.
    """

    replaced = (
        *AcceleratorEvents.replaced,
        "prepare_scheduler",
        "prepare_data_loader",
        "register_for_checkpointing",
        "gather_for_metrics",
    )

    def __init__(
        self,
        accelerator: Accelerator,
        hook: str,
        options: FaultTolerance,
        wrap: Callable[[Any, nn.Module, Accelerator], Any],
        *,
        resync: bool,
        strict_state: bool,
    ) -> None:
        super().__init__(accelerator, hook, resync=resync, strict_state=strict_state)
        self._options, self._wrap = options, wrap
        self._attachment: Attachment | None = None
        self.manager: Any = None
        # The vote of the replicas on the present step; `None` until they have voted.
        self._verdict: bool | None = True
        # Whether a backward has averaged gradients since; and optimizers, by `id`, that have stepped by the verdict.
        self._awaits_vote = False
        self._stepped: set[int] = set()
        # Objects whose state a joining replica receives.
        self._parts: list[Any] = []

    def check(self) -> None:
        accelerator = self.accelerator
        if accelerator.distributed_type != DistributedType.NO:
            raise ValueError(
                "with fault_tolerance= an Accelerator is one process without FSDP and the like, and this one is "
                f"{accelerator.distributed_type.value}, of {accelerator.num_processes}: start each replica with "
                "python, or with accelerate launch --num_processes 1"
            )
        if accelerator.scaler is not None:
            raise ValueError(
                "fault_tolerance= does not work with mixed_precision='fp16', whose scaler cannot take a step back that "
                "replicas lose: use mixed_precision='bf16'"
            )
        if accelerator.dispatch_batches:
            raise ValueError("fault_tolerance= does not work with dispatch_batches=True: each replica reads for itself")

    def _start(self) -> None:
        from lightning_commhooks.torchft.manager import start_replica

        self.manager = start_replica(self._options, self._state, self._load)
        # Checkpoints have how many steps there were.
        self.accelerator.register_for_checkpointing(self.manager)

    def prepare_model(
        self,
        original: Callable[..., Any],
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> Any:
        if isinstance(model, DistributedDataParallel):
            return model
        prepared = super().prepare_model(original, model, device_placement, evaluation_mode)
        is_trained = any(p.requires_grad for p in prepared.parameters())
        if evaluation_mode or not is_trained:
            return prepared
        if self.manager is None:
            self._start()
        ddp = self._wrap(self.manager, prepared, self.accelerator)
        self._attachment = ddp.attachment
        self._parts.append(prepared)
        if not self._attachment.averages_models:
            ddp.register_forward_pre_hook(NotCopied(torch.compiler.disable(self._before_forward)))
        return ddp

    def _before_forward(self, model: nn.Module, inputs: object) -> None:
        if not torch.is_grad_enabled():
            return
        if self._awaits_vote:
            # As after a look at the norm of gradients; another replica may have stepped.
            self.manager.report_error(HookError("the optimizer did not step after a backward"))
            self._vote()
        if self._verdict is not None:
            self.manager.start_quorum()
            self._verdict = None
            self._stepped.clear()

    def backward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = super().backward(original, *args, **kwargs)
        self._awaits_vote = self._verdict is None and self.accelerator.sync_gradients
        return result

    def _vote(self) -> bool:
        self._awaits_vote = False
        self._verdict = bool(self.manager.should_commit())
        return self._verdict

    def prepare_optimizer(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        optimizer = super().prepare_optimizer(original, *args, **kwargs)

        def step(original: Callable[..., Any], closure: Callable[[], Any] | None = None) -> Any:
            if closure is not None:
                raise ValueError("fault_tolerance= votes on a backward before the optimizer's step, which has one here")
            steps_alone = self._attachment is not None and self._attachment.averages_models
            if self.manager is not None and self.accelerator.sync_gradients and not steps_alone:
                committed = self._vote() if self._verdict is None else self._verdict
                if id(optimizer) in self._stepped:
                    raise HookError(
                        "fault_tolerance=: an optimizer stepped again on gradients that replicas have not voted on. "
                        "Call the model that prepare() returned before each step"
                    )
                self._stepped.add(id(optimizer))
                optimizer._is_overflow = not committed
                if not committed:
                    return None
            return original()

        replace_method(optimizer, "step", step)
        self._parts.append(optimizer)
        return optimizer

    def prepare_scheduler(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._parts.append(scheduler := original(*args, **kwargs))
        return scheduler

    def register_for_checkpointing(self, original: Callable[..., None], *objects: Any) -> None:
        original(*objects)
        self._parts += [one for one in objects if one is not self.manager]

    def prepare_data_loader(
        self,
        original: Callable[..., Any],
        data_loader: Any,
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> Any:
        if isinstance(data_loader, DataLoaderShard):
            return data_loader
        accelerator, options = self.accelerator, self._options
        seed = accelerator.dataloader_config.data_seed
        prepared = prepare_data_loader(
            data_loader,
            accelerator.device,
            num_processes=options.num_replica_groups,
            process_index=options.replica_rank,
            split_batches=accelerator.split_batches,
            put_on_device=accelerator.device_placement if device_placement is None else device_placement,
            rng_types=[],
            dispatch_batches=False,
            even_batches=accelerator.even_batches,
            # Each replica shuffles for itself, in the same order as the other replicas.
            use_seedable_sampler=True,
            data_seed=0 if seed is None else seed,
            non_blocking=accelerator.non_blocking,
            use_stateful_dataloader=accelerator.use_stateful_dataloader,
        )
        accelerator._dataloaders.append(prepared)
        return prepared

    def gather_for_metrics(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.accelerator.gradient_state.active_dataloader is not None:
            raise ValueError(
                "gather_for_metrics() with fault_tolerance=: a loader that is prepared gives this replica's share, and "
                "there is nobody to gather the others' from. Do not prepare the loader of an evaluation"
            )
        return original(*args, **kwargs)

    def end_training(self, original: Callable[[], None]) -> None:
        super().end_training(original)
        if self._attachment is not None:
            self._attachment.close()
            self.manager.shutdown()

    def _state(self) -> list[dict[str, Any]]:
        return [part.state_dict() for part in self._parts]

    def _load(self, state: list[dict[str, Any]]) -> None:
        for part, given in zip(self._parts, state, strict=True):
            part.load_state_dict(given)
