"""Local SGD in a Schedule: ranks are equal again after a phase in which they stepped alone."""

import pytest
import torch
from local_sgd_driver import ALONE, SimulationWithState, local, params, same, snapshot
from test_local_sgd import batch, loss, make_model

import lightning_commhooks as lc


def scheduled(rank, world, hook, kind):
    """Everything after each step."""
    model = make_model()
    makers = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.02),
    }
    optimizers = [makers[kind](model.parameters())]
    with local(model, hook, optimizers) as (ddp, _):
        trajectory = []
        for step in range(20):
            ddp.zero_grad()
            loss(ddp, batch(rank, step, "both"), "both").backward()
            optimizers[0].step()
            trajectory.append(snapshot(model, optimizers))
    return trajectory


SCHEDULES = {
    "post": {0: "allreduce", 4: lc.PostLocalSGD(period=3, **ALONE), 12: "allreduce"},
    "diloco": {0: "allreduce", 4: lc.DiLoCo(period=3, **ALONE), 12: "allreduce"},
    "beside": {0: "allreduce", 4: lc.DiLoCo(period=3, delay=2, **ALONE), 12: "allreduce"},
    "boundary": {0: lc.PostLocalSGD(period=4, **ALONE), 12: "allreduce"},
    "first": {0: lc.PostLocalSGD(period=50, **ALONE), 12: "powersgd"},
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_ranks_are_equal_after_a_phase_alone(run, name):
    first, *others = run(scheduled, lc.Schedule(SCHEDULES[name]), "adamw", world=4)
    for step in range(20):
        for other in others:
            apart = [key for key in first[step] if not torch.equal(first[step][key], other[step][key])]
            if step >= 13:
                assert not apart, f"step {step}"
            elif step == 10:
                assert apart


def test_schedule_is_the_simulation(run):
    results = run(scheduled, lc.Schedule(SCHEDULES["post"]), "sgd", world=4)
    simulation = SimulationWithState(
        make_model(),
        4,
        lambda m: [torch.optim.SGD(m.parameters(), lr=0.1)],
        loss,
        optimizer_state="keep",
        periods={3: 4},
        warmup=4,
    )
    for step in range(20):
        if step == 12:
            simulation.is_local, simulation.warmup = False, 100
        simulation.backward([[batch(rank, step, "both")] for rank in range(4)], "both")
        simulation.step(0)
        if step == 12:
            simulation._average(lambda m: list(m.parameters()), 4)
        for rank, trajectory in enumerate(results):
            for key, value in simulation.models[rank].named_parameters():
                torch.testing.assert_close(trajectory[step][key], value.detach(), rtol=0, atol=1e-12)


def test_diloco_begins_with_equal_models_after_another_way_of_stepping_alone(run):
    hook = lc.Schedule({0: lc.PostLocalSGD(period=50, **ALONE), 5: lc.DiLoCo(period=3, **ALONE)})
    first, second = run(scheduled, hook, "sgd")
    assert not same(first[4], second[4]) or not same(first[6], second[6])
    assert same(first[7], second[7])
    assert same(first[10], second[10])


def step_before_any_backward(rank, world, hook):
    model, gradients = params({"a": (3,)})
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with local(model, hook, [optimizer]) as (ddp, _):
        optimizer.step()  # as torch.distributed.checkpoint.state_dict does to have a state to load to
        ddp({"a": rank * gradients["a"]}).backward()
        optimizer.step()
    return model.a.tolist()


POST = lc.PostLocalSGD(period=1, **ALONE)


@pytest.mark.parametrize("hook", [POST, lc.Schedule({0: POST}), lc.Cast(POST), lc.DiLoCo(**ALONE, period=1)])
def test_step_before_any_backward(run, hook):
    first, second = run(step_before_any_backward, hook)
    assert first == second != [0.0] * 3
