"""Stock and user-written DDP hooks, `hook(state, bucket) -> Future`, run unchanged."""

# No `from __future__ import annotations`: this file compares real annotations, as DDP does.

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from lightning_commhooks.collectives.group import Group
from lightning_commhooks.collectives.steps import Steps, result
from lightning_commhooks.interface.bucket import Bucket
from lightning_commhooks.interface.hook import BoundHook, CommHook
from lightning_commhooks.interface.misplaced import refusal

DDPHook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]

_FUTURE = torch.futures.Future[torch.Tensor]
_STOCK = "torch.distributed.algorithms.ddp_comm_hooks"
_REPLACED_ON_GLOO = {
    f"{_STOCK}.powerSGD_hook.powerSGD_hook": ("hangs or aborts as soon as DDP has two buckets", "powersgd"),
    f"{_STOCK}.powerSGD_hook.batched_powerSGD_hook": ("fails on an assertion", "batched_powersgd"),
    f"{_STOCK}.quantization_hooks.quantization_pertensor_hook": ("runs on CUDA only", "bf16"),
    f"{_STOCK}.quantization_hooks.quantization_perchannel_hook": ("runs on CUDA only", "bf16"),
}


class UserFunction(CommHook):
    """A DDP hook function as a `CommHook` without state. DDP gets its result; `reduce` changes nothing."""

    def __init__(self, function: DDPHook) -> None:
        module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", None)
        self.name = f"{module}.{name or type(function).__qualname__}"  # type: ignore[misc]  # of the instance here
        self.function = function

    def __repr__(self) -> str:
        return self.name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UserFunction) and self.function == other.function

    def __hash__(self) -> int:
        return hash(self.function)

    def bind(self, group: Group) -> BoundHook:
        return _NoState(group)


class _NoState(BoundHook):
    def reduce(self, bucket: Bucket, ranks: Group) -> Steps[None]:
        return result(None)

    def reduce_sparse(self, grad: Tensor, bucket: Bucket, ranks: Group) -> Steps[Tensor]:
        return result(grad)


def check_user_hook(hook: object) -> None:
    """Check a function as DDP does, by a `ValueError` that says what to change.

    Mirrors `DistributedDataParallel._check_comm_hook`, except its refusal of functions *named* `bf16_compress_hook` on
    CPU: gloo reduces bfloat16.
    """
    name = getattr(hook, "__qualname__", repr(hook))
    if not callable(hook):
        raise ValueError(
            refusal(hook).replace("a name or a CommHook", "a name, a CommHook or a callable (state, bucket)")
        )
    signature = inspect.signature(hook)
    if "bucket" not in signature.parameters:
        raise ValueError(
            f"hook {name}{signature} needs a parameter named 'bucket': def {name}(state, bucket: dist.GradBucket)"
        )
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise ValueError(f"hook {name}{signature} must take (state, bucket): {error}") from error
    expected = (
        ("parameter 'bucket'", signature.parameters["bucket"].annotation, GradBucket, "dist.GradBucket"),
        ("return value", signature.return_annotation, _FUTURE, "torch.futures.Future[torch.Tensor]"),
    )
    for what, annotation, wanted, spelling in expected:
        if annotation is inspect.Signature.empty or annotation == wanted:
            continue
        text = " as text (drop `from __future__ import annotations`)" if isinstance(annotation, str) else ""
        raise ValueError(
            f"hook {name}: the {what} is annotated {annotation!r}{text}; DDP wants {spelling} or no annotation"
        )


def warn_if_broken_here(hook: DDPHook, backend: str) -> None:
    """Warn if a stock hook is known to fail on gloo, and name this library's replacement.

    Also inspects PyTorch's wrappers, whose hook is a closure variable.
    """
    if backend != dist.Backend.GLOO:
        return
    wrapped = [cell.cell_contents for cell in getattr(hook, "__closure__", None) or ()]
    works = () if torch.__version__ < "2.15" else ("quantization_pertensor_hook", "quantization_perchannel_hook")
    for function in filter(inspect.isfunction, (hook, *wrapped)):
        key = f"{function.__module__}.{function.__qualname__}"
        if key in _REPLACED_ON_GLOO and function.__qualname__ not in works:
            what, instead = _REPLACED_ON_GLOO[key]
            warnings.warn(
                f"PyTorch's {function.__qualname__} {what} on the gloo backend; use hook={instead!r}", stacklevel=5
            )
