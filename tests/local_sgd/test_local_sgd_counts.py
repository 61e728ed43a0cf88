"""Steps that count: those of an optimizer that change something, each once, however many backwards they take."""

import warnings
from unittest import mock

import pytest
import torch
from local_sgd_driver import ALONE, local, params, through_a_file
from test_local_sgd import batch, loss, make_model
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lightning_commhooks as lc
from lightning_commhooks.runtime.optimizers import ObservedSteps

FROM_4 = {"start_localSGD_iter": 4, "post_local_gradient_allreduce": False}


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimization: two backwards for one step of the optimizer that it wraps."""

    def __init__(self, base):
        super().__init__(base.param_groups, {})
        self.base = base
        self.param_groups = base.param_groups

    @torch.no_grad()
    def climb(self):
        for p in self.param_groups[0]["params"]:
            self.state[p]["moved"] = p.grad * 0.05
            p.add_(self.state[p]["moved"])

    @torch.no_grad()
    def descend(self):
        for p in self.param_groups[0]["params"]:
            p.sub_(self.state[p]["moved"])
        self.base.step()

    def step(self, closure):
        with torch.enable_grad():
            closure()
        self.climb()
        with torch.enable_grad():
            closure()
        self.descend()


class EverySecond(torch.optim.SGD):
    """Returns early in every second step, on some ranks."""

    skips = True
    num_calls = 0

    def step(self, closure=None):
        self.num_calls += 1
        if self.num_calls % 2 or not self.skips:
            super().step(closure)


class Foreign:
    """No `torch.optim.Optimizer`: its steps are reported by the user."""

    def __init__(self, parameters, skips):
        self.param_groups, self.state = [{"params": list(parameters)}], {}
        self.skips, self.num_calls = skips, 0

    @torch.no_grad()
    def step(self):
        self.num_calls += 1
        if self.num_calls % 2 or not self.skips:
            for p in self.param_groups[0]["params"]:
                p.sub_(0.1 * p.grad)


def is_same(tensor):
    parts = [torch.zeros_like(tensor) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(parts, tensor.detach().contiguous())
    return all(torch.equal(part, parts[0]) for part in parts)


def make_optimizers(kind, parameters, rank):
    """`(optimizer that is stepped, those that the hook is given)`."""
    if kind == "lbfgs":
        optimizer = torch.optim.LBFGS(parameters, lr=0.1, max_iter=5)
        return optimizer, [optimizer]
    if kind.startswith("sam"):
        base = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        sam = Sam(base)
        return sam, {"sam": [sam, base], "sam_alone": [sam], "sam_base": [base], "sam_by_hand": [sam]}[kind]
    if kind == "foreign":
        return Foreign(parameters, skips=True), []
    torch.optim.SGD(parameters, lr=0.1)  # makes PyTorch call hooks in the step of the base class, too
    optimizer = EverySecond(parameters, lr=0.1)
    optimizer.skips = kind == "skips" or (kind == "rank_0_skips" and rank == 0)
    return optimizer, [optimizer]


def equal_after(rank, world, kind, hook, steps=10):
    """Numbers of the optimizer's steps, from 1 on, after which ranks have the same weights."""
    torch.manual_seed(0)
    model = nn.Linear(6, 3).double()
    optimizer, given = make_optimizers(kind, list(model.parameters()), rank)
    found = []
    with local(model, hook, given) as (ddp, attachment):
        for step in range(steps):
            torch.manual_seed(10 * step + rank)
            x = torch.randn(8, 6, dtype=torch.float64)

            def closure(x=x):
                ddp.zero_grad()
                loss = (ddp(x) - 1).square().mean()
                loss.backward()
                return loss

            if kind == "sam_by_hand":
                closure()
                optimizer.climb()
                closure()
                optimizer.descend()
            elif kind == "lbfgs" or kind.startswith("sam"):
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
                if kind == "foreign":
                    attachment.after_optimizer_step(optimizer)
            if is_same(model.weight):
                found.append(step + 1)
    return found


@pytest.mark.parametrize("kind", ["lbfgs", "sam", "sam_alone", "sam_base", "sam_by_hand", "no_skips"])
def test_start_and_period_are_steps_of_the_optimizer(run, kind):
    hook = lc.PostLocalSGD(period=3, **FROM_4)
    assert run(equal_after, kind, hook) == [[1, 2, 3, 4, 7, 10]] * 2


@pytest.mark.parametrize("hook", [lc.DiLoCo(period=3, **FROM_4), lc.Schedule({0: lc.PostLocalSGD(period=3, **FROM_4)})])
def test_start_of_other_hooks(run, hook):
    assert run(equal_after, "lbfgs", hook) == [[1, 2, 3, 4, 7, 10]] * 2


@pytest.mark.parametrize(("kind", "found"), [("skips", [1, 2, 3, 4, 9, 10]), ("foreign", [1, 2, 3, 4, 9, 10])])
def test_steps_that_change_nothing_do_not_count(run, kind, found):
    hook = lc.PostLocalSGD(period=3, start_localSGD_iter=2, post_local_gradient_allreduce=False)
    # Those that change something are 1, 3, 5, 7, 9: the first two with averaged gradients.
    assert run(equal_after, kind, hook) == [found] * 2


@pytest.mark.parametrize("hook", [lc.PostLocalSGD(period=3, **ALONE), lc.DiLoCo(period=3, delay=1, mixing=0, **ALONE)])
def test_ranks_that_skip_by_themselves_average_together(run, hook):
    first, second = run(equal_after, "rank_0_skips", hook)
    # Rank 0 skips 2, 4, ...: the steps of the rank that took most count.
    assert first == second
    assert {3, 6, 9} <= {*first}


def step_both(rank, world):
    model, gradients = params({"a": (3,), "b": (2,)})
    parts = [torch.optim.SGD([p], lr=1.0) for p in model.parameters()]

    class Both(torch.optim.Optimizer):
        def step(self):
            for part in parts:
                part.step()

    both = Both(model.parameters(), {})
    found = []
    with local(model, lc.PostLocalSGD(period=2, **ALONE), [both, *parts]) as (ddp, attachment):
        for _ in range(4):
            ddp.zero_grad()
            ddp({name: rank * one for name, one in gradients.items()}).backward()
            both.step()
            found.append(attachment.metrics()["averagings"])
    return found, model.a.tolist(), model.b.tolist()


def test_outer_step_of_several_optimizers_counts_each_once(run):
    first, second = run(step_both)
    assert first == second
    assert first[0] == [0, 1, 1, 2], "averages of the model, whatever the number of optimizers"


class Fails(torch.optim.SGD):
    fails = False

    def step(self):
        if self.fails:
            raise RuntimeError("out of memory, say")
        super().step()


def fail_once(rank, world):
    model, gradients = params({"a": (3,)})
    optimizer = Fails(model.parameters(), lr=1.0)
    found = []
    with local(model, lc.PostLocalSGD(period=2, **ALONE), [optimizer]) as (ddp, attachment):
        for step in range(5):
            optimizer.fails = step == 1
            ddp.zero_grad()
            ddp({"a": rank * gradients["a"]}).backward()
            if optimizer.fails:
                with pytest.raises(RuntimeError, match="out of memory"):
                    optimizer.step()
            else:
                optimizer.step()
            found.append(attachment.metrics()["averagings"])
    return found


def test_a_step_that_raises_is_forgotten(run):
    assert run(fail_once) == [[0, 0, 1, 1, 2]] * 2


def resume(rank, world):
    hook, found, state = lc.PostLocalSGD(period=3, **FROM_4), [], None
    for begin, end in ((0, 3), (3, 5), (5, 9)):
        torch.manual_seed(0)
        model = nn.Linear(6, 3).double()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=5)
        with local(model, hook, [optimizer]) as (ddp, attachment):
            if state is not None:
                attachment.load_state_dict(state)
            for step in range(begin, end):
                torch.manual_seed(10 * step + rank)
                x = torch.randn(8, 6, dtype=torch.float64)

                def closure(ddp=ddp, x=x):
                    ddp.zero_grad()
                    loss = (ddp(x) - 1).square().mean()
                    loss.backward()
                    return loss

                optimizer.step(closure)
                if is_same(model.weight):
                    found.append(step + 1)
            attachment.average_weights()
            state = through_a_file(attachment.state_dict())
    return found


def test_start_goes_on_where_a_checkpoint_was_saved(run):
    """Each part begins with the same weights, and the second one with one more averaged gradient."""
    assert run(resume) == [[1, 2, 3, 4, 7]] * 2


class Late:
    """Whether a step changed something, known to the device only, as on CUDA."""

    waited = 0

    def __init__(self, moved):
        self.moved = moved

    def wait(self):
        Late.waited += 1
        return torch.tensor(self.moved)


def train_late(rank, world):
    model, gradients = params({"a": (3,)})
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    moved = iter([True, False, True, True, True, True, False, True, True, True])
    after = mock.patch.object(ObservedSteps, "after", side_effect=lambda *_: Late(next(moved)))
    waited, averagings = [], []
    Late.waited = 0
    with after, local(model, lc.PostLocalSGD(period=3, **ALONE), [optimizer]) as (ddp, attachment):
        for step in range(10):
            ddp.zero_grad()
            ddp({"a": rank * gradients["a"]}).backward()
            optimizer.step()
            waited.append(Late.waited)
            averagings.append(attachment.metrics()["averagings"])
            if step == 4:
                attachment.state_dict()
    return waited, averagings


def test_nobody_waits_for_a_device_before_an_average(run):
    for waited, averagings in run(train_late):
        # The third step might have ended the period, the fourth one did; a state is saved after the fifth.
        assert waited == [0, 0, 3, 4, 4, 5, 7, 8, 8, 8]
        assert averagings == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2]


# Local steps that end -------------------------------------------------------------------------------------------


def make_model_with_momentum():
    torch.manual_seed(0)
    model = nn.Linear(6, 3).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def take_steps(ddp, optimizer, rank, num):
    for step in range(num):
        torch.manual_seed(10 * step + rank)
        optimizer.zero_grad()
        (ddp(torch.randn(8, 6, dtype=torch.float64)) - 1).square().mean().backward()
        optimizer.step()


def reset(rank, world):
    model, optimizer = make_model_with_momentum()
    with local(model, lc.PostLocalSGD(period=4, **FROM_4), [optimizer]) as (ddp, attachment):
        take_steps(ddp, optimizer, rank, 9)
        attachment.average_weights()
        attachment.reset_state()
        before = is_same(optimizer.state[model.weight]["momentum_buffer"])
        take_steps(ddp, optimizer, rank, 3)
        return before, is_same(model.weight)


def test_reset_state_averages_optimizers_state(run):
    assert run(reset) == [(True, True)] * 2


def go_on_without(rank, world, averages):
    model, optimizer = make_model_with_momentum()
    with local(model, lc.PostLocalSGD(period=4, **ALONE), [optimizer]) as (ddp, attachment):
        take_steps(ddp, optimizer, rank, 5)
        attachment.average_weights()
        if averages:
            attachment.average_optimizer_state(optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        take_steps(DistributedDataParallel(model), optimizer, rank, 3)
    return [str(one.message) for one in caught], is_same(model.weight)


def test_an_optimizer_that_steps_on_after_its_hook_was_closed_gives_a_warning(run):
    assert run(go_on_without, True) == [([], True)] * 2
    for texts, is_equal in run(go_on_without, False):
        assert not is_equal
        assert [text.startswith("the state of SGD differs between ranks") for text in texts] == [True]


def go_on_with_another(rank, world):
    model, optimizer = make_model_with_momentum()
    with local(model, lc.PostLocalSGD(period=4, **ALONE), [optimizer]) as (ddp, _):
        take_steps(ddp, optimizer, rank, 4)
    with local(model, lc.PostLocalSGD(period=4, **FROM_4), [optimizer]) as (ddp, _):
        take_steps(ddp, optimizer, rank, 3)
        return is_same(model.weight)


def test_another_hook_averages_the_state_of_an_optimizer_that_it_takes_over(run):
    assert run(go_on_with_another) == [True] * 2


class Recording(lc.CommHook):
    """Records the numbers of the outer steps in which it averages pseudo-gradients."""

    name = "recording"

    def bind(self, group):
        return _BoundRecording(group)


class _BoundRecording(lc.BoundHook):
    def __init__(self, group):
        super().__init__(group)
        self.seen = []

    def reduce(self, bucket, ranks):
        self.seen.append(bucket.step)
        yield from ranks.all_reduce_mean_(bucket.flat)


def outer_steps(rank, world, options):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hook = lc.DiLoCo(period=4, pseudo_gradient=Recording(), error_feedback=False, **options, **ALONE)
    with local(model, hook, [optimizer]) as (ddp, attachment):
        for step in range(12):
            optimizer.zero_grad()
            loss(ddp, batch(rank, step, "both"), "both").backward()
            optimizer.step()
        return sorted({*attachment.bound._pseudo_gradients.inner.seen})


@pytest.mark.parametrize("options", [{}, {"delay": 1}, {"fragments": 2}], ids=str)
def test_outer_steps_are_counted_from_0(run, options):
    assert run(outer_steps, options) == [[0, 1, 2]] * 2
