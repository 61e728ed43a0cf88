"""A model with given gradients, and functions that run a hook on them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_commhooks.interface.hook import CommHook
from lightning_commhooks.runtime.attachment import Attachment
from lightning_commhooks.sources.attach import attach

Shapes = Mapping[str, tuple[int, ...]]
Gradients = dict[str, Tensor]
# Makes the gradients of a rank and step.
Make = Callable[[int, int, Shapes, torch.dtype], Gradients]

# Matrices of equal and different shapes, a convolution, vectors, and tensors with one element or none.
SHAPES: Shapes = {
    "first": (24, 40),
    "bias": (40,),
    "scalar": (),
    "second": (40, 24),
    "conv": (16, 8, 3, 3),
    "one": (1,),
    "third": (24, 40),
    "small": (3, 2),
    "row": (1, 50),
    "empty": (0, 3),
}
# Makes several buckets of these shapes, in MB.
SMALL_BUCKETS = 4e-3

# Device of this process's models; see `use_device`.
_device = torch.device("cpu")

# Warnings of hooks that run for a few steps only.
_EXPECTED_WARNINGS = ("hook=", "training ended after", "Grad strides do not match")


def use_device(device: torch.device | str) -> None:
    """Place this process's new models on a device. Gradients come from the CPU, and results are returned there."""
    global _device
    _device = torch.device(device)


def model_device() -> torch.device:
    """Return the device of this process's models."""
    return _device


class Params(nn.Module):
    """Parameters of given shapes whose gradients equal the arguments of `forward`."""

    def __init__(self, shapes: Shapes, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=dtype, device=_device)))

    def forward(self, gradients: Gradients) -> Tensor:
        """Return a loss with these gradients; parameters without a gradient are not used."""
        parameters = {name: self.get_parameter(name) for name in gradients}
        terms = ((p * gradients[name].to(p.device)).sum().double() for name, p in parameters.items())
        return sum(terms, torch.zeros((), dtype=torch.float64, device=next(self.parameters()).device))


def low_rank_gradients(
    rank: int, step: int, shapes: Shapes, dtype: torch.dtype = torch.float32, rows: int = 2
) -> Gradients:
    """Make gradients whose matrices span the same `rows` dimensions in all steps and on all ranks."""
    shared = torch.Generator().manual_seed(0)
    own = torch.Generator().manual_seed(1000 + 100 * step + rank)
    gradients = {}
    for name, shape in shapes.items():
        if len(shape) < 2:
            gradients[name] = torch.randn(shape, generator=own, dtype=torch.float64).to(dtype)
            continue
        left = torch.randn(shape[0], rows, generator=shared, dtype=torch.float64)
        right = torch.randn(rows, torch.Size(shape[1:]).numel(), generator=shared, dtype=torch.float64)
        weights = torch.randn(rows, 1, generator=own, dtype=torch.float64)
        gradients[name] = (left @ (weights * right)).view(shape).to(dtype)
    return gradients


def full_rank_gradients(rank: int, step: int, shapes: Shapes, dtype: torch.dtype = torch.float32) -> Gradients:
    """Make gradients of independent numbers around a mean that all ranks share."""
    own = torch.Generator().manual_seed(100 * step + rank)
    shared = torch.Generator().manual_seed(-1 - step)
    return {
        name: (torch.randn(shape, generator=own) + torch.randn(shape, generator=shared)).to(dtype)
        for name, shape in shapes.items()
    }


def zero_gradients(rank: int, step: int, shapes: Shapes, dtype: torch.dtype = torch.float32) -> Gradients:
    """Make gradients of zeros."""
    return {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}


def mean_gradients(
    make: Make, world: int, step: int, shapes: Shapes = SHAPES, dtype: torch.dtype = torch.float32
) -> Gradients:
    """Return the mean over ranks in float64; a parameter that a rank does not use counts as zero there."""
    ranks = [make(rank, step, shapes, dtype) for rank in range(world)]
    zeros = zero_gradients(0, step, shapes, torch.float64)
    return {name: sum((own[name].double() for own in ranks if name in own), zeros[name]) / world for name in shapes}


def backward(ddp: DistributedDataParallel, gradients: Gradients) -> Gradients:
    """Run one backward and return the `.grad` that DDP leaves, by name, on the CPU."""
    ddp.zero_grad(set_to_none=True)
    ddp(gradients).backward()
    return {name: p.grad.to("cpu", copy=True) for name, p in ddp.module.named_parameters() if p.grad is not None}


@contextmanager
def attached(
    hook: CommHook | str,
    shapes: Shapes = SHAPES,
    dtype: torch.dtype = torch.float32,
    exact_state: bool = False,
    grad_scaler: torch.amp.GradScaler | None = None,
    **ddp_options: Any,
) -> Iterator[tuple[DistributedDataParallel, Attachment]]:
    """Yield `(ddp, attachment)` of a `Params` model and close the attachment at the end."""
    ddp = DistributedDataParallel(Params(shapes, dtype), **{"bucket_cap_mb": SMALL_BUCKETS, **ddp_options})
    with warnings.catch_warnings():
        for message in _EXPECTED_WARNINGS:
            warnings.filterwarnings("ignore", message=message)
        attachment = attach(ddp, hook, exact_state=exact_state, grad_scaler=grad_scaler)
        yield ddp, attachment
        attachment.close()


def outputs(
    rank: int,
    world: int,
    hook: CommHook,
    make: Make,
    steps: int,
    shapes: Shapes = SHAPES,
    dtype: torch.dtype = torch.float32,
    options: Mapping[str, Any] | None = None,
) -> tuple[list[Gradients], dict[str, Any], dict[str, float]]:
    """Return the averaged gradients of every step, the final state and the metrics."""
    with attached(hook, shapes, dtype, **(options or {})) as (ddp, attachment):
        means = [backward(ddp, make(rank, step, shapes, dtype)) for step in range(steps)]
        metrics = attachment.metrics()  # first: the bytes that state_dict() sends are counted too
        return means, attachment.state_dict(), metrics


def norm(gradients: Gradients) -> float:
    """Return the Frobenius norm over all parameters, in float64."""
    return float(torch.cat([g.double().reshape(-1) for g in gradients.values()]).norm())


def distance(a: Gradients, b: Gradients) -> float:
    """Return the norm of the difference."""
    assert a.keys() == b.keys()
    return norm({name: a[name].double() - b[name].double() for name in a})


def same(a: Gradients, b: Gradients) -> bool:
    """Return whether two sets of gradients are equal bit by bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def equal_states(a: Any, b: Any) -> bool:
    """Return whether two states are equal bit by bit."""
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(equal_states(a[key], b[key]) for key in a)
    return torch.equal(a, b) if isinstance(a, Tensor) else bool(a == b)
