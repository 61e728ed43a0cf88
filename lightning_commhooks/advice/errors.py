"""Errors of hooks among simulated ranks: the gradients of several batches are averaged in memory."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from lightning_commhooks.advice.candidates import DENSE, Candidate
from lightning_commhooks.advice.task import Task
from lightning_commhooks.collectives.errors import HookError
from lightning_commhooks.collectives.group import Group
from lightning_commhooks.collectives.in_memory import groups_in_memory, run_together
from lightning_commhooks.collectives.steps import Steps
from lightning_commhooks.hooks import Noop
from lightning_commhooks.interface.accumulation import Accumulated
from lightning_commhooks.interface.bucket import Bucket, Slot
from lightning_commhooks.interface.error_sample import ErrorSampler
from lightning_commhooks.interface.hook import CommHook
from lightning_commhooks.interface.precision import all_finite
from lightning_commhooks.wrappers.scale import accumulation_of

# Bounds on the number of simulated ranks, and the size of all their gradients, which decides between the bounds.
_MAX_RANKS = 16
_MIN_RANKS = 4
_MAX_BYTES = 2**31
# Error feedback and warm starts take some steps to settle.
_STEPS = 8
_SAMPLED_STEPS = 2
_SAMPLED_NUMEL = 2**18

# DDP's default bucket size.
_BUCKET_BYTES = 25 * 2**20


def num_averaged(world_size: int, gradient_bytes: int) -> int:
    """Return the number of ranks, out of `world_size`, among which errors are measured."""
    return min(world_size, max(_MIN_RANKS, min(_MAX_RANKS, _MAX_BYTES // max(1, gradient_bytes))))


def errors_among(
    world_size: int, task: Task, chosen: Sequence[Candidate], tell: Callable[[str], None] = lambda label: None
) -> dict[str, list[float]]:
    """Return relative errors of the averaged gradient in some steps, by label; none for hooks that average models.

    A sample of the ranks represents all of them: each has the gradients of its own batch, the same in all steps. All
    processes call this function, and rank 0 gets the result.
    """
    num_ranks = num_averaged(world_size, task.gradient_bytes)
    buckets = _buckets(task, [task.batch, *itertools.islice(task.later_batches, num_ranks - 1)])
    if dist.get_rank() > 0:
        return {}
    errors: dict[str, list[float]] = {DENSE: [0.0]}
    for candidate in chosen:
        if candidate.measured is not None and not isinstance(candidate.measured, Noop):
            tell(f"error of {candidate.label}")
            try:
                errors[candidate.label] = _errors(candidate.measured, buckets, task.device, world_size)
            except Exception as error:
                kind = ValueError if isinstance(error, ValueError) else HookError
                raise kind(f"hook {candidate.label} among {world_size} ranks: {error}") from error
    return errors


def _buckets(task: Task, batches: list[Any]) -> list[list[Bucket]]:
    """Return the gradients of each rank, in buckets similar to DDP's and equal on all ranks."""
    own, ranks = task.batch, []
    parameters = {name: p for name, p in reversed(list(task.module.named_parameters())) if p.requires_grad}
    groups: list[tuple[Slot, ...]] = []
    for name, parameter in parameters.items():
        last = parameters[groups[-1][0].name] if groups else None
        end = sum(slot.numel for slot in groups[-1]) if groups else 0
        if last is None or last.dtype != parameter.dtype or end * parameter.itemsize >= _BUCKET_BYTES:
            groups.append(())
            end = 0
        # DDP gives hooks complex gradients as pairs of real numbers.
        pair = (2,) if parameter.is_complex() else ()
        groups[-1] += (Slot(name, (*parameter.shape, *pair), end, parameter),)
    for batch in batches:
        task.batch = batch
        task.gradients(task.module)
        if dist.get_rank() > 0:  # has taken part in case the model has its own collectives
            continue
        found = {name: torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for name, p in parameters.items()}
        found = {name: torch.view_as_real(grad) if grad.is_complex() else grad for name, grad in found.items()}
        flats = [torch.cat([found[slot.name].reshape(-1) for slot in slots]).cpu() for slots in groups]
        if not all(flat.isfinite().all() for flat in flats):
            raise ValueError(
                "gradients of the model are inf or NaN, so the errors of hooks are unknown; give a model, a batch and "
                "a loss whose gradients are finite"
            )
        ranks.append([Bucket(flat, 0, True, 0, slots) for flat, slots in zip(flats, groups, strict=True)])
    task.batch = own
    task.restore()
    return ranks


def _errors(hook: CommHook, buckets: list[list[Bucket]], device: torch.device, world_size: int) -> list[float]:
    """Measure among the sampled ranks or, if the hook rejects that number, among all ranks with repeated buckets."""
    for size in (len(buckets), world_size):
        ranks = zip(itertools.cycle(buckets), groups_in_memory(size, device), strict=False)
        try:
            return run_together([functools.partial(_run_rank, hook, own, group) for own, group in ranks])[0]
        except ValueError:
            if size == world_size:
                raise
    raise AssertionError


def _run_rank(hook: CommHook, own: list[Bucket], group: Group) -> Steps[list[float]]:
    """Run one rank, bucket by bucket, so that only one bucket's state is in memory."""
    numel = sum(bucket.flat.numel() for bucket in own)
    samplers = {step: ErrorSampler(1, _SAMPLED_NUMEL, numel) for step in range(_STEPS - _SAMPLED_STEPS, _STEPS)}
    for recorded in own:
        bound = hook.bind(group)
        if bound.is_local(_STEPS):
            return []
        for step in range(_STEPS):
            accumulated = Accumulated(weight=1.0) if accumulation_of(hook) != "framework" else None
            flat, sampler = recorded.flat.to(group.device, copy=True), samplers.get(step)
            bucket = dataclasses.replace(recorded, flat=flat, step=step, accumulated=accumulated)
            taken = sampler.take(flat, bucket) if sampler is not None else None
            finite = yield from bound.reduce(bucket, group)
            if bound.has_memory:
                bound.end_step((all_finite(flat) if finite is None else finite).cpu())
            if sampler is not None and taken is not None:
                yield from sampler.compare(taken, flat, bucket, group)
        bound.release()
    return [sampler.relative_error for sampler in samplers.values()]
