"""Hooks at work in an `Accelerator`: its backward, optimizers, barriers and checkpoints."""

from __future__ import annotations

import functools
import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import NoneType
from typing import Any, ClassVar

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, gather_object, save
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_commhooks.basics.announce import announce
from lightning_commhooks.basics.copies import NotCopied
from lightning_commhooks.monitoring import closing_line
from lightning_commhooks.runtime.attachment import Attachment
from lightning_commhooks.runtime.attachments import Attachments
from lightning_commhooks.runtime.optimizers import check_optimizer

FILE_NAME = "lightning_commhooks.bin"
# Where gradients are not averaged by a hook, whichever it is.
AVERAGED_ELSEWHERE = {
    "DEEPSPEED": "DeepSpeed averages gradients itself",
    "MEGATRON_LM": "Megatron-LM averages gradients itself",
    "XLA": "XLA averages gradients itself",
}
_REFUSED = {
    "FSDP": "FSDP shards the model, so call use_comm_hook(accelerator, hook) after prepare() instead",
    **AVERAGED_ELSEWHERE,
}
# Where an accelerator keeps its object; with it, both are collected together.
_ATTRIBUTE = "_comm_hook_events"


def replace_method(target: object, name: str, replacement: Callable[..., Any]) -> None:
    """Replace a method of one object by `replacement(original, *args, **kwargs)`.

    For the events that Accelerate and transformers have no callback for. The class stays as it is.
    """
    original = getattr(target, name)
    replaced = functools.update_wrapper(functools.partial(replacement, original), original)
    # A copy of the object, as a pickled one, has the method of its class.
    setattr(target, name, NotCopied(replaced, in_copies=original))


class AcceleratorEvents:
    """The object that replaces methods of one `Accelerator`, for averaged models, hook state and the closing line.

    Each method that `replaced` names is called instead of the accelerator's own method, which is its first argument.
    The constructor of the accelerator may still run. `hook` is the name of the hook, for messages; for `resync` and
    `strict_state`, see `CommHookKwargs`.

    Attributes:
        attachments: the hooks at work, one for each model.
        divided_before: the divisor of the loss in a trainer, which divides before it calls `backward`.
        tells_forecast: whether to warn after the first steps if next to nothing will be compressed. False where a
            tracker or a trainer, which knows the number of steps, does this.
        at_end: contexts to enter before `end_training`, and to leave after it.
    """

    # Accelerate has events for the beginning of saving and loading only.
    replaced: ClassVar[tuple[str, ...]] = (
        "prepare",
        "prepare_model",
        "prepare_optimizer",
        "backward",
        "no_sync",
        "wait_for_everyone",
        "get_state_dict",
        "save_state",
        "load_state",
        "free_memory",
        "end_training",
    )

    def __init__(self, accelerator: Accelerator, hook: str, *, resync: bool, strict_state: bool) -> None:
        self._accelerator = weakref.ref(accelerator)
        self._hook = hook
        self.attachments = Attachments(resync=resync, strict_state=strict_state)
        # Models with a hook, by the module inside. Accelerate keeps only that, so `model = unwrap_model(model)` on one
        # rank would free the model there, and close its hook on this rank alone.
        self._models: dict[nn.Module, nn.Module] = {}
        self._is_saved = self._has_warned = False
        self._folder = ""
        self._divides_by = 1.0
        self.divided_before = 1.0
        self.tells_forecast = True
        self.at_end: list[Callable[[], AbstractContextManager[None]]] = []
        for name in self.replaced:
            replace_method(accelerator, name, getattr(self, name))
        vars(accelerator)[_ATTRIBUTE] = self

    @staticmethod
    def of(accelerator: Accelerator) -> AcceleratorEvents | None:
        """Return the object of an accelerator; `None` if nothing of it was replaced."""
        events: AcceleratorEvents | None = getattr(accelerator, _ATTRIBUTE, None)
        return events

    def __reduce__(self) -> tuple[Callable[..., None], tuple[()]]:
        return NoneType, ()  # as of the attachments

    @property
    def accelerator(self) -> Accelerator:
        """The `Accelerator`, one of whose methods is running."""
        accelerator = self._accelerator()
        assert accelerator is not None
        return accelerator

    def add(self, attachment: Attachment) -> None:
        """Look after one more model."""
        self.attachments.add(attachment, self._optimizers())
        model = attachment.runtime.model()
        assert model is not None
        self._models[getattr(model, "module", model)] = model
        if not self._is_saved and (accelerator := self._accelerator()) is not None:
            # Not in `__init__`: the constructor of the accelerator makes the lists of these functions at its end.
            accelerator.register_save_state_pre_hook(NotCopied(lambda models, weights, folder: self.write(folder)))
            accelerator.register_load_state_pre_hook(NotCopied(self._remember_folder))
            self._is_saved = True

    def _optimizers(self) -> list[Optimizer]:
        accelerator = self._accelerator()
        return [] if accelerator is None else [wrapped.optimizer for wrapped in accelerator._optimizers]

    def averaged(self) -> AbstractContextManager[None]:
        """Swap models and the state of optimizers for their averages. Collective."""
        return self.attachments.averaged(self._optimizers())

    def warn_if_models_differ(self, fix: str) -> None:
        """Warn when the weights in place are those of each rank. Not collective."""
        if self.attachments.are_between_averages():
            fix = "look at it when the manager's current_step() has changed, which is after an average"
        elif not any(attachment.models_differ for attachment in self.attachments.averaging()):
            return
        warnings.warn(f"this is the model of one rank, not the average of all: {fix}", stacklevel=5)

    def write(self, folder: str) -> None:
        """Write the hooks' state to a checkpoint's folder. Collective."""
        states = self.attachments.state_dict()
        everywhere = self.accelerator.project_configuration.save_on_each_node
        save({"attachments": states}, Path(folder, FILE_NAME), save_on_each_node=everywhere)

    def read(self, folder: str) -> None:
        """Take the hooks' state over from a checkpoint, after models and optimizers were loaded. Collective."""
        self.attachments.begin_together("load_state()")
        self.attachments.load_state_dict(_load_everywhere(Path(folder, FILE_NAME)), str(folder))

    def loss_divided_by(self) -> float:
        """Divisor of the loss in the present backward; Accelerate divides in `accelerator.backward` only."""
        return self.divided_before * self._divides_by

    def check(self) -> None:
        """Refuse an accelerator that cannot use the hook, and warn if it has no use for it."""
        kind = self.accelerator.state.distributed_type
        if (reason := _REFUSED.get(kind.value)) is not None:
            raise ValueError(
                f"CommHookKwargs(hook={self._hook!r}) works with DistributedDataParallel only: {reason}. Leave the "
                "handler out"
            )
        if kind == DistributedType.NO and not self._has_warned:
            self._has_warned = True
            started = int(os.environ.get("WORLD_SIZE", 1))
            advice = f". {started} processes were started, and Accelerate finds no GPUs: write Accelerator(cpu=True)"
            warnings.warn(
                f"CommHookKwargs(hook={self._hook!r}) does nothing: training runs in one process, and "
                f"handler.attachments stays empty{advice if started > 1 else ''}",
                stacklevel=4,
            )

    def prepare(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.check()
        prepared = original(*args, **kwargs)
        # Not earlier: a model may be prepared again, too.
        self.drop_freed()
        return prepared

    def prepare_model(
        self,
        original: Callable[..., Any],
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> Any:
        if not evaluation_mode:
            self.check()
        return original(model, device_placement, evaluation_mode)

    def drop_freed(self) -> None:
        """Leave models out of checkpoints that were freed, once others have taken their place."""
        self.tell(map(closing_line, self.attachments.drop_freed(self.accelerator._models)))

    def backward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        for attachment in self.attachments.open() if self.tells_forecast else ():
            attachment.tell_forecast()
        self._divides_by = float(self.accelerator.gradient_accumulation_steps)
        try:
            return original(*args, **kwargs)
        finally:
            self._divides_by = 1.0

    def no_sync(
        self, original: Callable[[nn.Module], AbstractContextManager[None]], model: nn.Module
    ) -> AbstractContextManager[None]:
        # Accelerate's own does nothing in one process, where torchrun gives DDP all the same.
        return model.no_sync() if isinstance(model, DistributedDataParallel) else original(model)

    def prepare_optimizer(self, original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if any(attachment.averages_models for attachment in self.attachments.open()):
            check_optimizer(optimizer)
        prepared = original(optimizer, *args, **kwargs)
        self.attachments.add_optimizer(prepared.optimizer)
        return prepared

    def wait_for_everyone(self, original: Callable[[], None]) -> None:
        # Afterwards models are looked at: saved, by the main process alone, or evaluated.
        original()
        self.attachments.show_average()

    def get_state_dict(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # Not averaged here: perhaps only some ranks come by.
        self.warn_if_models_differ("call accelerator.wait_for_everyone() on all ranks before")
        return original(*args, **kwargs)

    def end_training(self, original: Callable[[], None]) -> None:
        with ExitStack() as stack:
            for context in self.at_end:
                stack.enter_context(context())
            self.attachments.average_for_good()
            self.tell_what_was_sent()
            original()

    def tell_what_was_sent(self) -> None:
        """Show one line on all of training for each model, on the main process, unless a monitor does."""
        self.tell(map(closing_line, self.attachments.open()))

    def tell(self, lines: Iterable[str | None]) -> None:
        """Show lines on the main process."""
        accelerator = self._accelerator()
        if accelerator is not None and accelerator.is_main_process:
            for line in filter(None, lines):
                announce(line)

    def save_state(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self.averaged():
            return original(*args, **kwargs)

    def load_state(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if self._is_saved:
            self.read(self._folder)
        return result

    def free_memory(self, original: Callable[..., Any], *objects: Any) -> Any:
        self.attachments.free()
        self._models.clear()
        return original(*objects)

    def _remember_folder(self, models: Sequence[torch.nn.Module], folder: str) -> None:
        self._folder = folder


def _load_everywhere(path: Path) -> list[dict[str, Any]] | None:
    """Return the states in a file, `None` if no rank finds it.

    If the file is missing on some ranks only, or a rank cannot read it, all ranks raise a `ValueError`.
    """
    states, problem = None, ""
    try:
        states = torch.load(path, map_location="cpu", weights_only=True)["attachments"]
    except FileNotFoundError:
        problem = "not there"
    except Exception as error:
        problem = f"unreadable: {error!r}"
    problems = gather_object([problem])
    if all(each == "not there" for each in problems):
        return None
    if any(problems):
        rank = next(rank for rank, each in enumerate(problems) if each)
        fix = "put checkpoints on a file system that all nodes share, or copy them"
        if all(problems):
            fix = "it is damaged: load another checkpoint"
        raise ValueError(f"{path} is {problems[rank]} on rank {rank}; {fix}")
    return states
