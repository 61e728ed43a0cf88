"""`check_hook(hook)`: does a hook do what every hook has to do?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lightning_commhooks.interface.hook import CommHook
from lightning_commhooks.interface.registry import get_hook
from lightning_commhooks.testing import rules, rules_of_state
from lightning_commhooks.testing.processes import Processes
from lightning_commhooks.testing.rules import BrokenRule, Case, Run

RULES: tuple[Callable[[Run, Case, int], None], ...] = (
    rules.config_is_frozen_and_pickles,
    rules.ranks_agree_on_the_mean,
    rules.all_dtypes,
    rules.zero_gradients_stay_zero,
    rules.deterministic,
    rules.bytes_are_counted,
    rules.bad_steps_leave_nothing_behind,
    rules.loss_scale_makes_no_difference,
    rules_of_state.error_feedback_loses_nothing,
    rules_of_state.unused_parameters_keep_their_memory,
    rules_of_state.a_resumed_run_goes_on,
    rules_of_state.other_numbers_of_ranks_keep_residuals,
)


def title(rule: Callable[..., Any]) -> str:
    """A rule in words."""
    return (rule.__doc__ or "").splitlines()[0].rstrip(".")


def check_hook(
    hook: CommHook | str,
    *,
    error: float | None = None,
    rounding: float = 1e-5,
    bytes_sent: Callable[[int], float] | None = None,
    depends_on_buckets: bool = False,
    goes_on_from_mean: bool = False,
    num_ranks: Sequence[int] = (2, 4),
    seconds: float = 60.0,
    device: str = "cpu",
    backend: str = "gloo",
) -> None:
    """Check a hook against what every hook has to do, on processes of its own, like scikit-learn's `check_estimator`.

    Trains models whose gradients are known, for a few steps each, and prints what was checked. Starts processes by
    "spawn": in a script, call it under `if __name__ == "__main__":`.

    Args:
        hook: a name, or a configured hook; with options that let it show what it does within a few steps of small
            gradients, such as `start_powerSGD_iter=0` and `min_bytes=0`.
        error: largest error of one step, as a fraction of the gradients' norm, for matrices of rank 2. `None`: how far
            a result is from the mean is not checked, only that it is not the sum over ranks.
        rounding: what may be lost in spite of error feedback, as a fraction of the gradients' norm: the precision of
            what is sent without it. Of hooks without memory only under a changing loss scale.
        bytes_sent: bytes that a rank sends in the third step, by the number of ranks, for one bucket in float32 of
            `lightning_commhooks.testing.model.SHAPES`; by default, what is counted has to be what is given to
            `torch.distributed`, and no more.
        depends_on_buckets: whether the result depends on where DDP's buckets begin and end.
        goes_on_from_mean: whether a run that resumes from the mean of the ranks' memories has to go on as it would
            have, as it does if results depend on that mean alone: PowerSGD's do, those of top-k and quantization not.
        num_ranks: numbers of ranks to check.
        seconds: that a collective may take before the ranks count as out of step.
        device: `"cpu"` or `"cuda"`. There may be more ranks than GPUs.
        backend: of the process groups: `"gloo"`, or `"nccl"` on CUDA.

    Raises:
        BrokenRule: says what is broken.
        ValueError: there is no hook of that name, or no such device or backend.
    """
    case = Case(
        get_hook(hook), 1.0 if error is None else error, rounding, bytes_sent, depends_on_buckets, goes_on_from_mean
    )
    print(f"{case.hook!r}")
    with Processes(max(num_ranks), seconds, device, backend) as processes:
        for rule in RULES:
            for world in num_ranks:
                check_rule(rule, processes, case, world)
            if rule is rules.ranks_agree_on_the_mean and error is None:
                print("  All ranks get the same, and not the sum over ranks: yes")
                print("  It is the mean over ranks up to an error: not checked, give error=")
            else:
                print(f"  {title(rule)}: yes")


def check_rule(rule: Callable[[Run, Case, int], None], run: Run, case: Case, world: int) -> None:
    """Check one rule on so many ranks.

    Raises:
        BrokenRule: with the rule in words, hook and number of ranks.
    """
    try:
        rule(run, case, world)
    except BrokenRule as broken:
        raise BrokenRule(f"{case.hook!r} on {world} ranks: {broken}") from None
    except Exception as error:
        raise BrokenRule(
            f"{case.hook!r} on {world} ranks failed. To be shown was: {title(rule)}. All ranks have to issue the same "
            f"collectives in the same order, and finish\n{error}"
        ) from error
