"""Options of hooks in the wrong place, given to the handler or in the environment."""

import re

import pytest

pytest.importorskip("accelerate")

from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs

from accelerate_integration import CommHookKwargs, CommHookTracker, use_comm_hook
from lightning_commhooks import HierarchicalLocalSGD, Int8

RANK_4 = "hook=PowerSGD(matrix_approximation_rank=4)"


def test_handler_of_accelerate():
    theirs = DistributedDataParallelKwargs(find_unused_parameters=True)
    one = "give one handler, which has the options of DistributedDataParallelKwargs too: CommHookKwargs(hook='int8'"
    for make, message in [
        (lambda: CommHookKwargs(hook="powersgd", rank=4), f"Write {RANK_4}"),
        (lambda: CommHookKwargs("powersgd"), "CommHookKwargs takes options by name: CommHookKwargs(hook='powersgd')"),
        (lambda: CommHookKwargs("powersgd", rank=4), f"CommHookKwargs({RANK_4})"),
        (lambda: CommHookKwargs(hook="int8", comm_state_option={"block_size": 128}), "write hook=Int8(block_size=128)"),
        (lambda: CommHookKwargs(hook="int8", comm_wrapper="bf16"), "write hook=Cast('int8', 'bf16')"),
        (lambda: CommHookKwargs(hook="int8", find_unused_params=True), "did you mean 'find_unused_parameters'?"),
        (lambda: use_comm_hook(None, "powersgd", rank=4), f"Write {RANK_4}"),
        (lambda: CommHookKwargs(Int8), "CommHookKwargs(hook=Int8())"),
        (
            lambda: use_comm_hook("powersgd"),
            "use_comm_hook(trainer, 'powersgd') needs a transformers.Trainer or an Acc",
        ),
        (lambda: use_comm_hook(None, "int8"), "use_comm_hook(trainer, 'int8') needs"),
        (lambda: CommHookTracker(CommHookKwargs(hook="int8"), "int8"), "needs an Accelerator and its handler"),
        (lambda: use_comm_hook(None, "powersgd", num_steps=9), "Lightning's Trainer and transformers.Trainer know"),
        (lambda: CommHookKwargs(hook="powersgd", monitor=True), "CommHookTracker in Accelerate"),
        (
            lambda: Accelerator(cpu=True, kwargs_handlers=[CommHookKwargs(hook="int8"), CommHookKwargs(hook="int8")]),
            one,
        ),
        (
            lambda: Accelerator(cpu=True, kwargs_handlers=[theirs, CommHookKwargs(hook="int8")]),
            f"{one}, find_unused_parameters=True)",
        ),
    ]:
        with pytest.raises(ValueError, match=re.escape(message)):
            make()


@pytest.mark.parametrize(
    ("hook", "options", "message"),
    [
        ("powersgd", "rank=4", 'is not JSON, as {"rank": 4}'),
        ("powersgd:rank=4", "", "COMMHOOKS_OPTIONS='{\"rank\": 4}'"),
    ],
)
def test_environment(monkeypatch, hook, options, message):
    monkeypatch.setenv("COMMHOOKS_HOOK", hook)
    monkeypatch.setenv("COMMHOOKS_OPTIONS", options)
    with pytest.raises(ValueError, match=re.escape(message)):
        CommHookKwargs()


def test_environment_has_strings_for_keys(monkeypatch):
    monkeypatch.setenv("COMMHOOKS_HOOK", "hierarchical_localsgd")
    monkeypatch.setenv(
        "COMMHOOKS_OPTIONS", '{"period_group_size_dict": {"16": null, "4": 8}, "start_localSGD_iter": 9}'
    )
    assert CommHookKwargs().hook == HierarchicalLocalSGD(period_group_size_dict={4: 8, 16: None}, start_localSGD_iter=9)
