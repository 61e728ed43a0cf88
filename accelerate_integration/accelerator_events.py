"""Hooks at work in an `Accelerator`: its backward, optimizers, barriers and checkpoints."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, save
from torch.optim import Optimizer

from accelerate_integration.replaced_methods import replace_method
from lightning_commhooks.basics.announce import announce
from lightning_commhooks.runtime.attachment import Attachment
from lightning_commhooks.runtime.attachments import Attachments
from lightning_commhooks.runtime.copies import NotCopied
from lightning_commhooks.runtime.monitor import closing_line
from lightning_commhooks.runtime.optimizers import check_optimizer

FILE_NAME = "lightning_commhooks.bin"


class AcceleratorEvents:
    """Has the methods of one `Accelerator` take averaged models and hook state into account from now on.

    Attributes:
        divided_before: what a trainer divides the loss by before it calls `backward`.
        tells_forecast: whether to warn after the first steps if next to nothing will be compressed; if not, somebody
            else does who knows how many steps there will be.
    """

    def __init__(self, accelerator: Accelerator, *, resync: bool, strict_state: bool) -> None:
        self._accelerator = weakref.ref(accelerator)
        self._attachments = Attachments(resync=resync, strict_state=strict_state)
        self._folder = ""
        self._divides_by = 1.0
        self.divided_before = 1.0
        self.tells_forecast = True
        # Accelerate has events for the beginning of saving and loading only.
        replace_method(accelerator, "backward", self._backward)
        replace_method(accelerator, "prepare_optimizer", self._prepare_optimizer)
        replace_method(accelerator, "wait_for_everyone", self._wait_for_everyone)
        replace_method(accelerator, "get_state_dict", self._get_state_dict)
        replace_method(accelerator, "save_state", self._save_state)
        replace_method(accelerator, "load_state", self._load_state)
        replace_method(accelerator, "end_training", self._end_training)
        accelerator.register_save_state_pre_hook(NotCopied(lambda models, weights, folder: self.write(folder)))
        accelerator.register_load_state_pre_hook(NotCopied(self._remember_folder))

    def add(self, attachment: Attachment) -> None:
        """Look after one more model."""
        self._attachments.add(attachment, self._optimizers())

    def _optimizers(self) -> list[Optimizer]:
        accelerator = self._accelerator()
        return [] if accelerator is None else [wrapped.optimizer for wrapped in accelerator._optimizers]

    def averaged(self) -> AbstractContextManager[None]:
        """Have averages in the place of models and of optimizers' state. Collective."""
        return self._attachments.averaged(self._optimizers())

    def averaged_models(self) -> AbstractContextManager[None]:
        """Have averages in the place of models, for evaluation. Collective."""
        return self._attachments.averaged([])

    def warn_if_models_differ(self, fix: str) -> None:
        """Warn when the weights in place are those of each rank. Not collective."""
        if self._attachments.are_between_averages():
            fix = "look at it when the manager's current_step() has changed, which is after an average"
        elif not any(attachment.models_differ for attachment in self._attachments.averaging()):
            return
        warnings.warn(f"this is the model of one rank, not the average of all: {fix}", stacklevel=5)

    def average_for_good(self) -> None:
        """Average models at the end of training. Collective."""
        self._attachments.average_for_good()

    def write(self, folder: str) -> None:
        """Write the hooks' state to a checkpoint's folder. Collective."""
        accelerator = self._accelerator()
        assert accelerator is not None
        states = self._attachments.state_dict()
        everywhere = accelerator.project_configuration.save_on_each_node
        save({"attachments": states}, Path(folder, FILE_NAME), save_on_each_node=everywhere)

    def read(self, folder: str) -> None:
        """Take the hooks' state over from a checkpoint, after models and optimizers were loaded. Collective."""
        self._attachments.load_state_dict(_load_everywhere(Path(folder, FILE_NAME)), str(folder))

    def loss_divided_by(self) -> float:
        """Divisor of the loss in the present backward; Accelerate divides in `accelerator.backward` only."""
        return self.divided_before * self._divides_by

    def _backward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        accelerator = self._accelerator()
        assert accelerator is not None
        for attachment in self._attachments.open() if self.tells_forecast else ():
            attachment.tell_forecast()
        self._divides_by = float(accelerator.gradient_accumulation_steps)
        try:
            return original(*args, **kwargs)
        finally:
            self._divides_by = 1.0

    def _prepare_optimizer(self, original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if any(attachment.averages_models for attachment in self._attachments.open()):
            check_optimizer(optimizer)
        prepared = original(optimizer, *args, **kwargs)
        self._attachments.add_optimizer(prepared.optimizer)
        return prepared

    def _wait_for_everyone(self, original: Callable[[], None]) -> None:
        # Afterwards models are looked at: saved, by the main process alone, or evaluated.
        original()
        self._attachments.show_average()

    def _get_state_dict(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # Not averaged here: perhaps only some ranks come by.
        self.warn_if_models_differ("call accelerator.wait_for_everyone() on all ranks before")
        return original(*args, **kwargs)

    def _end_training(self, original: Callable[[], None]) -> None:
        self.average_for_good()
        self.tell_what_was_sent()
        original()

    def tell_what_was_sent(self) -> None:
        """Show one line on all of training for each model, on the main process, unless a monitor does."""
        accelerator = self._accelerator()
        if accelerator is not None and accelerator.is_main_process:
            for line in filter(None, map(closing_line, self._attachments.open())):
                announce(line)

    def _save_state(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self.averaged():
            return original(*args, **kwargs)

    def _load_state(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        self.read(self._folder)
        return result

    def _remember_folder(self, models: Sequence[torch.nn.Module], folder: str) -> None:
        self._folder = folder


def _load_everywhere(path: Path) -> list[dict[str, Any]] | None:
    """States in a file, `None` if no rank finds it.

    Raises:
        ValueError: some rank does not find it, though others do, or cannot read it. On all ranks.
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
        raise ValueError(
            f"{path} is {problems[rank]} on rank {rank}; put checkpoints on a file system that all nodes share, or "
            "copy them"
        )
    return states
