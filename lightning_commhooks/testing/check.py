"""`check_hook(hook)` checks the contract that every hook has to follow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lightning_commhooks.interface.hook import CommHook
from lightning_commhooks.interface.registry import get_hook
from lightning_commhooks.testing import rules, rules_of_state
from lightning_commhooks.testing.processes import Processes
from lightning_commhooks.testing.rules import BrokenRule, Case, Run

# Each returns what `check_hook` prints instead of "yes", if anything.
Rule = Callable[[Run, Case, int], str | None]

RULES: tuple[Rule, ...] = (
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
    """Return a rule in words."""
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
    """Check the rules that every hook has to follow, in new processes, like scikit-learn's `check_estimator`.

    Trains models with known gradients for a few steps each and prints each rule that the hook follows. Starts processes
    with "spawn": in a script, call it under `if __name__ == "__main__":`.

    Args:
        hook: a name or a configured hook, with options that make it compress small gradients within a few steps, such
            as `start_powerSGD_iter=0` and `min_bytes=0`.
        error: largest error of one step for matrices of rank 2, as a fraction of the gradients' norm. `None`: do not
            check the distance of the result from the mean, only that the result is not the sum over ranks.
        rounding: largest loss in spite of error feedback, as a fraction of the gradients' norm: the precision of data
            that is sent without error feedback. For hooks without memory, it only applies to a changing loss scale.
        bytes_sent: function from the number of ranks to the bytes that a rank sends in the third step, for one float32
            bucket of `lightning_commhooks.testing.model.SHAPES`. By default, only check that the bytes counted equal
            the bytes passed to `torch.distributed`.
        depends_on_buckets: whether the result depends on the boundaries of DDP's buckets.
        goes_on_from_mean: whether a run that resumes from the mean of the ranks' memories has to give the same results
            as an uninterrupted one. It does if the results depend on that mean only, as for PowerSGD, unlike top-k and
            quantization.
        num_ranks: numbers of ranks to check.
        seconds: time limit of a collective; ranks that exceed it are out of step.
        device: `"cpu"` or `"cuda"`. There may be more ranks than GPUs.
        backend: backend of the process groups: `"gloo"`, or `"nccl"` on CUDA.

    Raises:
        BrokenRule: the hook breaks a rule; the message says how.
        ValueError: the hook, the device or the backend does not exist.
    """
    case = Case(
        get_hook(hook), 1.0 if error is None else error, rounding, bytes_sent, depends_on_buckets, goes_on_from_mean
    )
    print(f"{case.hook!r}")
    with Processes(max(num_ranks), seconds, device, backend) as processes:
        for rule in RULES:
            results = [check_rule(rule, processes, case, world) or "yes" for world in num_ranks]
            if rule is rules.ranks_agree_on_the_mean and error is None:
                print(f"  All ranks get the same, and not the sum over ranks: {results[0]}")
                print("  It is the mean over ranks up to an error: not checked, give error=")
            else:
                print(f"  {title(rule)}: {results[0]}")


def check_rule(rule: Rule, run: Run, case: Case, world: int) -> str | None:
    """Check one rule on `world` ranks.

    Returns:
        a text to print instead of "yes", or `None`.

    Raises:
        BrokenRule: the hook breaks the rule; the message has the rule, the hook and the number of ranks.
    """
    try:
        return rule(run, case, world)
    except BrokenRule as broken:
        raise BrokenRule(f"{case.hook!r} on {world} ranks: {broken}") from None
    except Exception as error:
        raise BrokenRule(f"{case.hook!r} on {world} ranks failed while checking: {title(rule)}\n{error}") from None
