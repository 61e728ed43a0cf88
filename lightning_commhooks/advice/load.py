"""The model and batch that `module:factory` on the command line makes."""

from __future__ import annotations

import importlib
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_commhooks.advice.task import Task, is_lightning

T = TypeVar("T")
_EXPECTED = (
    "it must return (model, batch), (model, batch, loss_fn), or a dict with 'model' and 'batch' and optionally "
    "'loss_fn', 'optimizer' and 'ddp'"
)
_FIELDS = {"model", "batch", "loss_fn", "optimizer", "ddp"}
_LEARNING_RATE = 1e-4


def load_task(spec: str, device: torch.device, seed: int) -> Task:
    """Call `module:factory`; modules in the current folder take precedence.

    Args:
        spec: name of a module or path of a `.py` file, and name of a function without arguments.
        device: device that model and batch are moved to.
        seed: seed of the global random number generator for the call.

    Raises:
        ValueError: the function does not exist, failed, or did not return a model and a batch.
    """
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
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {key: _moved(value, device) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        return [_moved(value, device) for value in batch]
    return batch
