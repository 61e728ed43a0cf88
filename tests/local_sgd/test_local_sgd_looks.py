"""Looking at models whose ranks step alone: when the average is there, when it is gone again, and what is refused."""

import warnings

import pytest
import torch
import torch.distributed as dist
from pool import WorkerError, ignoring
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lightning_commhooks as lc

ALONE = {"start_localSGD_iter": 0, "post_local_gradient_allreduce": False}
ENDED = ("hook='.*' ended while", "training ended after")
FAR = lc.PostLocalSGD(period=1000, **ALONE)


class Run:
    """A model with BatchNorm, stepped alone a few times."""

    def __init__(self, rank, hook=FAR, steps=3, optimizer=torch.optim.SGD):
        torch.manual_seed(0)
        self.module = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).double()
        self.ddp = DistributedDataParallel(self.module)
        self.optimizer = optimizer(self.module.parameters(), lr=0.1)
        self.attachment = lc.attach(self.ddp, hook, optimizers=[self.optimizer])
        self.generator = torch.Generator().manual_seed(rank)
        for _ in range(steps):
            self.step()

    def forward(self):
        return self.ddp(torch.randn(6, 4, generator=self.generator, dtype=torch.float64)).square().mean()

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

    def state(self):
        return {n: t.clone() for n, t in self.module.state_dict().items() if t.is_floating_point()}

    def close(self):
        with ignoring(*ENDED):
            self.attachment.close()


def same(value):
    """Whether a tensor is the same on all ranks."""
    everyone = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, value)
    return all(torch.equal(value, other) for other in everyone)


def plain_evaluation(rank, world):
    """Whether ranks see the same: in a plain forward in eval mode, within `averaged_weights()`, after a barrier."""
    run = Run(rank)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        seen = [same(run.evaluate()), same(run.evaluate())]
    with run.ddp.no_sync():
        run.forward().backward()  # also between accumulated backwards
    own = run.state()
    with run.attachment.averaged_weights():
        seen.append(same(run.evaluate()))
    run.attachment.show_average()
    seen.append(same(run.evaluate()))
    run.forward().backward()
    back = all(torch.equal(own[n], t) for n, t in run.state().items() if "running" not in n)
    run.close()
    return seen, back, [str(warning.message) for warning in caught]


def test_evaluation_with_a_ranks_own_model_gives_one_warning(run):
    for seen, back, texts in run(plain_evaluation):
        assert seen == [False, False, True, True]
        assert back
        (text,) = texts
        assert "sees this rank's own model, not the average" in text
        assert "`with attachment.averaged_weights():`" in text


def backward_of_other_weights(rank, world, which):
    run = Run(rank)
    if which == "inside":
        with run.attachment.averaged_weights():
            loss = run.forward()
    else:
        loss = run.forward()
        run.attachment.average_weights()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    run.attachment.average_weights()
    run.close()


@pytest.mark.parametrize("which", ["inside", "before"])
def test_backward_through_weights_that_are_gone_is_refused(run, which):
    run(backward_of_other_weights, which)


def buffers_of_a_forward(rank, world):
    run = Run(rank, lc.PostLocalSGD(period=3, **ALONE))
    before = run.attachment.models_differ
    with torch.no_grad():
        run.forward()
    after = run.attachment.models_differ
    with run.attachment.averaged_weights():
        is_same = same(run.module[1].running_mean)
    run.close()
    return before, after, is_same


def test_buffers_that_a_forward_has_changed_are_averaged_too(run):
    assert run(buffers_of_a_forward) == [(False, True, True)] * 2


def largest_numbers(rank, world):
    run = Run(rank, steps=1)
    lowest = torch.finfo(torch.float64).min
    run.module.register_buffer("mask", torch.full((3,), lowest, dtype=torch.float64))
    run.attachment.average_weights()
    values = run.module.mask.tolist()
    run.close()
    return values == [lowest] * 3


def test_largest_numbers_do_not_overflow(run, world):
    assert all(run(largest_numbers, world=world))


def one_rank_evaluates(rank, world):
    run = Run(rank, lc.PostLocalSGD(period=4, **ALONE))
    with pytest.raises(lc.HookError, match=r"show_average\(\).*rank 1 has gone on|ranks called different"):
        run.attachment.show_average() if rank == 0 else run.step()
    run.close()


def test_evaluation_on_one_rank_is_an_error_on_all(run):
    run(one_rank_evaluates)


def closed_while_shown(rank, world):
    run = Run(rank)
    context = run.attachment.averaged_weights()
    context.__enter__()
    run.close()
    context.__exit__(None, None, None)
    return same(run.module[0].weight.detach())


def test_average_stays_when_closed(run):
    assert run(closed_while_shown) == [True] * 2


def begin_anew(rank, world):
    run = Run(rank, lc.DiLoCo(period=4, **ALONE), steps=6)
    run.attachment.average_weights()
    run.attachment.reset_state()
    state = run.attachment.state_dict()
    for _ in range(4):
        run.step()
    is_same = same(run.module[0].weight.detach())
    run.close()
    return state["steps"], state["hook"]["state"], is_same


def test_reset_state_begins_anew(run):
    for steps, state, is_same in run(begin_anew):
        assert steps == 0
        assert not state["num_steps"]
        assert not state["entries"]
        assert is_same, "4 steps after the reset, not 2"


class Quantized(torch.optim.SGD):
    """Keeps what it remembers as codes and a scale."""

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            scale = p.grad.abs().max()
            self.state[p] = {"codes": (p.grad / scale * 127).round().to(torch.int8), "scale": scale}
        return super().step(closure)


def quantized(rank, world):
    run = Run(rank, optimizer=Quantized)
    weight = run.module[0].weight
    own = run.optimizer.state[weight]["scale"].clone()
    with run.attachment.averaged_optimizer_state(run.optimizer):
        kept = torch.equal(run.optimizer.state[weight]["scale"], own)
    run.attachment.average_weights()
    run.close()
    return kept


def test_quantized_state_is_left_as_it_is(run):
    assert run(quantized) == [True] * 2


class Otherwise(torch.optim.SGD):
    """Steps, but not by `step`."""

    def leap(self):
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.sub_(p.grad, alpha=0.1)


def never_steps(rank, world):
    run = Run(rank, steps=0, optimizer=Otherwise)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(260):
            run.optimizer.zero_grad()
            run.forward().backward()
            run.optimizer.leap()
    run.close()
    return [str(warning.message) for warning in caught]


def test_optimizer_that_never_steps_gives_a_warning(run):
    for texts in run(never_steps):
        assert len(texts) == 1
        assert "no optimizer that it knows has stepped in 256 backwards" in texts[0]
        assert "after_optimizer_step" in texts[0]


def refused_and_attached_again(rank, world):
    ddp = DistributedDataParallel(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="not an optimizer"):
        lc.attach(ddp, FAR, optimizers=[object()])
    attachment = lc.attach(ddp, FAR, optimizers=[torch.optim.SGD(ddp.parameters(), lr=0.1)])
    with ignoring(*ENDED):
        attachment.close()


def refused_by_others_only(rank, world):
    ddp = DistributedDataParallel(nn.Linear(2, 2))
    lc.attach(ddp, "bf16", optimizers=[object()]).close()


def test_hooks_that_average_gradients_take_no_offence_at_optimizers(run):
    run(refused_by_others_only)


def test_refused_optimizer_leaves_the_model_as_it_was(run):
    run(refused_and_attached_again)


def other_models_optimizer(rank, world):
    first, second = Run(rank), Run(rank)
    for optimizer in (first.optimizer, second.optimizer):
        for attachment in (first.attachment, second.attachment):
            attachment.add_optimizer(optimizer)
    with first.attachment.averaged_weights():
        second.step()
        with pytest.raises(lc.HookError, match=r"stepped within averaged_weights\(\)"):
            first.step()
    first.close()
    second.close()


def test_another_models_optimizer_may_step_meanwhile(run):
    run(other_models_optimizer)


def different_buffers_choice(rank, world):
    phases = {0: lc.PostLocalSGD(average_buffers=False, **ALONE), 5: lc.DiLoCo(**ALONE)}
    lc.attach(DistributedDataParallel(nn.Linear(2, 2)), lc.Schedule(phases))


def test_schedule_refuses_two_opinions_on_buffers(run):
    with pytest.raises(WorkerError, match="must have the same average_buffers"):
        run(different_buffers_choice)
