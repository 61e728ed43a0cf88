"""Averages that are shown while ranks step alone: when they are in place, and what a rank does alone meanwhile."""

import contextlib
import warnings

import pytest
import torch
import torch.distributed as dist
from local_sgd_driver import ALONE, copied, local, same
from pool import WorkerError
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lightning_commhooks as lc

P = 4
FAR = lc.PostLocalSGD(period=1000, **ALONE)
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

    def evaluate(self):
        """What the model makes of the same input on each rank."""
        self.ddp.eval()
        with torch.no_grad():
            value = self.ddp(torch.ones(1, 4, dtype=torch.float64))
        self.ddp.train()
        return value

    def weights(self):
        return {n: t for n, t in copied(self.module.state_dict().items()).items() if t.is_floating_point()}


@contextlib.contextmanager
def a_task(rank, hook=FAR, steps=3, norm=True, optimizer=torch.optim.SGD):
    """A task after some steps, whose hook is closed at the end."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), *[nn.BatchNorm1d(8)] * norm, nn.Linear(8, 2)).double()
    own = optimizer(module.parameters(), lr=0.1)
    with local(module, hook, [own]) as (ddp, attachment):
        task = Task(rank, ddp, module, own, attachment)
        for _ in range(steps):
            task.step()
        yield task


def is_same(value):
    """Whether a tensor is the same on all ranks."""
    everyone = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, value)
    return all(torch.equal(value, other) for other in everyone)


# What a rank does alone ---------------------------------------------------------------------------------------


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


def looks(rank, world, hook, alone):
    """What ranks see in looks, after one of them has done something alone each time."""
    seen = []
    with warnings.catch_warnings(), a_task(rank, hook, 0) as task:
        warnings.simplefilter("ignore")
        attachment = task.attachment

        def act():
            alone(task) if rank == 1 else None

        for step in range(1, 2 * P + 2):
            task.step()
            if step in (P - 1, P, P + 1):
                act()
                with attachment.averaged_weights():
                    seen.append(task.weights())
                for _ in range(2):
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
def test_looks_are_the_same_after_what_a_rank_did_alone(run, alone):
    for first, second in zip(*run(looks, HOOKS["post"], alone), strict=True):
        assert same(first, second)


@pytest.mark.parametrize("name", [name for name in HOOKS if name != "post"])
def test_looks_are_the_same_with_every_method(run, name):
    for first, second in zip(*run(looks, HOOKS[name], forward_with_gradients), strict=True):
        assert same(first, second)


def training_goes_on(rank, world, alone):
    """Weights at the end of a run whose ranks look at the average; one of them does something alone before."""
    with warnings.catch_warnings(), a_task(rank, HOOKS["post"], 0, norm=False) as task:
        warnings.simplefilter("ignore")
        for step in range(P + 1):
            task.step()
            task.attachment.show_average()
            if rank == 0 and step:  # in the second forward, DDP itself builds buckets together
                with torch.set_grad_enabled(alone == "with_gradients"):
                    task.ddp(torch.ones(1, 4, dtype=torch.float64))
            with task.attachment.averaged_weights():
                pass
        task.attachment.average_weights()
        return task.weights()


def test_training_goes_on_as_if_nobody_had_looked(run):
    without, with_gradients = (run(training_goes_on, how) for how in ("without_gradients", "with_gradients"))
    assert all(same(one, other) for one, other in zip(without, with_gradients, strict=True))


def an_error_within(rank, world):
    with a_task(rank, HOOKS["post"], 1, norm=False) as task:
        own, averaged = task.weights(), task.attachment.averaged_weights
        with contextlib.suppress(KeyError), averaged():
            if rank == 1:
                raise KeyError
        is_back = same(own, task.weights())
        with averaged():
            if rank == 0:
                with averaged():
                    pass
            return is_back, task.weights()


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


# When averages are in place --------------------------------------------------------------------------------------


def plain_evaluation(rank, world):
    """Whether ranks see the same: in a plain forward in eval mode, within `averaged_weights()`, after a barrier."""
    with a_task(rank) as task:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            seen = [is_same(task.evaluate()), is_same(task.evaluate())]
        with task.ddp.no_sync():
            task.forward().backward()  # also between accumulated backwards
        own = task.weights()
        with task.attachment.averaged_weights():
            seen.append(is_same(task.evaluate()))
        task.attachment.show_average()
        seen.append(is_same(task.evaluate()))
        task.forward().backward()
        back = all(torch.equal(own[n], t) for n, t in task.weights().items() if "running" not in n)
    return seen, back, [str(warning.message) for warning in caught]


def test_evaluation_with_a_ranks_own_model_gives_one_warning(run):
    for seen, back, texts in run(plain_evaluation):
        assert seen == [False, False, True, True]
        assert back
        (text,) = texts
        assert "sees this rank's own model, not the average" in text
        assert "`with attachment.averaged_weights():`" in text


def backward_of_other_weights(rank, world, which):
    with a_task(rank) as task:
        with task.attachment.averaged_weights() if which == "inside" else contextlib.nullcontext():
            loss = task.forward()
        if which == "before":
            task.attachment.average_weights()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        task.attachment.average_weights()


@pytest.mark.parametrize("which", ["inside", "before"])
def test_backward_through_weights_that_are_gone_is_refused(run, which):
    run(backward_of_other_weights, which)


def buffers_of_a_forward(rank, world):
    with a_task(rank, lc.PostLocalSGD(period=3, **ALONE)) as task:
        before = task.attachment.models_differ
        with torch.no_grad():
            task.forward()
        after = task.attachment.models_differ
        with task.attachment.averaged_weights():
            return before, after, is_same(task.module[1].running_mean)


def test_buffers_that_a_forward_has_changed_are_averaged_too(run):
    assert run(buffers_of_a_forward) == [(False, True, True)] * 2


def largest_numbers(rank, world):
    with a_task(rank, steps=1) as task:
        lowest = torch.finfo(torch.float64).min
        task.module.register_buffer("mask", torch.full((3,), lowest, dtype=torch.float64))
        task.attachment.average_weights()
        return task.module.mask.tolist() == [lowest] * 3


def test_largest_numbers_do_not_overflow(run):
    assert all(run(largest_numbers, world=4))


def one_rank_evaluates(rank, world):
    message = r"show_average\(\).*rank 1 has gone on|ranks called different averaging operations"
    with a_task(rank, lc.PostLocalSGD(period=4, **ALONE)) as task, pytest.raises(lc.HookError, match=message):
        task.attachment.show_average() if rank == 0 else task.step()


def test_evaluation_on_one_rank_is_an_error_on_all(run):
    run(one_rank_evaluates)


def closed_while_shown(rank, world):
    with a_task(rank) as task:
        with task.attachment.averaged_weights():
            task.attachment.close()
        return is_same(task.module[0].weight.detach())


def test_average_stays_when_closed(run):
    assert run(closed_while_shown) == [True] * 2


def begin_anew(rank, world):
    with a_task(rank, lc.DiLoCo(period=4, **ALONE), steps=6) as task:
        task.attachment.average_weights()
        task.attachment.reset_state()
        state = task.attachment.state_dict()
        for _ in range(4):
            task.step()
        return state["steps"], state["hook"]["state"], is_same(task.module[0].weight.detach())


def test_reset_state_begins_anew(run):
    for steps, state, are_equal in run(begin_anew):
        assert steps == 0
        assert not state["num_steps"]
        assert not state["entries"]
        assert are_equal, "4 steps after the reset, not 2"


class Quantized(torch.optim.SGD):
    """Keeps what it remembers as codes and a scale."""

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            scale = p.grad.abs().max()
            self.state[p] = {"codes": (p.grad / scale * 127).round().to(torch.int8), "scale": scale}
        return super().step(closure)


def quantized(rank, world):
    with a_task(rank, optimizer=Quantized) as task:
        state = task.optimizer.state[task.module[0].weight]
        own = state["scale"].clone()
        with task.attachment.averaged_optimizer_state(task.optimizer):
            return torch.equal(state["scale"], own)


def test_quantized_state_is_left_as_it_is(run):
    assert run(quantized) == [True] * 2


class Otherwise(torch.optim.SGD):
    """Steps, but not by `step`."""

    def leap(self):
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.sub_(p.grad, alpha=0.1)


def never_steps(rank, world):
    with warnings.catch_warnings(record=True) as caught, a_task(rank, steps=0, optimizer=Otherwise) as task:
        warnings.simplefilter("always")
        for _ in range(260):
            task.optimizer.zero_grad()
            task.forward().backward()
            task.optimizer.leap()
        return [str(warning.message) for warning in caught]


def test_optimizer_that_never_steps_gives_a_warning(run):
    for texts in run(never_steps):
        assert len(texts) == 1
        assert "no optimizer that it knows has stepped in 256 backwards" in texts[0]
        assert "after_optimizer_step" in texts[0]


def forgotten(rank, world):
    """Whether ranks are equal before, within and after averages, with an optimizer that the hook is not told of."""
    with a_task(rank, hook=lc.PostLocalSGD(period=2, **ALONE), steps=4) as task:
        task.optimizer = torch.optim.SGD(task.module.parameters(), lr=0.1)
        for _ in range(3):
            task.step()
        weight = task.module[0].weight
        same = [is_same(weight)]
        with task.attachment.averaged_weights():
            same.append(is_same(weight))
        same.append(is_same(weight))
        task.attachment.average_weights()
        return [*same, is_same(weight)]


def test_averages_include_steps_of_an_optimizer_that_the_hook_does_not_know(run):
    assert run(forgotten) == [[False, True, False, True]] * 2


def refused_and_attached_again(rank, world):
    module = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="not an optimizer"), local(module, FAR, [object()]):
        pass
    with local(module, FAR, [torch.optim.SGD(module.parameters(), lr=0.1)]):
        pass


def refused_by_others_only(rank, world):
    ddp = DistributedDataParallel(nn.Linear(2, 2))
    lc.attach(ddp, "bf16", optimizers=[object()]).close()


def test_hooks_that_average_gradients_take_no_offence_at_optimizers(run):
    run(refused_by_others_only)


def test_refused_optimizer_leaves_the_model_as_it_was(run):
    run(refused_and_attached_again)


def other_models_optimizer(rank, world):
    with a_task(rank) as first, a_task(rank) as second:
        for optimizer in (first.optimizer, second.optimizer):
            for attachment in (first.attachment, second.attachment):
                attachment.add_optimizer(optimizer)
        with first.attachment.averaged_weights():
            second.step()
            with pytest.raises(lc.HookError, match=r"stepped within averaged_weights\(\)"):
                first.step()


def test_another_models_optimizer_may_step_meanwhile(run):
    run(other_models_optimizer)


def different_buffers_choice(rank, world):
    phases = {0: lc.PostLocalSGD(average_buffers=False, **ALONE), 5: lc.DiLoCo(**ALONE)}
    lc.attach(DistributedDataParallel(nn.Linear(2, 2)), lc.Schedule(phases))


def test_schedule_refuses_two_opinions_on_buffers(run):
    with pytest.raises(WorkerError, match="must have the same average_buffers"):
        run(different_buffers_choice)
