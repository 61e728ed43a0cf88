"""From DDP's flat buckets to named gradients; survives bucket rebuilds."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import DataParallel, Module
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim.swa_utils import AveragedModel

from lightning_commhooks.collectives.averaging import own_part
from lightning_commhooks.interface.bucket import Slot

# Attributes in which wrappers of activation checkpointing, of torch.compile and of FSDP have what they wrap, and which
# their state dicts leave out of names.
_WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
# Those that have it in `module`, which may be any attribute elsewhere.
_WRAPPERS = (DistributedDataParallel, DataParallel, AveragedModel)


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


def names_without_wrappers(model: Module, names: Iterable[str]) -> dict[str, str]:
    """Names of parameters or buffers as if no module were in a wrapper, by those with it.

    The state of a hook, patterns and messages use these, so that they do not depend on wrappers.

    Args:
        model: the module.
        names: as `torch.nn.Module.named_parameters(model)` and `named_buffers` give them. Wrappers override these.
    """
    modules = dict(Module.named_modules(model))
    clean = {"": ""}
    for path in filter(None, modules):  # parents come first
        parent, _, attribute = path.rpartition(".")
        is_wrapped = attribute in _WRAPPED or (attribute == "module" and isinstance(modules[parent], _WRAPPERS))
        clean[path] = clean[parent] if is_wrapped else _joined(clean[parent], attribute)
    found: dict[str, str] = {}
    taken = set()
    for name in names:
        path, _, own = name.rpartition(".")
        short = _joined(clean[path], own)
        # A wrapper may have a tensor of its own of that name.
        found[name] = name if short in taken else short
        taken.add(found[name])
    return found


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def is_statistic(owner: Module, name: str, buffer: Tensor) -> bool:
    """Whether a buffer is a running statistic of a normalization layer, PyTorch's or another one.

    Args:
        owner: the module that has it.
        name: under which it has it.
        buffer: the buffer.
    """
    return name.startswith("running_") and buffer.is_floating_point() and _is_normalization(owner)


def is_count_of_steps(owner: Module, buffer: Tensor) -> bool:
    """Whether a buffer counts the steps of a normalization layer, as `num_batches_tracked`."""
    return not _is_continuous(buffer) and buffer.numel() == 1 and _is_normalization(owner)


def _is_normalization(module: Module) -> bool:
    return any("norm" in one.__name__.lower() for one in type(module).__mro__)


def _is_continuous(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


class Layout:
    """Names the parameters of one model.

    Args:
        module: the module that DDP wraps. A parameter shared between modules has its first name.
        ignored: names of parameters and buffers that DDP leaves to each rank (`DDP.parameters_to_ignore`).
    """

    def __init__(self, module: Module, ignored: Collection[str] = ()) -> None:
        given = dict(Module.named_parameters(module))
        left = {p for name, p in given.items() if name in ignored}
        clean = names_without_wrappers(module, given)
        names: dict[Tensor, str] = {p: clean[name] for name, p in given.items()}
        self._names = {p: name for p, name in names.items() if p not in left}
        # DDP averages the gradients of the root module's own parameters even if they are to be ignored.
        self._in_buckets = {p: name for p, name in names.items() if p not in left or "." not in name}
        self._ignored = ignored
        # By what is left without `module`, which only a module can tell to be a wrapper's.
        self._meant: dict[str, list[str]] = {}
        for name in names.values():
            self._meant.setdefault(_without_module(name), []).append(name)
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

    def buffers(self) -> Iterator[tuple[str, Tensor, Module, str]]:
        """Buffers that are not ignored, as they are now: modules may replace them.

        Yields:
            name, buffer, the module that has it, and its name in that; only plain tensors whose numbers are in memory.
        """
        module = self._module()
        if module is None:
            return
        given = dict(Module.named_buffers(module))
        clean = names_without_wrappers(module, given)
        modules = dict(Module.named_modules(module))
        for name, buffer in given.items():
            path, _, own = name.rpartition(".")
            if name not in self._ignored and _is_plain(buffer):
                yield clean[name], buffer, modules[path], own

    def float_buffers(self) -> dict[str, Tensor]:
        """Floating-point and complex buffers by name: see `buffers`."""
        return {name: buffer for name, buffer, *_ in self.buffers() if _is_continuous(buffer)}

    def name_now(self, saved: str) -> str:
        """The name that a parameter has now, by the one that a state has, perhaps of a model with wrappers."""
        plain = ".".join(part for part in saved.split(".") if part not in _WRAPPED)
        meant = self._meant.get(_without_module(plain), [])
        return meant[0] if plain not in meant and len(meant) == 1 else plain

    def with_names_of_now(self, saved: Any) -> Any:
        """A saved state with the names that parameters have now, wherever it has names."""
        if not isinstance(saved, Mapping):
            return saved
        return {
            "\n".join(map(self.name_now, key.split("\n"))) if isinstance(key, str) else key: (
                value if key == "options" else self.with_names_of_now(value)
            )
            for key, value in saved.items()
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


def _without_module(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != "module")


def _is_plain(buffer: Tensor) -> bool:
    """Whether a buffer is an ordinary tensor, of which each element has a place of its own in memory."""
    if is_lazy(buffer) or type(buffer) is not Tensor or buffer.layout != torch.strided:
        return False
    overlaps = any(stride == 0 for size, stride in zip(buffer.shape, buffer.stride(), strict=True) if size > 1)
    return not (overlaps or buffer.is_meta or buffer.is_quantized or buffer.is_conj() or buffer.is_neg())


def _pack(names: tuple[str, ...], parameters: Sequence[Tensor]) -> tuple[Slot, ...]:
    slots, offset = [], 0
    for name, parameter in zip(names, parameters, strict=True):
        slots.append(Slot(name, memory_shape(parameter), offset, parameter))
        offset += slots[-1].numel
    return tuple(slots)
