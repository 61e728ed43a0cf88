"""The contract on CUDA devices: two ranks over gloo, both on one device if there is one only, and over NCCL on two."""

import pytest
from gpu_steps import Ranks, needs_one, needs_two
from hooks_under_test import CASES
from test_contract import cases

from lightning_commhooks.testing.check import check_rule

pytestmark = [pytest.mark.gpu, needs_one]


@pytest.fixture(scope="module", params=[pytest.param("nccl", marks=needs_two), "gloo"])
def ranks(request):
    ranks = Ranks(request.param)
    yield ranks
    ranks.close()


@pytest.mark.parametrize(("rule", "label"), cases(CASES))
def test_rule(ranks, rule, label):
    check_rule(rule, ranks, CASES[label], 2)
