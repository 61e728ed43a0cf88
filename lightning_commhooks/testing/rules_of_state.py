"""Rules over several steps: error feedback, unused parameters, checkpoints. See `rules.py`.

A `Schedule` reveals the residuals: when it changes the hook, it adds them to the gradients of the next step, which are
zero here.
"""

from __future__ import annotations

import io
from typing import Any

import torch

from lightning_commhooks.interface.hook import CommHook
from lightning_commhooks.runtime.attachment import Attachment
from lightning_commhooks.testing.model import (
    SHAPES,
    Gradients,
    Shapes,
    attached,
    backward,
    distance,
    equal_states,
    full_rank_gradients,
    mean_gradients,
    norm,
    outputs,
    same,
    zero_gradients,
)
from lightning_commhooks.testing.rules import ROUNDING_OF_16_BIT, Case, Run, demand
from lightning_commhooks.wrappers.schedule import Schedule


def _until_handed_over(
    rank: int, world: int, hook: CommHook, steps: int, shapes: Shapes = SHAPES
) -> tuple[list[Gradients], bool]:
    """Return the outputs of `steps` steps and of one more after a change of hook; and whether there are residuals."""
    with attached(Schedule({0: hook, steps: "allreduce"}), shapes) as (ddp, attachment):
        means = [backward(ddp, full_rank_gradients(rank, step, shapes)) for step in range(steps)]
        has_residuals = _has_residuals(attachment)
        means.append(backward(ddp, zero_gradients(rank, steps, shapes)))
        return means, has_residuals


def _has_residuals(attachment: Attachment) -> bool:
    assert attachment.bound is not None
    return next(attachment.bound.residuals(), None) is not None


def _total(means: list[Gradients]) -> Gradients:
    return {name: torch.stack([mean[name].double() for mean in means]).sum(0) for name in means[0]}


def error_feedback_loses_nothing(run: Run, case: Case, world: int) -> str | None:
    """The sent gradients and the residual add up to all gradients."""
    for steps in (3, 6):
        (means, has_residuals), *_ = run(_until_handed_over, case.hook, steps, world=world)
        if not has_residuals:
            return "not checked, the hook has no memory of the kind 'residual'"
        expected = [mean_gradients(full_rank_gradients, world, step) for step in range(steps)]
        size = sum(norm(mean) for mean in expected)
        lost = distance(_total(means), _total(expected)) / size
        demand(
            lost <= case.rounding,
            f"{lost:.3g} of the gradients of {steps} steps is missing in the results and the residuals that flush_() "
            f"returns, more than rounding={case.rounding:.3g}. In an ErrorFeedback, the mean over ranks of `sent` has "
            "to equal `mean`",
        )
    return None


def _used(rank: int, step: int, shapes: Shapes, dtype: torch.dtype = torch.float32) -> Gradients:
    """Make the gradients of a step in which this rank, or all ranks, do not use some parameters."""
    gradients = full_rank_gradients(rank, step, shapes, dtype)
    if step % 2:
        del gradients["first"], gradients["bias"]
    if rank % 2 == step % 2:
        del gradients["second"]
    return gradients


# `bucket_cap_mb` with which each parameter has its own bucket, which a rank may not use at all.
_ONE_PARAMETER = 1e-6


def _with_unused(rank: int, world: int, hook: CommHook, steps: int) -> tuple[list[Gradients], bool, list[Gradients]]:
    """As `_until_handed_over`, with unused parameters as zeros; also return the outputs without these zeros."""
    shown = []
    options: dict[str, Any] = {"find_unused_parameters": True, "bucket_cap_mb": _ONE_PARAMETER}
    with attached(Schedule({0: hook, steps: "allreduce"}), **options) as (ddp, attachment):
        for step in range(steps):
            shown.append(backward(ddp, _used(rank, step, SHAPES)))
        has_residuals = _has_residuals(attachment)
        last = backward(ddp, zero_gradients(rank, steps, SHAPES))
        zeros = zero_gradients(rank, 0, SHAPES)
        return [{**zeros, **mean} for mean in [*shown, last]], has_residuals, shown


def unused_parameters_keep_their_memory(run: Run, case: Case, world: int) -> None:
    """A parameter that no rank uses gets no gradient and keeps its memory."""
    steps = 4
    results = run(_with_unused, case.hook, steps, world=world)
    for _, _, shown in results:
        for step, gradients in enumerate(shown):
            demand(
                ("first" in gradients) == (step % 2 == 0),
                f"unlike with plain DDP, 'first' has {'a' if step % 2 else 'no'} gradient in step {step}; no rank uses "
                "it in odd steps",
            )
            demand(
                all(same({name: mean}, {name: results[0][2][step][name]}) for name, mean in gradients.items()),
                f"ranks get different results in step {step}, in which some ranks do not use a parameter",
            )
    means, has_residuals, _ = results[0]
    if has_residuals:
        expected = [mean_gradients(_used, world, step) for step in range(steps)]
        lost = distance(_total(means), _total(expected)) / sum(norm(mean) for mean in expected)
        demand(
            lost <= case.rounding,
            f"{lost:.3g} of the gradients is missing: the memory of a parameter was used up in a step in which no rank "
            "uses it; see Bucket.unused",
        )


def _interrupted(
    rank: int, world: int, hook: CommHook, options: dict[str, Any], steps: int, stop: int
) -> tuple[list[Gradients], Any]:
    """Return the outputs of `steps` steps, resumed from a checkpoint at `stop`, and the final state."""
    means, state = [], None
    for first, last in [(0, stop), (stop, steps)]:
        with attached(hook, dtype=torch.float64, **options) as (ddp, attachment):
            if state is not None:
                attachment.load_state_dict(state)
            for step in range(first, last):
                means.append(backward(ddp, full_rank_gradients(rank, step, SHAPES, torch.float64)))
            state = _through_a_file(attachment.state_dict())
    return means, state


def _through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def _kinds_not_in_kept(rank: int, world: int, hook: CommHook) -> set[str]:
    """Return the kinds of memory in a state that the hook's `kept` does not name."""
    with attached(hook) as (ddp, attachment):
        for step in range(2):
            backward(ddp, full_rank_gradients(rank, step, SHAPES))
        bound, state = attachment.bound, attachment.state_dict()["hook"]["state"]
        assert bound is not None
        # The memory of a wrapper is that of the hooks inside.
        own = bound.memory.keys() & SHAPES.keys()
        saved = {name: entry for name, entry in state.get("entries", {}).items() if name in own}
        return {kind for name, entry in saved.items() for kind in entry.keys() - bound.kept([SHAPES[name]]).keys()}


_STEPS, _STOP = 8, 3
_OTHER_BUCKETS = (
    ". If results depend on the boundaries of buckets, as with one scale for each, state depends_on_buckets=True"
)


def a_resumed_run_goes_on(run: Run, case: Case, world: int) -> None:
    """A resumed run gives the same results as an uninterrupted one, with the same or different buckets."""
    missing = run(_kinds_not_in_kept, case.hook, world=world)[0]
    demand(not missing, f"kept() does not name {sorted(missing)}: it has to name all kinds of memory")
    for rebuilds, exact in ((False, True), (True, False), (True, True)):
        if rebuilds and case.depends_on_buckets:
            if exact:
                continue
            rebuilds = False
        options = {"find_unused_parameters": not rebuilds, "exact_state": exact}
        whole = run(outputs, case.hook, full_rank_gradients, _STEPS, SHAPES, torch.float64, options, world=world)
        demand(
            all(equal_states(whole[0][1], state) for _, state, _ in whole),
            "ranks save different states: name the kinds of memory that differ between ranks in own_kinds",
        )
        if not (exact and not rebuilds) and not whole[0][1]["hook"]["state"]:
            continue  # an empty state needs one check only
        parts = run(_interrupted, case.hook, options, _STEPS, _STOP, world=world)
        how = f"exact_state={exact}, {'other' if rebuilds else 'the same'} buckets"
        for (expected, state, _), (means, resumed) in zip(whole, parts, strict=True):
            for step, (a, b) in enumerate(zip(expected, means, strict=True)):
                rule = f"a resumed run differs from an uninterrupted one: with {how}, step {step} differs"
                if exact and not rebuilds:
                    demand(same(a, b), f"{rule} in some bits")
                    continue
                # Different buckets change the order of sums and, with more than two ranks, each rank's share. Rounding
                # then differs, and the runs diverge.
                bound = (
                    1e-10
                    if case.goes_on_from_mean or (exact and world == 2)
                    else 2 * case.error + 4 * ROUNDING_OF_16_BIT
                )
                if case.goes_on_from_mean or step < _STOP + 3:
                    demand(
                        distance(a, b) <= bound * norm(a),
                        f"{rule} by {distance(a, b) / norm(a):.3g}{_OTHER_BUCKETS if rebuilds else ''}",
                    )
            demand(resumed["steps"] == state["steps"] == _STEPS, f"the step count is not resumed, with {how}")
        demand(all(equal_states(state, parts[0][1]) for _, state in parts), "ranks save different states")


def _leg(
    rank: int, world: int, hook: CommHook, state: Any, steps: int, exact: bool, is_last: bool
) -> tuple[list[Gradients], Any, bool]:
    """Run some steps after a checkpoint, in the last leg also the step after a change of hook.

    Returns:
        the outputs, a checkpoint, and whether there were residuals.
    """
    with attached(hook, dtype=torch.float64, exact_state=exact) as (ddp, attachment):
        if state is not None:
            attachment.load_state_dict(state)
        means = [backward(ddp, full_rank_gradients(rank, step, SHAPES, torch.float64)) for step in range(steps)]
        has_residuals = _has_residuals(attachment)
        if is_last:
            means.append(backward(ddp, zero_gradients(rank, 0, SHAPES, torch.float64)))
        return means, _through_a_file(attachment.state_dict()), has_residuals


def other_numbers_of_ranks_keep_residuals(run: Run, case: Case, world: int) -> None:
    """A state loads on more or fewer ranks and keeps its residuals."""
    legs, steps = (2, world, 1, 2), 3
    hook = Schedule({0: case.hook, steps * len(legs): "allreduce"})
    for exact in (False, True):
        state, received, produced = None, [], []
        for i, ranks in enumerate(legs):
            results = run(_leg, hook, state, steps, exact, i == len(legs) - 1, world=ranks)
            received += results[0][0]
            produced += [mean_gradients(full_rank_gradients, ranks, step, dtype=torch.float64) for step in range(steps)]
            _, state, has_residuals = results[0]
            demand(state["steps"] == len(received), f"the step count is not resumed on {ranks} ranks")
            for means, _, _ in results[1:]:
                demand(
                    same(means[-1], results[0][0][-1]), f"ranks get different results after resuming on {ranks} ranks"
                )
        if not has_residuals:
            continue
        lost = distance(_total(received), _total(produced)) / sum(norm(mean) for mean in produced)
        demand(
            lost <= case.rounding,
            f"{lost:.3g} of the gradients is missing after {legs} ranks with exact_state={exact}: a state must keep "
            "the residuals for any number of ranks",
        )
