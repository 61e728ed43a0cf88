"""Forwards and backwards in any order, and the warning about a backward that averages nothing."""

import contextlib
import gc
import warnings
import weakref
from dataclasses import dataclass

import pytest
import torch
from driver import NOT_AVERAGING, Params
from local_sgd_driver import ENDED
from pool import ignoring
from test_accumulation import SMALL, attached, backward, error, exact_mean, grads, micro
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import lightning_commhooks as lc


@contextlib.contextmanager
def synchronized(ddp):
    """As `Accelerator.trigger_sync_in_backward` does it."""
    ddp.require_backward_grad_sync = True
    ddp.reducer.prepare_for_backward([])
    yield


def forwards(ddp, numbers, rank):
    with ddp.no_sync():
        return [ddp(micro(rank, i)) for i in numbers]


def backwards(ddp, losses, retain_graph=False):
    for loss in losses[:-1]:
        loss.backward(retain_graph=retain_graph)
    with synchronized(ddp):
        losses[-1].backward(retain_graph=retain_graph)


@pytest.mark.parametrize(("accumulation", "reverse"), [("mean", False), ("mean", True), ("sum", True), (2, False)])
def test_all_forwards_before_all_backwards(run, accumulation, reverse):
    for errors in run(_forwards_first, accumulation, reverse):
        assert max(errors) <= 1e-6


def _forwards_first(rank, world, accumulation, reverse):
    errors = []
    with attached(lc.ScaleByGradAccumulation("allreduce", accumulation)) as (ddp, _):
        for num_before, window in ((0, range(3)), (1, range(3, 6)), (0, range(6, 8))):
            for i in window[:num_before]:
                backward(ddp, i, rank, sync=False)
            losses = forwards(ddp, window[num_before:], rank)
            backwards(ddp, losses[::-1] if reverse else losses)
            divisor = {"mean": len(window), 2: 2.0}.get(accumulation, 1.0)
            errors.append(error(grads(ddp), exact_mean(world, window, lambda _, by=divisor: by)))
            ddp.zero_grad()
    return errors


@pytest.mark.parametrize("order", ["wfwfwfbbb", "fwfwfwbbb", "fffwbwbwb", "fffwwwbbb", "wfwbfwbwfb"])
def test_weights_in_any_order(run, order):
    """A weight, a forward, a backward."""
    for errors in run(_weights, order):
        assert max(errors) <= 1e-6


def _weights(rank, world, order):
    errors = []
    total = sum(1.0 + 3 * r + k for r in range(world) for k in range(order.count("w")))
    with attached("allreduce", accumulation="weighted") as (ddp, attachment):
        for _ in range(2):
            given, losses, done = 0, [], 0
            for part in order:
                if part == "w":
                    attachment.add_weight(1.0 + 3 * rank + given)
                    given += 1
                elif part == "f":
                    losses += forwards(ddp, [len(losses)], rank)
                else:
                    done += 1
                    with synchronized(ddp) if done == order.count("b") else contextlib.nullcontext():
                        losses[done - 1].backward()
            expected = exact_mean(world, range(len(losses)), lambda _: total / world)
            errors.append(error(grads(ddp), expected))
            ddp.zero_grad()
    return errors


@pytest.mark.parametrize("order", ["wfwbfb", "fffwbwbb"])
def test_a_weight_that_is_missing(run, order):
    assert all("have no weight" in text for text in run(_missing, order))


def _missing(rank, world, order):
    with pytest.raises(lc.HookError) as failure:
        _weights(rank, world, order)
    return str(failure.value)


def inference(ddp, losses):
    with torch.no_grad():
        ddp(micro(0, 9))


def forward_that_is_dropped(ddp, losses):
    forwards(ddp, [9], 0)


def gradients_of_another_loss(ddp, losses):
    torch.autograd.grad(losses[-1], list(ddp.parameters()), retain_graph=True)


def second_backward(ddp, losses):
    (losses[0] * 0).backward(retain_graph=True)


@pytest.mark.parametrize(
    "between",
    [inference, forward_that_is_dropped, gradients_of_another_loss, second_backward],
    ids=lambda f: f.__name__,
)
def test_what_comes_between(run, between):
    for found in run(_between, between):
        assert found <= 1e-6


def _between(rank, world, between):
    with attached("allreduce", accumulation="mean") as (ddp, _):
        losses = forwards(ddp, range(3), rank)
        losses[0].backward(retain_graph=True)
        between(ddp, losses)
        losses[1].backward()
        between(ddp, losses)
        with synchronized(ddp):
            losses[2].backward()
        return error(grads(ddp), exact_mean(world, range(3), lambda _: 3.0))


def test_gradients_that_are_cleared_between(run):
    for found in run(_cleared_between):
        assert found <= 1e-6


def _cleared_between(rank, world):
    with attached("allreduce", accumulation="mean") as (ddp, _):
        first, *others = forwards(ddp, range(3), rank)
        first.backward()
        ddp.zero_grad()
        backwards(ddp, others)
        return error(grads(ddp), exact_mean(world, (1, 2), lambda _: 2.0))


def test_one_backward_of_several_forwards_is_one_micro_batch(run):
    for errors in run(_siamese):
        assert max(errors) <= 1e-6


def _siamese(rank, world):
    errors = []
    with attached("allreduce", accumulation="mean") as (ddp, _):
        for _ in range(2):
            with ddp.no_sync():
                (ddp(micro(rank, 0)) + ddp(micro(rank, 1))).backward()
            (ddp(micro(rank, 2)) + ddp(micro(rank, 3))).backward()
            errors.append(error(grads(ddp), exact_mean(world, range(4), lambda _: 2.0)))
            ddp.zero_grad()
    return errors


@dataclass
class InDataclass:
    value: Tensor


class Opaque:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


class Returning(nn.Module):
    """A function makes its output."""

    def __init__(self, make):
        super().__init__()
        self.net, self.make = Params(SMALL), make

    def forward(self, gradients):
        return self.make(self.net(gradients))


RETURNED = {
    "nested": (lambda y: {"all": [None, (y,)]}, lambda output: output["all"][1][0]),
    "dataclass": (InDataclass, lambda output: output.value),
    "distribution": (lambda y: torch.distributions.Normal(y, 1.0), lambda output: output.loc),
    "view": (lambda y: (y * torch.ones(2)).view(2, 1), lambda output: output.mul_(0.5).sum()),
    "opaque": (Opaque, lambda output: output.value),
}


@pytest.mark.parametrize("returned", RETURNED)
def test_outputs(run, returned):
    """What cannot be counted is refused."""
    for found in run(_returned, returned):
        if returned == "opaque":
            assert "several forwards of the model came before several backwards" in found
        else:
            assert found <= 1e-6


def _returned(rank, world, returned):
    make, loss_of = RETURNED[returned]
    with attached("allreduce", Returning(make), accumulation="mean") as (ddp, _):
        losses = [loss_of(output) for output in forwards(ddp, range(3), rank)]
        try:
            backwards(ddp, losses)
        except lc.HookError as refusal:
            return str(refusal)
        found = {name.removeprefix("net."): gradient for name, gradient in grads(ddp).items()}
        return error(found, exact_mean(world, range(3), lambda _: 3.0))


def test_nothing_is_kept_by_an_output(run):
    for gone, num_forwards in run(_kept_by_output):
        assert gone
        assert num_forwards == [1, 0]


def _kept_by_output(rank, world):
    with attached("allreduce", accumulation="mean") as (ddp, attachment):
        passes = attachment.runtime.passes
        loss = ddp(micro(rank, 0))
        before = len(passes._uncounted())
        # A signal handler that raises in a callback would be ignored.
        assert [one.__callback__ for one in passes._forwards] == [None]
        loss.backward()
        kept = ddp(micro(rank, 1))
    model = weakref.ref(ddp)
    del ddp
    gc.collect()
    gone = model() is None
    del kept
    return gone, [before, len(passes._uncounted())]


def two_losses(ddp, rank):
    loss = ddp(micro(rank, 0))
    loss.backward(retain_graph=True)
    (loss * 2).backward()


def two_forwards(ddp, rank):
    first, second = ddp(micro(rank, 0)), ddp(micro(rank, 1))
    first.backward()
    second.backward()


def users_function(state, bucket):
    return default_hooks.allreduce_hook(state, bucket)


def warned(function, *args):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function(*args)
    texts = [str(warning.message) for warning in caught]
    return [text for text in texts if "not averaged over ranks" in text or "has not run yet" in text]


@pytest.mark.parametrize(
    ("hook", "accumulation", "passes"),
    [
        *(("allreduce", "mean", two_losses), ("allreduce", "mean", two_forwards), ("allreduce", 2, two_losses)),
        *(("powersgd", "framework", two_forwards), ("noop", "framework", two_losses)),
        *((users_function, "framework", two_losses), (lc.Schedule({0: "bf16"}), "framework", two_losses)),
    ],
)
def test_a_backward_that_averages_nothing_warns_once(run, hook, accumulation, passes):
    for texts in run(_averages_nothing, hook, accumulation, passes):
        (text,) = texts
        assert "Sum the losses and call backward once" in text
        assert "no_sync()" in text


def _averages_nothing(rank, world, hook, accumulation, passes):
    with ignoring(NOT_AVERAGING), attached(hook, accumulation=accumulation) as (ddp, _):

        def steps():
            for _ in range(3):
                passes(ddp, rank)
                ddp.zero_grad()

        return warned(steps)


@pytest.mark.parametrize(
    "options", [{"static_graph": True}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}]
)
def test_a_backward_that_averages_nothing_warns_however_the_model_is_wrapped(run, options):
    assert [len(texts) for texts in run(_wrapped, options, two_losses)] == [1, 1]
    assert run(_wrapped, options, ordinary) == [[], []]


def ordinary(ddp, rank):
    ddp(micro(rank, 0)).backward()


def _wrapped(rank, world, options, passes):
    with attached("allreduce", ddp_options=options) as (ddp, _):
        return warned(lambda: [(ddp.zero_grad(), passes(ddp, rank)) for _ in range(3)])


def _never_synchronizes(rank, world, first):
    with attached("bf16") as (ddp, _):
        if first:
            ordinary(ddp, rank)

        def steps():
            with ddp.no_sync():
                for _ in range(1100):
                    ordinary(ddp, rank)

        return warned(steps)


def test_a_hook_that_never_runs_warns_once(run):
    for texts in run(_never_synchronizes, False):
        (text,) = texts
        assert text.startswith("hook 'bf16' has not run yet, after 1024 forwards in no_sync()")
    assert run(_never_synchronizes, True) == [[], []]


def one_after_the_other(ddp, rank):
    """As for real and generated data of a GAN."""
    ordinary(ddp, rank)
    ordinary(ddp, rank)


def two_without_synchronization(ddp, rank):
    with ddp.no_sync():
        two_losses(ddp, rank)
    ordinary(ddp, rank)


def triggered(ddp, rank):
    backwards(ddp, forwards(ddp, range(3), rank))


def gradients_of_the_loss(ddp, rank):
    loss = ddp(micro(rank, 0))
    loss.backward(retain_graph=True)
    torch.autograd.grad(loss, list(ddp.parameters()))


def one_of_two_forwards(ddp, rank):
    (ddp(micro(rank, 0)) + ddp(micro(rank, 1))).backward()


def prepared_by_hand(ddp, rank):
    """As Lightning does before each backward of manual optimization."""
    loss = ddp(micro(rank, 0))
    loss.backward(retain_graph=True)
    with synchronized(ddp):
        loss.backward()


RIGHT = [
    *(one_after_the_other, two_without_synchronization, triggered),
    *(gradients_of_the_loss, one_of_two_forwards, prepared_by_hand),
]


def test_what_is_right_does_not_warn(run):
    assert run(_right) == [[], []]


def _right(rank, world):
    texts = []
    with attached("allreduce", ddp_options={"bucket_cap_mb": 1e-5}) as (ddp, _):
        for passes in RIGHT:
            for _ in range(2):
                texts += [(passes.__name__, text) for text in warned(passes, ddp, rank)]
                ddp.zero_grad()
    return texts


ALONE = lc.PostLocalSGD(start_localSGD_iter=0, post_local_gradient_allreduce=False)


@pytest.mark.parametrize(
    ("hook", "num_warnings"), [(ALONE, 0), (lc.PerParameter({"first": ALONE, "*": "allreduce"}), 1)]
)
def test_ranks_that_step_alone_average_nothing_anyway(run, hook, num_warnings):
    assert [len(texts) for texts in run(_alone, hook)] == [num_warnings, num_warnings]


def _alone(rank, world, hook):
    model = Params(SMALL)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with ignoring(ENDED), attached(hook, model, optimizers=[optimizer]) as (ddp, _):
        return warned(two_losses, ddp, rank)


def test_two_networks(run):
    """The backward of one passes through the other, whose parameters may be frozen then."""
    assert run(_two_networks) == [[], []]


def _two_networks(rank, world):
    one, two = nn.Linear(3, 3), nn.Linear(3, 1)

    def steps(first, second):
        for freeze in (False, True, False):
            made = first(torch.randn(2, 3))
            second(made.detach()).sum().backward()
            two.zero_grad()
            two.requires_grad_(not freeze)
            second(made).sum().backward()
            two.requires_grad_(True)
            one.zero_grad()

    with attached("allreduce", one) as (first, _), attached("allreduce", two) as (second, _):
        return warned(steps, first, second)
