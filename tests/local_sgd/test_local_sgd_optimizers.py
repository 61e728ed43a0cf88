"""Optimizers of ranks that step alone: their state, how the hook gets to know of them, clipping, sparse gradients."""

import contextlib
import gc
import itertools
import warnings
import weakref

import pytest
import torch
from local_sgd_driver import (
    ALONE,
    METHODS,
    SimulationWithState,
    local,
    params,
    same,
    snapshot,
)
from pool import ignoring
from test_local_sgd import batch, loss, make_model, make_optimizers
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import lightning_commhooks as lc

NOT_SYNCHRONIZED = "an optimizer stepped after a backward in no_sync()"


def train(rank, world, hook, kind="momentum", steps=12, clip=None, optimizers="given"):
    """Parameters and optimizers' state after each step. `optimizers` is how the hook gets to know of them."""
    model = make_model()
    own = make_optimizers(model, kind)
    given = {"given": own, "callable": lambda: own, "late": None}[optimizers]
    trajectory = []
    with local(model, hook, given) as (ddp, attachment):
        for step in range(steps):
            if step == 1 and given is None:
                for optimizer in own:
                    attachment.add_optimizer(optimizer)
            ddp.zero_grad()
            loss(ddp, batch(rank, step, "both"), "both").backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            for optimizer in own:
                optimizer.step()
            trajectory.append(snapshot(model, own))
    return trajectory


def simulate(world, steps=12, kind="momentum", optimizer_state="keep", **options):
    simulation = SimulationWithState(
        make_model(), world, lambda m: make_optimizers(m, kind), loss, optimizer_state=optimizer_state, **options
    )
    trajectory = []
    for step in range(steps):
        simulation.backward([[batch(rank, step, "both")] for rank in range(world)], "both")
        for k in (0, 1):
            simulation.step(k)
        trajectory.append([snapshot(*pair) for pair in zip(simulation.models, simulation.optimizers, strict=True)])
    return trajectory


def assert_same_trajectory(results, expected):
    for rank, trajectory in enumerate(results):
        for step, (mine, theirs) in enumerate(zip(trajectory, expected, strict=True)):
            assert mine.keys() == theirs[rank].keys(), f"step {step}, rank {rank}"
            for name, value in mine.items():
                torch.testing.assert_close(value, theirs[rank][name], rtol=0, atol=1e-12, msg=f"{name}, {step}, {rank}")


@pytest.mark.parametrize(
    ("state", "method"), [("keep", "diloco"), *(("average", method) for method in METHODS), ("reset", "post")]
)
def test_state_of_optimizers(run, method, state):
    make, options, simulated = METHODS[method]
    results = run(train, make(optimizer_state=state, **options, **ALONE), "adamw", world=4)
    assert_same_trajectory(results, simulate(4, kind="adamw", optimizer_state=state, **simulated))


def missing_state(rank, world, hook):
    """State after two steps when rank 1 has no gradient of the first parameter once, and of the second one never."""
    model, gradients = params({"a": (3,), "b": (4,)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.5, 0.9))
    with local(model, hook, [optimizer]) as (ddp, _):
        for step in range(2):
            ddp.zero_grad()
            ddp({name: g * (rank + 1) for name, g in gradients.items()}).backward()
            if rank:
                model.b.grad = None
                model.a.grad = model.a.grad if step else None
            optimizer.step()
    return [(s["exp_avg"].tolist(), s["step"].item()) for s in optimizer.state.values()]


def test_state_that_one_rank_has_not_got_is_left_alone_and_so_are_step_counts(run):
    first, second = run(missing_state, lc.PostLocalSGD(period=2, optimizer_state="average", **ALONE))
    assert first == [([0.875] * 3, 2), ([0.75] * 4, 2)]
    assert second == [([0.875] * 3, 1)]


# Ways to train -----------------------------------------------------------------------------------------------


def test_gradients_are_clipped_on_each_rank_alone(run):
    class Clipped(torch.optim.SGD):
        def step(self):
            nn.utils.clip_grad_norm_(itertools.chain(*(g["params"] for g in self.param_groups)), 0.5)
            super().step()

    simulation = SimulationWithState(
        make_model(), 2, lambda m: [Clipped(m.parameters(), 0.05, 0.9)], loss, optimizer_state="keep", periods={4: 2}
    )
    results = run(train, lc.PostLocalSGD(period=4, **ALONE), "momentum", 8, 0.5)
    for step in range(8):
        simulation.backward([[batch(rank, step, "both")] for rank in range(2)], "both")
        simulation.step(0)
        for rank, model in enumerate(simulation.models):
            for name, value in model.named_parameters():
                torch.testing.assert_close(results[rank][step][name], value.detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("how", ["callable", "late"])
def test_optimizers_that_the_hook_learns_of_later(run, how):
    hook = lc.PostLocalSGD(period=3, start_localSGD_iter=2, post_local_gradient_allreduce=False)
    assert_same_trajectory(run(train, hook, "adamw", 9, None, how), simulate(2, 9, "adamw", periods={3: 2}, warmup=2))


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.actor, self.critic = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 1)

    def forward(self, x, head):
        return getattr(self, head)(self.trunk(x).tanh()).square().mean()


def with_common_trunk(rank, world, hook):
    """Sums of each part after each step, and of the average of each optimizer's state."""
    torch.manual_seed(0)
    model, heads, sums = TwoHeads(), ("actor", "critic"), {"trunk": [], "actor": [], "critic": []}
    own = {head: [*model.trunk.parameters(), *getattr(model, head).parameters()] for head in heads}
    optimizers = {head: torch.optim.Adam(own[head], lr=0.01) for head in heads}
    with local(model, hook, optimizers.values(), find_unused_parameters=True) as (ddp, attachment):
        for step in range(8):
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + rank))
            for head in heads:
                model.zero_grad()
                ddp(x, head).backward()
                optimizers[head].step()
            for part, found in sums.items():
                found.append(sum(p.double().sum().item() for p in getattr(model, part).parameters()))
        with attachment.averaged(optimizers.values()):
            states = [sum(s["exp_avg"].double().sum().item() for s in o.state.values()) for o in optimizers.values()]
        attachment.average_weights()
    return sums, states


@pytest.mark.parametrize("method", ["post", "diloco"])
def test_optimizers_with_a_common_first_parameter_have_counts_and_states_of_their_own(run, method):
    make, *_ = METHODS[method]
    (first, states), (second, others) = run(with_common_trunk, make(period=3, **ALONE))
    assert states == others
    for part, sums in first.items():
        equal = [a == b for a, b in zip(sums, second[part], strict=True)]
        assert equal == [False, False, True, False, False, True, False, False], part


def replaced_by_another(rank, world):
    """Counts by key with an optimizer that replaces one of partly other parameters."""
    torch.manual_seed(0)
    model, hook = TwoHeads(), lc.PostLocalSGD(period=2, **ALONE)
    optimizer = torch.optim.SGD([*model.trunk.parameters(), *model.actor.parameters()], lr=0.01)
    options = {"find_unused_parameters": True}
    with ignoring("2 trained parameters"), local(model, hook, [optimizer], **options) as (ddp, attachment):
        ddp(torch.ones(1, 3), "actor").backward()
        optimizer.step()
        optimizer = torch.optim.SGD([*model.trunk.parameters(), *model.critic.parameters()], lr=0.01)
        attachment.add_optimizer(optimizer)
        ddp(torch.ones(1, 3), "critic").backward()
        optimizer.step()
        attachment.average_weights()
        return attachment.runtime.local.models.num_steps


def test_an_optimizer_that_replaces_another_takes_over_its_count(run):
    assert run(replaced_by_another) == [{"trunk.weight": 2}] * 2


def with_every_name_taken(rank, world):
    model = TwoHeads()
    parts = [list(part.parameters()) for part in (model.actor, model.critic)]
    own = [*parts, [parts[0][0], parts[1][0]]]
    optimizers = [torch.optim.SGD(parameters, lr=0.01) for parameters in own]
    with local(model, lc.PostLocalSGD(period=2, **ALONE), optimizers) as (_, attachment), ignoring("2 trained"):
        models = attachment.runtime.local.models
        return [models.stepped(optimizer, 0).optimizer for optimizer in optimizers]


def test_an_optimizer_without_a_name_of_its_own_shares_one(run):
    assert run(with_every_name_taken)[0][2] == "actor.weight"


def embed(rank, world, hook):
    torch.manual_seed(1)
    model = nn.Embedding(9, 3, sparse=True).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    with local(model, hook, [optimizer]) as (ddp, _):
        for step in range(8):
            ddp.zero_grad()
            ddp(words(rank, step)).sin().sum().backward()
            optimizer.step()
    return model.weight.detach().clone()


def words(rank, step):
    return torch.randint(9, (5,), generator=torch.Generator().manual_seed(10 * step + rank))


@pytest.mark.parametrize("method", ["post", "diloco"])
def test_sparse_gradients(run, method):
    make, options, simulated = METHODS[method]
    torch.manual_seed(1)
    simulation = SimulationWithState(
        nn.Embedding(9, 3).double(),
        4,
        lambda m: [torch.optim.SGD(m.parameters(), lr=0.3)],
        lambda model, x, part: model(x).sin().sum(),
        optimizer_state="keep",
        **simulated,
    )
    for step in range(8):
        simulation.backward([[words(rank, step)] for rank in range(4)], None)
        simulation.step(0)
    for rank, weight in enumerate(run(embed, make(**options, **ALONE), world=4)):
        torch.testing.assert_close(weight, simulation.models[rank].weight.detach(), rtol=0, atol=1e-12)


def saved_by_dcp(rank, world, hook, saves):
    """Parameters after each of 6 steps of SGD, which has no state; rank 0 saves that alone after the third."""
    model, gradients = params({"a": (3,), "b": (4,)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trajectory = []
    with local(model, hook, [optimizer]) as (ddp, attachment):
        for step in range(6):
            ddp.zero_grad()
            ddp({name: g * (rank + 1 + step) for name, g in gradients.items()}).backward()
            optimizer.step()
            ddp.zero_grad()
            trajectory.append(snapshot(model, [optimizer]))
            if saves and step == 2:
                if rank == 0:
                    get_optimizer_state_dict(model, optimizer)
                with attachment.averaged_weights():
                    get_optimizer_state_dict(model, optimizer)
                get_optimizer_state_dict(model, optimizer)
    return trajectory


@pytest.mark.parametrize("method", ["post", "diloco"])
def test_steps_that_only_make_state(run, method):
    make, options, _ = METHODS[method]
    plain, saved = (run(saved_by_dcp, make(**options, **ALONE), saves, world=4) for saves in (False, True))
    assert_same_trajectory(saved, list(zip(*plain, strict=True)))


def with_optimizers_in_turn(rank, world):
    """Whether each of three optimizers still exists after the next has taken its place."""
    model, found = make_model(), []
    with local(model, lc.PostLocalSGD(period=2, **ALONE), []) as (ddp, attachment):
        for step in range(6):
            if step % 2 == 0:
                optimizer = torch.optim.AdamW(model.parameters())
                attachment.add_optimizer(optimizer)
                found.append(weakref.ref(optimizer))
            optimizer.zero_grad()
            loss(ddp, batch(rank, step, "both"), "both").backward()
            optimizer.step()
        gc.collect()
        return [one() is not None for one in found]


def test_an_optimizer_that_was_replaced_is_freed(run):
    assert run(with_optimizers_in_turn) == [[False, False, True]] * 2


def first_backward_alone(rank, world, hook):
    """The average after 9 steps whose first backward is not synchronized, and the model after `average_weights()`."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        ignoring("hook .*: an optimizer stepped after a backward"),
        local(model, hook, [optimizer]) as (ddp, attachment),
    ):
        for step in range(10):
            optimizer.zero_grad()
            with ddp.no_sync() if step == 0 else contextlib.nullcontext():
                loss(ddp, batch(rank, step, "both"), "both").backward()
            optimizer.step()
        with attachment.averaged_weights():
            shown = snapshot(model, [])
        attachment.average_weights()
        return shown, snapshot(model, []), attachment.metrics()["averagings"]


@pytest.mark.parametrize("method", ["post", "diloco"])
def test_a_step_before_the_first_synchronized_backward(run, method):
    make = METHODS[method][0]
    (shown, ended, num), (shown_there, ended_there, _) = run(first_backward_alone, make(period=3, **ALONE))
    assert num == 3
    assert same(shown, shown_there)
    assert same(ended, ended_there)


def without_synchronized_backwards(rank, world, hook, first):
    """The model after each step and after `average_weights()`, and warnings; from step `first` on in `no_sync()`.

    Rank 1 skips a step, as a `GradScaler` lets it.
    """
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trajectory = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with local(model, hook, [optimizer]) as (ddp, attachment):
            for step in range(8):
                optimizer.zero_grad()
                with ddp.no_sync() if step >= first else contextlib.nullcontext():
                    loss(ddp, batch(rank, step, "both"), "both").backward()
                if first > 4 or (rank, step) != (1, 6):
                    optimizer.step()
                trajectory.append(snapshot(model, []))
            attachment.average_weights()
            trajectory.append(snapshot(model, []))
    return trajectory, [str(warning.message) for warning in caught if NOT_SYNCHRONIZED in str(warning.message)]


@pytest.mark.parametrize(
    ("first", "alike", "num"),
    [(0, 0, 1), (4, 4, 1), (5, 4, 0)],
)
@pytest.mark.parametrize("method", ["post", "diloco"])
def test_local_steps_without_synchronized_backwards(run, method, first, alike, num):
    """Local steps begin after step 4; the hook does not know that if no synchronized backward comes after it."""
    options = {**ALONE, "start_localSGD_iter": 4}
    here, there = run(without_synchronized_backwards, METHODS[method][0](period=3, **options), first)
    (trajectory, told), (trajectory_there, told_there) = here, there
    is_alike = [same(a, b) for a, b in zip(trajectory, trajectory_there, strict=True)]
    assert is_alike[:alike] == [True] * alike
    assert is_alike[alike:-1].count(False) >= 2
    assert is_alike[-1], "after average_weights()"
    assert [len(told), len(told_there)] == [num, num]


def accumulate_with_closures(rank, world):
    """The number of averages in evaluations of a warm-up, whose last backward of each window is in the closure."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hook = METHODS["post"][0](period=3, **{**ALONE, "start_localSGD_iter": 99})
    with local(model, hook, [optimizer]) as (ddp, attachment):

        def backward(step):
            loss(ddp, batch(rank, step, "both"), "both").backward()

        for step in range(6):
            optimizer.zero_grad()
            with ddp.no_sync():
                backward(step)
            optimizer.step(lambda step=step: backward(step + 100))
            with attachment.averaged_weights():
                pass
        return attachment.metrics()["averagings"]


def test_a_closure_that_ends_a_window(run):
    """As Lightning's. Warnings are errors."""
    assert run(accumulate_with_closures) == [0, 0]


class StepOfItsBase(torch.optim.SGD):
    """The hooks of a step run twice, once PyTorch has made the step of SGD report its own."""

    def step(self, closure=None):
        return super().step(closure)


def look_alone(rank, world, optimizer_class):
    """The number of averages after two steps, a forward of one rank in `no_sync()`, and an evaluation by all."""
    model = make_model()
    torch.optim.SGD(make_model().parameters(), lr=0.1)
    optimizer = optimizer_class(model.parameters(), lr=0.1)
    hook = METHODS["post"][0](period=3, **{**ALONE, "start_localSGD_iter": 99})
    with local(model, hook, [optimizer]) as (ddp, attachment):
        for step in range(2):
            optimizer.zero_grad()
            loss(ddp, batch(rank, step, "both"), "both").backward()
            if rank == 0:
                with ddp.no_sync():
                    loss(ddp, batch(rank, 2, "both"), "both")
            optimizer.step()
        with attachment.averaged_weights():
            return attachment.metrics()["averagings"]


@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, StepOfItsBase])
def test_a_forward_of_one_rank_decides_nothing(run, optimizer_class):
    assert run(look_alone, optimizer_class) == [0, 0]


def compiled_steps(rank, world):
    """The model after 8 steps of a compiled function and of a plain one, and warnings."""
    torch._dynamo.reset()
    found = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for compiles in (True, False):
            model = make_model()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            step = (
                torch.compile(lambda optimizer=optimizer: optimizer.step(), backend="eager")
                if compiles
                else optimizer.step
            )
            with local(model, METHODS["post"][0](period=3, **ALONE), [optimizer]) as (ddp, attachment):
                for number in range(8):
                    optimizer.zero_grad()
                    loss(ddp, batch(rank, number, "both"), "both").backward()
                    step()
                found.append((snapshot(model, [optimizer]), attachment.metrics()["averagings"]))
    return found, [text for warning in caught if "ynamo" in (text := str(warning.message))]


def test_a_compiled_step(run):
    for ((compiled, num), (plain, num_plain)), texts in run(compiled_steps):
        assert num == num_plain == 2
        for name, value in plain.items():
            torch.testing.assert_close(compiled[name], value)
        assert texts == []
