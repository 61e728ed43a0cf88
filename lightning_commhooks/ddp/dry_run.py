"""A hook on ranks that are not there, with the buckets and parameters of a real model: what does a step send?"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_commhooks.collectives.counters import Counters
from lightning_commhooks.collectives.counting_group import CountingGroup, on_meta
from lightning_commhooks.collectives.group import Group
from lightning_commhooks.interface.accumulation import Accumulated
from lightning_commhooks.interface.averages_models import averages_models, is_local
from lightning_commhooks.interface.bucket import Bucket, Slot
from lightning_commhooks.interface.hook import CommHook
from lightning_commhooks.interface.layout import Layout
from lightning_commhooks.interface.models import Models, OptimizerStep
from lightning_commhooks.interface.wrapper import after_optimizer_step


@dataclass(frozen=True)
class Sent:
    """What is sent in a step, or in several; see `Counters`."""

    bytes_sent: float = 0.0
    bytes_dense: float = 0.0
    bytes_sent_between_nodes: float = 0.0
    bytes_dense_between_nodes: float = 0.0
    numel_compressed: int = 0
    numel_uncompressed: int = 0

    @classmethod
    def until_now(cls, counters: Counters) -> Sent:
        """All that was counted."""
        return cls(*(getattr(counters, field.name) for field in dataclasses.fields(cls)))

    def __add__(self, other: Sent) -> Sent:
        return self.plus(other, 1)

    def plus(self, other: Sent, times: int) -> Sent:
        """This and so many times the other."""
        names = [field.name for field in dataclasses.fields(self)]
        return Sent(*(getattr(self, name) + times * getattr(other, name) for name in names))

    @property
    def is_between_nodes(self) -> bool:
        """Whether what counts is what leaves nodes, which have several ranks each."""
        return 0 < self.bytes_dense_between_nodes < 0.999 * self.bytes_dense

    @property
    def ratio(self) -> float:
        """Times fewer bytes than plain DDP sends, between nodes if that is what counts; inf if nothing is sent."""
        if self.is_between_nodes:
            sent, dense = self.bytes_sent_between_nodes, self.bytes_dense_between_nodes
        else:
            sent, dense = self.bytes_sent, self.bytes_dense
        return dense / sent if sent else math.inf

    @property
    def saved(self) -> float:
        """Part of those bytes that is not sent; below 0 if more is sent."""
        return 1 - 1 / self.ratio if self.bytes_dense else 0.0

    @property
    def share_compressed(self) -> float:
        """Part of the gradients that is compressed."""
        return self.numel_compressed / max(1, self.numel_compressed + self.numel_uncompressed)


@dataclass(frozen=True)
class Training:
    """What steps of a training consist of.

    Attributes:
        group: the ranks.
        buckets: those of a step, with the dtype of each.
        counts_micro_batches: whether buckets come with what they are the sum of.
        layout: the model.
        optimizers: what changes it.
        cycle: the optimizers that step after each synchronized backward, until they repeat.
        first: number of a step at which the cycle begins.
    """

    group: Group
    buckets: Sequence[tuple[Bucket, torch.dtype]]
    counts_micro_batches: bool
    layout: Layout
    optimizers: dict[str, OptimizerStep]
    cycle: Sequence[Sequence[str]]
    first: int


class DryRun:
    """Goes through steps of a hook without its numbers.

    Args:
        config: the hook.
        training: what steps consist of.

    Attributes:
        bound: the hook, bound anew.
    """

    def __init__(self, config: CommHook, training: Training) -> None:
        self._training = training
        self._group = CountingGroup(training.group)
        self.bound = config.bind(self._group)
        self._layout = _MetaLayout(training.layout)
        parameters = self._layout.trained
        self._buckets = [
            (tuple(_on_meta(slot, parameters) for slot in bucket.slots), bucket, dtype)
            for bucket, dtype in training.buckets
        ]
        self._models = Models(self._group, {}, config.name)
        self._models.layout = self._layout
        self._optimizers: dict[str, OptimizerStep] = {}
        if averages_models(self.bound):
            self._models.average_buffers = self.bound.average_buffers
            self._optimizers = {key: self._stepped(stepped) for key, stepped in training.optimizers.items()}

    def _stepped(self, stepped: OptimizerStep) -> OptimizerStep:
        own = {name: p for name, p in self._layout.trained.items() if name in stepped.parameters}
        state = {own[name]: _state_on_meta(stepped.state.get(p, {})) for name, p in stepped.parameters.items()}
        return OptimizerStep(stepped.optimizer, -1, own, state, self._models)

    def step(self, number: int) -> Sent:
        """What a synchronized backward, and the steps of optimizers after it, send; its number rises with each call."""
        counters = self._group.counters
        before = Sent.until_now(counters)
        for slots, seen, dtype in self._buckets:
            accumulated = Accumulated() if self._training.counts_micro_batches else None
            flat = torch.empty(seen.numel, dtype=dtype, device="meta")
            dense = self._group.ring_bytes(flat)
            counters.bytes_dense += dense
            counters.bytes_dense_between_nodes += dense * self._group.leaving(around_ring=True)
            self.bound.reduce(flat, Bucket(seen.index, seen.is_last, number, slots, accumulated=accumulated))
        self.bound.end_step(torch.tensor(True, device="cpu"))
        cycle = self._training.cycle
        for key in cycle[(number - self._training.first) % len(cycle)] if self._optimizers and cycle else ():
            after_optimizer_step(self.bound, dataclasses.replace(self._optimizers[key], step=number))
        return Sent.until_now(counters).plus(before, -1)

    def is_local(self, step: int) -> bool:
        """Whether ranks step alone."""
        return is_local(self.bound, step)


class _MetaLayout(Layout):
    """The parameters and buffers of a model, without memory."""

    def __init__(self, layout: Layout) -> None:
        super().__init__(nn.Module())
        self._parameters = {name: on_meta(p) for name, p in layout.trained.items()}
        self._buffers = {name: on_meta(b) for name, b in layout.float_buffers().items()}

    @property
    def trained(self) -> dict[str, Tensor]:
        return self._parameters

    def float_buffers(self) -> dict[str, Tensor]:
        return self._buffers


def _on_meta(slot: Slot, parameters: dict[str, Tensor]) -> Slot:
    return Slot(slot.name, slot.shape, slot.offset, parameters.get(slot.name))


def _state_on_meta(state: dict[str, Any]) -> dict[str, Any]:
    return {key: on_meta(value) if isinstance(value, Tensor) else value for key, value in state.items()}
