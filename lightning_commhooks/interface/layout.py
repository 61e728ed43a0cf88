"""From DDP's flat buckets to named gradients; survives bucket rebuilds."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor
from torch.nn import Module

from lightning_commhooks.collectives.averaging import own_part
from lightning_commhooks.interface.bucket import Slot


def memory_shape(parameter: Tensor) -> tuple[int, ...]:
    """Sizes of `parameter`, or this rank's part of it, ordered by stride, outermost first.

    DDP lays a gradient out with the strides of its parameter when that is dense and non-overlapping
    (`reducer.cpp`, `initialize_bucket_views`), and contiguously otherwise.
    """
    parameter = own_part(parameter)
    # DDP gives hooks complex gradients as pairs of real numbers.
    pair = (2,) if parameter.is_complex() else ()
    if not torch.ops.aten.is_non_overlapping_and_dense(parameter):
        return (*parameter.shape, *pair)
    strides = parameter.stride()
    order = sorted(range(parameter.dim()), key=lambda dim: -strides[dim])
    return (*(parameter.shape[dim] for dim in order), *pair)


def unwrapped(model: object) -> object:
    """The module in what `torch.compile(module)` returns, or the model itself."""
    return getattr(model, "_orig_mod", model)


class Layout:
    """Names the parameters of one model.

    Args:
        module: the module that DDP wraps. A parameter shared between modules has its first name.
        ignored: names of parameters and buffers that DDP leaves to each rank (`DDP.parameters_to_ignore`).
    """

    def __init__(self, module: Module, ignored: Collection[str] = ()) -> None:
        left = {p for name, p in module.named_parameters() if name in ignored}
        # torch.compile puts "_orig_mod." into names; the state of a hook must not depend on it.
        names: dict[Tensor, str] = {p: name.replace("_orig_mod.", "") for name, p in module.named_parameters()}
        self._names = {p: name for p, name in names.items() if p not in left}
        # DDP averages the gradients of the root module's own parameters even if they are to be ignored.
        self._in_buckets = {p: name for p, name in names.items() if p not in left or "." not in name}
        self._ignored = ignored
        self._frozen = {p: name for p, name in self._names.items() if not p.requires_grad}
        # Not the module itself: it may hold the DDP wrapper, which holds this, invisibly to the garbage collector.
        self._module = weakref.ref(module)
        # With the number of elements in all of them.
        self._slots: dict[tuple[str, ...], tuple[tuple[Slot, ...], int]] = {}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape in memory order of every parameter whose gradients DDP averages, if it is trained."""
        return {name: memory_shape(parameter) for parameter, name in self._in_buckets.items()}

    def name_of(self, parameter: Tensor) -> str | None:
        """Name of a parameter; `None` if the model has not got it, or DDP ignores it."""
        return self._names.get(parameter)

    @property
    def trained(self) -> dict[str, Tensor]:
        """Parameters by name, without ignored ones and those that have been frozen all the time."""
        return {name: p for p, name in self._names.items() if p.requires_grad or p not in self._frozen}

    def trained_among(self, parameters: Iterable[Tensor]) -> dict[str, Tensor]:
        """Of `parameters` those in `trained`, by name."""
        named = ((self._names.get(p), p) for p in parameters if p.requires_grad or p not in self._frozen)
        return {name: p for name, p in named if name is not None}

    def float_buffers(self) -> dict[str, Tensor]:
        """Floating-point buffers that are not ignored, by name, as they are now: modules may replace them."""
        module = self._module()
        named = [] if module is None else module.named_buffers()
        return {
            name.replace("_orig_mod.", ""): b
            for name, b in named
            if name not in self._ignored and (b.is_floating_point() or b.is_complex())
        }

    def unfrozen(self) -> list[str]:
        """Names of parameters that are trained now, but were not when this layout was made."""
        return [name for p, name in self._frozen.items() if p.requires_grad]

    def slots(self, parameters: Sequence[Tensor], numel: int) -> tuple[Slot, ...]:
        """Slots of a bucket that holds the gradients of `parameters` one after another.

        Args:
            parameters: as `GradBucket.parameters()` returns them.
            numel: length of the flat bucket.

        Raises:
            RuntimeError: a parameter is not in the model, or the gradients do not fill the bucket.
        """
        try:
            names = tuple(self._in_buckets[p] for p in parameters)
        except KeyError:
            raise RuntimeError(
                "DDP reduces a parameter that the model did not have when the hook was attached; "
                "replace parameters before wrapping the model in DistributedDataParallel"
            ) from None
        if names not in self._slots:
            packed = _pack(names, parameters)
            self._slots[names] = packed, sum(slot.numel for slot in packed)
        slots, num_packed = self._slots[names]
        if num_packed != numel:
            raise RuntimeError(f"bucket of {numel} elements does not match its parameters {list(names)}")
        return slots


def _pack(names: tuple[str, ...], parameters: Sequence[Tensor]) -> tuple[Slot, ...]:
    slots, offset = [], 0
    for name, parameter in zip(names, parameters, strict=True):
        slots.append(Slot(name, memory_shape(parameter), offset, parameter))
        offset += slots[-1].numel
    return tuple(slots)
