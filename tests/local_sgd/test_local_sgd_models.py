"""Which tensors of a model are averaged, what stays in its place, and looks at averages while ranks differ."""

from types import SimpleNamespace

import pytest
import torch
from local_sgd_driver import (
    ALONE,
    METHODS,
    copied,
    local,
    mean,
    one_step,
    params,
    put,
    same,
    snapshot,
    whole_numbers,
    zero_lr,
)
from pool import ignoring
from test_local_sgd import batch, parameters
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lightning_commhooks as lc
from lightning_commhooks.collectives import averaging
from lightning_commhooks.collectives.counters import Counters
from lightning_commhooks.collectives.group import Group
from lightning_commhooks.interface import models
from lightning_commhooks.interface.layout import Layout

EVERY_STEP = lc.PostLocalSGD(period=1, **ALONE)
NEVER = lc.PostLocalSGD(period=1000, **ALONE)
# Outer step without momentum: the mean of the models, by another way.
AS_MEAN = {"outer_lr": 1.0, "outer_momentum": 0.0, "nesterov": False, "post_local_gradient_allreduce": False}
AVERAGES = [
    EVERY_STEP,
    lc.HierarchicalLocalSGD(period_group_size_dict={1: None}, **ALONE),
    lc.DiLoCo(period=1, **AS_MEAN),
]
BY_NAME = {"ids": lambda value: getattr(value, "name", value)}


# Which tensors -----------------------------------------------------------------------------------------------


def of_kind(rank, world, hook, kind, chunk):
    """Values before and after an averaging of all sorts of tensors, and whether storage was kept."""
    dtypes = {"bf16": torch.bfloat16, "half": torch.float16, "complex": torch.complex128}
    dtype = dtypes.get(kind, torch.float64)
    shapes = {"a": (3, 2), "empty": (0, 4), "conv": (4, 3, 2, 2), "b": (7,), "scalar": ()}
    model, _ = params(shapes, dtype)
    if kind == "channels_last":
        model.to(memory_format=torch.channels_last)
    model.forward = lambda: sum(p.sum().abs() for p in model.parameters())
    before_chunk, averaging.CHUNK_BYTES = averaging.CHUNK_BYTES, chunk
    optimizer = zero_lr(model)
    with local(model, hook, [optimizer]) as (ddp, _):
        ddp().backward()
        before = whole_numbers(rank, shapes, dtype)
        if dtype.itemsize == 2:  # sums that need more digits than it has
            generator = torch.Generator().manual_seed(rank)
            before = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
        if kind == "complex":
            before = {name: value * (1 + 0.5j * (rank + 1)) for name, value in before.items()}
        put(model, before)
        places = [(p.data_ptr(), p.stride(), p.dtype) for p in model.parameters()]
        optimizer.step()
        assert places == [(p.data_ptr(), p.stride(), p.dtype) for p in model.parameters()]
    averaging.CHUNK_BYTES = before_chunk
    return before, parameters(model)


@pytest.mark.parametrize("hook", [AVERAGES[0], AVERAGES[2]], **BY_NAME)
@pytest.mark.parametrize(("kind", "chunk"), [("channels_last", 60), ("bf16", 2**25), ("half", 16), ("complex", 1)])
def test_all_sorts_of_tensors_are_averaged_in_their_place(run, hook, kind, chunk):
    results = run(of_kind, hook, kind, chunk, world=4)
    dtype = results[0][0]["a"].dtype
    exact = mean([{n: v.float() if dtype.itemsize == 2 else v for n, v in before.items()} for before, _ in results])
    expected = {name: value.to(dtype) for name, value in exact.items()}
    assert not same(results[0][0], expected)
    for _, after in results:
        assert same(after, expected)


def unused_on_one(rank, world, hook, kind):
    """Parameters before and after a step in which the last one has no gradient on rank 1."""
    shapes = {"used": (3, 2), "sometimes": (4,), "frozen": (5,)}
    model, gradients = params(shapes)
    model.frozen.requires_grad_(False)
    optimizer = zero_lr(model)
    with local(model, hook, [optimizer], find_unused_parameters=True) as (ddp, attachment):
        if rank and kind == "unused":
            del gradients["sometimes"]
        ddp(gradients).backward()
        if rank and kind == "no_gradient":
            model.sometimes.grad = None
        before = whole_numbers(rank, shapes)
        put(model, before)
        optimizer.step()
        frozen = model.frozen.clone()
        attachment.average_weights()
        assert torch.equal(model.frozen, frozen)
    return before, parameters(model)


@pytest.mark.parametrize(
    ("hook", "kind"), [(AVERAGES[0], "unused"), (AVERAGES[0], "no_gradient"), (AVERAGES[2], "no_gradient")], **BY_NAME
)
def test_parameter_without_gradient_is_averaged_and_a_frozen_one_is_not(run, hook, kind):
    results = run(unused_on_one, hook, kind)
    expected = mean([before for before, _ in results])
    for before, after in results:
        assert same(after, {**expected, "frozen": before["frozen"]})


class Sharded(nn.Module):
    """A part of each rank's own, named by the module that it is in; and one at the root."""

    def __init__(self):
        super().__init__()
        self.common = nn.Linear(3, 2)
        self.own = nn.Linear(3, 2)
        self.own.register_buffer("statistic", torch.zeros(2))
        self.own_at_root = nn.Parameter(torch.zeros(2))

    def forward(self, x):
        return self.common(x) + self.own(x) + self.own_at_root


OWN = ["own.weight", "own.bias", "own.statistic", "own_at_root"]


def leave_alone(rank, world, hook, resize):
    """Values before and after an averaging of a model of which DDP ignores some, and the hook's state."""
    torch.manual_seed(0)
    model = Sharded().double()
    if resize:
        model.own.register_parameter("extra", nn.Parameter(torch.zeros(rank + 1, dtype=torch.float64)))
    ignored = [*OWN, "own.extra"]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    optimizer = zero_lr(model)
    with local(model, hook, [optimizer]) as (ddp, attachment):
        ddp(batch(rank, 0, "both")[:, :3]).sum().backward()
        before = {name: torch.full_like(value, rank) for name, value in model.state_dict().items()}
        model.load_state_dict(before)
        optimizer.step()
        attachment.average_weights(everything=True)
        attachment.load_state_dict(attachment.state_dict())
        return before, copied(model.state_dict().items())


@pytest.mark.parametrize(
    ("hook", "resize"),
    [(AVERAGES[0], False), (AVERAGES[0], True), (AVERAGES[2], True), (NEVER, True)],
    ids=["same_sizes", "post", "diloco", "in_the_end"],
)
def test_what_ddp_ignores_stays_each_ranks_own(run, hook, resize):
    results = run(leave_alone, hook, resize)
    for before, after in results:
        for name, value in after.items():
            expected = before[name] if name.startswith("own") else torch.full_like(value, 0.5)
            assert torch.equal(value, expected), name


def unfrozen_fragment(rank, world, pseudo_gradient):
    """Parameters after outer steps of two fragments; the second was frozen when the model was wrapped."""
    model, gradients = params({"used": (4, 2), "unfrozen": (4, 2)}, torch.float32)
    model.unfrozen.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0 + rank)
    hook = lc.DiLoCo(period=2, fragments=2, pseudo_gradient=pseudo_gradient, start_localSGD_iter=0, **AS_MEAN)
    with ignoring("1 parameters are trained now that were frozen"), local(model, hook, [optimizer]) as (ddp, _):
        model.unfrozen.requires_grad_(True)
        for _ in range(2):
            one_step(ddp, optimizer, gradients)
    return parameters(model)


@pytest.mark.parametrize("pseudo_gradient", ["fp32", "bf16", "int8"])
def test_a_fragment_that_was_in_no_bucket_is_averaged(run, pseudo_gradient):
    for rank, after in enumerate(run(unfrozen_fragment, pseudo_gradient)):
        assert torch.equal(after["used"], torch.full((4, 2), -1.5 - (1 + rank)))  # averaged after the first step
        assert torch.equal(after["unfrozen"], torch.full((4, 2), -3.0))


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(self.linear(x))


def normed_model():
    torch.manual_seed(3)
    return Normed().double()


BUFFER_STEPS = 10


def statistics(rank, world, hook, options):
    """Running means after each forward and step of a model that does not change otherwise."""
    model = normed_model()
    optimizer = zero_lr(model)
    means = []
    with ignoring("`broadcast_buffers` is deprecated"), local(model, hook, [optimizer], **options) as (ddp, _):
        for step in range(BUFFER_STEPS):
            ddp(batch(rank, step, "both")).square().sum().backward()
            if step == 4:
                model.norm.num_batches_tracked += 10 * rank  # the first rank's counts where DDP broadcasts, as DDP does
            optimizer.step()
            means.append(model.norm.running_mean.clone())
    return means, model.norm.num_batches_tracked.item()


def expected_statistics(world, warmup, period, broadcast, average):
    models = [normed_model() for _ in range(world)]
    means = []
    for step in range(BUFFER_STEPS):
        if broadcast(step):
            for model in models[1:]:
                model.norm.running_mean.copy_(models[0].norm.running_mean)
        for rank, model in enumerate(models):
            model(batch(rank, step, "both"))
        if average and (step + 1 - warmup) > 0 and (step + 1 - warmup) % period == 0:
            mean = sum(model.norm.running_mean for model in models) / world
            for model in models:
                model.norm.running_mean.copy_(mean)
        means.append([model.norm.running_mean.clone() for model in models])
    return means


@pytest.mark.parametrize(
    ("average", "broadcasts", "world"), [(True, True, 4), (True, False, 2), (False, True, 2), (False, False, 4)]
)
def test_buffers_are_averaged_or_left_to_ddp(run, world, average, broadcasts):
    warmup = {"start_localSGD_iter": 2, "post_local_gradient_allreduce": False, "average_buffers": average}
    until = 3 if average else BUFFER_STEPS  # from the forward after the first local backward on
    expected = expected_statistics(world, 2, 4, lambda step: broadcasts and step < until, average)
    hooks = [lc.PostLocalSGD(period=4, **warmup), lc.Cast(lc.DiLoCo(period=4, **warmup)), "schedule"]
    hooks[2] = lc.Schedule({0: "bf16", 2: hooks[0]})
    for hook in hooks:
        results = run(statistics, hook, {"broadcast_buffers": broadcasts}, world=world)
        for rank, (means, num_batches) in enumerate(results):
            for step, mine in enumerate(means):
                torch.testing.assert_close(mine, expected[step][rank], rtol=0, atol=1e-12, msg=f"{hook} {step} {rank}")
            assert num_batches == BUFFER_STEPS + (0 if broadcasts else 10 * rank)


# Looking at averages -----------------------------------------------------------------------------------------


def look(rank, world, hook, looks):
    """A run, with or without looks at averages in the middle of it; and what was seen."""
    model = nn.Sequential(normed_model(), nn.Linear(4, 2).double())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    seen, values = [], lambda: copied(model.state_dict().items())
    with local(model, hook, [optimizer]) as (ddp, attachment):
        for step in range(10):
            ddp.zero_grad()
            ddp(batch(rank, step, "both")).square().sum().backward()
            optimizer.step()
            if looks and step % 3 != 1:
                own, own_state = values(), snapshot(model, [optimizer])
                with attachment.averaged_weights(), attachment.averaged_optimizer_state(optimizer):
                    with attachment.averaged_weights():
                        seen.append((own | own_state, values() | snapshot(model, [optimizer])))
                    assert all(torch.equal(seen[-1][1][name], value) for name, value in values().items())
                assert same(own_state, snapshot(model, [optimizer]))
                assert same(own, values())
        return values(), seen


@pytest.mark.parametrize("method", METHODS)
def test_look_at_averages_disturbs_nothing(run, method):
    make, options, _ = METHODS[method]
    hook = make(**options, **ALONE)
    results, undisturbed = run(look, hook, True, world=4), run(look, hook, False, world=4)
    assert all(same(a, b) for (a, _), (b, _) in zip(results, undisturbed, strict=True))
    for ranks in zip(*(seen for _, seen in results), strict=True):
        expected = mean([{n: v.double() for n, v in own.items()} for own, _ in ranks])
        for own, average in ranks:
            assert any(not torch.equal(own[name], average[name]) for name in own if name.endswith("exp_avg"))
            for name, value in average.items():
                torch.testing.assert_close(value.double(), expected[name], rtol=0, atol=1e-12, msg=name)
        assert all(same(ranks[0][1], average) for _, average in ranks)


def average_for_good(rank, world):
    """Bytes sent to look and to average, by an average of the model, and parameters before and after."""
    shapes = {"a": (6,), "b": (2, 2)}
    model, gradients = params(shapes)
    optimizer = zero_lr(model)
    before = whole_numbers(rank, shapes)
    with local(model, NEVER, [optimizer]) as (ddp, attachment):
        attachment.average_weights()  # nobody stepped
        one_step(ddp, optimizer, gradients)
        put(model, before)
        with attachment.averaged_weights():
            attachment.average_weights()
        after = parameters(model)
        attachment.average_weights()
        whole = attachment.bound.group.ring_bytes(torch.zeros(10, dtype=torch.float64))
        return before, after, attachment.metrics()["bytes_evaluation"] / whole


def test_nothing_is_sent_when_ranks_are_equal(run):
    results = run(average_for_good, world=4)
    expected = mean([before for before, *_ in results])
    for _, after, cost in results:
        assert cost == 2
        assert same(after, expected)


def average_what_others_changed(rank, world):
    """Ranks have the same numbers in another order, so that no sum tells them apart."""
    model, gradients = params({"a": (2,)})
    optimizer = zero_lr(model)
    with local(model, NEVER, [optimizer]) as (ddp, attachment):
        one_step(ddp, optimizer, gradients)
        attachment.average_weights()
        put(model, {"a": torch.tensor([3.0, 1.0] if rank else [1.0, 3.0], dtype=torch.float64)})
        attachment.average_weights(everything=True)
        return parameters(model)["a"].tolist()


def test_any_bit_makes_ranks_different(run):
    assert run(average_what_others_changed) == [[2, 2], [2, 2]]


def step_while_looking(rank, world):
    model, gradients = params({"a": (6,)})
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with local(model, NEVER, [optimizer]) as (ddp, attachment):
        one_step(ddp, optimizer, {"a": gradients["a"] * rank})
        own = parameters(model)
        stepped = pytest.raises(lc.HookError, match=r"an optimizer stepped within averaged_weights\(\)")
        with pytest.raises(ZeroDivisionError), attachment.averaged_weights():
            1 / 0  # noqa: B018
        seen = parameters(model)
        with stepped, attachment.averaged_weights():
            optimizer.step()
        return own, seen, parameters(model)


def test_optimizer_must_not_step_meanwhile(run):
    for own, seen, after in run(step_while_looking):
        assert same(own, seen)
        assert same(own, after)


def test_any_bit_of_a_large_parameter(monkeypatch):
    """A length above 2 GiB fits no C int."""
    digests = []
    monkeypatch.setattr(models, "check_same", lambda what, group, number: digests.append([number]) or digests)
    large = torch.zeros(2**31 + 8, dtype=torch.uint8)
    copies = models.Models(None, {}, "post_localsgd")
    copies.layout = SimpleNamespace(trained={"large": large, "empty": torch.zeros(0)})
    assert not copies._any_bit_differs("", copies.layout.trained.values())
    large[-1] = 1
    assert copies._any_bit_differs("", copies.layout.trained.values())


def two_optimizers():
    """Models of one rank, with an optimizer of `a` and one of `b`."""
    model, counters = params({"a": (2,), "b": (2,)})[0], Counters()
    optimizers = {name: torch.optim.SGD([parameter]) for name, parameter in model.named_parameters()}
    copies = models.Models(Group(None, counters), optimizers, "post_localsgd")
    copies.layout = Layout(model)
    return copies, counters, model


@pytest.mark.parametrize(
    ("averaged", "num"),
    [("aaabbb", 6), ("ababab", 3), ("ababbb", 4)],
)
def test_averages_are_counted_when_another_optimizer_takes_over(averaged, num):
    copies, counters, _ = two_optimizers()
    for name in averaged:
        copies.averaged([name])
    assert counters.averagings == num


def test_failure_while_averages_are_shown_leaves_the_own_model(monkeypatch):
    def fail(tensors, group):
        tensors[0].data.fill_(7)
        raise RuntimeError("connection lost")

    copies, _, model = two_optimizers()
    own = parameters(model)
    copies.diverged = {"a", "b"}
    monkeypatch.setattr(models, "average_", fail)
    with pytest.raises(RuntimeError, match="connection lost"):
        copies.show_()
    assert same(parameters(model), own)
    assert not copies.shows_averages
    assert copies.diverged == {"a", "b"}
