"""Hooks that count nothing by hand: the kit lets those pass that are right, and the library counts what they sent."""

import re

import plain_hooks
import pytest
import torch
from driver import SHAPES, full_rank_gradients, outputs
from hooks_under_test import CASES

from lightning_commhooks.testing import BrokenRule
from lightning_commhooks.testing.check import RULES, check_rule
from lightning_commhooks.testing.rules import Case

BY_NAME = {rule.__name__: rule for rule in RULES}
NUMEL = sum(torch.Size(shape).numel() for shape in SHAPES.values())
NUMEL_OF_MATRICES = sum(torch.Size(shape).numel() for shape in SHAPES.values() if len(shape) > 1)
ONE_BUCKET = {"bucket_cap_mb": 25}


def counts(run, hook, dtype=torch.float32, world=2, **options):
    """Elements of one step, compressed and not."""
    options = {**ONE_BUCKET, **options}
    found = [metrics for *_, metrics in run(outputs, hook, full_rank_gradients, 1, SHAPES, dtype, options, world=world)]
    (both,) = {(metrics["numel_compressed"], metrics["numel_uncompressed"]) for metrics in found}
    return both


def hook_of(bound):
    return getattr(plain_hooks, f"{bound}Hook")()


@pytest.mark.parametrize(
    ("bound", "as_they_are"),
    [
        *((bound, NUMEL) for bound in ("InPlace", "OfACopy", "InPieces", "Gathered")),
        ("InBFloat16", 0),
        # The scale.
        ("Signs", 1),
        ("MatricesInBFloat16", NUMEL - NUMEL_OF_MATRICES),
        ("LargestTenth", -(-NUMEL // 10)),
    ],
)
def test_what_was_sent_as_it_is_follows_from_what_was_sent(run, bound, as_they_are):
    assert counts(run, hook_of(bound)) == (NUMEL - as_they_are, as_they_are)


def test_a_cast_to_what_gradients_are_in_is_no_compression(run):
    assert counts(run, hook_of("InBFloat16"), torch.bfloat16) == (0, NUMEL)
    assert counts(run, hook_of("InBFloat16"), torch.float64) == (NUMEL, 0)


def test_buckets_of_which_nothing_is_sent_do_not_count(run):
    assert counts(run, hook_of("Nothing")) == (0, 0)
    assert counts(run, hook_of("InPlace"), world=1) == (0, 0)


def test_factors_and_masks_are_no_gradients(run):
    """Though they are in float32."""
    plain = counts(run, CASES["powersgd"].hook)
    assert sum(plain) == NUMEL
    assert plain[1] == sum(torch.Size(SHAPES[name]).numel() for name in ("bias", "scalar", "one", "small", "row"))
    assert counts(run, CASES["powersgd"].hook, find_unused_parameters=True) == plain


@pytest.mark.parametrize("bound", ["InFloat16", "LargestTenth"])
def test_right_hooks_pass(run, bound):
    case = Case(hook_of(bound), rounding=2**-7 if bound == "InFloat16" else 1e-5, depends_on_buckets=True)
    for rule in RULES:
        check_rule(rule, run, case, 2)


@pytest.mark.parametrize(
    ("bound", "text"),
    [
        ("DividedTwice", "is 0.50 times the mean of 2 ranks: divided by group.size twice?"),
        ("NotWritten", "ranks got different results in step 0: write the same numbers to bucket.flat on all ranks"),
        ("Alone", "step 0 is local, and the rules check averages of gradients in the first 20 steps"),
        ("NoGenerator", "NoGenerator.reduce is no generator, it returned NoneType: wait for each collective by"),
        ("YieldsGenerator", "YieldsGenerator.reduce yields generator: write `yield from`, not `yield`"),
        ("NoPair", "NoPair.average returned Tensor: end with `return mean, sent`"),
        ("AverageNoGenerator", "AverageNoGenerator.average is no generator, it returned tuple"),
    ],
)
def test_wrong_hooks_are_told_what_to_write(run, bound, text):
    with pytest.raises(BrokenRule, match=rf"(?s)^{bound}Hook\(.* on 2 ranks.*{re.escape(text)}"):
        check_rule(BY_NAME["ranks_agree_on_the_mean"], run, Case(hook_of(bound)), 2)


def test_what_depends_on_buckets_is_told_how_to_state_it(run):
    with pytest.raises(BrokenRule, match="state depends_on_buckets=True"):
        check_rule(BY_NAME["a_resumed_run_goes_on"], run, Case(hook_of("Signs")), 2)
