"""What hooks have to do with an `Accelerator` besides `backward`: its optimizers, barriers and checkpoints."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, save
from torch.optim import Optimizer

from lightning_commhooks.core.attachment import Attachment
from lightning_commhooks.core.optimizers import check_optimizer

FILE_NAME = "lightning_commhooks.bin"


class Companion:
    """Goes along with one `Accelerator`, whose methods have averaged models and hook state in view from now on.

    Args:
        accelerator: the accelerator.
        resync: whether models are averaged for good when they are looked at.
        strict_state: whether hook state that does not fit is an error.

    Attributes:
        attachments: of the models that the accelerator has prepared, in order.
    """

    def __init__(self, accelerator: Accelerator, *, resync: bool, strict_state: bool) -> None:
        self._accelerator = weakref.ref(accelerator)
        self._resync = resync
        self._strict_state = strict_state
        self._states: list[dict[str, Any]] = []
        self._folder: Path | None = None
        self.attachments: list[Attachment] = []
        # Accelerate has events for the beginning of saving and loading only.
        _wrap(accelerator, self.prepare_optimizer)
        _wrap(accelerator, self.wait_for_everyone)
        _wrap(accelerator, self.get_state_dict)
        _wrap(accelerator, self.save_state)
        _wrap(accelerator, self.load_state)
        _wrap(accelerator, self.end_training)
        accelerator.register_save_state_pre_hook(self._write)
        accelerator.register_load_state_pre_hook(self._remember_folder)

    def add(self, attachment: Attachment) -> None:
        """Look after one more model.

        Raises:
            ValueError: an optimizer cannot step on one rank alone.
        """
        self.attachments.append(attachment)
        if attachment.averages_models:
            attachment.evaluate_average(resync=self._resync)
            for optimizer in self.optimizers():
                attachment.add_optimizer(optimizer)

    def optimizers(self) -> list[Optimizer]:
        """Those that the accelerator has prepared, without its wrappers."""
        accelerator = self._accelerator()
        return [] if accelerator is None else [wrapped.optimizer for wrapped in accelerator._optimizers]

    def averaging(self) -> list[Attachment]:
        """Attachments whose hooks average models."""
        return [a for a in self.attachments if a.averages_models and not a.is_closed]

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Have averages in the place of models and of optimizers' state."""
        with ExitStack() as stack:
            for attachment in self.averaging():
                if self._resync:
                    attachment.average_weights()
                else:
                    stack.enter_context(attachment.averaged_weights())
                for optimizer in self.optimizers():
                    if self._resync:
                        attachment.average_optimizer_state(optimizer)
                    else:
                        stack.enter_context(attachment.averaged_optimizer_state(optimizer))
            yield

    def prepare_optimizer(self, original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Refuse optimizers that cannot step on one rank alone, tell the hooks about others."""
        if self.averaging():
            check_optimizer(optimizer)
        prepared = original(optimizer, *args, **kwargs)
        for attachment in self.averaging():
            attachment.add_optimizer(prepared.optimizer)
        return prepared

    def wait_for_everyone(self, original: Callable[[], None]) -> None:
        """After a barrier models are looked at: saved, on the main process alone, or evaluated."""
        original()
        for attachment in self.averaging():
            attachment.show_average()

    def get_state_dict(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Warn of models that were not averaged; here it cannot be done, since only some ranks may come by."""
        if any(attachment.models_differ for attachment in self.averaging()):
            warnings.warn(
                "this is the model of one rank; call accelerator.wait_for_everyone() on all ranks before, to get the "
                "average of all",
                stacklevel=4,
            )
        return original(*args, **kwargs)

    def end_training(self, original: Callable[[], None]) -> None:
        """End with the average."""
        for attachment in self.averaging():
            attachment.average_weights()
        original()

    def save_state(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Save averages, and the hooks' state."""
        self._states = [attachment.state_dict() for attachment in self.attachments if not attachment.is_closed]
        with self.averaged():
            return original(*args, **kwargs)

    def _write(self, models: Sequence[torch.nn.Module], weights: Sequence[Any], folder: str) -> None:
        accelerator = self._accelerator()
        assert accelerator is not None
        everywhere = accelerator.project_configuration.save_on_each_node
        save({"attachments": self._states}, Path(folder, FILE_NAME), save_on_each_node=everywhere)

    def load_state(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Load, and after the models the hooks' state, which may have each rank's own."""
        result = original(*args, **kwargs)
        assert self._folder is not None
        self._read(self._folder / FILE_NAME)
        return result

    def _remember_folder(self, models: Sequence[torch.nn.Module], folder: str) -> None:
        self._folder = Path(folder)

    def _read(self, path: Path) -> None:
        attachments = [attachment for attachment in self.attachments if not attachment.is_closed]
        states = _load_everywhere(path)
        if states is None:
            if any(attachment.has_state for attachment in attachments):
                warnings.warn(
                    f"{path.parent} has no state of communication hooks: it was saved without CommHookKwargs. They "
                    "begin anew, at step 0",
                    stacklevel=3,
                )
            return
        if len(states) != len(attachments):
            raise ValueError(
                f"{path} has the state of {len(states)} communication hooks, but {len(attachments)} models have one; "
                "prepare the same models as when it was saved, or delete the file to begin anew"
            )
        for attachment, state in zip(attachments, states, strict=True):
            attachment.load_state_dict(state, strict_state=self._strict_state)


def _wrap(accelerator: Accelerator, around: Callable[..., Any]) -> None:
    """Replace a method of one accelerator by `around(original, ...)`, which has the same name."""
    original = getattr(accelerator, around.__name__)

    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(accelerator, around.__name__, method)


def _load_everywhere(path: Path) -> list[dict[str, Any]] | None:
    """States in a file, `None` if no rank finds it.

    Raises:
        ValueError: only some ranks find it.
    """
    found = gather_object([path.exists()])
    if not any(found):
        return None
    if not all(found):
        raise ValueError(
            f"{path} is there on rank {found.index(True)}, but not on rank {found.index(False)}; put checkpoints on a "
            "file system that all nodes share, or copy them"
        )
    states: list[dict[str, Any]] = torch.load(path, map_location="cpu", weights_only=True)["attachments"]
    return states
