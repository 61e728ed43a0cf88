"""Rules for every hook in single steps, one rule per function.

A rule gets `run`, which calls a function on a number of ranks, and a [`Case`][], and raises [`BrokenRule`][] with an
explanation. Functions that run on ranks are at module level, so that they can be pickled.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

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

# Bound on the relative rounding error of a 16-bit number.
ROUNDING_OF_16_BIT = 2**-7


class BrokenRule(AssertionError):
    """A hook breaks a rule that every hook has to follow."""


class Run(Protocol):
    """Calls `function(rank, world, *args)` on each of `world` ranks and returns the results by rank."""

    def __call__(self, function: Callable[..., Any], *args: Any, world: int) -> list[Any]: ...


@dataclass(frozen=True)
class Case:
    """A hook and its expected properties: the arguments of `check_hook`."""

    hook: CommHook
    error: float = 1.0
    rounding: float = 1e-5
    bytes_sent: Callable[[int], float] | None = None
    depends_on_buckets: bool = False
    goes_on_from_mean: bool = False


def demand(condition: object, broken: str) -> None:
    """Raise [`BrokenRule`][] with the message `broken` unless a condition holds."""
    if not condition:
        raise BrokenRule(broken)


def largest_norm(make: Callable[..., Gradients], world: int, step: int, dtype: torch.dtype = torch.float32) -> float:
    """Return the largest norm of a rank's gradients that `make` gives."""
    return max(norm(make(rank, step, SHAPES, dtype)) for rank in range(world))


def check_result(means: list[Gradients], world: int, step: int, bound: float, dtype: torch.dtype) -> None:
    """Require the same result on all ranks, and that it is the mean of `low_rank_gradients`."""
    demand(
        all(same(means[0], other) for other in means[1:]),
        f"ranks got different results in step {step}: write the same numbers to bucket.flat on all ranks, computed "
        "from the results of collectives only",
    )
    error = distance(means[0], mean_gradients(low_rank_gradients, world, step, dtype=dtype))
    error /= largest_norm(low_rank_gradients, world, step, dtype)
    demand(
        error <= bound,
        f"in step {step} the result differs from the mean over ranks by {error:.3g} of the gradients' norm, more than "
        f"error={bound:.3g}",
    )


def _equal_gradients(rank: int, step: int, shapes: Any, dtype: torch.dtype = torch.float32) -> Gradients:
    return full_rank_gradients(0, step, shapes, dtype)


def _scale(result: Gradients, mean: Gradients) -> float:
    """Return the factor between a result and the mean, over the parts that the hook has sent."""
    squares, products = (
        sum(float((result[name].double() * other[name].double()).sum()) for name in result) for other in (result, mean)
    )
    return squares / products if products else 0.0


# No rule runs more steps than this.
_MAX_STEPS = 20


def _first_local_step(rank: int, world: int, hook: CommHook) -> tuple[int | None, bool]:
    """Return the first step whose gradients are not averaged, and whether the hook averages models."""
    with attached(hook) as (_, attachment):
        bound = attachment.bound
        assert bound is not None
        return next((step for step in range(_MAX_STEPS) if bound.is_local(step)), None), bound.averages_models


def ranks_agree_on_the_mean(run: Run, case: Case, world: int) -> str | None:
    """All ranks get the same result, the mean over ranks up to the stated error."""
    local, averages_models = run(_first_local_step, case.hook, world=world)[0]
    demand(
        local is None,
        f"step {local} is local, and the rules check averages of gradients in the first {_MAX_STEPS} steps: set an "
        "option that delays local steps, such as start_localSGD_iter of local SGD",
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
    return "yes, for gradients; averages of models are not checked" if averages_models else None


def all_dtypes(run: Run, case: Case, world: int) -> None:
    """Gradients in 64, 32 and 16 bits are returned in their own dtype."""
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        results = run(outputs, case.hook, low_rank_gradients, 2, SHAPES, dtype, world=world)
        for means, _, _ in results:
            demand(
                all(mean.dtype == dtype for mean in means[1].values()),
                f"gradients of {dtype} were returned in another dtype",
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
    """The same gradients give the same results, bit by bit, and the global random state is not changed."""
    for (once, again), is_untouched in run(_with_rng, case.hook, world=world):
        demand(
            all(same(a, b) for a, b in zip(once, again, strict=True)),
            "a second run with the same gradients gives different bits, usually because the hook draws from the global "
            "random generator: give the hook its own generator",
        )
        demand(is_untouched, "the hook changes the global random state: give the hook its own generator")


_STEPS = 5


@dataclass(frozen=True)
class _WithBadStep:
    """One rank's results of some steps with a bad step between them, or without one.

    Attributes:
        means: outputs of the good steps.
        bad: output of the bad step.
        residuals: norms of the residuals before and after the bad step.
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


# For each bad step: the step that follows, the parameter, its value, and a factor of the remaining gradients. The first
# entry has no bad step.
_BAD_STEPS = [
    (None, "first", 0.0, 1.0),
    (3, "first", float("inf"), 1e20),
    (3, "bias", float("nan"), 1.0),
    (1, "row", float("-inf"), 1.0),
    (0, "conv", float("inf"), 1e20),
]


def bad_steps_leave_nothing_behind(run: Run, case: Case, world: int) -> None:
    """A step with inf or NaN on one rank is NaN on all ranks, and leaves no trace in later steps."""
    # The remaining cases do not depend on the number of ranks.
    tried = _BAD_STEPS if world == 2 else _BAD_STEPS[:2]
    results = run(_with_bad_steps, case.hook, tried, world=world)
    for i, (step, at, value, size) in enumerate(tried[1:], start=1):
        where = f"; before step {step}, {at!r} had {value} on the last rank, and all gradients were scaled by {size:g}"
        for good, one, first in ((ranks[0], ranks[i], results[0][i]) for ranks in results):
            finite = [bool(mean.isfinite().all()) for mean in one.bad.values() if mean.numel()]
            demand(
                not all(finite),
                "some rank gets only finite gradients in a step that is bad on one rank: send data that turns NaN on "
                f"all ranks, such as a scale or norm of all gradients{where}",
            )
            if not one.has_memory:
                same_steps = all(same(a, b) for a, b in zip(good.means, one.means, strict=True))
                demand(same_steps, f"a bad step changes later steps, though the hook has no memory{where}")
                continue
            demand(not any(finite), f"some gradients of a bad step are finite, though the hook has a memory{where}")
            before, after = one.residuals
            demand(
                after <= (1 + ROUNDING_OF_16_BIT) * before,
                f"the residual is larger after a bad step, or not finite after it: its norm was {before:.3g} and is "
                f"{after:.3g}{where}",
            )
            demand(
                (good.num_bad, one.num_bad) == (0, 1),
                f"one bad step was counted as {one.num_bad:.0f}, and no bad step as {good.num_bad:.0f}{where}",
            )
            largest = sum(largest_norm(full_rank_gradients, world, t) for t in range(_STEPS))
            for mean, other in zip(one.means, first.means, strict=True):
                demand(same(mean, other), f"ranks get different results after a bad step{where}")
                demand(norm(mean) <= 2 * largest, f"a part of a bad step returns in a later step{where}")


_SCALES = [2.0**16, 2.0**17, 2.0**17, 2.0**5, 1.0, 3.0, 2.0**10, 2.0**9]


def _scaled_and_not(rank: int, world: int, hook: CommHook) -> list[tuple[list[Gradients], bool]]:
    """Return outputs without a scaler, and with a changing scale and divided by it; and whether there is memory."""
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
                scaler.scale(torch.ones((), device=device))  # initializes the scale; the loss is in float64 here
                scaler.update(scale)
                (ddp(gradients) * scale).backward()
                grads = {name: cast("Tensor", p.grad) for name, p in ddp.module.named_parameters()}
                means.append({name: grad.cpu() / scale for name, grad in grads.items()})
            assert attachment.bound is not None
            results.append((means, attachment.bound.has_memory))
    return results


def loss_scale_makes_no_difference(run: Run, case: Case, world: int) -> None:
    """Under a `GradScaler` whose scale changes, results are multiplied by the scale and otherwise the same."""
    bound = max(2 * case.rounding, 1e-5)
    for (plain, _), (scaled, has_memory) in run(_scaled_and_not, case.hook, world=world):
        advice = (
            "Memory must not depend on the scale: divide gradients by bucket.loss_scale when they enter the memory, "
            "and multiply them when they leave it"
            if has_memory
            else "Results must be proportional to the gradients; if the hook rounds numbers, state a larger rounding="
        )
        for step, (a, b) in enumerate(zip(plain, scaled, strict=True)):
            if _SCALES[step] >= 2**16 and not math.isfinite(norm(b)):
                continue  # they overflow float16, and the scaler would skip the step
            demand(
                distance(a, b) <= bound * norm(a),
                f"the scale of a GradScaler changes the result by {distance(a, b) / norm(a):.3g} in step {step}, after "
                f"scales {_SCALES[: step + 1]}, more than rounding={case.rounding:.3g}. {advice}",
            )


def config_is_frozen_and_pickles(run: Run, case: Case, world: int) -> None:
    """The configuration is immutable and can be pickled."""
    demand(
        pickle.loads(pickle.dumps(case.hook)) == case.hook,
        "the configuration changes when it is pickled: use fields that can be pickled and compared",
    )
    try:
        case.hook.anything = 1  # type: ignore[attr-defined]
    except AttributeError:
        return
    raise BrokenRule("the configuration can be changed: make it a frozen dataclass")


# For each collective: the position of the tensor argument, and the bytes that a rank sends as a multiple of its size.
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
    """Record the bytes of each collective of PyTorch's and each message of gloo's in a list."""
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
    """Return the bytes counted and the bytes sent in the third step, in which DDP's buckets are final."""
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
    """`bytes_sent` equals the bytes passed to PyTorch's collectives, and the stated bytes."""
    numel = sum(torch.Size(shape).numel() for shape in SHAPES.values())
    found = run(_measured, case.hook, world=world)
    # The ranks' shares of a sum may differ by an element.
    counted, sent = sum(metrics["bytes_sent"] for metrics, _ in found), sum(sent for _, sent in found)
    demand(
        math.isclose(counted, sent, rel_tol=1e-6),
        f"{sent:.0f} bytes were sent, and {counted:.0f} counted: send by the group that the hook is given",
    )
    for metrics, _ in found:
        counted = metrics["bytes_sent"]
        if case.bytes_sent is not None:
            stated = case.bytes_sent(world)
            demand(
                math.isclose(counted, stated, rel_tol=1e-6),
                f"a step sends {counted:.0f} bytes, and bytes_sent says {stated:.0f}",
            )
        demand(
            metrics["steps"] == 1 and metrics["collectives"] > 0,
            "no collective was counted: send by the `ranks` argument of reduce, as in `yield from "
            "ranks.all_reduce_mean_(bucket.flat)`",
        )
        dense = 2 * (world - 1) / world * 4 * numel
        demand(
            math.isclose(metrics["bytes_dense"], dense, rel_tol=1e-6),
            f"bytes_dense is {metrics['bytes_dense']:.0f}, but plain DDP sends {dense:.0f}",
        )
