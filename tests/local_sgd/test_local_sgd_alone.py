"""What one rank does alone between averages of models: never whether it takes part in the next one."""

import warnings

import pytest
import torch
from local_sgd_driver import ALONE, copied, local, same
from torch import nn

import lightning_commhooks as lc

P = 4
HOOKS = {
    "post": lc.PostLocalSGD(period=P, **ALONE),
    "diloco": lc.DiLoCo(period=P, fragments=2, **ALONE),
    "delay": lc.DiLoCo(period=P, delay=1, **ALONE),
    "eager": lc.DiLoCo(period=P, eager=True, **ALONE),
}


class Task:
    """A model whose ranks step alone."""

    def __init__(self, rank, ddp, module, optimizer, attachment):
        self.ddp, self.module, self.optimizer, self.attachment = ddp, module, optimizer, attachment
        self._generator = torch.Generator().manual_seed(rank)

    def forward(self):
        return self.ddp(torch.randn(6, 4, generator=self._generator, dtype=torch.float64)).square().mean()

    def step(self):
        self.optimizer.zero_grad()
        self.forward().backward()
        self.optimizer.step()

    def weights(self):
        return {n: t for n, t in copied(self.module.state_dict().items()).items() if t.is_floating_point()}


def forward_without_gradients(task):
    with torch.no_grad():
        task.forward()


def forward_with_gradients(task):
    task.forward()


def evaluation(task):
    with torch.no_grad():
        task.ddp.eval()
        task.forward()
        task.ddp.train()


def load(task):
    task.module.load_state_dict(copied(task.module.state_dict().items()))


def statistics_without_ddp(task):
    with torch.no_grad():
        task.module(torch.randn(6, 4, dtype=torch.float64))


ALONE_ON_ONE = (forward_without_gradients, forward_with_gradients, evaluation, load, statistics_without_ddp)


def looks(rank, world, hook, normed, alone):
    """What ranks see in looks, after one of them has done something alone each time."""
    torch.manual_seed(0)
    norm = [nn.BatchNorm1d(8)] if normed else []
    module = nn.Sequential(nn.Linear(4, 8), *norm, nn.Linear(8, 2)).double()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    seen = []
    with local(module, hook, [optimizer]) as (ddp, attachment), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        task = Task(rank, ddp, module, optimizer, attachment)

        def act():
            alone(task) if rank == 1 else None

        for step in range(1, 2 * P + 2):
            task.step()
            if step in (P - 1, P, P + 1):
                act()
                with attachment.averaged_weights():
                    seen.append(task.weights())
                act()
                attachment.show_average()
                seen.append(task.weights())
                act()
                attachment.show_average()
                seen.append(task.weights())
                act()
                with attachment.averaged_weights():
                    act() if alone is evaluation else None
                    with attachment.averaged_weights():
                        seen.append(task.weights())
                act()
        attachment.average_weights()
        seen.append(task.weights())
    return seen


@pytest.mark.parametrize("alone", ALONE_ON_ONE, ids=lambda alone: alone.__name__)
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
def test_looks_are_the_same_after_what_a_rank_did_alone(run, normed, alone):
    for first, second in zip(*run(looks, HOOKS["post"], normed, alone), strict=True):
        assert same(first, second)


@pytest.mark.parametrize("name", [name for name in HOOKS if name != "post"])
def test_looks_are_the_same_with_every_method(run, name):
    for first, second in zip(*run(looks, HOOKS[name], True, forward_with_gradients), strict=True):
        assert same(first, second)


def training_goes_on(rank, world, alone):
    """Weights at the end of a run whose ranks look at the average; one of them does something alone before."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)).double()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    with local(module, HOOKS["post"], [optimizer]) as (ddp, attachment), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(P + 1):
            optimizer.zero_grad()
            ddp(torch.randn(6, 4, generator=generator, dtype=torch.float64)).square().mean().backward()
            optimizer.step()
            attachment.show_average()
            if rank == 0 and step:  # in the second forward, DDP itself builds buckets together
                with torch.set_grad_enabled(alone == "with_gradients"):
                    ddp(torch.ones(1, 4, dtype=torch.float64))
            with attachment.averaged_weights():
                pass
        attachment.average_weights()
        return copied(module.named_parameters())


def test_training_goes_on_as_if_nobody_had_looked(run):
    without, with_gradients = (run(training_goes_on, how) for how in ("without_gradients", "with_gradients"))
    assert all(same(one, other) for one, other in zip(without, with_gradients, strict=True))


def an_error_within(rank, world):
    torch.manual_seed(0)
    module = nn.Linear(4, 2).double()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with local(module, HOOKS["post"], [optimizer]) as (ddp, attachment):
        ddp(torch.full((1, 4), 1.0 + rank, dtype=torch.float64)).sum().backward()
        optimizer.step()
        own = copied(module.named_parameters())
        try:
            with attachment.averaged_weights():
                if rank == 1:
                    raise KeyError
        except KeyError:
            pass
        is_back = same(own, copied(module.named_parameters()))
        with attachment.averaged_weights():
            if rank == 0:
                with attachment.averaged_weights():
                    pass
            return is_back, copied(module.named_parameters())


def test_an_error_on_one_rank_and_a_look_within_a_look(run):
    (first_back, first), (second_back, second) = run(an_error_within)
    assert first_back
    assert second_back
    assert same(first, second)


def other_shapes(rank, world, hook):
    """Whether the weights of all ranks are those of a model without a cache; and shapes of the cache in the end."""

    class Cached(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("cache", torch.zeros(0, 4), persistent=False)

        def forward(self, x):
            if len(self.cache) < len(x):
                self.cache = torch.zeros(len(x), 4)
            return self.linear(x) + self.cache[: len(x)]

    torch.manual_seed(0)
    module = Cached()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with local(module, hook, [optimizer], exact_state=True, broadcast_buffers=False) as (ddp, attachment):
            for step in range(5):
                optimizer.zero_grad()
                ddp(torch.ones(2 + 3 * rank + step, 4) * (1 + rank)).square().mean().backward()
                optimizer.step()
            with attachment.averaged_weights():
                weight = module.linear.weight.detach().clone()
            attachment.load_state_dict(attachment.state_dict())
            attachment.average_weights()
            assert torch.equal(weight, module.linear.weight)
    texts = [str(warning.message) for warning in caught]
    return weight, len(module.cache), [text for text in texts if "differ between ranks and" in text]


@pytest.mark.parametrize("name", HOOKS)
def test_buffers_of_other_shapes_stay_each_ranks_own(run, name):
    (first, mine, told), (second, theirs, silent) = run(other_shapes, HOOKS[name])
    assert torch.equal(first, second)
    assert (mine, theirs) == (6, 9)
    assert not silent
    assert len(told) == 1
    assert "1 buffers, 'cache' first, differ between ranks and are not averaged" in told[0]


MASKS = {
    "mask": torch.tensor([1.0, 0.0]),
    "bool": torch.tensor([True, False]),
    "infinite": torch.tensor([0.0, -torch.inf]),
    "nan": torch.tensor([torch.nan, 1.0]),
    "rope": torch.tensor([1j, 1.0]),
    "narrow": torch.tensor([0.1, 0.3], dtype=torch.bfloat16),
    "index": torch.tensor([2**40 + 1, 3]),
    "step": torch.tensor(7, dtype=torch.int32),
}


def other_buffers(rank, world, broadcasts):
    """Buffers of a model that are no statistics: before, in a look, afterwards, and when models have been averaged."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    def buffers():
        return copied((name, b) for name, b in module.named_buffers() if name in MASKS)

    seen = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with local(module, HOOKS["post"], [optimizer], broadcast_buffers=broadcasts) as (ddp, attachment):
            for step in range(P):
                optimizer.zero_grad()
                ddp(torch.randn(4, 4)).square().mean().backward()
                if step == 1:
                    # As pruning does, by each rank's own weights.
                    for name, mask in MASKS.items():
                        module.register_buffer(
                            name, (mask if rank == 0 else mask.flip(0) if mask.dim() else mask + 1).clone()
                        )
                    seen.append(buffers())
                    with attachment.averaged_weights():
                        seen.append(buffers())
                    seen.append(buffers())
                optimizer.step()
            seen.append(buffers())
    return seen, [text for text in (str(warning.message) for warning in caught) if "differ between ranks and" in text]


def bits(buffers):
    return {name: buffer.reshape(-1).view(torch.uint8) for name, buffer in buffers.items()}


@pytest.mark.parametrize("broadcasts", [True, False], ids=["broadcast", "no_broadcast"])
def test_buffers_that_are_no_statistics_are_not_averaged(run, broadcasts):
    (first, told), (second, silent) = run(other_buffers, broadcasts)
    own, looked, after, averaged = map(bits, second)
    assert all(same(bits(first[0]), bits(one)) for one in first)
    assert same(own, after)
    for seen in (looked, averaged):
        assert same(seen, bits(first[0]) if broadcasts else own)
    assert not silent
    assert len(told) == 1
    assert f"{len(MASKS)} buffers, 'mask' first, differ between ranks" in told[0]
    assert ("get the first rank's at each average" if broadcasts else "each rank keeps its own") in told[0]


def states_of_other_kinds(rank, world, average):
    """Adam's state, of which one rank has more than the other; and the warnings."""
    torch.manual_seed(0)
    module = nn.Linear(4, 2).double()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01, amsgrad=rank == 1)
    hook = lc.PostLocalSGD(period=2, optimizer_state="average" if average else "keep", **ALONE)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with local(module, hook, [optimizer], exact_state=True) as (ddp, attachment):
            for step in range(2):
                optimizer.zero_grad()
                ddp(torch.full((3, 4), 1.0 + rank + step, dtype=torch.float64)).square().mean().backward()
                optimizer.step()
            with attachment.averaged_optimizer_state(optimizer):
                seen = optimizer.state[module.weight]["exp_avg"].clone()
            attachment.load_state_dict(attachment.state_dict())
    return seen, [text for text in (str(warning.message) for warning in caught) if "tensors" in text]


@pytest.mark.parametrize("average", [True, False], ids=["average", "look"])
def test_state_that_another_rank_has_not_is_left_out(run, average):
    (first, silent), (second, told) = run(states_of_other_kinds, average)
    assert torch.equal(first, second)
    assert not silent
    assert len(told) == 1
    assert "2 tensors, 'weight max_exp_avg_sq' first, have another shape" in told[0]
