"""The names of the gradients in DDP's flat buckets, which do not change when DDP rebuilds its buckets."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import DataParallel, Module
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim.swa_utils import AveragedModel

from lightning_commhooks.collectives.averaging import own_part
from lightning_commhooks.interface.bucket import Slot

# Attributes in which the wrappers of torch.compile, activation checkpointing and FSDP keep the wrapped module, and
# which their state dicts omit from names.
_WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
# Wrappers with the attribute `module`, which other modules may use for other purposes.
_WRAPPERS = (DistributedDataParallel, DataParallel, AveragedModel)


def memory_shape(parameter: Tensor) -> tuple[int, ...]:
    """Return the sizes of `parameter`, or of this rank's part of it, ordered by stride, outermost first.

    DDP lays a gradient out with the strides of its parameter when that is dense and non-overlapping
    (`reducer.cpp`, `initialize_bucket_views`), and contiguously otherwise.
    """
    parameter = own_part(parameter)
    # DDP gives hooks complex gradients as pairs of real numbers.
    pair = (2,) if parameter.is_complex() else ()
    return (*(parameter.shape[dim] for dim in _memory_order(parameter)), *pair)


def _memory_order(parameter: Tensor) -> Sequence[int]:
    """Return the dimensions of a tensor, ordered by stride, outermost first."""
    if not torch.ops.aten.is_non_overlapping_and_dense(parameter):
        return range(parameter.dim())
    strides = parameter.stride()
    return sorted(range(parameter.dim()), key=lambda dim: -strides[dim])


def _unusual_order(parameter: Tensor) -> list[int]:
    """Return the order in memory of the dimensions larger than 1, as with `channels_last`; empty if it is ascending."""
    if is_lazy(parameter):
        return []
    parameter = own_part(parameter)
    order = [dim for dim in _memory_order(parameter) if parameter.shape[dim] > 1]
    return [] if order == sorted(order) else order


def unwrapped(model: object) -> object:
    """Return the module inside the result of `torch.compile(module)`, or the model itself.

    Also if `fully_shard` was applied to that result, as Accelerate does it.
    """
    return model if hasattr(type(model), "_get_fsdp_state") else getattr(model, "_orig_mod", model)


def names_without_wrappers(model: Module, names: Iterable[str]) -> dict[str, str]:
    """Map names from `torch.nn.Module.named_parameters(model)`, or `named_buffers`, to names without wrapper modules.

    A hook's state, patterns and messages use these, so that they do not depend on wrappers.
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
        # A wrapper may have its own tensor of that name.
        found[name] = name if short in taken else short
        taken.add(found[name])
    return found


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def is_statistic(owner: Module, name: str, buffer: Tensor) -> bool:
    """Return whether a buffer of a module is a running statistic of a normalization layer, PyTorch's or another."""
    return name.startswith("running_") and buffer.is_floating_point() and _is_normalization(owner)


def is_count_of_steps(owner: Module, buffer: Tensor) -> bool:
    """Return whether a buffer counts the steps of a normalization layer, such as `num_batches_tracked`."""
    return not is_continuous(buffer) and buffer.numel() == 1 and _is_normalization(owner)


def _is_normalization(module: Module) -> bool:
    return any("norm" in one.__name__.lower() for one in type(module).__mro__)


def is_continuous(tensor: Tensor) -> bool:
    """Return whether the elements of a tensor are floating-point or complex numbers."""
    return tensor.is_floating_point() or tensor.is_complex()


class Layout:
    """Names the parameters of one model.

    Args:
        module: the module that DDP wraps. A parameter shared between modules has its first name.
        ignored: names of parameters and buffers that DDP does not synchronize (`DDP.parameters_to_ignore`).
        ignores_root: whether the root module's own parameters can be ignored. DDP averages their gradients anyway.

    Attributes:
        orders: the order of the dimensions in memory, by name, of parameters whose order is not ascending.
    """

    def __init__(self, module: Module, ignored: Collection[str] = (), ignores_root: bool = False) -> None:
        given = dict(Module.named_parameters(module))
        left = {p for name, p in given.items() if name in ignored}
        clean = names_without_wrappers(module, given)
        names: dict[Tensor, str] = {p: clean[name] for name, p in given.items()}
        self._names = {p: name for p, name in names.items() if p not in left}
        of_root = set() if ignores_root else {p for p, name in names.items() if "." not in name}
        self._in_buckets = {p: name for p, name in names.items() if p not in left or p in of_root}
        self._ignored = ignored
        self.orders = {name: order for p, name in self._in_buckets.items() if (order := _unusual_order(p))}
        self._frozen = {p: name for p, name in self._names.items() if not p.requires_grad}
        # Weak: the module may hold the DDP wrapper, which holds this object, invisibly to the garbage collector.
        self._module = weakref.ref(module)
        # Slots and their total number of elements, by names.
        self._slots: dict[tuple[str, ...], tuple[tuple[Slot, ...], int]] = {}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape in memory order of every parameter whose gradients DDP averages while it is trained."""
        return {name: memory_shape(parameter) for parameter, name in self._in_buckets.items()}

    def check_orders(self, parameters: Mapping[str, Tensor]) -> None:
        """Refuse parameters whose memory format has changed since this layout was made, by a `ValueError`."""
        for name, parameter in parameters.items():
            if _unusual_order(parameter) != self.orders.get(name, []):
                raise ValueError(
                    f"the memory format of parameter {name!r} has changed since the hook was attached, which keeps the "
                    "earlier order. Call module.to(memory_format=...) before the model is wrapped, or attach another "
                    "hook"
                )

    def name_of(self, parameter: Tensor) -> str | None:
        """Return the name of a parameter; `None` if it is not in the model, or DDP ignores it."""
        return self._names.get(parameter)

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Parameters by name, except ignored ones."""
        return {name: p for p, name in self._names.items()}

    @property
    def trained(self) -> dict[str, Tensor]:
        """Parameters by name, except ignored parameters and parameters that have always been frozen."""
        return {name: p for p, name in self._names.items() if p.requires_grad or p not in self._frozen}

    def trained_among(self, parameters: Iterable[Tensor]) -> dict[str, Tensor]:
        """Return the subset of `parameters` in `trained`, by name."""
        named = ((self._names.get(p), p) for p in parameters if p.requires_grad or p not in self._frozen)
        return {name: p for name, p in named if name is not None}

    def buffers(self) -> Iterator[tuple[str, Tensor, Module, str]]:
        """Yield the current buffers that are not ignored; modules may replace their buffers.

        Yields:
            name, buffer, its module, and its name in that module; only plain, dense tensors in memory.
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
        """Return floating-point and complex buffers by name: see `buffers`."""
        return {name: buffer for name, buffer, *_ in self.buffers() if is_continuous(buffer)}

    def unfrozen(self) -> list[str]:
        """Return the names of parameters that are trained now but were frozen when this layout was made."""
        return [name for p, name in self._frozen.items() if p.requires_grad]

    def added(self, parameters: Iterable[Tensor]) -> list[str]:
        """Return the names of those of `parameters` that the module has got since this layout was made."""
        module, new = self._module(), {*parameters}.difference(self._names, self._in_buckets)
        now = {} if module is None else dict(Module.named_parameters(module))
        return [name for name, p in now.items() if p in new and name not in self._ignored]

    def slots(self, parameters: Sequence[Tensor], numel: int) -> tuple[Slot, ...]:
        """Return the slots of a bucket of `numel` elements with the gradients of `parameters` in this order.

        Raises a `RuntimeError` if a parameter is not in the model, or the gradients do not fill the bucket.
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


def _is_plain(buffer: Tensor) -> bool:
    """Return whether a buffer is an ordinary tensor whose elements do not overlap in memory."""
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
