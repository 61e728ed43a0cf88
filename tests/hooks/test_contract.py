"""What every hook has to do, for all of ours: the rules that `check_hook` checks for anybody's."""

import pytest
from driver import SHAPES, low_rank_gradients, outputs, same
from hooks_under_test import CASES

from lightning_commhooks import Noop
from lightning_commhooks.testing.check import RULES, check_rule

# What depends on the number of ranks; the others run on two.
ON_FOUR = {"ranks_agree_on_the_mean", "bytes_are_counted", "error_feedback_loses_nothing"}
ON_FOUR_ONLY = {"other_numbers_of_ranks_keep_residuals"}  # and on two and one
# Its phases depend on the number of steps; see test_checkpoint.py.
COUNTS_STEPS = {("bad_steps_leave_nothing_behind", "schedule")}  # "powersgd+half inside" has another phase only later


# Variations of a hook that differ from it in what they send.
VARIATIONS = {"fp16+float32", "bf16", "bf16+float32", "powersgd+batch", "int4", "int2", "quantize_per_channel"}
OF_VARIATIONS = ON_FOUR | {"all_dtypes", "a_resumed_run_goes_on"}


def is_owed(rule, label):
    """Whether a rule is about a hook."""
    return (rule, label) not in COUNTS_STEPS and (label not in VARIATIONS or rule in OF_VARIATIONS)


def cases(labels):
    """Rules with each of the hooks that they are about."""
    pairs = [(rule, label) for rule in RULES for label in labels if is_owed(rule.__name__, label)]
    return [pytest.param(rule, label, id=f"{rule.__name__}-{label}") for rule, label in pairs]


def worlds(name):
    """Numbers of ranks that a rule is checked on."""
    return [4] if name in ON_FOUR_ONLY else [2, 4] if name in ON_FOUR else [2]


@pytest.mark.parametrize(
    ("rule", "label", "world"),
    [
        pytest.param(*case.values, world, id=f"{case.id}-{world}")
        for case in cases(CASES)
        for world in worlds(case.values[0].__name__)
    ],
)
def test_rule(run, rule, label, world):
    check_rule(rule, run, CASES[label], world)


def far(rank, world, function, args):
    """Call a function as if ranks were far from each other: direct messages, of several buckets at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMMHOOKS_LATENCY_MS", "40")
        return function(rank, world, *args)


@pytest.mark.parametrize(
    ("rule", "label"),
    [
        *cases(["int8"]),
        *(case for case in cases(["powersgd"]) if case.values[0].__name__ in ON_FOUR | ON_FOUR_ONLY),
    ],
)
def test_rule_of_far_ranks(run, rule, label):
    check_rule(rule, lambda function, *args, world: run(far, function, args, world=world), CASES[label], 4)


def test_noop_sends_nothing_and_changes_nothing(run, world):
    for rank, (means, _, metrics) in enumerate(run(outputs, Noop(), low_rank_gradients, 3, world=world)):
        assert all(same(mean, low_rank_gradients(rank, step, SHAPES)) for step, mean in enumerate(means))
        assert metrics["bytes_sent"] == metrics["collectives"] == 0
