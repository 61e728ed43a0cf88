"""Pseudo-gradients of DiLoCo: their means over ranks, immediately or during training, and the length of periods."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from lightning_commhooks.collectives.averaging import check_same, check_same_in_background, flat_view
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

# Two different digests: buffers may differ.
_UNKNOWN = (0, 1)


def at_least_float32(parameter: Tensor) -> Tensor:
    """Return a parameter's elements, flat in memory order."""
    flat = flat_view(parameter)
    return flat.reshape(-1).to(torch.promote_types(flat.dtype, torch.float32))


def pseudo_gradients_of(parameters: Mapping[str, Tensor], anchors: Mapping[str, Tensor], step: int) -> list[Bucket]:
    """Return the difference between the common model and this rank's model, a bucket for each dtype.

    Args:
        parameters: the parameters by name.
        anchors: their values in the common model. Parameters that were in no backward have none.
        step: number of earlier outer steps.
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


class PseudoGradients:
    """Averages pseudo-gradients with a hook that averages gradients.

    Args:
        group: all ranks.
        encoding: the hook.
        in_background: whether ranks continue to train meanwhile.

    Attributes:
        inner: the bound hook.
        under_way: averages in flight by `(optimizer, fragment)`: a function that waits for the end and returns the
            ranks' digests of their buffers, and the buckets.
    """

    def __init__(self, group: Group, encoding: CommHook, in_background: bool) -> None:
        self._group = group.split([range(group.size)], apart=True) if in_background else group
        self._in_background = in_background
        self.inner = encoding.bind(self._group)
        self.under_way: dict[tuple[str, int], tuple[Callable[[], list[int]], list[Bucket]]] = {}
        # The digests of averages that have ended.
        self._told: dict[tuple[str, int], Collection[int]] = {}

    def begin(
        self, fragment: int, buckets: list[Bucket], stepped: OptimizerStep, weigh: Callable[[], float] | None = None
    ) -> None:
        """Begin to average the pseudo-gradients of an optimizer's parameters, in place.

        Args:
            fragment: number of the fragment.
            buckets: the pseudo-gradients.
            stepped: the optimizer.
            weigh: returns this rank's weight, 1 on average, once all ranks are there.
        """
        num = sum(len(bucket.slots) for bucket in buckets)
        numel = sum(bucket.flat.numel() for bucket in buckets)
        what = f"take an outer step of {num} parameters with {numel} elements of {stepped.optimizer!r}"
        average = self._average_in_background if self._in_background else self._average_now
        self.under_way[stepped.optimizer, fragment] = average(what, buckets, stepped, weigh), buckets

    def _average_now(
        self, what: str, buckets: list[Bucket], stepped: OptimizerStep, weigh: Callable[[], float] | None
    ) -> Callable[[], list[int]]:
        told = check_same(what, self._group, stepped.models.digest_of_buffers())
        weight = 1.0 if weigh is None else weigh()
        for bucket in buckets if weight != 1 else ():
            bucket.flat.mul_(weight)
        self._group.finish(self._average(buckets, self._group))
        return lambda: [number for number, *_ in told]

    def _average_in_background(
        self, what: str, buckets: list[Bucket], stepped: OptimizerStep, weigh: object
    ) -> Callable[[], list[int]]:
        check: list[Callable[[], list[int]]] = []
        digest_of_buffers = stepped.models.digest_of_buffers()

        def run(ranks: Group) -> Steps[None]:
            check.append((yield from check_same_in_background(what, ranks, digest_of_buffers)))
            yield from self._average(buckets, ranks)

        wait = stepped.models.begin(self._group, run)

        def wait_and_check() -> list[int]:
            wait()
            return check[0]()

        return wait_and_check

    def _average(self, buckets: list[Bucket], ranks: Group) -> Steps[None]:
        for bucket in buckets:
            with counted(bucket.flat, ranks):
                yield from self.inner.reduce(bucket, ranks)
            # With inf or NaN in it the model is lost as well.
            self.inner.end_step(torch.tensor(True, device="cpu"))

    def end(self, optimizer: str, fragment: int) -> Iterator[tuple[str, Tensor]]:
        """Wait for an average, if one is in flight, and yield names and flat means."""
        if (optimizer, fragment) not in self.under_way:
            return
        wait, buckets = self.under_way.pop((optimizer, fragment))
        self._told[optimizer, fragment] = wait()
        for bucket in buckets:
            for slot in bucket.slots:
                yield slot.name, slot.view(bucket.flat).view(-1)

    def note_buffers(self, fragment: int, stepped: OptimizerStep, *, has_average: bool) -> None:
        """Compare buffers at the next average of the model if they differed when this pseudo-gradient's began."""
        # A state that was loaded has averages without digests.
        told = self._told.pop((stepped.optimizer, fragment), _UNKNOWN if has_average else ())
        stepped.models.note_digests_of_buffers(told)

    def release(self) -> None:
        """Release all tensors."""
        self.under_way, self._told = {}, {}
        self.inner.release()


class Pace:
    """Steps of one period after another, each as many as this rank can take in `seconds`.

    The number of steps is set when a period begins, from the duration of the previous period's steps, so that ranks
    that step together agree on it without a message in each step. Dynamic local updates, Liu et al. 2024,
    https://arxiv.org/abs/2401.09135, section 5, which give every worker a share of the fastest one's steps.

    Args:
        group: all ranks.
        subgroup: the ranks that average gradients with this one in each step; the slowest of them sets the number.
        first: steps of the first period, which measures how long they take.
        seconds: intended duration of a period.

    Attributes:
        length: steps of this period.
        taken: steps of it that this rank has taken.
    """

    def __init__(self, group: Group, subgroup: Sequence[int], first: int, seconds: float) -> None:
        self._group, self._subgroup, self._seconds = group, subgroup, seconds
        self.length, self.taken = first, 0
        # When the first step of the period ended, and the last one.
        self._first = self._last = 0.0

    def step(self, num_steps: int) -> None:
        """Count steps of the optimizer, the last of which has just ended."""
        is_first = not self.taken
        self.taken += num_steps
        if self.is_over() and self._group.device.type == "cuda":
            torch.empty(1, device=self._group.device).item()  # the time of this device's work, without the average
        # Before the average: its wait for slower ranks is not part of a step.
        self._last = time.monotonic()
        if is_first:
            self._first = self._last

    def is_over(self, num_steps: int = 0) -> bool:
        """Return whether the period is over after `num_steps` more steps."""
        return self.taken + num_steps >= self.length

    def end(self) -> float:
        """End the period on all ranks; returns this rank's weight in the mean, by its steps: 1 on average."""
        microseconds = (self._last - self._first) * 1e6 / max(1, self.taken - 1)
        told = self._group.all_gather_quietly([self.taken, int(microseconds)])
        weight = self.taken * len(told) / sum(steps for steps, _ in told)
        slowest = max(1, *(told[rank][1] for rank in self._subgroup))
        self.length, self.taken = max(2, round(self._seconds * 1e6 / slowest)), 0
        return weight


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
    """Return the hook that averages pseudo-gradients.

    Args:
        given: the name of a format, or a hook.
        error_feedback: whether the hook's compression error is added to the next pseudo-gradient.

    Raises:
        ValueError: unknown name; a hook that averages no gradients, or starts late; no such error feedback.
    """
    if isinstance(given, CommHook):
        return _checked(given, error_feedback)
    if not isinstance(given, str) or given not in _HOOKS:
        raise ValueError(
            f"pseudo_gradient must be one of {[*get_args(PseudoGradient)]} or a hook, as "
            f"PowerSGD(start_powerSGD_iter=0), got {given!r}"
        )
    hook = _HOOKS[given]
    if not error_feedback or given == "topk":
        return hook
    if not hasattr(hook, "use_error_feedback"):
        raise ValueError(
            f"error_feedback=True has no effect with pseudo_gradient={given!r}; use 'int8', 'int4', 'int2' or 'topk'"
        )
    return dataclasses.replace(hook, use_error_feedback=True)  # type: ignore[type-var]


def has_residuals(given: PseudoGradient | CommHook, error_feedback: bool) -> bool:
    """Whether the hook that averages pseudo-gradients has error feedback."""
    return pseudo_gradient_hook(given, error_feedback).bind(Group(None)).has_memory


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
