"""How far ranks have moved from the common model, and the mean of it, by a hook: at once, or while they train on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Literal, get_args

import torch
from torch import Tensor

from lightning_commhooks.collectives.averaging import check_same, check_same_beside, flat_view
from lightning_commhooks.collectives.group import Group, counted
from lightning_commhooks.collectives.steps import Steps
from lightning_commhooks.hooks._local_sgd import LocalSGDConfig
from lightning_commhooks.hooks.allreduce import AllReduce
from lightning_commhooks.hooks.chunked_topk import ChunkedTopK
from lightning_commhooks.hooks.half import BF16
from lightning_commhooks.hooks.quantized import Int2, Int4, Int8
from lightning_commhooks.interface.bucket import Bucket, Slot
from lightning_commhooks.interface.hook import CommHook
from lightning_commhooks.interface.layout import memory_shape
from lightning_commhooks.interface.models import OptimizerStep
from lightning_commhooks.interface.start import late_starts


def at_least_float32(parameter: Tensor) -> Tensor:
    """A parameter's numbers, flat in memory order."""
    flat = flat_view(parameter)
    return flat.reshape(-1).to(torch.promote_types(flat.dtype, torch.float32))


def moves_of(parameters: Mapping[str, Tensor], anchors: Mapping[str, Tensor], step: int) -> list[Bucket]:
    """How far this rank is from the common model, a bucket for each dtype.

    Args:
        parameters: by name.
        anchors: their values in the common model. Parameters that were in no backward have none.
        step: number of outer steps before.
    """
    buckets: dict[torch.dtype, list[str]] = {}
    for name in parameters:
        if name in anchors:
            buckets.setdefault(anchors[name].dtype, []).append(name)
    return [_bucket(i, step, names, parameters, anchors) for i, names in enumerate(buckets.values())]


def _bucket(
    index: int, step: int, names: list[str], parameters: Mapping[str, Tensor], anchors: Mapping[str, Tensor]
) -> Bucket:
    sizes = [anchors[name].numel() for name in names]
    flat = anchors[names[0]].new_empty(sum(sizes))
    slots: list[Slot] = []
    for name, place in zip(names, flat.split(sizes), strict=True):
        torch.sub(anchors[name], at_least_float32(parameters[name]), out=place)
        slots.append(Slot(name, memory_shape(parameters[name]), place.storage_offset(), parameters[name]))
    return Bucket(flat, index, True, step, tuple(slots))


class Moves:
    """Averages moves by a hook of gradients.

    Args:
        group: all ranks.
        encoding: the hook.
        is_beside: whether ranks train on meanwhile.

    Attributes:
        inner: the hook, bound.
        under_way: what averages are of that have begun and were not waited for, `(optimizer, fragment)`.
    """

    def __init__(self, group: Group, encoding: CommHook, is_beside: bool) -> None:
        self._group = group.split([range(group.size)], apart=True) if is_beside else group
        self._is_beside = is_beside
        self.inner = encoding.bind(self._group)
        self.under_way: dict[tuple[str, int], tuple[Callable[[], None], list[Bucket]]] = {}

    def begin(
        self, fragment: int, moves: list[Bucket], stepped: OptimizerStep, weigh: Callable[[], float] | None = None
    ) -> None:
        """Begin to average moves of an optimizer's parameters, in place.

        `weigh` gives this rank's weight, 1 on average, when all ranks are there.
        """
        num = sum(len(bucket.slots) for bucket in moves)
        numel = sum(bucket.flat.numel() for bucket in moves)
        what = f"take an outer step of {num} parameters with {numel} elements of {stepped.optimizer!r}"
        average = self._average_beside if self._is_beside else self._average_now
        self.under_way[stepped.optimizer, fragment] = average(what, moves, stepped, weigh), moves

    def _average_now(
        self, what: str, moves: list[Bucket], stepped: OptimizerStep, weigh: Callable[[], float] | None
    ) -> Callable[[], None]:
        told = check_same(what, self._group, stepped.models.about_buffers())
        stepped.models.heard_of_buffers([number for number, *_ in told])
        weight = 1.0 if weigh is None else weigh()
        for bucket in moves if weight != 1 else ():
            bucket.flat.mul_(weight)
        self._group.finish(self._average(moves, self._group))
        return lambda: None

    def _average_beside(
        self, what: str, moves: list[Bucket], stepped: OptimizerStep, weigh: object
    ) -> Callable[[], None]:
        check: list[Callable[[], list[int]]] = []
        about_buffers = stepped.models.about_buffers()

        def run(ranks: Group) -> Steps[None]:
            check.append((yield from check_same_beside(what, ranks, about_buffers)))
            yield from self._average(moves, ranks)

        wait = stepped.models.begin(self._group, run)

        def wait_and_check() -> None:
            wait()
            stepped.models.heard_of_buffers(check[0]())

        return wait_and_check

    def _average(self, moves: list[Bucket], ranks: Group) -> Steps[None]:
        for bucket in moves:
            with counted(bucket.flat, ranks):
                yield from self.inner.reduce(bucket, ranks)
            # With inf or NaN in it the model is lost as well.
            self.inner.end_step(torch.tensor(True))

    def end(self, optimizer: str, fragment: int) -> Iterator[tuple[str, Tensor]]:
        """Wait for an average, if one is under way; names and means, flat."""
        wait, moves = self.under_way.pop((optimizer, fragment), (lambda: None, []))
        wait()
        for bucket in moves:
            for slot in bucket.slots:
                yield slot.name, slot.view(bucket.flat).view(-1)

    def release(self) -> None:
        """Release all tensors."""
        self.under_way = {}
        self.inner.release()


PseudoGradient = Literal["fp32", "bf16", "int8", "int4", "int2", "topk"]

_HOOKS: dict[str, CommHook] = {
    "fp32": AllReduce(),
    "bf16": BF16(accumulate_dtype="float32"),
    "int8": Int8(compress_1d=True, min_bytes=0, use_error_feedback=False),
    "int4": Int4(compress_1d=True, min_bytes=0, use_error_feedback=False),
    "int2": Int2(compress_1d=True, min_bytes=0, use_error_feedback=False),
    "topk": ChunkedTopK(compress_1d=True),
}


def pseudo_gradient_hook(given: PseudoGradient | CommHook, error_feedback: bool) -> CommHook:
    """The hook that averages pseudo-gradients.

    Args:
        given: its name, of those above, or itself.
        error_feedback: whether its compression error is added to the next pseudo-gradient.

    Raises:
        ValueError: unknown name; a hook that averages no gradients, or starts late; no such error feedback.
    """
    if isinstance(given, CommHook):
        return _checked(given, error_feedback)
    if given not in _HOOKS:
        raise ValueError(
            f"pseudo_gradient must be one of {[*get_args(PseudoGradient)]} or a hook, as "
            f"PowerSGD(start_powerSGD_iter=0); is {given!r}"
        )
    hook = _HOOKS[given]
    if not error_feedback or given == "topk":
        return hook
    if not hasattr(hook, "use_error_feedback"):
        raise ValueError(
            f"error_feedback=True has no effect with pseudo_gradient={given!r}; use 'int8', 'int4', 'int2' or 'topk'"
        )
    return dataclasses.replace(hook, use_error_feedback=True)  # type: ignore[type-var]


def _checked(hook: CommHook, error_feedback: bool) -> CommHook:
    name = type(hook).__name__
    if error_feedback:
        raise ValueError(f"error_feedback=True was given beside pseudo_gradient={name}(...), which has its own option")
    if isinstance(hook, LocalSGDConfig) or hook.is_outermost:
        raise ValueError(f"pseudo_gradient={name}(...) does not average gradients in each step; take another hook")
    for owner, field, start in late_starts(hook):
        raise ValueError(
            f"pseudo_gradient={type(owner).__name__}({field}={start!r}) would begin after so many outer steps: set "
            f"{field}=0"
        )
    return hook
