"""State of local SGD: resumed in the middle of a period, on other numbers of ranks; handed over by a Schedule."""

import copy
import itertools
import warnings

import pytest
import torch
from local_sgd_driver import (
    ALONE,
    METHODS,
    SimulationWithState,
    local,
    same,
    snapshot,
    through_a_file,
    zero_lr,
)
from test_local_sgd import OUTER, batch, loss, make_model, parameters
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lightning_commhooks as lc

WARM_UP = {"start_localSGD_iter": 5, "post_local_gradient_allreduce": False}
STEPS = 16
FRAGMENTS = lc.DiLoCo(period=4, fragments=2, **WARM_UP)
HOOKS = {name: make(**options, **WARM_UP) for name, (make, options, _) in METHODS.items()} | {"fragments": FRAGMENTS}


def make(kind="mixed", seed=7):
    model = make_model()
    model.first.insert(2, nn.BatchNorm1d(8).double())
    first, second = model.first.parameters(), model.second.parameters()
    if kind == "sgd":
        return model, [torch.optim.SGD(first, lr=0.1), torch.optim.SGD(second, lr=0.1)]
    return model, [torch.optim.AdamW(first, lr=0.02), torch.optim.SGD(second, lr=0.05, momentum=0.9)]


def stepping(step, kind):
    """Which optimizers step; the second one rests every third time, unless they are of one kind."""
    return (0, 1) if step % 3 or kind == "sgd" else (0,)


def train(rank, ddp, optimizers, steps, kind="mixed"):
    """Parameters, buffers and optimizers' state after each of these steps."""
    trajectory = []
    for step in steps:
        ddp.zero_grad()
        loss(ddp, batch(rank, step, "both"), "both").backward()
        for k in stepping(step, kind):
            optimizers[k].step()
        trajectory.append(snapshot(ddp.module, optimizers) | dict(copy.deepcopy(ddp.module).named_buffers()))
    return trajectory


def save(model, optimizers, attachment, exact=True):
    """A checkpoint of everything: as each rank has it, or of the averages."""
    if not exact:
        averaged = [attachment.averaged_optimizer_state(optimizer) for optimizer in optimizers]
        with attachment.averaged_weights(), averaged[0], averaged[1]:
            return save(model, optimizers, attachment)
    state = {
        "hook": attachment.state_dict(),
        "model": model.state_dict(),
        "optimizers": [o.state_dict() for o in optimizers],
    }
    return through_a_file(state)


def load(saved, model, optimizers, attachment):
    model.load_state_dict(saved["model"])
    for optimizer, state in zip(optimizers, saved["optimizers"], strict=True):
        optimizer.load_state_dict(state)
    attachment.load_state_dict(saved["hook"])


def uninterrupted(rank, world, hook, kind="mixed", average_at=None):
    """A whole run; perhaps one in which everything is averaged for good before a step."""
    model, optimizers = make(kind)
    with local(model, hook, optimizers) as (ddp, attachment):
        trajectory = train(rank, ddp, optimizers, range(average_at or 0), kind)
        if average_at is not None:
            attachment.average_weights()
            for optimizer in optimizers:
                attachment.average_optimizer_state(optimizer)
        return trajectory + train(rank, ddp, optimizers, range(average_at or 0, STEPS), kind)


def resumed(rank, world, hook, points, exact, kind="mixed"):
    """What comes after each checkpoint of one run, with all objects new and another initial model."""
    model, optimizers = make(kind)
    checkpoints = []
    with local(model, hook, optimizers, exact_state=exact) as (ddp, attachment):
        for begin, at in itertools.pairwise([0, *points]):
            train(rank, ddp, optimizers, range(begin, at), kind)
            checkpoints.append(save(model, optimizers, attachment, exact))
    trajectories = []
    for at, saved in zip(points, checkpoints, strict=True):
        model, optimizers = make(kind)
        nn.init.ones_(model.first[0].weight)
        with local(model, hook, optimizers, exact_state=exact) as (ddp, attachment):
            load(saved, model, optimizers, attachment)
            trajectories.append(train(rank, ddp, optimizers, range(at, STEPS), kind))
    return trajectories


WITH_OWN_STATE = [name for name in HOOKS if name != "diloco"]  # which fragments have as well


@pytest.mark.parametrize("name", WITH_OWN_STATE)
def test_exact_state_resumes_bit_by_bit(run, name):
    """In the warm-up not all bits are the same: DDP has other buckets in its first step, and sums in another order."""
    in_warm_up, in_a_period, _after_averaging = points = [3, 8, 9]
    whole, parts = run(uninterrupted, HOOKS[name], world=4), run(resumed, HOOKS[name], points, True, world=4)
    assert not same(whole[0][in_a_period - 1], whole[3][in_a_period - 1])
    for before, trajectories in zip(whole, parts, strict=True):
        for at, after in zip(points, trajectories, strict=True):
            for step, (theirs, mine) in enumerate(zip(before[at:], after, strict=True), start=at):
                for key in theirs:
                    tolerance = 1e-12 if at == in_warm_up else 0
                    text = f"{key}, step {step}, saved at {at}"
                    torch.testing.assert_close(mine[key], theirs[key], rtol=0, atol=tolerance, msg=text)


@pytest.mark.parametrize("name", WITH_OWN_STATE)
def test_state_with_averages_goes_on_as_if_averaged_for_good(run, name):
    whole, part = run(uninterrupted, HOOKS[name], "mixed", 8, world=4), run(resumed, HOOKS[name], [8], False, world=4)
    for before, (after,) in zip(whole, part, strict=True):
        for step, (mine, theirs) in enumerate(zip(after, before[8:], strict=True)):
            for key in theirs:
                torch.testing.assert_close(mine[key], theirs[key], rtol=0, atol=1e-12, msg=f"{key}, {step}")


@pytest.mark.parametrize(("name", "at"), [("post", 9), ("hierarchical", 11), ("diloco", 9)])
def test_state_saved_when_ranks_are_equal_goes_on_as_if_nothing_was(run, name, at):
    whole = run(uninterrupted, HOOKS[name], "sgd", world=4)
    part = run(resumed, HOOKS[name], [at], False, "sgd", world=4)
    for before, (after,) in zip(whole, part, strict=True):
        assert all(same(a, b) for a, b in zip(before[at:], after, strict=True))


# On other numbers of ranks -----------------------------------------------------------------------------------

LEGS = [(4, 6), (2, 5), (1, 3), (4, 6)]


def thawed(rank, world, hook):
    """Parameters of a run whose first layer is unfrozen, and of one that resumes from a checkpoint after that."""

    def frozen():
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        model[0].requires_grad_(False)
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def thaw(model, attachment):
        attachment.average_weights()
        model[0].requires_grad_(True)
        ddp = DistributedDataParallel(model)
        attachment.move_to(ddp)
        return ddp

    def train(ddp, optimizer, steps):
        for step in steps:
            data = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)
            optimizer.zero_grad()
            ddp(data).square().mean().backward()
            optimizer.step()

    model, optimizer = frozen()
    with local(model, hook, [optimizer], exact_state=True) as (ddp, attachment):
        train(ddp, optimizer, range(3))
        ddp = thaw(model, attachment)
        train(ddp, optimizer, range(3, 7))
        saved = save(model, [optimizer], attachment)
        assert "0.weight" in saved["hook"]["models"]["parameters"]
        attachment.average_weights()  # as before a model is wrapped again
        train(ddp, optimizer, range(7, 11))
    again, optimizer = frozen()
    with local(again, hook, [optimizer], exact_state=True) as (_, attachment):
        load(saved, again, [optimizer], attachment)
        train(thaw(again, attachment), optimizer, range(7, 11))
    return [[p.detach() for p in one.parameters()] for one in (model, again)]


@pytest.mark.parametrize(
    "hook",
    [
        lc.PostLocalSGD(start_localSGD_iter=2, period=3, post_local_gradient_allreduce=False),
        lc.DiLoCo(start_localSGD_iter=2, period=3, post_local_gradient_allreduce=False),
    ],
    ids=lambda hook: hook.name,
)
def test_exact_state_of_a_layer_that_was_unfrozen_later(run, hook):
    for whole, resumed in run(thawed, hook):
        assert all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True))


def delayed(rank, world, hook, save_at, steps=12):
    """Buffers after each step: of a run in which nothing is saved, of one that saves, and of one that resumes."""

    def make():
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()
        parts = [model[0].parameters(), [*model[1].parameters(), *model[2].parameters()]]
        return model, [torch.optim.SGD(part, lr=0.1, momentum=0.9) for part in parts]

    def train(ddp, optimizers, steps):
        for step in steps:
            data = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)
            ddp.zero_grad()
            ddp(data).square().mean().backward()
            optimizers[0].step()
            if step % 2 == 0:
                optimizers[1].step()
            yield {name: buffer.clone() for name, buffer in ddp.module.named_buffers()}

    runs = []
    for saves in (False, True):
        model, optimizers = make()
        with local(model, hook, optimizers, exact_state=True) as (ddp, attachment):
            before = [*train(ddp, optimizers, range(save_at))]
            saved = save(model, optimizers, attachment) if saves else None
            runs.append([*before, *train(ddp, optimizers, range(save_at, steps))])
    model, optimizers = make()
    with local(model, hook, optimizers, exact_state=True) as (ddp, attachment):
        load(saved, model, optimizers, attachment)
        return *runs, [*train(ddp, optimizers, range(save_at, steps))]


@pytest.mark.parametrize("save_at", [4, 5])
@pytest.mark.parametrize("delay", [2, 3])
def test_statistics_do_not_depend_on_a_save_while_averages_are_in_flight(run, delay, save_at):
    hook = lc.DiLoCo(period=3, delay=delay, **ALONE)
    for whole, with_save, resumed in run(delayed, hook, save_at):
        assert all(map(same, whole, with_save))
        assert all(map(same, whole[save_at:], resumed))


def skipped(rank, world):
    """Buffers of a rank whose first local step was skipped, and of one that resumes from a checkpoint after that."""
    hook = lc.PostLocalSGD(start_localSGD_iter=2, period=4, post_local_gradient_allreduce=False)

    def make():
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        return model, [torch.optim.SGD(model.parameters(), lr=0.1)], torch.amp.GradScaler("cpu", init_scale=4.0)

    model, optimizers, scaler = make()
    with local(model, hook, optimizers, scaler, exact_state=True) as (ddp, attachment):
        for step in range(3):
            data = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))
            loss = ddp(data).square().mean() * (torch.inf if step == 2 and rank == 1 else 1)
            ddp.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizers[0])
            scaler.update()
        saved = save(model, optimizers, attachment)
        own = model[1].running_mean.clone()
    model, optimizers, scaler = make()
    with local(model, hook, optimizers, scaler, exact_state=True) as (ddp, attachment):
        load(saved, model, optimizers, attachment)
        return own, model[1].running_mean.clone()


def test_exact_state_of_statistics_after_a_skipped_local_step(run):
    results = run(skipped)
    assert not torch.equal(results[0][0], results[1][0])
    assert all(torch.equal(own, resumed) for own, resumed in results)


def in_another_format(rank, world, hook):
    """Messages about a model with another memory format than when the hook was attached, or its state was saved."""

    def make(memory_format=torch.contiguous_format):
        torch.manual_seed(3)
        # In both formats the sizes of the first weight are [4, 3, 3, 3] in memory.
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 8, 2)).to(memory_format=memory_format)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def train(ddp, optimizer, steps):
        for step in range(steps):
            data = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(10 * step + rank))
            optimizer.zero_grad()
            ddp(data).square().mean().backward()
            optimizer.step()

    texts = []
    model, optimizer = make()
    with local(model, hook, [optimizer]) as (ddp, attachment):
        train(ddp, optimizer, 3)
        saved = through_a_file(attachment.state_dict())
        attachment.average_weights()
        model.to(memory_format=torch.channels_last)
        with pytest.raises(ValueError, match=r"'0.weight' has changed") as error:
            attachment.move_to(DistributedDataParallel(model))
        texts.append(str(error.value))
    model, optimizer = make(torch.channels_last)
    with local(model, hook, [optimizer]) as (_, attachment):
        with pytest.raises(ValueError, match="another memory format") as error:
            attachment.load_state_dict(saved)
        texts.append(str(error.value))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            attachment.load_state_dict(saved, strict_state=False)
        texts += [str(one.message) for one in caught]
    model, optimizer = make()
    with local(model, hook, [optimizer]) as (ddp, attachment):
        attachment.load_state_dict(saved)
        train(ddp, optimizer, 1)
    return texts


@pytest.mark.parametrize(
    "hook", [lc.DiLoCo(period=2, **ALONE), lc.PowerSGD(start_powerSGD_iter=0)], ids=lambda hook: hook.name
)
def test_memory_is_not_taken_over_by_a_model_of_another_memory_format(run, hook):
    for rank, (moved, loaded, *taken_over) in enumerate(run(in_another_format, hook)):
        assert "Call module.to(memory_format=...) before the model is wrapped, or attach another hook" in moved
        assert "parameter '0.weight' has another memory format in the state than now" in loaded
        assert ["'0.weight'" in text and "'1.weight'" in text for text in taken_over] == [True] * (rank == 0)


def converted(rank, world):
    """A model whose memory format is changed while DiLoCo trains it."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with local(model, lc.DiLoCo(period=2, **ALONE), [optimizer]) as (ddp, _), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Grad strides do not match")
        for step in range(4):
            if step == 3:
                model.to(memory_format=torch.channels_last)
            optimizer.zero_grad()
            ddp(torch.randn(2, 3, 6, 6)).square().mean().backward()
            if step < 3:
                optimizer.step()
                continue
            with pytest.raises(lc.HookError, match=r"memory format of parameter '0.weight' has changed"):
                optimizer.step()


def test_diloco_refuses_a_model_that_has_changed_its_memory_format(run):
    run(converted)


def leg(rank, world, hook, saved, steps):
    """Some steps after a checkpoint of averages; the next checkpoint."""
    model = make_model()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)]
    with local(model, hook, optimizers) as (ddp, attachment):
        if saved is not None:
            load(saved, model, optimizers, attachment)
        trajectory = []
        for step in steps:
            ddp.zero_grad()
            loss(ddp, batch(rank, step, "both"), "both").backward()
            optimizers[0].step()
            trajectory.append(parameters(model))
        with attachment.averaged_weights(), attachment.averaged_optimizer_state(optimizers[0]):
            return trajectory, save(model, optimizers, attachment)


def resize(simulation, world):
    """Go on with the mean of the models and of their optimizers' state."""
    own = {
        id(m): [s["momentum_buffer"] for s in o[0].state.values()]
        for m, o in zip(simulation.models, simulation.optimizers, strict=True)
    }
    simulation._average(lambda m: [*m.parameters(), *own[id(m)]], simulation.world)
    pairs = [copy.deepcopy((simulation.models[0], simulation.optimizers[0])) for _ in range(world)]
    simulation.models, simulation.optimizers = [list(part) for part in zip(*pairs, strict=True)]
    simulation.periods = dict.fromkeys(simulation.periods, world)
    simulation.world = world


@pytest.mark.parametrize(
    "hook", [lc.PostLocalSGD(period=4, **ALONE), lc.DiLoCo(period=4, fragments=2, **ALONE)], ids=["post", "fragments"]
)
def test_goes_on_with_another_number_of_ranks(run, hook):
    outer = {"outer": OUTER, "fragments": hook.fragments} if isinstance(hook, lc.DiLoCo) else {}
    simulation = SimulationWithState(
        make_model(),
        4,
        lambda m: [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9)],
        loss,
        optimizer_state="keep",
        periods={4: 4},
        **outer,
    )
    begin, saved = 0, None
    for world, num_steps in LEGS:
        if begin:
            resize(simulation, world)
        steps = range(begin, begin + num_steps)
        results = run(leg, hook, saved, steps, world=world)
        for i, step in enumerate(steps):
            simulation.backward([[batch(rank, step, "both")] for rank in range(world)], "both")
            simulation.step(0)
            for rank, (trajectory, _) in enumerate(results):
                for key, value in simulation.models[rank].named_parameters():
                    torch.testing.assert_close(
                        trajectory[i][key], value.detach(), rtol=0, atol=1e-12, msg=f"{key}, step {step}, {world} ranks"
                    )
        begin += num_steps
        saved = results[0][1]
        assert saved["hook"]["hook"]["state"]["num_steps"] == {"first.0.weight": begin}


def in_another_hook(rank, world, hook, other):
    """Parameters at the end of a run that resumes from another hook's checkpoint in the middle of a period."""
    model, optimizers = make()
    with local(model, hook, optimizers, exact_state=True) as (ddp, attachment):
        train(rank, ddp, optimizers, range(10))
        saved = save(model, optimizers, attachment, exact=False)
    model, optimizers = make()
    with local(model, other, optimizers, exact_state=True) as (ddp, attachment):
        model.load_state_dict(saved["model"])
        for optimizer, state in zip(optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            attachment.load_state_dict(saved["hook"], strict_state=False)
        train(rank, ddp, optimizers, range(10, STEPS))
        if isinstance(other, lc.DiLoCo):
            attachment.average_weights()
        return parameters(model)


@pytest.mark.parametrize(
    ("hook", "other"),
    [
        (HOOKS["post"], "int8"),
        (HOOKS["post"], lc.PerParameter({"*": "bf16"})),
        (lc.DiLoCo(period=4, **WARM_UP), lc.DiLoCo(period=4, eager=True, **WARM_UP)),
        (lc.DiLoCo(period=4, eager=True, **WARM_UP), lc.DiLoCo(period=4, **WARM_UP)),
    ],
    ids=["int8", "per_parameter", "eager", "not_eager"],
)
def test_exact_state_in_a_hook_that_keeps_less_or_more_apart(run, hook, other):
    first, second = run(in_another_hook, hook, other)
    assert same(first, second)


# What does not fit ---------------------------------------------------------------------------------------------


def refuse(rank, world):
    """A run that is offered states that do not fit in the middle of a period; and what was said."""
    hook, texts = HOOKS["diloco"], []
    others = [lc.DiLoCo(period=4, post_local_gradient_allreduce=False), HOOKS["post"]]
    states = []
    for other, wider in [(others[0], True), (others[1], False)]:
        model, optimizers = make()
        if wider:
            model.first[3] = nn.Linear(8, 4).double()
            optimizers = [torch.optim.SGD(model.parameters(), lr=0.1)]
        with local(model, other, optimizers, find_unused_parameters=True) as (ddp, attachment):
            ddp(batch(rank, 0, "both"), "second" if wider else "both").sum().backward()
            optimizers[0].step()
            states.append(attachment.state_dict())
    model, optimizers = make()
    with local(model, hook, optimizers, exact_state=True) as (ddp, attachment):
        trajectory = train(rank, ddp, optimizers, range(10))
        exact = attachment.state_dict()
        states += [{**exact, "num_tensors": 3}, {**exact, "steps": -1}, None]
        for state in states:
            with pytest.raises(ValueError, match=r"strict_state=False") as error:
                attachment.load_state_dict(state)
            texts.append(str(error.value))
        trajectory += train(rank, ddp, optimizers, range(10, STEPS))
    model, optimizers = make()
    with local(model, hook, exact_state=True) as (_, attachment):
        attachment.add_optimizer(optimizers[0])
        with pytest.raises(ValueError, match=r"optimizer state of 'first.0.weight': 'exp_avg' is not there"):
            attachment.load_state_dict(exact)
    model, optimizers = make()
    refused = pytest.raises(ValueError, match=r"no optimizer whose first parameter is 'first.0.weight'")
    with local(model, hook, optimizers[1:], exact_state=True) as (_, attachment), refused:
        attachment.load_state_dict(exact)
    return trajectory, texts


def test_state_that_does_not_fit_changes_nothing(run):
    results, whole = run(refuse), run(uninterrupted, HOOKS["diloco"])
    for (trajectory, texts), expected in zip(results, whole, strict=True):
        assert all(same(a, b) for a, b in zip(trajectory, expected, strict=True))
        assert "it has memory of 'first.3.bias', but parameter 'first.3.bias' has shape" in texts[0]
        assert "it is of hook 'post_localsgd', not of 'diloco'" in texts[1]
        assert "truncated" in texts[2]


def load_loosely(rank, world):
    """Anchors after loading what fits only."""
    model, optimizers = make()
    with local(model, HOOKS["diloco"], optimizers) as (ddp, attachment):
        train(rank, ddp, optimizers, range(12))
        state = attachment.state_dict()
    wider, _ = make()
    wider.first[3] = nn.Linear(8, 4).double()
    with local(wider, HOOKS["diloco"], [zero_lr(wider)]) as (_, attachment):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            attachment.load_state_dict(state, strict_state=False)
        kept = attachment.state_dict()
    before, after = (s["hook"]["state"]["entries"] for s in (state, kept))
    assert all(same(entry, before[name]) for name, entry in after.items())
    return before.keys() - after.keys(), kept["steps"], [str(warning.message) for warning in caught]


def test_what_fits_may_be_taken_over_alone(run):
    first, second = run(load_loosely)
    assert first[:2] == second[:2] == ({"first.3.weight", "first.3.bias"}, 12)
    assert "not taken over by hook 'diloco' from the state: it has memory of 'first.3." in first[2][0]
    assert not second[2]
