"""Attachments of all models in one training run, for framework adapters that train several models."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_commhooks.runtime.attachment import Attachment


def attachment_of(model: nn.Module | None, attachments: Sequence[Attachment]) -> Attachment:
    """Return the open attachment of a model, or the only open attachment."""
    in_use = [attachment for attachment in attachments if not attachment.is_closed]
    found = [attachment for attachment in in_use if model is None or attachment.is_attached_to(model)]
    if not in_use:
        raise ValueError("no model has a communication hook: wrap one first. In a single process there is none")
    if len(found) != 1:
        raise ValueError(
            f"{len(in_use)} models have a hook, and the call names {'none' if model is None else 'another one'}: give "
            "the model that was wrapped"
        )
    return found[0]


class Attachments:
    """The attachments of an adapter. Closed attachments, whose models no longer exist, are ignored.

    With `resync`, models are averaged permanently for evaluation.
    """

    def __init__(self, *, resync: bool, strict_state: bool) -> None:
        self._resync = resync
        self._strict_state = strict_state
        self._attachments: list[Attachment] = []
        self._freed: list[Attachment] = []

    def __getstate__(self) -> dict[str, Any]:
        return dict(vars(self), _attachments=[], _freed=[])

    def add(self, attachment: Attachment, optimizers: Iterable[Optimizer]) -> None:
        """Add the attachment of another model, and register its optimizers."""
        self._attachments = [*self.open(), attachment]
        if attachment.averages_models:
            for optimizer in optimizers:
                attachment.add_optimizer(optimizer)

    def free(self) -> None:
        """Record that the user has freed the present models."""
        self._freed = self.open()

    def drop_freed(self, models: Sequence[nn.Module]) -> list[Attachment]:
        """Drop the models that were freed, except these `models`, if others have taken their place; return them.

        They are not in use any more, whether or not they still exist on a rank.
        """
        if not self._freed or all(one in self._freed for one in self.open()):
            return []
        dropped = [one for one in self._freed if not any(one.is_attached_to(model) for model in models)]
        self._attachments, self._freed = [one for one in self.open() if one not in dropped], []
        return [one for one in dropped if not one.is_closed]

    def open(self) -> list[Attachment]:
        """Return the attachments whose models are in use."""
        return [attachment for attachment in self._attachments if not attachment.is_closed]

    def averaging(self) -> list[Attachment]:
        """Return the open attachments whose hooks average models, also for evaluation."""
        return [attachment for attachment in self.open() if attachment.averages_when_asked]

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Register another optimizer with all hooks that average models."""
        for attachment in self.open():
            attachment.add_optimizer(optimizer)

    def are_between_averages(self) -> bool:
        """Return whether replicas have different models that are not averaged for evaluation."""
        return any(attachment.models_differ and not attachment.averages_when_asked for attachment in self.open())

    @contextmanager
    def averaged(self, optimizers: Sequence[Optimizer]) -> Iterator[None]:
        """Replace models and optimizer state by their averages. Collective."""
        with ExitStack() as stack:
            for attachment in self.averaging():
                stack.enter_context(attachment.averaged(optimizers, permanently=self._resync))
            yield

    def show_average(self) -> None:
        """Replace models by their averages until training continues, or with `resync` permanently. Collective."""
        for attachment in self.averaging():
            if self._resync:
                attachment.average_weights()
            else:
                attachment.show_average()

    def average_for_good(self) -> None:
        """Average models at the end of training. Collective."""
        for attachment in self.averaging():
            attachment.average_weights()

    def begin_together(self, what: str) -> None:
        """Wait for all ranks; raise a `HookError` on all if one continues to train instead. Collective."""
        for attachment in self.open()[:1]:
            attachment.runtime.begin_together(what)

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the states of the open attachments, in order. Collective."""
        return [attachment.state_dict() for attachment in self.open()]

    def load_state_dict(self, states: Sequence[dict[str, Any]] | None, source: str) -> None:
        """Load a result of `state_dict` after models and optimizers were loaded; `None` gives a warning. Collective.

        `source` names the origin of the states in messages.
        """
        attachments, text = self.open(), _without_states(source)
        found: list[dict[str, Any] | None] = [None] * len(attachments)
        if states is not None and len(states) == len(attachments):
            found = [*states]
        elif states is not None and attachments:  # a single process has no hooks
            text = (
                f"{source} has the state of {len(states)} communication hooks, but {len(attachments)} models have one"
            )
            if self._strict_state:
                raise ValueError(f"{text}; prepare the same models as when it was saved, or use strict_state=False")
        self._load(attachments, found, text)

    def by_name(self, models: Mapping[str, nn.Module]) -> dict[str, Attachment]:
        """Return the open attachments of models, by the models' names, in the same order on all ranks."""
        named = [(name, models[name]) for name in sorted(models)]
        return {name: one for name, model in named for one in self.open() if one.is_attached_to(model)}

    def load_by_name(
        self, attachments: Mapping[str, Attachment], states: Mapping[str, dict[str, Any]] | None, source: str
    ) -> None:
        """Load states as `load_state_dict` does, into `attachments` of the same names. Collective."""
        text = _without_states(source)
        missing = [name for name in attachments if states is not None and name not in states]
        if states is not None and missing:
            text = f"{source} has the state of communication hooks for {sorted(states)}, and not for {missing}"
            if self._strict_state:
                raise ValueError(f"{text}; give models the names they were saved with, or use strict_state=False")
        self._load([*attachments.values()], [(states or {}).get(name) for name in attachments], text)

    def _load(self, attachments: Sequence[Attachment], states: Sequence[dict[str, Any] | None], text: str) -> None:
        """Load states, and reset a hook without one, with a warning."""
        reset = []
        for attachment, state in zip(attachments, states, strict=True):
            if state is not None:
                attachment.load_state_dict(state, strict_state=self._strict_state)
            else:
                attachment.reset_state()
                reset.append(attachment)
        if any(attachment.has_state for attachment in reset):
            warnings.warn(f"{text}. They are reset to step 0", stacklevel=4)


def _without_states(source: str) -> str:
    return f"{source} has no state of communication hooks: it was saved without them"
