"""The contract on CUDA devices: two ranks over NCCL and over gloo, both on one device if there is only one."""

import pytest
from gpu_steps import NCCL, Ranks, needs_one
from hooks_under_test import CASES
from test_contract import cases

from lightning_commhooks.testing.check import check_rule

pytestmark = [pytest.mark.gpu, needs_one]


def each_hook_first():
    """Cases in an order in which every hook comes once, each with another rule, before one comes again.

    There may be no time for all of them.
    """
    of_hooks = {}
    for case in cases(CASES):
        of_hooks.setdefault(case.values[1], []).append(case)
    turned = [own[i % len(own) :] + own[: i % len(own)] for i, own in enumerate(of_hooks.values())]
    return [own[turn] for turn in range(max(map(len, turned))) for own in turned if turn < len(own)]


@pytest.fixture(scope="module", params=[*NCCL, "gloo"])
def ranks(request):
    ranks = Ranks(request.param)
    yield ranks
    ranks.close()


@pytest.mark.parametrize(("rule", "label"), each_hook_first())
def test_rule(ranks, rule, label):
    check_rule(rule, ranks, CASES[label], 2)
