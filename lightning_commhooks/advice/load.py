"""What `module:factory` on the command line stands for."""

from __future__ import annotations

import importlib
import itertools
import os
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_commhooks.advice.task import Task, is_lightning

_EXPECTED = (
    "it must return (model, batch), (model, batch, loss_fn), or a dict with 'model' and 'batch' and, if need be, "
    "'loss_fn', 'optimizer' and 'ddp'"
)
_FIELDS = {"model", "batch", "loss_fn", "optimizer", "ddp"}
_LEARNING_RATE = 1e-4


def load_task(spec: str, device: torch.device, seed: int) -> Task:
    """Call `module:factory`, which is looked for in the current folder first.

    Args:
        spec: name of a module, or path of a `.py` file, and of a function without arguments in it.
        device: where model and batch are moved to.
        seed: of the global random numbers, before the call.

    Raises:
        ValueError: there is no such function, it failed, or what it returned is no model and batch.
    """
    factory = _factory(spec)
    begin = time.perf_counter()
    parts = _made(spec, factory, seed)
    load_seconds = time.perf_counter() - begin
    module = parts["model"]
    if isinstance(module, DistributedDataParallel):
        raise ValueError(f"{spec}() returned a wrapped model; return the model inside, which is wrapped here")
    if not isinstance(module, nn.Module):
        raise ValueError(f"{spec}() returned {type(module).__name__} as the model, no torch.nn.Module; {_EXPECTED}")
    if not any(p.requires_grad for p in module.parameters()):
        raise ValueError(f"{spec}() returned a model without parameters that are trained")
    loss_fn, options = parts.get("loss_fn"), parts.get("ddp") or {}
    if loss_fn is not None and not callable(loss_fn):
        raise ValueError(f"{spec}(): loss_fn must be a function (output, target) -> loss, is {loss_fn!r}")
    if not isinstance(options, Mapping):
        raise ValueError(f"{spec}(): ddp must be a dict of arguments of DistributedDataParallel, is {options!r}")
    module.to(device).train()
    batch = _first(parts["batch"])
    if loss_fn is not None and not is_lightning(module) and isinstance(batch, (tuple, list)) and len(batch) < 2:
        raise ValueError(
            f"{spec}() returned a loss function and a batch of {len(batch)}, in a {type(batch).__name__}: with "
            "loss_fn(output, target) the batch is (inputs, target); with loss_fn(output) it is the inputs alone"
        )
    further = (_moved(batch, device) for batch in _further(spec, factory, seed, parts["batch"]))
    optimizers = _optimizers(spec, parts.get("optimizer"), module)
    return Task(module, _moved(batch, device), loss_fn, optimizers, dict(options), device, further, load_seconds)


def _made(spec: str, factory: Callable[[], object], seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    try:
        made = factory()
    except Exception as error:
        raise ValueError(f"{spec}() failed: {type(error).__name__}: {error}") from error
    return _fields_of(spec, made)


def _first(batch: object) -> object:
    return next(iter(batch)) if isinstance(batch, torch.utils.data.DataLoader) else batch


def _further(spec: str, factory: Callable[[], object], seed: int, batch: object) -> Iterator[object]:
    """Batches of the ranks behind this one: the loader's next ones, or what the factory makes with their seeds."""
    if isinstance(batch, torch.utils.data.DataLoader):
        yield from itertools.islice(batch, 1, None)
    for other in itertools.count(seed + 1):
        yield _first(_made(spec, factory, other)["batch"])


def _factory(spec: str) -> Callable[[], object]:
    name, colon, attribute = spec.rpartition(":")
    if not colon or not name or not attribute:
        raise ValueError(f"the model is given as module:factory, as in my_module:make, is {spec!r}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    if name.endswith(".py"):
        folder, file = os.path.split(os.path.abspath(name))
        sys.path.insert(0, folder)
        name = file.removesuffix(".py")
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise ValueError(f"{spec}: there is no module {name!r} in {os.getcwd()} or on PYTHONPATH") from error
        raise ValueError(f"{spec}: importing {name!r} failed: {error}") from error
    except Exception as error:
        raise ValueError(f"{spec}: importing {name!r} failed: {type(error).__name__}: {error}") from error
    factory = getattr(module, attribute, None)
    if factory is None:
        known = [key for key, value in vars(module).items() if isinstance(value, types.FunctionType) and key[0] != "_"]
        raise ValueError(f"{spec}: module {name!r} has no {attribute!r}; its functions: {', '.join(known) or 'none'}")
    if not callable(factory):
        raise ValueError(f"{spec}: {attribute!r} is no function without arguments, is {factory!r}")
    return factory  # type: ignore[no-any-return]


def _fields_of(spec: str, made: object) -> dict[str, Any]:
    if isinstance(made, Mapping):
        if unknown := sorted(set(made) - _FIELDS):
            raise ValueError(f"{spec}() returned a dict with {unknown}; known are {sorted(_FIELDS)}")
        parts = dict(made)
    elif isinstance(made, (tuple, list)) and len(made) in (2, 3):
        parts = dict(zip(("model", "batch", "loss_fn"), made, strict=False))
    else:
        raise ValueError(f"{spec}() returned {type(made).__name__}; {_EXPECTED}")
    if missing := [key for key in ("model", "batch") if parts.get(key) is None]:
        raise ValueError(f"{spec}() returned no {missing[0]}; {_EXPECTED}")
    return parts


def _optimizers(spec: str, given: object, module: nn.Module) -> list[Optimizer]:
    if given is None and is_lightning(module):
        try:
            given = module.configure_optimizers()  # type: ignore[operator]
        except Exception as error:
            raise ValueError(
                f"{spec}: configure_optimizers() failed without a Trainer, {type(error).__name__}: {error}; "
                "return a dict with 'optimizer'"
            ) from error
    if given is None:
        return [torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=_LEARNING_RATE)]
    if isinstance(given, Mapping):
        given = given["optimizer"]
    elif isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], Sequence):
        given = given[0]  # Lightning's optimizers and schedulers
    found: list[Optimizer] = []
    for optimizer in given if isinstance(given, Sequence) else [given]:
        if not isinstance(optimizer, Optimizer):
            raise ValueError(f"{spec}: optimizer must be of torch.optim, is {optimizer!r}")
        found.append(optimizer)
    return found


def _moved(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {key: _moved(value, device) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        return [_moved(value, device) for value in batch]
    return batch
