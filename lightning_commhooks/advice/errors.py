"""Errors of hooks among ranks that are not there: gradients of several batches are averaged for real, in memory."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_commhooks.advice.candidates import DENSE, NOOP, Candidate
from lightning_commhooks.advice.task import Task, Tell
from lightning_commhooks.collectives.errors import HookError
from lightning_commhooks.collectives.group import Group
from lightning_commhooks.collectives.in_memory import groups_in_memory, run_together
from lightning_commhooks.collectives.steps import Steps, result
from lightning_commhooks.interface.averages_models import is_local
from lightning_commhooks.interface.bucket import Bucket
from lightning_commhooks.interface.error_sample import ErrorSampler
from lightning_commhooks.interface.hook import BoundHook, CommHook
from lightning_commhooks.interface.precision import all_finite
from lightning_commhooks.sources.attach import attach
from lightning_commhooks.wrappers.scale import accumulation_of

# Ranks whose gradients are averaged, at most; at least, where there are as many; in between, what may be spent on them.
_MAX_RANKS = 16
_MIN_RANKS = 4
_MAX_BYTES = 2**31
_MAX_SECONDS = 40.0
# Error feedback and warm starts take some steps to settle.
_STEPS = 8
_SAMPLED_STEPS = 2
_SAMPLED_NUMEL = 2**18


def num_averaged(world_size: int, gradient_bytes: int, seconds: float) -> int:
    """Among how many of `world_size` ranks errors are measured, if a batch and its gradients take so many seconds."""
    affordable = min(_MAX_RANKS, _MAX_BYTES // max(1, gradient_bytes), int(_MAX_SECONDS / max(1e-6, seconds)))
    return min(world_size, max(_MIN_RANKS, affordable))


def errors_among(
    num_ranks: int,
    world_size: int,
    task: Task,
    alone: dist.ProcessGroup,
    chosen: Sequence[Candidate],
    tell: Tell = lambda what, label: None,
) -> dict[str, list[float]]:
    """Relative errors of the averaged gradient in some steps, by label; none of hooks with which ranks step alone.

    Each of `num_ranks` ranks has the gradients of a batch of its own, the same in all steps. They stand for
    `world_size` ranks; hooks that do not fit fewer get as many. Collective; `alone` is the group of this process.

    Raises:
        ValueError: a hook does not fit, or there are no batches for other ranks. Raised in all processes.
    """
    batches = _agreed(lambda: [task.batch, *itertools.islice(task.further, num_ranks - 1)])
    gradients = _gradients(task, alone, batches)
    errors: dict[str, list[float]] = {DENSE: [0.0], NOOP: []}
    for candidate in chosen:
        if candidate.hook is not None and candidate.label != NOOP:
            tell("averaging", candidate.label)
            sizes = sorted({num_ranks, world_size})
            # In one process: the others would do the same.
            found = [_agreed(functools.partial(_errors, candidate, gradients, sizes, task))]
            dist.broadcast_object_list(found, device=task.device)
            errors[candidate.label] = found[0]
    return errors


def _agreed(make: Callable[[], list[Any]]) -> list[Any]:
    """What `make` returns here; its `ValueError` if it raises one in any process. Collective."""
    own: list[Any] = []
    text = None
    try:
        own = make()
    except ValueError as error:
        text = str(error)
    texts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    if wrong := [text for text in texts if text is not None]:
        raise ValueError(wrong[0])
    return own


@dataclass
class _Recorded:
    """A bucket of one rank, as it comes from a backward; the gradients on the host."""

    flat: Tensor
    bucket: Bucket

    def at(self, step: int, hook: CommHook, device: torch.device) -> Bucket:
        """A copy of this bucket on a device, in a step that has no other one."""
        accumulated = self.bucket.accumulated if accumulation_of(hook) != "framework" else None
        if accumulated is not None:
            accumulated = dataclasses.replace(accumulated, factor=None)
        flat = self.flat.to(device, copy=True)
        return dataclasses.replace(self.bucket, flat=flat, index=0, is_last=True, step=step, accumulated=accumulated)


@dataclass(frozen=True, eq=False)
class _Recorder(CommHook):
    """Keeps dense gradients."""

    name: ClassVar[str] = "recorder"
    kept: dict[tuple[str, ...], _Recorded]

    def bind(self, group: Group) -> BoundHook:
        return _BoundRecorder(self.kept, group)


class _BoundRecorder(BoundHook):
    has_memory = True  # is told of unused parameters

    def __init__(self, kept: dict[tuple[str, ...], _Recorded], group: Group) -> None:
        super().__init__(group)
        self._kept = kept

    def reduce(self, bucket: Bucket, ranks: Group) -> Steps[None]:
        self._kept[bucket.names] = _Recorded(bucket.flat.detach().to("cpu", copy=True), bucket)
        return result(None)


def _gradients(task: Task, alone: dist.ProcessGroup, batches: list[Any]) -> list[list[_Recorded]]:
    """Buckets of each rank, the same ones for all."""
    kept: dict[tuple[str, ...], _Recorded] = {}
    ranks: list[dict[tuple[str, ...], _Recorded]] = []
    task.restore()
    model = task.wrap(alone)
    attachment = attach(model, _Recorder(kept), accumulation=1)
    own = task.batch
    try:
        task.gradients(model)  # DDP makes its final buckets then
        for batch in batches:
            kept.clear()
            task.batch = batch
            task.gradients(model)
            ranks.append(dict(kept) if dist.get_rank() == 0 else {})
    finally:
        task.batch = own
        attachment.close()
        task.restore()
    every = {names: recorded for rank in ranks for names, recorded in rank.items()}
    return [[rank.get(names, _unused(recorded)) for names, recorded in every.items()] for rank in ranks]


def _unused(recorded: _Recorded) -> _Recorded:
    """A bucket that DDP skips, since a rank uses nothing in it."""
    bucket = dataclasses.replace(recorded.bucket, unused=frozenset(recorded.bucket.names))
    return _Recorded(torch.zeros_like(recorded.flat), bucket)


def _errors(candidate: Candidate, gradients: list[list[_Recorded]], sizes: list[int], task: Task) -> list[float]:
    """Among the first of `sizes`, numbers of ranks, that the hook fits; nothing but in the first process."""
    assert candidate.measured is not None
    for size in sizes if dist.get_rank() == 0 else []:
        try:
            groups = groups_in_memory(size, task.device)
            lives = [functools.partial(_live, candidate.measured, gradients, group) for group in groups]
            return run_together(lives)[0]
        except ValueError as error:
            if size == sizes[-1]:
                raise ValueError(f"hook {candidate.label}: {error}") from error
        except Exception as error:
            raise HookError(f"hook {candidate.label} failed among {size} emulated ranks: {error}") from error
    return []


def _live(hook: CommHook, gradients: list[list[_Recorded]], group: Group) -> Steps[list[float]]:
    """One rank: bucket by bucket, so that there is the memory of one bucket only."""
    own = gradients[group.rank % len(gradients)]
    numel = sum(recorded.flat.numel() for recorded in own)
    samplers = {step: ErrorSampler(1, _SAMPLED_NUMEL, numel) for step in range(_STEPS - _SAMPLED_STEPS, _STEPS)}
    for recorded in own:
        bound = hook.bind(group)
        if is_local(bound, _STEPS):
            return []
        for step in range(_STEPS):
            bucket, sampler = recorded.at(step, hook, group.device), samplers.get(step)
            taken = sampler.take(bucket.flat, bucket) if sampler is not None else None
            finite = yield from bound.reduce(bucket, group)
            if bound.has_memory:
                bound.end_step((all_finite(bucket.flat) if finite is None else finite).cpu())
            if sampler is not None and taken is not None:
                yield from sampler.compare(taken, bucket.flat, bucket, group)
        bound.release()
    return [sampler.relative_error for sampler in samplers.values()]
