"""Writer and reader of a hook's state; the reader accepts any world size and reports the parts that do not fit."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_commhooks.collectives.group import Group

# A hook's memory, `{parameter: {kind: tensor}}`: see `BoundHook.memory`.
Memory = dict[str, dict[str, Tensor]]

# Shapes of a parameter's memory, by kind; `None`: any.
Shapes = Mapping[str, tuple[int, ...] | None]

# The contents of a state for tensors that differ between ranks: their mean or all ranks' tensors; or, without
# communication, this rank's own tensor or, for a joining replica, zeros.
PerRank = Literal["mean", "exact", "own", "joining"]


class StateError(ValueError):
    """A state does not fit the hook. Raised on all ranks; the hook is unchanged."""


class StateWriter:
    """Copies tensors into a state, on CPU so that it can be loaded on any device.

    Args:
        group: the ranks.
        kind: how to save tensors that differ between ranks.
    """

    def __init__(self, group: Group, kind: PerRank) -> None:
        self._group = group
        self.kind = kind

    def shared(self, tensor: Tensor) -> Tensor:
        """Copy a rank-uniform tensor."""
        return tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)

    def per_rank(self, tensor: Tensor) -> Tensor:
        """Save a tensor that differs between ranks as `kind` says; all ranks' tensors have shape `(w, *shape)`."""
        if self.kind in ("own", "joining"):
            return self.shared(tensor if self.kind == "own" else torch.zeros_like(tensor))
        if self.kind == "exact":
            gathered = self._group.finish(self._group.all_gather(tensor.reshape(-1).to(self._group.device)))
            return gathered.view(self._group.size, *tensor.shape).cpu()
        mean = tensor.to(self._group.device, copy=True, memory_format=torch.contiguous_format)
        return self._group.finish(self._group.all_reduce_mean_(mean)).cpu()

    def memory(self, memory: Memory, own_kinds: Container[str]) -> Memory:
        """Copy a hook's memory."""
        saved: Memory = {}
        # The order of the parameters may differ between ranks.
        for name in sorted(name for name in memory if memory[name]):
            entry = sorted(memory[name].items())
            saved[name] = {kind: (self.per_rank if kind in own_kinds else self.shared)(own) for kind, own in entry}
        return saved


class StateReader:
    """Gives a hook its part of a saved state.

    Args:
        saved: the result of [`save`][].
        shapes: shapes of all parameters of the model, by name.
        group: the current ranks.
        strict: whether a difference is an error.
        orders: the order in memory of the dimensions of parameters whose order is not ascending, by name.

    Attributes:
        is_exact: whether each rank gets exactly the tensors that it saved.
        steps: synchronized backwards before the state was saved.
        differences: descriptions of the parts skipped so far.
    """

    def __init__(
        self,
        saved: Mapping[str, Any],
        shapes: Mapping[str, tuple[int, ...]],
        group: Group,
        strict: bool,
        orders: Mapping[str, Sequence[int]],
    ) -> None:
        self._group = group
        self._ranks: Sequence[int] = [group.rank]
        self._strict = strict
        self._options = ""
        self._saved_exact = saved["per_rank"] == "exact"
        self.steps: int = saved["steps"]
        self.is_exact = self._saved_exact and saved["world_size"] == group.size
        self.differences: list[str] = []
        saved_shapes = {name: tuple(shape) for name, shape in saved["parameters"].items()}
        self._parameters = saved_shapes, dict(shapes)
        self._orders = saved["orders"], orders
        self._shapes = {name: shape for name, shape in shapes.items() if not self._changed(name)}

    def differs(self, problem: str) -> None:
        """Report a part of the state that does not fit. Returns only if that part may be skipped.

        Raises:
            StateError: the reader is strict.
        """
        if self._strict:
            raise StateError(
                f"the state of the communication hook does not fit: {problem}{self._options}. With strict_state=False "
                "entries that do not fit are reset"
            )
        self.differences.append(problem)

    def check_parameters(self) -> None:
        """Report the parameters that have changed since the state was saved."""
        saved, now = self._parameters
        for name in {**saved, **now}:
            if problem := self._changed(name):
                self.differs(problem)

    def _changed(self, name: str) -> str:
        """Return how a parameter differs from the one that was saved; empty if it does not."""
        (saved, now), (saved_orders, orders) = self._parameters, self._orders
        if name not in now:
            return f"parameter {name!r} of the state is not in the model"
        if name not in saved:
            return f"parameter {name!r} of the model is not in the state"
        has_other_order = list(saved_orders.get(name, [])) != list(orders.get(name, []))
        if has_other_order and sorted(saved[name]) == sorted(now[name]):
            return (
                f"parameter {name!r} has another memory format in the state than now, such as torch.channels_last; "
                "give the model the same format before it is wrapped"
            )
        if has_other_order or saved[name] != now[name]:
            return f"parameter {name!r} has shape {list(saved[name])} in the state and {list(now[name])} now"
        return ""

    def section(self, state: Any, key: str) -> Mapping[str, Any]:
        """Return the dictionary `state[key]`, or an empty one if it is missing."""
        section = state.get(key) if isinstance(state, Mapping) else None
        if isinstance(section, Mapping):
            return section
        self.differs(f"it has no {key!r}")
        return {}

    def shared(self, tensor: Tensor) -> Tensor:
        """Copy a tensor that `StateWriter.shared` saved to the gradients' device."""
        return tensor.to(self._group.device, copy=True)

    def per_rank(self, tensor: Tensor) -> Tensor:
        """Return this rank's part of a tensor that `StateWriter.per_rank` saved: its own tensor or the mean."""
        if self._saved_exact:
            rows = tensor[list(self._ranks)] if self.is_exact else tensor
            # The mean of equal rows could be rounded.
            tensor = rows[0] if bool((rows == rows[0]).all()) else rows.mean(dim=0)
        return tensor.to(self._group.device, copy=True)

    def memory(
        self,
        saved: Mapping[str, Any],
        kept: Callable[[list[tuple[int, ...]]], Shapes],
        own_kinds: Container[str],
        saved_kinds: Container[str],
    ) -> Memory:
        """Return the part of a saved memory that fits `BoundHook.kept`.

        Args:
            saved: memory by parameter and kind.
            kept: see `BoundHook.kept`.
            own_kinds: kinds that differ between ranks now.
            saved_kinds: kinds that differed when the memory was saved.
        """
        memory: Memory = {}
        for name in saved:
            shapes = [self._shapes[part] for part in name.split("\n") if part in self._shapes]
            if len(shapes) <= name.count("\n"):
                why = next(filter(None, map(self._changed, name.split("\n"))), "another hook has that parameter now")
                self.differs(f"it has memory of {name!r}, but {why}")
            elif not (expected := kept(shapes)):
                self.differs(
                    f"parameter {name!r} is compressed in the state and not any more, or without error feedback"
                )
            else:
                memory[name] = self._entry(name, self.section(saved, name), expected, own_kinds, saved_kinds)
        return memory

    def _entry(
        self,
        name: str,
        saved: Mapping[str, Tensor],
        expected: Shapes,
        own_kinds: Container[str],
        saved_kinds: Container[str],
    ) -> dict[str, Tensor]:
        entry: dict[str, Tensor] = {}
        if "residual" in expected and "residual" not in saved:
            self.differs(f"it has no error feedback of {name!r}")
        for kind, tensor in saved.items():
            if kind not in saved_kinds:
                own = self.shared(tensor)
            elif kind in own_kinds or not self._saved_exact:
                own = self.per_rank(tensor)
            else:
                own = self.shared(tensor.mean(dim=0))
            shape = expected.get(kind)
            if kind not in expected:
                what = "error feedback" if kind == "residual" else f"the {kind}"
                self.differs(f"it has {what} of {name!r} and the hook has none now")
            elif shape is not None and own.shape != shape:
                self.differs(f"the {kind} of {name!r} has shape {list(own.shape)} in the state and {list(shape)} now")
            else:
                entry[kind] = own
        return entry

    @contextmanager
    def of_ranks(self, ranks: Sequence[int]) -> Iterator[None]:
        """Give the mean over these ranks to a hook whose memory they share, while it loads."""
        before, self._ranks = self._ranks, ranks
        yield
        self._ranks = before

    @contextmanager
    def of_hook(self, options: str, has: Callable[[str], bool]) -> Iterator[None]:
        """Restrict the reader to an inner hook while that hook loads its part.

        Args:
            options: text to append to messages about parts that do not fit.
            has: whether a parameter of the model, by name, belongs to this hook.
        """
        before = self._options, self._shapes
        self._options, self._shapes = options, {name: shape for name, shape in self._shapes.items() if has(name)}
        yield
        self._options, self._shapes = before
