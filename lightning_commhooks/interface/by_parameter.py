"""Memory by parameter name, which survives that DDP rebuilds its buckets, checkpoints, and another hook taking over."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

from torch import Tensor

from lightning_commhooks.collectives.group import Group
from lightning_commhooks.interface.bucket import Bucket, Slot
from lightning_commhooks.interface.hook import BoundHook
from lightning_commhooks.interface.memory import Memory
from lightning_commhooks.interface.state import StateReader, StateWriter

# What is remembered of one parameter. "residual", shape of its slot: what this rank owes, before what else is there of
# that is taken into account (`settled`). All else is equal on all ranks.
Entry = dict[str, Tensor]
# Shapes of the tensors that an entry may have, by their keys; `None`: any.
Shapes = dict[str, tuple[int, ...] | None]


class Plan(ABC):
    """What to do with one bucket, and its memory."""

    @property
    @abstractmethod
    def memories(self) -> list[Memory]:
        """All memory."""

    @abstractmethod
    def entries(self) -> dict[str, Entry]:
        """The memory by key, views or copies. May be collective."""

    @abstractmethod
    def owed(self) -> Iterator[Tensor]:
        """What this rank owes."""


P = TypeVar("P", bound=Plan)


class BoundByParameter(BoundHook, Generic[P]):
    """Hooks with error feedback.

    The plans of subclasses lay memory out in larger tensors for one bucket at a time. What is in no plan is stored by
    key: the name of a parameter, or the names of several.

    Attributes:
        lasting: keys of what a hook goes on from whether or not what is owed goes on exactly.
    """

    lasting: ClassVar[tuple[str, ...]] = ()
    has_memory = True

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self._plans: dict[tuple[str, ...], P] = {}
        self._stored: dict[str, Entry] = {}
        self._drained: list[str] = []

    def _plan(self, flat: Tensor, bucket: Bucket) -> P:
        if bucket.names not in self._plans:
            # The first time, or DDP has rebuilt its buckets: memory moves along by name.
            self._store_plans_of(bucket)
            self._plans[bucket.names] = self._make_plan(flat, bucket)
        return self._plans[bucket.names]

    @abstractmethod
    def _make_plan(self, flat: Tensor, bucket: Bucket) -> P:
        """Lay out the memory of one bucket, with what is stored of its parameters."""

    @abstractmethod
    def _entry_shapes(self, shapes: list[tuple[int, ...]]) -> Shapes:
        """Tensors of an entry whose parameters have these shapes; none if they are not compressed."""

    def _settled(self, entry: Mapping[str, Tensor]) -> Tensor:
        """What a parameter with a residual is owed."""
        return entry["residual"]

    def end_step(self, finite: Tensor) -> None:
        for plan in self._plans.values():
            for memory in plan.memories:
                memory.end_step(finite)
        if self._drained and finite:
            for name in self._drained:
                self._stored.pop(name, None)
        self._drained = []

    def _store_plans_of(self, bucket: Bucket) -> None:
        self._store([names for names in self._plans if set(names) & set(bucket.names)])

    def _store(self, plans: list[tuple[str, ...]]) -> None:
        for names in plans:
            self._stored |= self._plans.pop(names).entries()

    def _take(self, key: str, *kinds: str) -> Entry:
        """Take these of what is stored by a key out of the store."""
        entry = self._stored.pop(key, {})
        if left := {kind: tensor for kind, tensor in entry.items() if kind not in kinds}:
            self._stored[key] = left
        return {kind: tensor for kind, tensor in entry.items() if kind in kinds}

    def _pay_off_(self, flat: Tensor, bucket: Bucket) -> None:
        """Add what is owed to gradients that are not compressed any more, since DDP has rebuilt its buckets."""
        self._store_plans_of(bucket)
        owed = [slot for slot in bucket.slots if "residual" in self._stored.get(slot.name, {})]
        if owed and bucket.unused is not None:
            # DDP throws away what a hook returns for a parameter that no rank used.
            used = self.group.all_reduce_(bucket.used(owed, flat)).tolist()
            owed = [slot for slot, is_used in zip(owed, used, strict=True) if is_used]
        self._drain_(flat, owed, bucket.loss_scale)

    def drain_(self, flat: Tensor, bucket: Bucket) -> None:
        self._store(list(self._plans))
        self._drain_(flat, bucket.slots, bucket.loss_scale)

    def _drain_(self, flat: Tensor, slots: Sequence[Slot], loss_scale: float | Tensor) -> None:
        for slot in slots:
            entry = self._stored.get(slot.name, {})
            if "residual" in entry:
                slot.view(flat).add_(self._settled(entry) * loss_scale)
                self._drained.append(slot.name)

    def owed(self) -> Iterator[Tensor]:
        for plan in self._plans.values():
            yield from plan.owed()
        for entry in self._stored.values():
            if "residual" in entry:
                yield self._settled(entry)

    def state_dict(self, writer: StateWriter) -> dict[str, Any]:
        plans = (plan.entries() for plan in self._plans.values())
        entries = {key: entry for some in (self._stored, *plans) for key, entry in some.items()}
        return {"entries": {key: self._saved(entries[key], writer) for key in sorted(entries)}}

    def _saved(self, entry: Entry, writer: StateWriter) -> Entry:
        # The mean over ranks of what is owed is all that ranks other than these can go on from.
        exact = writer.kind == "exact"
        kinds = (kind for kind in entry if kind != "residual" and (exact or kind in self.lasting))
        saved = {kind: writer.shared(entry[kind]) for kind in kinds}
        if "residual" in entry:
            saved["residual"] = writer.per_rank(entry["residual"] if exact else self._settled(entry))
        return saved

    def load_state_dict(self, state: dict[str, Any], reader: StateReader) -> None:
        stored = {}
        for key, saved in reader.section(state, "entries").items():
            shapes = [shape for name in key.split("\n") if (shape := reader.shape_of(name)) is not None]
            if len(shapes) <= key.count("\n"):
                reader.differs(f"it has memory of {key!r}, but the model no such parameter, or another hook has it")
            elif not (expected := self._entry_shapes(shapes)):
                reader.differs(
                    f"parameter {key!r} is compressed in the state and not any more, or without error feedback"
                )
            else:
                stored[key] = self._loaded(key, reader.section({key: saved}, key), expected, reader)
        self._plans, self._stored = {}, stored

    def _loaded(self, key: str, saved: Mapping[str, Tensor], expected: Shapes, reader: StateReader) -> Entry:
        """What fits of a saved entry."""
        entry = {kind: reader.shared(tensor) for kind, tensor in saved.items() if kind != "residual"}
        if "residual" in saved:
            entry["residual"] = reader.per_rank(saved["residual"])
            if not (reader.is_exact and all(_fits(tensor, expected.get(kind)) for kind, tensor in entry.items())):
                kept = {kind: tensor for kind, tensor in entry.items() if kind in self.lasting}
                entry = {**kept, "residual": self._settled(entry)}
        elif "residual" in expected:
            reader.differs(f"it has no error feedback of {key!r}")
        for kind, tensor in list(entry.items()):
            if kind not in expected:
                what = f"the {kind}" if kind in self.lasting else "error feedback"
                reader.differs(f"it has {what} of {key!r} and the hook has none now")
            elif not _fits(tensor, expected[kind]):
                now = f"{list(tensor.shape)} in the state and {list(expected[kind] or ())} now"
                reader.differs(f"the {kind} of {key!r} has shape {now}")
            else:
                continue
            del entry[kind]
        return entry

    def release(self) -> None:
        self._plans, self._stored, self._drained = {}, {}, []


def _fits(tensor: Tensor, shape: tuple[int, ...] | None) -> bool:
    return shape is None or tensor.shape == shape
