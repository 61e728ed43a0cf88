"""The user's model, made by `module:factory` on the command line, and one step of its training."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import itertools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

T = TypeVar("T")
_EXPECTED = (
    "it must return (model, batch), (model, batch, loss_fn), or a dict with 'model' and 'batch' and optionally "
    "'loss_fn', 'optimizer' and 'ddp'"
)
_FIELDS = {"model", "batch", "loss_fn", "optimizer", "ddp"}
_LEARNING_RATE = 1e-4


@dataclass
class Task:
    """A model, a batch and the objects that a training step needs.

    Attributes:
        module: the model, not wrapped.
        loss_fn: `loss_fn(model(inputs), target)`; `None`: the model's output is the loss, or has a `.loss`.
        ddp_options: further arguments of `DistributedDataParallel`.
        later_batches: batches of the ranks after this one.
    """

    module: nn.Module
    batch: Any
    loss_fn: Callable[..., Tensor] | None
    optimizers: list[Optimizer]
    ddp_options: dict[str, Any]
    device: torch.device
    later_batches: Iterator[Any] = field(default_factory=lambda: iter(()), repr=False)
    _saved: dict[str, Tensor] = field(default_factory=dict, repr=False)
    _saved_optimizers: list[dict[str, Any]] = field(default_factory=list, repr=False)

    @property
    def gradient_bytes(self) -> int:
        """Size of all gradients."""
        return sum(p.numel() * p.element_size() for p in self.module.parameters() if p.requires_grad)

    def wrap(self, process_group: dist.ProcessGroup | None = None, init_sync: bool = False) -> DistributedDataParallel:
        """Wrap the model in a new DDP, for some ranks or all; `init_sync` broadcasts the first rank's model."""
        options = {"process_group": process_group, "init_sync": init_sync, **self.ddp_options}
        if self.device.type == "cuda":
            options["device_ids"] = [self.device]
        return DistributedDataParallel(self.module, **options)

    def step(self, model: nn.Module) -> None:
        """Run forward, backward and the optimizers' steps."""
        self.gradients(model)
        for optimizer in self.optimizers:
            optimizer.step()

    def gradients(self, model: nn.Module) -> None:
        """Run forward and backward."""
        for parameter in self.module.parameters():
            parameter.grad = None
        self._loss(model).backward()

    def _loss(self, model: nn.Module) -> Tensor:
        if is_lightning(self.module):
            output = self._training_step(model)
        elif self.loss_fn is not None:
            *inputs, target = self.batch if isinstance(self.batch, (tuple, list)) else (self.batch, None)
            output = model(*inputs)
            output = self.loss_fn(output) if target is None else self.loss_fn(output, target)
        elif isinstance(self.batch, Mapping):
            output = model(**self.batch)
        elif isinstance(self.batch, (tuple, list)):
            output = model(*self.batch)
        else:
            output = model(self.batch)
        return _scalar(output)

    def _training_step(self, model: nn.Module) -> object:
        """Call it through DDP, which calls `forward`, as Lightning's own strategies do."""
        module: Any = self.module
        original = module.forward

        def redirected(batch: object) -> object:
            module.forward = original
            return module.training_step(batch, 0)

        module.forward = redirected
        try:
            return model(self.batch)
        finally:
            module.forward = original

    def save(self) -> None:
        """Save the parameters, the buffers and the state of the optimizers."""
        self._saved = {name: tensor.detach().clone() for name, tensor in self._tensors()}
        self._saved_optimizers = [copy.deepcopy(optimizer.state_dict()) for optimizer in self.optimizers]

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the saved parameters, buffers and optimizers."""
        for name, tensor in self._tensors():
            tensor.copy_(self._saved[name])
        for optimizer, state in zip(self.optimizers, self._saved_optimizers, strict=True):
            optimizer.load_state_dict(copy.deepcopy(state))

    def _tensors(self) -> Iterable[tuple[str, Tensor]]:
        yield from self.module.named_parameters()
        yield from self.module.named_buffers()


def _scalar(output: object) -> Tensor:
    if isinstance(output, Mapping) and "loss" in output:
        output = output["loss"]
    elif hasattr(output, "loss"):
        output = output.loss
    if not isinstance(output, Tensor) or output.numel() != 1:
        what = f"a tensor of shape {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
        raise ValueError(f"the model returned {what}, not a loss; return (model, batch, loss_fn), or a loss")
    return output


def is_lightning(module: nn.Module) -> bool:
    """Return whether the model defines its own `training_step`."""
    return callable(getattr(module, "training_step", None))


def load_task(spec: str, device: torch.device, seed: int) -> Task:
    """Call `module:factory`, with a seed of the global random number generator; refuse what is no model and batch."""
    module_name, _, attribute = spec.rpartition(":")
    if not module_name or not attribute:
        raise ValueError(f"the model must be given as module:factory, such as my_module:make, got {spec!r}")
    factory = _attempt(f"{spec}: importing it", lambda: imported(module_name, attribute))
    parts = _parts(spec, factory, seed)
    module = parts["model"]
    if not isinstance(module, nn.Module) or isinstance(module, DistributedDataParallel):
        raise ValueError(f"{spec}() returned {type(module).__name__} as the model, not a bare nn.Module; {_EXPECTED}")
    if not any(p.requires_grad for p in module.parameters()):
        raise ValueError(f"{spec}() returned a model without trainable parameters")
    batch, loss_fn, options = _first(parts["batch"]), parts.get("loss_fn"), parts.get("ddp") or {}
    if loss_fn is not None and not callable(loss_fn):
        raise ValueError(f"{spec}(): loss_fn must be a function (output, target) -> loss, got {loss_fn!r}")
    if not isinstance(options, Mapping):
        raise ValueError(f"{spec}(): ddp must be a dict of arguments of DistributedDataParallel, got {options!r}")
    if loss_fn is not None and not is_lightning(module) and isinstance(batch, (tuple, list)) and len(batch) < 2:
        raise ValueError(
            f"{spec}() returned a loss function and a batch of {len(batch)}, in a {type(batch).__name__}: with "
            "loss_fn(output, target) the batch is (inputs, target); with loss_fn(output) it is only the inputs"
        )
    module.to(device).train()
    later = (_moved(other, device) for other in _later_batches(spec, factory, seed, parts["batch"]))
    optimizers = _optimizers(spec, parts.get("optimizer"), module)
    return Task(module, _moved(batch, device), loss_fn, optimizers, dict(options), device, later)


def imported(module: str, attribute: str) -> Any:
    """Import an attribute of a module, given by name or `.py` file; the current folder takes precedence."""
    folder, file = os.path.split(os.path.abspath(module)) if module.endswith(".py") else (os.getcwd(), module)
    if sys.path[:1] != [folder]:
        sys.path.insert(0, folder)
    return getattr(importlib.import_module(file.removesuffix(".py")), attribute)


def _attempt(what: str, function: Callable[[], T]) -> T:
    try:
        return function()
    except Exception as error:
        raise ValueError(f"{what} failed, {type(error).__name__}: {error}") from error


def _parts(spec: str, factory: Callable[[], object], seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    made = _attempt(f"{spec}()", factory)
    if isinstance(made, (tuple, list)) and len(made) in (2, 3):
        made = dict(zip(("model", "batch", "loss_fn"), made, strict=False))
    if not isinstance(made, Mapping):
        raise ValueError(f"{spec}() returned {type(made).__name__}; {_EXPECTED}")
    if unknown := sorted(set(made) - _FIELDS):
        raise ValueError(f"{spec}() returned a dict with {unknown}; known keys are {sorted(_FIELDS)}")
    if missing := [key for key in ("model", "batch") if made.get(key) is None]:
        raise ValueError(f"{spec}() returned no {missing[0]}; {_EXPECTED}")
    return dict(made)


def _first(batch: object) -> object:
    return next(iter(batch)) if isinstance(batch, torch.utils.data.DataLoader) else batch


def _later_batches(spec: str, factory: Callable[[], object], seed: int, batch: object) -> Iterator[object]:
    """Yield batches of the ranks after this one: the loader's next batches, then the factory's with their seeds."""
    if isinstance(batch, torch.utils.data.DataLoader):
        yield from itertools.islice(batch, 1, None)
    for other in itertools.count(seed + 1):
        yield _first(_parts(spec, factory, other)["batch"])


def _optimizers(spec: str, given: Any, module: Any) -> list[Optimizer]:
    if given is None and is_lightning(module):
        given = _attempt(f"{spec}: configure_optimizers() without a Trainer", module.configure_optimizers)
    if given is None:
        return [torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=_LEARNING_RATE)]
    if found := list(_optimizers_in(given)):
        return found
    raise ValueError(f"{spec}: optimizer must be a torch.optim.Optimizer, got {given!r}")


def _optimizers_in(given: object) -> Iterator[Optimizer]:
    """Yield the optimizers in any return value of `configure_optimizers` that Lightning accepts."""
    if isinstance(given, Optimizer):
        yield given
    elif isinstance(given, (Mapping, tuple, list)):
        for inner in given.values() if isinstance(given, Mapping) else given:
            yield from _optimizers_in(inner)


def _moved(batch: Any, device: torch.device) -> Any:
    if hasattr(batch, "to"):  # tensors, and batches such as those of tokenizers
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {key: _moved(value, device) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        values = [_moved(value, device) for value in batch]
        return values if isinstance(batch, list) else type(batch)(*values) if hasattr(batch, "_fields") else (*values,)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        values_by_name = {one.name: getattr(batch, one.name) for one in dataclasses.fields(batch) if one.init}
        return dataclasses.replace(batch, **_moved(values_by_name, device))
    return batch
