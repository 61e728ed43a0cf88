"""Converts the state of a hook between replicas of a sharded model to another number of shards."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_commhooks.collectives.averaging import own_part
from lightning_commhooks.interface.layout import Layout, memory_shape

_NOTHING = object()


def resharded(
    states: Sequence[Mapping[str, Any]], shard: Sequence[Sequence[int]], layout: Layout
) -> tuple[Any, list[str]]:
    """Return the state of a hook for this rank's shard, from the states of all saved shards.

    Per-element state of a parameter, such as residuals and anchors, is concatenated and split again. Other state of a
    parameter, such as PowerSGD's Q, comes from the shard that had this shard's first row. State that depends on the
    number of rows, such as PowerSGD's P, is reset.

    Args:
        states: results of `checkpoint.save` for each shard, in order.
        shard: index of this rank's shard and number of shards: `Source.shard`.
        layout: layout of the model.

    Returns:
        the state, and names of parameters whose memory was lost.
    """
    # With nested sharding, per-element state is reset.
    named = layout.trained.items() if len(shard) <= 1 else ()
    index, size = shard[0] if shard else (0, 1)
    parts = {name: _Part(name, p, states, (index, size)) for name, p in named}
    lost: list[str] = []
    return _merged([state["hook"] for state in states], parts, None, lost), lost


class _Part:
    """Rows of a parameter on the saved shards and on this one; or columns, if these are sharded."""

    def __init__(
        self, name: str, parameter: Tensor, states: Sequence[Mapping[str, Any]], shard: tuple[int, int]
    ) -> None:
        dims = [one.dim for one in getattr(parameter, "placements", ()) if one.is_shard()]
        self._dim, self._shape = dims[0] if dims else 0, memory_shape(parameter)
        # Shards without rows lack the parameter.
        self._shapes = [tuple(state["parameters"].get(name, ())) for state in states]
        self._lengths = [shape[self._dim] if shape else 0 for shape in self._shapes]
        self._num_replicas = states[0]["world_size"] if states[0]["per_rank"] == "exact" else 1
        index, size = shard
        total = sum(self._lengths)
        self._start = min(index * -(-total // size), total)  # as `torch.chunk`
        self._length = self._shape[self._dim] if self._shape else 0
        # For a sharded parameter, whether the shards cover all of its rows.
        is_whole = not dims or total == parameter.shape[self._dim]
        others = [_without(self._dim, shape) for shape in (*self._shapes, self._shape) if shape]
        is_in_order = self._shape == tuple(own_part(parameter).shape)
        fits = 0 < self._length <= total - self._start and len(set(others)) == 1
        self._fits = is_in_order and is_whole and fits
        # A shard without rows loses nothing.
        self.is_lost = self._length > 0 and not self._fits

    def of(self, tensors: Sequence[Tensor | None]) -> Tensor | None:
        """Return this shard's tensor from the tensors of the saved shards; `None`: there is none, or it is reset."""
        if not self._fits:
            return None
        about = zip(tensors, self._shapes, self._lengths, strict=True)
        found = [(tensor, shape, length) for tensor, shape, length in about if tensor is not None]
        nums = {tensor.numel() / math.prod(shape) for tensor, shape, _ in found}
        if nums in ({1}, {self._num_replicas}):
            tensor, shape, _ = found[0]
            return self._cut(tensors, int(nums.pop()), *_form(tensor, shape))
        return None if all(length in tensor.shape for tensor, _, length in found) else tensors[self._first_shard()]

    def _first_shard(self) -> int:
        """Return the saved shard with the first row of this one."""
        ends = itertools.accumulate(self._lengths)
        return next(i for i, end in enumerate(ends) if self._start < end)

    def _cut(self, tensors: Sequence[Tensor | None], num: int, lead: Sequence[int], is_flat: bool) -> Tensor:
        like = next(tensor for tensor in tensors if tensor is not None)
        whole = [
            (like.new_zeros(num, *shape) if tensor is None else tensor).reshape(num, *shape)
            for tensor, shape in zip(tensors, self._shapes, strict=True)
            if shape
        ]
        own = torch.cat(whole, dim=self._dim + 1).narrow(self._dim + 1, self._start, self._length)
        return own.reshape(*lead, *((-1,) if is_flat else self._shape)).clone()


def _form(tensor: Tensor, shape: tuple[int, ...]) -> tuple[Sequence[int], bool]:
    """Return the dimensions before the parameter's, and whether the parameter's are flattened."""
    is_flat = tensor.shape[-len(shape) :] != shape
    return (tensor.shape[:-1] if is_flat else tensor.shape[: -len(shape)]), is_flat


def _without(dim: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape[:dim] + shape[dim + 1 :]


def _merged(values: Sequence[Any], parts: Mapping[str, _Part], part: _Part | None, lost: list[str]) -> Any:
    """Merge the nested states of all shards, `_NOTHING` for a missing one, into the state of this shard."""
    there = [value for value in values if value is not _NOTHING]
    if all(isinstance(value, Mapping) for value in there):
        merged = {}
        for key in dict.fromkeys(key for value in there for key in value):
            of_key = [value if value is _NOTHING else value.get(key, _NOTHING) for value in values]
            own = _merged(of_key, parts, parts.get(key) if part is None else part, lost)
            if own is not _NOTHING:
                merged[key] = own
            elif any(isinstance(value, Mapping) for value in of_key) and (key not in parts or parts[key].is_lost):
                lost.append(key)
        had_tensors = any(isinstance(one, Tensor) for value in there for one in value.values())
        return _NOTHING if had_tensors and not merged else merged
    if not isinstance(there[0], Tensor):
        return there[0]
    found = None if part is None else part.of([None if value is _NOTHING else value for value in values])
    return _NOTHING if found is None else found
