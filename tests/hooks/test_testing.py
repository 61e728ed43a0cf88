"""The testing kit: each thing that can be wrong breaks the rule that is about it."""

import contextlib
import os
import re
import time

import broken_hooks
import pytest
import torch
from driver import SHAPES, attached, backward, full_rank_gradients, outputs, same

import lightning_commhooks as lc
from lightning_commhooks.testing import BrokenRule, check, check_hook
from lightning_commhooks.testing import processes as processes_module
from lightning_commhooks.testing.check import RULES, check_rule, title
from lightning_commhooks.testing.processes import Processes, take_gpu, variables_for_shared_gpus
from lightning_commhooks.testing.rules import Case

BY_NAME = {rule.__name__: rule for rule in RULES}


@pytest.mark.parametrize(
    ("hook", "rule", "text"),
    [
        (broken_hooks.NotDivided, "ranks_agree_on_the_mean", "is 2.0 times the mean of 2 ranks: divide by group.size?"),
        (broken_hooks.NotDivided, "error_feedback_loses_nothing", "is missing"),
        (broken_hooks.Hasty, "bad_steps_leave_nothing_behind", "not finite after it"),
        (broken_hooks.Forgetful, "a_resumed_run_goes_on", "a resumed run differs from an uninterrupted one"),
        (broken_hooks.Forgetful, "other_numbers_of_ranks_keep_residuals", "a state must keep the residuals"),
        (broken_hooks.Secret, "bytes_are_counted", "counted: send by the group that the hook is given"),
        (broken_hooks.Scaled, "loss_scale_makes_no_difference", "bucket.loss_scale"),
        (broken_hooks.Spending, "unused_parameters_keep_their_memory", "in which no rank uses it"),
        (broken_hooks.Random, "deterministic", "the hook changes the global random state"),
        (broken_hooks.Lossy, "error_feedback_loses_nothing", "is missing"),
        (broken_hooks.Lossy, "error_feedback_loses_nothing", "the mean over ranks of `sent` has to equal `mean`"),
        (broken_hooks.Uniform, "a_resumed_run_goes_on", "name the kinds of memory that differ between ranks"),
        (broken_hooks.Unnamed, "a_resumed_run_goes_on", "kept() does not name ['mean']"),
    ],
)
def test_what_is_wrong_is_said(run, hook, rule, text):
    with pytest.raises(BrokenRule, match=rf"^{hook.__name__}\(.* on 2 ranks: .*{re.escape(text)}"):
        check_rule(BY_NAME[rule], run, Case(hook()), 2)


def lost(rank, world, hook, within):
    hook = hook()
    with attached(lc.PerParameter({"*": hook}) if within else hook) as (ddp, _):
        try:
            backward(ddp, full_rank_gradients(rank, 0, SHAPES))
        except RuntimeError as error:
            return str(error)


@pytest.mark.parametrize(
    ("hook", "text"),
    [
        (
            broken_hooks.Returned,
            "ReturnedBound.reduce returned Tensor: write the average to bucket.flat, and return nothing",
        ),
        (broken_hooks.Unwaited, "UnwaitedBound.reduce has ended without waiting for 1 of its collectives"),
    ],
)
@pytest.mark.parametrize("within", [False, True])
def test_an_average_that_is_lost_is_an_error(run, hook, text, within):
    for said in run(lost, hook, within):
        assert text in said


def test_inf_in_what_is_not_sent_is_seen_on_all_ranks(run):
    check_rule(BY_NAME["bad_steps_leave_nothing_behind"], run, Case(broken_hooks.First()), 2)


def test_what_is_owed_may_be_the_mean(run):
    for rule in ("other_numbers_of_ranks_keep_residuals", "all_dtypes"):
        check_rule(BY_NAME[rule], run, Case(broken_hooks.Whole()), 2)
    ((means, _, _),) = run(outputs, broken_hooks.Whole(), full_rank_gradients, 1, world=1)
    assert same(means[0], full_rank_gradients(0, 0, SHAPES))


def test_a_memory_without_residuals(run):
    for rule in RULES:
        said = check_rule(rule, run, Case(broken_hooks.Changes()), 2)
        assert (said or "").startswith("not checked") == (rule.__name__ == "error_feedback_loses_nothing")


def test_averages_of_models_are_not_checked(run):
    case = Case(lc.get_hook("post_localsgd", start_localSGD_iter=100), error=1e-6)
    said = check_rule(BY_NAME["ranks_agree_on_the_mean"], run, case, 2)
    assert said == "yes, for gradients; averages of models are not checked"


def test_a_bucket_that_one_rank_does_not_use():
    with (
        pytest.raises(BrokenRule, match=r"failed while checking: A parameter that no rank uses"),
        Processes(2, seconds=3) as run,
    ):
        check_rule(BY_NAME["unused_parameters_keep_their_memory"], run, Case(broken_hooks.Idle()), 2)


@pytest.mark.parametrize(
    ("hook", "text"),
    [
        (broken_hooks.Raising, "ArithmeticError: no convergence"),
        (
            broken_hooks.Short,
            r"TypeError: ShortBound.average returned `mean` of shape .* and `sent` of shape \(1,\): both",
        ),
    ],
)
def test_the_cause_of_a_failure_comes_first(hook, text):
    with pytest.raises(BrokenRule) as caught, Processes(2, seconds=60) as run:
        check_rule(BY_NAME["ranks_agree_on_the_mean"], run, Case(hook()), 2)
    title_line, _, ranks = str(caught.value).partition("\nrank ")
    assert title_line.endswith("up to the stated error")
    cause = ranks.split("\n\n")[0]
    assert re.search(text, cause)
    assert len(cause.splitlines()) < 45
    assert "same collectives in the same order" not in str(caught.value)


def test_a_class_with_end_step_says_whether_it_has_memory():
    with pytest.raises(TypeError, match=r"Silent has an end_step.*write `has_memory = True`"):

        class Silent(lc.BoundHook):
            def end_step(self, finite):
                pass


def test_sum_in_place_of_a_mean(run):
    with pytest.raises(
        BrokenRule, match=r"^Sum\(\) on 4 ranks: .*is 4.0 times the mean of 4 ranks: divide by group.size"
    ):
        check_rule(BY_NAME["ranks_agree_on_the_mean"], run, Case(broken_hooks.Sum()), 4)


def test_processes_of_its_own(capsys):
    """What a user calls; of a hook that is right, test_topk_plugin.py."""
    with pytest.raises(BrokenRule, match=r"(?s)^Skipping\(.* on 2 ranks failed.*same collectives in the same order"):
        check_hook(broken_hooks.Skipping(), num_ranks=(2,), seconds=3)
    assert capsys.readouterr().out.splitlines() == ["Skipping(ratio=0.1)", f"  {title(RULES[0])}: yes"]


def test_what_is_not_stated_is_printed_as_not_checked(run, capsys, monkeypatch):
    monkeypatch.setattr(check, "Processes", lambda *_: contextlib.nullcontext(run))
    monkeypatch.setattr(check, "RULES", [BY_NAME["ranks_agree_on_the_mean"]])
    for error in (None, 0.5):
        check_hook("int8", error=error, num_ranks=(2,), seconds=30)
    out = capsys.readouterr().out
    assert out.count("It is the mean over ranks up to an error: not checked, give error=") == 1
    assert out.count("and not the sum over ranks: yes") == 1
    assert out.count(f"{title(BY_NAME['ranks_agree_on_the_mean'])}: yes") == 1


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ({"device": "meta"}, r"^device='meta' is not available; use 'cpu'"),
        ({"backend": "mpi"}, r"^backend='mpi': use 'gloo'"),
        ({"backend": "nccl"}, r"^backend='nccl': use 'gloo', or 'nccl' with device='cuda'"),
        pytest.param(
            {"device": "cuda"},
            r"^device='cuda' is not available",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one"),
        ),
    ],
)
def test_devices_that_are_not_there(place, text):
    with pytest.raises(ValueError, match=text):
        check_hook("allreduce", num_ranks=(2,), **place)


def test_variables_of_ranks_that_share_a_gpu(monkeypatch):
    monkeypatch.delenv("NCCL_HOSTID", raising=False)
    assert variables_for_shared_gpus(1, 2, 2, (2, 28, 9)) == {}
    before, after = (variables_for_shared_gpus(1, 2, 1, version) for version in ((2, 28, 9), (2, 30, 1)))
    assert before["NCCL_HOSTID"] != variables_for_shared_gpus(0, 2, 1, (2, 28, 9))["NCCL_HOSTID"]
    assert before["NCCL_SOCKET_IFNAME"] == "lo"
    assert "NCCL_MULTI_RANK_GPU_ENABLE" not in before
    assert "NCCL_HOSTID" not in after
    assert after["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
    assert after["NCCL_MAX_CTAS"] == "2"
    assert variables_for_shared_gpus(1, 2, 1, (3, 0)).keys() == after.keys()


@pytest.mark.parametrize(("num_ranks", "is_shared"), [(2, False), (4, True)])
def test_take_gpu(monkeypatch, num_ranks, is_shared):
    """Of two devices, rank 3 takes the second one; variables that are set stay as they are."""
    chosen = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    for name in ("NCCL_HOSTID", "NCCL_NVLS_ENABLE", "NCCL_IB_DISABLE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    assert take_gpu(3, num_ranks) == torch.device("cuda", 1)
    assert chosen == [torch.device("cuda", 1)]
    assert os.environ.get("NCCL_HOSTID") == ("rank-3" if is_shared else None)
    assert os.environ["NCCL_SOCKET_IFNAME"] == "eth7"


def test_what_fails_on_a_rank_is_shown():
    with Processes(2, 10) as processes, pytest.raises(RuntimeError, match=r"(?s)rank 1: Traceback.*ZeroDivisionError"):
        processes(_divide, world=2)


def _divide(rank, world):
    return 1 / (1 - rank)


def test_the_others_are_not_waited_for_long_after_a_failure(monkeypatch):
    monkeypatch.setattr(processes_module, "_SECONDS_AFTER_FAILURE", 0.5)
    with (
        Processes(2, 100) as processes,
        pytest.raises(RuntimeError, match=r"(?s)rank 1: .*ZeroDivisionError.*rank 0: no reply after \d+ s"),
    ):
        processes(_divide_or_sleep, world=2)


def _divide_or_sleep(rank, world):
    return time.sleep(300) if rank == 0 else 1 / (1 - rank)
