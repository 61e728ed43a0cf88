"""The user's model: what `module:factory` on the command line stands for."""

from __future__ import annotations

import importlib
import os
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

_EXPECTED = (
    "it must return (model, batch), (model, batch, loss_fn), or a dict with 'model' and 'batch' and, if need be, "
    "'loss_fn', 'optimizer' and 'ddp'"
)
_FIELDS = {"model", "batch", "loss_fn", "optimizer", "ddp"}
_LEARNING_RATE = 1e-4


@dataclass
class Task:
    """A model, a batch and what to do with them in one step of training.

    Attributes:
        module: the model, not wrapped.
        batch: what each step is computed on.
        loss_fn: `loss_fn(model(inputs), target)`; `None`: the model's output is the loss, or has it as `.loss`.
        optimizers: which step after each backward.
        ddp_options: further arguments of `DistributedDataParallel`.
        device: of the model.
    """

    module: nn.Module
    batch: Any
    loss_fn: Callable[..., Tensor] | None
    optimizers: list[Optimizer]
    ddp_options: dict[str, Any]
    device: torch.device
    _saved: dict[str, Tensor] = field(default_factory=dict, repr=False)

    @property
    def gradient_bytes(self) -> int:
        """Size of all gradients."""
        return sum(p.numel() * p.element_size() for p in self.module.parameters() if p.requires_grad)

    def wrap(
        self, process_group: dist.ProcessGroup | None = None, *, make_equal: bool = False
    ) -> DistributedDataParallel:
        """Wrap the model anew.

        Args:
            process_group: the ranks; `None`: all.
            make_equal: give all of them rank 0's model, which takes as long as sending it does.
        """
        options = {"process_group": process_group, "init_sync": make_equal, **self.ddp_options}
        if self.device.type == "cuda":
            options["device_ids"] = [self.device]
        return DistributedDataParallel(self.module, **options)

    def step(self, model: nn.Module) -> None:
        """Forward, backward and the optimizers' steps."""
        self.gradients(model)
        for optimizer in self.optimizers:
            optimizer.step()

    def gradients(self, model: nn.Module) -> None:
        """Forward and backward."""
        for parameter in self.module.parameters():
            parameter.grad = None
        self._loss(model).backward()

    def _loss(self, model: nn.Module) -> Tensor:
        if _is_lightning(self.module):
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
        """Call it through DDP, which calls `forward`: in the same way as Lightning's own strategies."""
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
        """Remember parameters and buffers."""
        self._saved = {name: tensor.detach().clone() for name, tensor in self._tensors()}

    @torch.no_grad()
    def restore(self) -> None:
        """Put remembered parameters and buffers back."""
        for name, tensor in self._tensors():
            tensor.copy_(self._saved[name])

    def _tensors(self) -> Iterable[tuple[str, Tensor]]:
        yield from self.module.named_parameters()
        yield from self.module.named_buffers()


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
    torch.manual_seed(seed)
    try:
        made = factory()
    except Exception as error:
        raise ValueError(f"{spec}() failed: {type(error).__name__}: {error}") from error
    parts = _parts(spec, made)
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
    batch = parts["batch"]
    if isinstance(batch, torch.utils.data.DataLoader):
        batch = next(iter(batch))
    task = Task(module, _moved(batch, device), loss_fn, [], dict(options), device)
    task.optimizers = _optimizers(spec, parts.get("optimizer"), module)
    return task


def try_task(spec: str, task: Task) -> None:
    """Compute gradients once; apart from `load_task`, for a model may wait for other ranks here.

    Raises:
        ValueError: that failed.
    """
    try:
        task.gradients(task.module)
    except Exception as error:
        raise ValueError(
            f"{spec}: a forward and backward of the model on the batch failed, {type(error).__name__}: {error}"
        ) from error


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


def _parts(spec: str, made: object) -> dict[str, Any]:
    if isinstance(made, Mapping):
        if unknown := sorted(set(made) - _FIELDS):
            raise ValueError(f"{spec}() returned a dict with {unknown}; known are {sorted(_FIELDS)}")
        parts = dict(made)
    elif isinstance(made, (tuple, list)) and len(made) in (2, 3):
        parts = dict(zip(("model", "batch", "loss_fn"), made, strict=False))
    elif hasattr(made, "model") and hasattr(made, "batch"):
        parts = {key: getattr(made, key) for key in _FIELDS if hasattr(made, key)}
    else:
        raise ValueError(f"{spec}() returned {type(made).__name__}; {_EXPECTED}")
    if missing := [key for key in ("model", "batch") if parts.get(key) is None]:
        raise ValueError(f"{spec}() returned no {missing[0]}; {_EXPECTED}")
    return parts


def _optimizers(spec: str, given: object, module: nn.Module) -> list[Optimizer]:
    if given is None and _is_lightning(module):
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


def _scalar(output: object) -> Tensor:
    if isinstance(output, Mapping) and "loss" in output:
        output = output["loss"]
    elif hasattr(output, "loss"):
        output = output.loss
    if not isinstance(output, Tensor) or output.numel() != 1:
        what = f"a tensor of shape {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
        raise ValueError(f"no loss came out, but {what}; return (model, batch, loss_fn), or a model that gives a loss")
    return output


def _is_lightning(module: nn.Module) -> bool:
    return callable(getattr(module, "training_step", None))


def _moved(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {key: _moved(value, device) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        return [_moved(value, device) for value in batch]
    return batch
