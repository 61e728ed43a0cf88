"""Local SGD on nodes, at the end of training, and when a rank fails; what it cannot do while ranks step alone."""

import contextlib
import os
import re
import time
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from driver import closing_texts
from local_sgd_driver import ALONE, local, one_step, params
from torch.nn.parallel import DistributedDataParallel

import lightning_commhooks as lc
from lightning_commhooks.interface import models

SHAPES = {"a": (6,), "b": (2, 2)}
POST = lc.PostLocalSGD(period=2, **ALONE)

# Ranks and nodes -------------------------------------------------------------------------------------------------


def too_small(rank, world):
    for hook in (lc.HierarchicalLocalSGD(period_group_size_dict={2: 2, 4: 3}), "all"):
        if hook == "all":
            hook = lc.HierarchicalLocalSGD(period_group_size_dict={2: 8})
        with pytest.raises(ValueError, match=r"the largest group in .* must be all 4 ranks; None stands for that"):
            lc.attach(DistributedDataParallel(params(SHAPES)[0]), hook)


def test_largest_group_must_be_all_ranks(run):
    run(too_small, world=4)


def mean_gradient(rank, world, hook, variables):
    """What a rank steps by alone, when its launcher has set these variables; and the warnings of `attach`."""
    others = dict.fromkeys(("NODE_RANK", "GROUP_RANK", "SLURM_NODEID"))
    with mock.patch.dict(os.environ), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for key in others:
            os.environ.pop(key, None)
        os.environ.update({key: str(numbers[rank]) for key, numbers in variables.items()})
        model, gradients = params(SHAPES)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with local(model, hook, [optimizer]) as (ddp, _):
            one_step(ddp, optimizer, {name: (rank + 1) * g for name, g in gradients.items()})
            return -model.a[0].item(), [str(warning.message) for warning in caught]


FAR = {"COMMHOOKS_LATENCY_MS": [40] * 4}
NODES = {
    "two": ({"NODE_RANK": [0, 0, 1, 1]}, None, [1.5, 1.5, 3.5, 3.5]),
    "torchrun": ({"GROUP_RANK": [0, 0, 1, 1]}, None, [1.5, 1.5, 3.5, 3.5]),
    "slurm": ({"SLURM_NODEID": [4, 4, 2, 2]}, None, [1.5, 1.5, 3.5, 3.5]),
    "lightning_comes_first": ({"SLURM_NODEID": [0] * 4, "NODE_RANK": [0, 0, 1, 1]}, None, [1.5, 1.5, 3.5, 3.5]),
    "uneven": ({"NODE_RANK": [0, 0, 0, 1]}, None, [2.0, 2.0, 2.0, 4.0]),
    "interleaved": ({"NODE_RANK": [0, 1, 0, 1]}, None, [2.0, 3.0, 2.0, 3.0]),
    "one_each": ({"NODE_RANK": [0, 1, 2, 3]}, None, [1.0, 2.0, 3.0, 4.0]),
    "given": ({"NODE_RANK": [0, 0, 0, 1]}, 2, [1.5, 1.5, 3.5, 3.5]),
    "uneven_given": ({}, 3, [2.0, 2.0, 2.0, 4.0]),
    "one_node": ({}, None, [2.5] * 4),
    "all_given": ({}, 4, [2.5] * 4),
    "far": ({"NODE_RANK": [0, 0, 1, 1], **FAR}, None, [1.5, 1.5, 3.5, 3.5]),
    "far_one_each": ({"NODE_RANK": [0, 1, 2, 3], **FAR}, None, [1.0, 2.0, 3.0, 4.0]),
    "far_uneven_given": ({**FAR}, 3, [2.0, 2.0, 2.0, 4.0]),
}


@pytest.mark.parametrize("case", NODES)
def test_gradients_are_averaged_within_a_node(run, case):
    variables, size, expected = NODES[case]
    hook = lc.PostLocalSGD(start_localSGD_iter=0, period=10, subgroup_size=size)
    results = run(mean_gradient, hook, variables, world=4)
    assert [mean for mean, _ in results] == pytest.approx(expected)
    texts = [[text for text in texts if "gradients go on being averaged" in text] for _, texts in results]
    assert texts[1:] == [[]] * 3
    why = {"one_node": "over all 4 ranks at every step, because all are on one node", "all_given": "one subgroup"}
    assert len(texts[0]) == (case in why)
    assert why.get(case, "") in "".join(texts[0])


# While ranks step alone, and at the end ------------------------------------------------------------------------


def join(rank, world, hook):
    model, gradients = params(SHAPES)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with local(model, hook, [optimizer]) as (ddp, attachment), contextlib.ExitStack() as stack:
        stack.enter_context(pytest.raises(lc.HookError, match=r"join\(\) does not work while ranks step alone"))
        with ddp.join():
            for _ in range(5):
                one_step(ddp, optimizer, gradients)
    return attachment.metrics()["steps"]


def test_join_is_refused_while_ranks_step_alone(run):
    late = lc.PostLocalSGD(start_localSGD_iter=2, post_local_gradient_allreduce=False)
    assert run(join, late) == [3, 3]


def move(rank, world):
    model, gradients = params(SHAPES)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with local(model, lc.PostLocalSGD(period=3, **ALONE), [optimizer]) as (ddp, attachment):
        one_step(ddp, optimizer, {name: rank * g for name, g in gradients.items()})
        with pytest.raises(ValueError, match=r"models of the ranks differed .* average_weights\(\) before making it"):
            attachment.move_to(DistributedDataParallel(model))
        attachment.average_weights()
        new = DistributedDataParallel(model)
        attachment.move_to(new)
        for _ in range(2):
            one_step(new, optimizer, {name: rank * g for name, g in gradients.items()})
        return model.a.tolist()


def test_moves_to_a_new_wrapper_when_ranks_are_equal_only(run):
    first, second = run(move)
    assert first == second


def end(rank, world, hook, steps, average):
    model, gradients = params(SHAPES)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    ddp = DistributedDataParallel(model)
    attachment = lc.attach(ddp, hook, optimizers=[optimizer])
    for _ in range(steps):
        one_step(ddp, optimizer, gradients)
    if average:
        attachment.average_weights()
    return closing_texts(attachment)


DIVERGED = r"ended while 2 parameters differed between ranks; call Attachment.average_weights\(\)"
NEVER = "training ended after .* steps, and hook='.*' has never averaged models"
LONG = lc.PostLocalSGD(period=20, **ALONE)
LATE = lc.PostLocalSGD(period=2, start_localSGD_iter=12, post_local_gradient_allreduce=False)


@pytest.mark.parametrize(
    ("hook", "steps", "average", "expected"),
    [
        (POST, 0, False, []),
        (lc.DiLoCo(post_local_gradient_allreduce=False), 0, True, []),
        (LONG, 9, False, [DIVERGED]),
        (LONG, 10, False, [DIVERGED, NEVER]),
        (LONG, 10, True, []),
        (POST, 2, False, []),
        (POST, 3, False, [DIVERGED]),
        (LATE, 9, False, []),
        (
            LATE,
            10,
            False,
            ["after 10 steps, and hook='post_localsgd' averages gradients .* until start_localSGD_iter=12"],
        ),
        (LATE, 13, False, [DIVERGED, NEVER]),
        (LATE, 14, False, []),
        (lc.Cast(LONG), 10, False, [DIVERGED, NEVER]),
        (lc.Schedule({0: POST, 3: "allreduce"}), 4, False, []),
    ],
    ids=lambda value: str(getattr(value, "name", value))[:12],
)
def test_what_is_said_at_the_end(run, hook, steps, average, expected):
    first, second = run(end, hook, steps, average)
    assert second == []
    assert len(first) == len(expected), first
    for text, pattern in zip(first, expected, strict=True):
        assert re.search(pattern, text)


# Failures ----------------------------------------------------------------------------------------------------


def fail(rank, world, where, failing):
    """How long a rank waited for its error, and the error."""
    hook = lc.PostLocalSGD(start_localSGD_iter=0, period=2, subgroup_size=2)
    model, gradients = params(SHAPES)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def out_of_numbers(*_):
        raise ArithmeticError("out of numbers")

    with local(model, hook, [optimizer]) as (ddp, attachment), mock.patch.object(models, "average_", models.average_):
        began = time.monotonic()
        one_step(ddp, optimizer, gradients)
        if rank == failing and where == "averaging":
            models.average_ = out_of_numbers
        elif rank == failing and where == "subgroup":
            attachment.bound._subgroup.all_reduce_mean_ = out_of_numbers
        elif rank == failing:
            attachment.close()  # as after an error of the user's
        with pytest.raises(lc.HookError) as error:
            one_step(ddp, optimizer, gradients)
        seconds = time.monotonic() - began
        dist.barrier()  # whoever failed stays, and closes nothing, until all have
        return seconds, str(error.value)


@pytest.mark.parametrize("failing", [0, 3])
@pytest.mark.parametrize("where", ["averaging", "subgroup", "user"])
def test_failure_on_one_rank_ends_all_though_they_are_in_subgroups(run, where, failing):
    for rank, (seconds, text) in enumerate(run(fail, where, failing, world=4, timeout=40)):
        assert seconds < 20
        if rank == failing:
            assert ("the communication hook was closed" if where == "user" else "out of numbers") in text
        if where != "user":
            assert f"failed on rank {rank}" in text
        if where == "averaging":
            assert "after the optimizer's step 1 (a, ...)" in text
