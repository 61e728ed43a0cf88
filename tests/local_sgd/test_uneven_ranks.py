"""DiLoCo of ranks that take as many steps as they can, against a simulation in one process in float64."""

import dataclasses
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from local_sgd_driver import ALONE, local
from test_diloco_beside import batch, loss, make_model
from torch import nn

import lightning_commhooks as lc
from accelerate_integration import CommHookKwargs
from lightning_commhooks.collectives.averaging import check_same
from lightning_commhooks.hooks import _pseudo_gradients

OUTER = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
# Of each rank's steps.
SECONDS = [1.0, 2.0, 1.0, 3.0]
FIRST, PERIOD_SECONDS, OUTER_STEPS = 2, 6.0, 4


def train(rank, world, options):
    """Parameters after each outer step, and the steps that the rank has taken until then."""
    model, optimizer = make_model()
    hook = lc.DiLoCo(period=FIRST, period_seconds=PERIOD_SECONDS, **options)
    clock, after, step = mock.Mock(), [], 0
    clock.monotonic.return_value = 0.0

    def meet(*args):
        told = check_same(*args)
        clock.monotonic.return_value += 100 / SECONDS[rank]  # the faster, the longer a rank waits for the others
        return told

    clocked = mock.patch.multiple(_pseudo_gradients, time=clock, check_same=meet)
    with clocked, local(model, hook, [optimizer]) as (ddp, attachment):
        while len(after) < OUTER_STEPS:
            ddp.zero_grad()
            loss(ddp, batch(rank, step)).backward()
            step += 1
            clock.monotonic.return_value += SECONDS[rank]
            optimizer.step()
            if attachment.metrics()["averagings"] > len(after):
                after.append((torch.cat([p.detach().reshape(-1) for p in model.parameters()]), step))
    return after


def simulate(world, subgroup):
    """The same in one process: moves weighted by steps, outer SGD of PyTorch."""
    ranks = [make_model() for _ in range(world)]
    common = [p.detach().clone() for p in ranks[0][0].parameters()]
    outer = torch.optim.SGD(common, **OUTER)
    groups = [range(first, first + subgroup) for first in range(0, world, subgroup)]
    steps, trajectory = [0] * world, []
    for number in range(OUTER_STEPS):
        taken = []
        for group in groups:
            slowest = max(SECONDS[rank] for rank in group)
            length = FIRST if number == 0 else round(PERIOD_SECONDS / slowest)
            for _ in range(length):
                for rank in group:
                    ranks[rank][1].zero_grad()
                    loss(ranks[rank][0], batch(rank, steps[rank])).backward()
                    steps[rank] += 1
                for same in zip(*(ranks[rank][0].parameters() for rank in group), strict=True):
                    mean = sum(p.grad for p in same) / subgroup
                    for p in same:
                        p.grad.copy_(mean)
                for rank in group:
                    ranks[rank][1].step()
            taken += [length] * subgroup
        for i, p in enumerate(common):
            moves = [p - list(model.parameters())[i].detach() for model, _ in ranks]
            p.grad = sum(num * move for num, move in zip(taken, moves, strict=True)) / sum(taken)
        outer.step()
        for model, _ in ranks:
            for p, anchor in zip(model.parameters(), common, strict=True):
                p.data.copy_(anchor)
        trajectory.append((torch.cat([p.detach().reshape(-1) for p in common]), list(steps)))
    return trajectory


@pytest.mark.parametrize(("world", "subgroup"), [(2, 1), (4, 1), (4, 2)])
def test_trajectory_is_that_of_the_simulation(run, world, subgroup):
    alone = {"post_local_gradient_allreduce": False} if subgroup == 1 else {"subgroup_size": subgroup}
    expected = simulate(world, subgroup)
    assert len({*expected[-1][1]}) > 1, "ranks take different numbers of steps"
    for rank, after in enumerate(run(train, alone, world=world)):
        for (own, taken), (parameters, steps) in zip(after, expected, strict=True):
            assert taken == steps[rank]
            torch.testing.assert_close(own, parameters, rtol=0, atol=1e-12)


def at_different_places(rank, world):
    """The error where one rank evaluates while the other takes an outer step."""
    model, optimizer = make_model()
    hook = lc.DiLoCo(period=3, period_seconds=1.0, post_local_gradient_allreduce=False)
    with local(model, hook, [optimizer]) as (ddp, attachment):
        for step in range(3):
            if step:
                optimizer.step()
            if rank == 0 or step < 2:
                loss(ddp, batch(rank, step)).backward()
        with pytest.raises(lc.HookError, match="ranks called different averaging operations") as error:
            (attachment.average_weights if rank else optimizer.step)()
        dist.barrier()
    return str(error.value)


def test_evaluating_at_different_places_is_an_error_on_all_ranks(run):
    run(at_different_places, timeout=60)


def waited(rank, world):
    model, optimizer = make_model()
    with local(model, lc.PostLocalSGD(period=1, **ALONE), [optimizer]) as (ddp, attachment):
        loss(ddp, batch(rank, 0)).backward()
        time.sleep(0.5 * rank)
        optimizer.step()
        return attachment.metrics()["waited_ms"]


def test_metrics_say_who_waits(run):
    early, late = run(waited)
    assert early > late


UNEVEN = lc.DiLoCo(period_seconds=60, post_local_gradient_allreduce=False)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: lc.DiLoCo(period_seconds=0), "period_seconds must be None or above 0, got 0"),
        (lambda: lc.DiLoCo(period_seconds=True), "period_seconds must be None or above 0, got True"),
        (lambda: lc.DiLoCo(period=1, period_seconds=60), "period, the first one with period_seconds, must be"),
        (lambda: lc.DiLoCo(delay=2, period_seconds=60), "delay=2 does not go with period_seconds=60"),
        (lambda: lc.DiLoCo(fragments=2, period_seconds=60), "fragments=2 does not go with period_seconds=60"),
        (lambda: lc.DiLoCo(eager=True, period_seconds=60), "eager=True does not go with period_seconds=60"),
        (lambda: lc.Schedule({0: UNEVEN}), "cannot be inside another hook"),
        (lambda: lc.PerParameter({"*": UNEVEN}), "cannot be inside another hook"),
        (lambda: CommHookKwargs(hook=UNEVEN), "Accelerate makes all wait for each other"),
    ],
)
def test_what_does_not_work_is_refused(make, text):
    with pytest.raises(ValueError, match=text):
        make()


def test_the_trainer_refuses_it():
    pytest.importorskip("lightning")
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    with pytest.raises(MisconfigurationException, match="the Trainer makes all wait for each other"):
        lc.CompressedDDPStrategy(hook=UNEVEN)


def refused_by_attach(rank, world):
    model, optimizer = make_model()
    scaler = torch.amp.GradScaler("cpu")
    for options, what in (({"find_unused_parameters": True}, "find_unused_parameters=True"), ({}, "grad_scaler")):
        used = None if options else scaler
        with (
            pytest.raises(ValueError, match=f"with {what} every step is collective"),
            local(model, UNEVEN, [optimizer], grad_scaler=used, **options),
        ):
            pass
    with (
        pytest.raises(
            ValueError, match="average_buffers=False, while DDP broadcasts buffers, every step is collective"
        ),
        local(nn.BatchNorm1d(3), dataclasses.replace(UNEVEN, average_buffers=False)),
    ):
        pass
    optimizers = [torch.optim.SGD([p], lr=0.1) for p in model.parameters()]
    with local(model, UNEVEN, optimizers) as (ddp, _):
        loss(ddp, batch(rank, 0)).backward()
        optimizers[0].step()
        with pytest.raises(lc.HookError, match="period_seconds works with one optimizer"):
            optimizers[1].step()
        dist.barrier()


def test_attach_refuses_what_is_collective_in_each_step(run):
    run(refused_by_attach)
