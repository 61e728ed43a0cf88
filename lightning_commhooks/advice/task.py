"""The user's model, and one step of its training."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer


@dataclass
class Task:
    """A model, a batch and the objects that a training step needs.

    Attributes:
        module: the model, not wrapped.
        batch: the input of every step.
        loss_fn: `loss_fn(model(inputs), target)`; `None`: the model's output is the loss, or has a `.loss`.
        optimizers: optimizers, which step after each backward.
        ddp_options: further arguments of `DistributedDataParallel`.
        device: device of the model.
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
