"""Rules for every hook, in each step: one rule per function.

A rule gets `run`, which calls a function on so many ranks, and a [`Case`][], and raises [`BrokenRule`][] with the rule
in words. Whatever runs on a rank is a function of a module, so that it can be sent there.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_commhooks.interface.averages_models import is_local
from lightning_commhooks.interface.hook import CommHook
from lightning_commhooks.testing.model import (
    SHAPES,
    Gradients,
    attached,
    backward,
    distance,
    full_rank_gradients,
    low_rank_gradients,
    mean_gradients,
    model_device,
    norm,
    outputs,
    same,
    zero_gradients,
)

# Half a unit in the last place of what a 16-bit number has at most.
ROUNDING_OF_16_BIT = 2**-7


class BrokenRule(AssertionError):
    """A hook does not do what every hook has to do."""


class Run(Protocol):
    """Calls `function(rank, world, *args)` on each of `world` ranks; returns the results by rank."""

    def __call__(self, function: Callable[..., Any], *args: Any, world: int) -> list[Any]: ...


@dataclass(frozen=True)
class Case:
    """A hook, and what is expected of it.

    Attributes:
        hook: with options that show what it does within a few steps.
        error: largest error of one step, as a fraction of the gradients' norm, for matrices of rank 2.
        rounding: what may be lost in a step though there is error feedback, as a fraction of the gradients' norm.
        bytes_sent: bytes that a rank sends in the third step, by the number of ranks, for one bucket of `SHAPES` in
            float32; `None`: whatever is measured.
        depends_on_buckets: whether the result depends on where DDP's buckets begin and end.
        goes_on_from_mean: whether a run resumed from the mean of the ranks' memory has to go on as it would have.
    """

    hook: CommHook
    error: float = 1.0
    rounding: float = 1e-5
    bytes_sent: Callable[[int], float] | None = None
    depends_on_buckets: bool = False
    goes_on_from_mean: bool = False


def demand(condition: object, broken: str) -> None:
    """Raise [`BrokenRule`][], which says what is broken, unless a condition holds."""
    if not condition:
        raise BrokenRule(broken)


def largest_norm(world: int, step: int, dtype: torch.dtype = torch.float32) -> float:
    """Norm of the largest rank's gradients."""
    return max(norm(low_rank_gradients(rank, step, SHAPES, dtype)) for rank in range(world))


def largest_norm_of(make: Callable[..., Gradients], world: int, step: int) -> float:
    """The same of other gradients."""
    return max(norm(make(rank, step, SHAPES)) for rank in range(world))


def check_result(means: list[Gradients], world: int, step: int, bound: float, dtype: torch.dtype) -> None:
    """All ranks have the same, and it is the mean of `low_rank_gradients`."""
    demand(
        all(same(means[0], other) for other in means[1:]),
        f"ranks got different results in step {step}: write the same numbers to bucket.flat on all ranks, made of what "
        "collectives return",
    )
    error = distance(means[0], mean_gradients(low_rank_gradients, world, step, dtype=dtype))
    error /= largest_norm(world, step, dtype)
    demand(
        error <= bound,
        f"in step {step} the result is off the mean over ranks by {error:.3g} of the gradients' norm, and error= is "
        f"{bound:.3g}",
    )


def _equal_gradients(rank: int, step: int, shapes: Any, dtype: torch.dtype = torch.float32) -> Gradients:
    return full_rank_gradients(0, step, shapes, dtype)


def _scale(result: Gradients, mean: Gradients) -> float:
    """How large what is in a result is there, compared with what it is in the mean: 1 for each part that was sent."""
    squares, products = (
        sum(float((result[name].double() * other[name].double()).sum()) for name in result) for other in (result, mean)
    )
    return squares / products if products else 0.0


# No rule has a hook make more steps.
_MOST_STEPS = 20


def _first_step_alone(rank: int, world: int, hook: CommHook) -> int | None:
    with attached(hook) as (_, attachment):
        assert attachment.bound is not None
        return next((step for step in range(_MOST_STEPS) if is_local(attachment.bound, step)), None)


def ranks_agree_on_the_mean(run: Run, case: Case, world: int) -> None:
    """All ranks get the same, and it is the mean over ranks up to the stated error."""
    alone = run(_first_step_alone, case.hook, world=world)[0]
    demand(
        alone is None,
        f"ranks step alone in step {alone}, and the rules are about averages of gradients in the first {_MOST_STEPS} "
        "steps: set an option by which ranks step alone later, as start_localSGD_iter of local SGD",
    )
    means, *_ = run(outputs, case.hook, _equal_gradients, 1, world=world)[0]
    scale = _scale(means[0], _equal_gradients(0, 0, SHAPES))
    demand(
        abs(scale - world) > 0.05 * world,
        f"the result is {scale:.1f} times the mean of {world} ranks: divide by group.size?",
    )
    demand(
        abs(scale - 1 / world) > 0.05 / world,
        f"the result is {scale:.2f} times the mean of {world} ranks: divided by group.size twice?",
    )
    results = run(outputs, case.hook, low_rank_gradients, 3, world=world)
    for step in range(3):
        check_result([means[step] for means, _, _ in results], world, step, case.error + 1e-5, torch.float32)


def all_dtypes(run: Run, case: Case, world: int) -> None:
    """Gradients of 64, 32 and 16 bit come back in their own dtype."""
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        results = run(outputs, case.hook, low_rank_gradients, 2, SHAPES, dtype, world=world)
        for means, _, _ in results:
            demand(
                all(mean.dtype == dtype for mean in means[1].values()),
                f"gradients of {dtype} came back in another dtype",
            )
        rounding = 1e-9 if dtype == torch.float64 else 8 * ROUNDING_OF_16_BIT
        check_result([means[1] for means, _, _ in results], world, 1, case.error + rounding, dtype)


def zero_gradients_stay_zero(run: Run, case: Case, world: int) -> None:
    """Gradients that are zero on all ranks stay zero."""
    for find_unused in (False, True):
        options = {"find_unused_parameters": find_unused}
        for means, _, _ in run(outputs, case.hook, zero_gradients, 4, SHAPES, torch.float32, options, world=world):
            demand(
                all(not mean.any() for step in means for mean in step.values()), "zero gradients became other numbers"
            )


def _with_rng(rank: int, world: int, hook: CommHook) -> tuple[list[list[Gradients]], bool]:
    torch.manual_seed(rank)
    before = torch.get_rng_state()
    results = [outputs(rank, world, hook, full_rank_gradients, 4)[0] for _ in range(2)]
    return results, torch.equal(before, torch.get_rng_state())


def deterministic(run: Run, case: Case, world: int) -> None:
    """The same gradients give the same results, bit by bit, and the global random state is left alone."""
    for (once, again), is_untouched in run(_with_rng, case.hook, world=world):
        demand(
            all(same(a, b) for a, b in zip(once, again, strict=True)),
            "a second run with the same gradients has other bits, usually because the hook draws from the global "
            "random generator: let it have one of its own",
        )
        demand(is_untouched, "the hook changes the global random state: draw from a generator of its own")


_STEPS = 5


@dataclass(frozen=True)
class _WithBadStep:
    """The view that a rank has of some steps and a bad one between them, or none.

    Attributes:
        means: outputs of the good steps.
        bad: what the bad step gave.
        residuals: norms of what was not sent, before the bad step and after it.
        num_bad: bad steps that were counted.
        has_memory: whether the hook has.
    """

    means: list[Gradients]
    bad: Gradients
    residuals: tuple[float, float]
    num_bad: float
    has_memory: bool


def _with_bad_step(
    rank: int, world: int, hook: CommHook, bad_step: int | None, at: str, value: float, size: float
) -> _WithBadStep:
    means: list[Gradients] = []
    bad, residuals = {}, (0.0, 0.0)
    with attached(hook, find_unused_parameters=True) as (ddp, attachment):
        for step in range(_STEPS):
            if step == bad_step:
                gradients = {name: size * own for name, own in full_rank_gradients(rank, 100, SHAPES).items()}
                if rank == world - 1:
                    gradients[at].view(-1)[-1] = value
                before = attachment.residual_norm()
                bad = backward(ddp, gradients)
                residuals = before, attachment.residual_norm()
            means.append(backward(ddp, full_rank_gradients(rank, step, SHAPES)))
        has_memory = attachment.bound is not None and attachment.bound.has_memory
        return _WithBadStep(means, bad, residuals, attachment.metrics()["nonfinite_steps"], has_memory)


def _with_bad_steps(rank: int, world: int, hook: CommHook, bad_steps: list[tuple[Any, ...]]) -> list[_WithBadStep]:
    return [_with_bad_step(rank, world, hook, *arguments) for arguments in bad_steps]


# The step before which it comes, the parameter, its value, and how large all other gradients are; first none.
_BAD_STEPS = [
    (None, "first", 0.0, 1.0),
    (3, "first", float("inf"), 1e20),
    (3, "bias", float("nan"), 1.0),
    (1, "row", float("-inf"), 1.0),
    (0, "conv", float("inf"), 1e20),
]


def bad_steps_leave_nothing_behind(run: Run, case: Case, world: int) -> None:
    """A step with inf or NaN on one rank is NaN on all, and nothing of it comes back with later steps."""
    # What is particular about the others does not depend on the number of ranks.
    tried = _BAD_STEPS if world == 2 else _BAD_STEPS[:2]
    results = run(_with_bad_steps, case.hook, tried, world=world)
    for i, (step, at, value, size) in enumerate(tried[1:], start=1):
        where = f"; step {step} had {value} in {at!r} of the last rank, and gradients of {size:.0e} times the size"
        for good, one, first in ((ranks[0], ranks[i], results[0][i]) for ranks in results):
            finite = [bool(mean.isfinite().all()) for mean in one.bad.values() if mean.numel()]
            demand(
                not all(finite),
                "some rank sees only finite gradients in a step that is bad on one: what is sent has to tell, as a "
                f"scale or norm of all gradients does{where}",
            )
            if not one.has_memory:
                same_steps = all(same(a, b) for a, b in zip(good.means, one.means, strict=True))
                demand(same_steps, f"a bad step changes later ones, though the hook has no memory{where}")
                continue
            demand(not any(finite), f"some gradients of a bad step are finite, though the hook has a memory{where}")
            before, after = one.residuals
            demand(
                after <= (1 + ROUNDING_OF_16_BIT) * before,
                f"what is remembered is larger after a bad step, or not finite after it: it was {before:.3g} and is "
                f"{after:.3g}{where}",
            )
            demand(
                (good.num_bad, one.num_bad) == (0, 1),
                f"a bad step was counted {one.num_bad:.0f} times, and {good.num_bad:.0f} without one{where}",
            )
            largest = sum(largest_norm_of(full_rank_gradients, world, t) for t in range(_STEPS))
            for mean, other in zip(one.means, first.means, strict=True):
                demand(same(mean, other), f"ranks get different results after a bad step{where}")
                demand(norm(mean) <= 2 * largest, f"a part of a bad step comes back with a later one{where}")


_SCALES = [2.0**16, 2.0**17, 2.0**17, 2.0**5, 1.0, 3.0, 2.0**10, 2.0**9]


def _scaled_and_not(rank: int, world: int, hook: CommHook) -> list[tuple[list[Gradients], bool]]:
    """Outputs without a scaler, and with one whose scale changes, divided by the scale; whether the hook has memory."""
    results = []
    device = model_device()
    for scaler in (None, torch.amp.GradScaler(device.type)):
        means = []
        with attached(hook, grad_scaler=scaler) as (ddp, attachment):
            for step, scale in enumerate(_SCALES):
                gradients = full_rank_gradients(rank, step, SHAPES)
                if scaler is None:
                    means.append(backward(ddp, gradients))
                    continue
                ddp.zero_grad()
                scaler.scale(torch.ones((), device=device))  # makes the scale; the loss is of float64 here
                scaler.update(scale)
                (ddp(gradients) * scale).backward()
                means.append({name: _gradient(p).cpu() / scale for name, p in ddp.module.named_parameters()})
            assert attachment.bound is not None
            results.append((means, attachment.bound.has_memory))
    return results


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def loss_scale_makes_no_difference(run: Run, case: Case, world: int) -> None:
    """Under a `GradScaler` whose scale changes, results are those without, times the scale."""
    bound = max(2 * case.rounding, 1e-5)
    for (plain, _), (scaled, has_memory) in run(_scaled_and_not, case.hook, world=world):
        advice = (
            "Memory is kept in units of the loss: divide gradients by bucket.loss_scale on the way in, multiply on the "
            "way out"
            if has_memory
            else "Results have to be proportional to gradients; if the hook rounds numbers, state a larger rounding="
        )
        for step, (a, b) in enumerate(zip(plain, scaled, strict=True)):
            if _SCALES[step] >= 2**16 and not math.isfinite(norm(b)):
                continue  # float16 does not hold them, and the scaler would leave out the step
            demand(
                distance(a, b) <= bound * norm(a),
                f"the scale of a GradScaler makes a difference of {distance(a, b) / norm(a):.3g} in step {step}, after "
                f"scales {_SCALES[: step + 1]}; rounding={case.rounding:.3g} is stated. {advice}",
            )


def config_is_frozen_and_pickles(run: Run, case: Case, world: int) -> None:
    """A configuration cannot be changed, and pickles."""
    demand(
        pickle.loads(pickle.dumps(case.hook)) == case.hook,
        "the configuration does not come back from a pickle as it was",
    )
    try:
        case.hook.anything = 1  # type: ignore[attr-defined]
    except AttributeError:
        return
    raise BrokenRule("the configuration can be changed: make it a frozen dataclass")


# What a rank sends for a call, by the function: all tensors of it, times this.
_SENDERS: dict[str, tuple[int, Callable[[int], float]]] = {
    "all_reduce": (0, lambda w: 2 * (w - 1) / w),
    "all_gather": (1, lambda w: w - 1),
    "all_gather_into_tensor": (1, lambda w: w - 1),
    "all_gather_single": (1, lambda w: w - 1),
    "all_to_all_single": (1, lambda w: (w - 1) / w),
    "reduce_scatter_tensor": (1, lambda w: (w - 1) / w),
    "reduce_scatter_single": (1, lambda w: (w - 1) / w),
    "broadcast": (0, lambda w: 1),
}


@contextmanager
def _measuring() -> Iterator[list[float]]:
    """Bytes that are given to PyTorch's collectives, and in messages to gloo, meanwhile, as a list of numbers."""
    sent: list[float] = []
    originals = {name: getattr(dist, name) for name in _SENDERS if hasattr(dist, name)}
    gloo: Any = dist.ProcessGroupGloo
    send_message = gloo.send

    def measuring(name: str) -> Callable[..., Any]:
        place, factor = _SENDERS[name]

        def call(*args: Any, **kwargs: Any) -> Any:
            tensor = args[place]
            sent.append(factor(dist.get_world_size(kwargs.get("group"))) * tensor.numel() * tensor.element_size())
            return originals[name](*args, **kwargs)

        return call

    def send(self: Any, tensors: list[Tensor], *args: Any) -> Any:
        sent.extend(tensor.nbytes for tensor in tensors)
        return send_message(self, tensors, *args)

    for name in originals:
        setattr(dist, name, measuring(name))
    gloo.send = send
    try:
        yield sent
    finally:
        gloo.send = send_message
        for name, original in originals.items():
            setattr(dist, name, original)


def _measured(rank: int, world: int, hook: CommHook) -> tuple[dict[str, float], float]:
    """Bytes counted in a step, and bytes sent; not in the first two, after which DDP builds its buckets anew."""
    with attached(hook, bucket_cap_mb=25) as (ddp, attachment):
        for step in range(2):
            backward(ddp, full_rank_gradients(rank, step, SHAPES))
        before = attachment.metrics()
        with _measuring() as sent:
            backward(ddp, full_rank_gradients(rank, 2, SHAPES))
        counted = attachment.metrics()
        return {key: counted[key] - before[key] for key in _COUNTED}, sum(sent)


_COUNTED = ("bytes_sent", "bytes_dense", "steps", "collectives")


def bytes_are_counted(run: Run, case: Case, world: int) -> None:
    """`bytes_sent` is what ranks give to PyTorch's collectives, and what the hook is stated to send."""
    numel = sum(torch.Size(shape).numel() for shape in SHAPES.values())
    found = run(_measured, case.hook, world=world)
    # Shares of a sum differ by an element.
    counted, sent = sum(metrics["bytes_sent"] for metrics, _ in found), sum(sent for _, sent in found)
    demand(
        _close(counted, sent),
        f"{sent:.0f} bytes were sent, and {counted:.0f} counted: send by the group that the hook is given",
    )
    for metrics, _ in found:
        counted = metrics["bytes_sent"]
        if case.bytes_sent is not None:
            stated = case.bytes_sent(world)
            demand(_close(counted, stated), f"a step sends {counted:.0f} bytes, and bytes_sent says {stated:.0f}")
        demand(
            metrics["steps"] == 1 and metrics["collectives"] > 0,
            "no collective was counted: send by the ranks that reduce is given, as in `yield from "
            "ranks.all_reduce_mean_(bucket.flat)`",
        )
        dense = 2 * (world - 1) / world * 4 * numel
        demand(
            _close(metrics["bytes_dense"], dense),
            f"bytes_dense is {metrics['bytes_dense']:.0f}; plain DDP sends {dense:.0f}",
        )


def _close(a: float, b: float) -> bool:
    return abs(a - b) <= 1e-6 * max(abs(a), abs(b))
