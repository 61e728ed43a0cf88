"""Where a window of micro-batches begins and ends, and what is refused."""

import contextlib
import pickle

import numpy as np
import pytest
import torch
from driver import HOOKS, Params
from local_sgd_driver import ENDED
from pool import OF_COMPILING, ignoring
from test_accumulation import SMALL, attached, backward, error, exact_mean, grads, micro
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import lightning_commhooks as lc


@pytest.mark.parametrize("set_to_none", [True, False])
def test_what_was_cleared_does_not_count(run, set_to_none):
    for errors in run(_cleared, set_to_none):
        assert max(errors) <= 1e-6


def _cleared(rank, world, set_to_none):
    errors = []
    for accumulation, divisor in (("mean", 2.0), ("weighted", 6.0)):
        with attached("allreduce", accumulation=accumulation) as (ddp, attachment):
            for i in range(5):
                if i == 3:  # an epoch has ended in the middle of a window, and its gradients are thrown away
                    ddp.zero_grad(set_to_none=set_to_none)
                if accumulation == "weighted":
                    attachment.add_weight(3)
                backward(ddp, i, rank, sync=i == 4)
            errors.append(error(grads(ddp), exact_mean(world, (3, 4), lambda _, divisor=divisor: divisor)))
    return errors


def gradients_kept_over_the_end_of_an_epoch(rank, world):
    with attached("allreduce", accumulation="mean") as (ddp, _):
        for i in range(3):
            backward(ddp, i, rank, sync=False)
            with torch.no_grad():
                ddp(micro(rank, 9))  # validation
        torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1e9)  # touches gradients, and leaves them
        backward(ddp, 3, rank)
        return error(grads(ddp), exact_mean(world, range(4), lambda _: 4.0))


class Experts(nn.Module):
    """Every other micro-batch uses the second expert, on rank 0 only when asked so."""

    def __init__(self):
        super().__init__()
        self.shared = Params({"weight": (5, 3)})
        self.experts = nn.ModuleList([Params({"weight": (4, 4)}) for _ in range(2)])

    def forward(self, gradients, expert):
        shared = self.shared({"weight": gradients["first"][:5, :3]})
        return shared + self.experts[expert]({"weight": gradients["first"][:4, :4]})


@pytest.mark.parametrize(
    ("hook", "alike", "view"),
    [("allreduce", True, False), ("allreduce", False, False), ("allreduce", False, True), ("schedule", False, False)],
)
def test_parameters_that_some_micro_batches_do_not_use(run, hook, alike, view):
    """The mean is over all micro-batches of the window, not over those that used a parameter."""
    for errors in run(_experts, hook, alike, view):
        assert max(errors) <= 1e-6


def _experts(rank, world, name, alike, view):
    errors = []
    hook = name if name == "allreduce" else lc.Schedule({0: "allreduce"})
    options = {"find_unused_parameters": True, "gradient_as_bucket_view": view}

    def expert(r, i):
        return int(i % 4 in (1, 2)) if alike else (i + r) % 2

    with attached(hook, Experts(), options, accumulation="mean") as (ddp, _):
        for window in (range(4), range(4, 8), range(8, 10)):
            for i in window:
                with contextlib.nullcontext() if i == window[-1] else ddp.no_sync():
                    ddp(micro(rank, i), expert(rank, i)).backward()
            expected = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in ddp.module.named_parameters()}
            for r in range(world):
                for i in window:
                    g = micro(r, i)["first"].double() / len(window) / world
                    expected["shared.weight"] += g[:5, :3]
                    expected[f"experts.{expert(r, i)}.weight"] += g[:4, :4]
            found = {name: torch.zeros_like(expected[name]) for name in expected}
            found |= {n: p.grad.double() for n, p in ddp.module.named_parameters() if p.grad is not None}
            errors.append(error(found, expected))
            ddp.zero_grad()
    return errors


class TwoNetworks(nn.Module):
    """As in a GAN: both losses reach both networks, whose gradients are cleared by turns."""

    def __init__(self):
        super().__init__()
        self.one, self.two = Params(SMALL), Params(SMALL)

    def forward(self, gradients):
        return self.one(gradients) + self.two(gradients)


def networks_that_are_cleared_by_turns(rank, world):
    errors = []
    with attached("allreduce", TwoNetworks(), accumulation="mean") as (ddp, _):
        for i in range(4):
            turn = ddp.module.one if i % 2 == 0 else ddp.module.two
            turn.zero_grad()
            backward(ddp, i, rank)
            found = {name: p.grad.double() for name, p in turn.named_parameters()}
            errors.append(error(found, exact_mean(world, [i], lambda _: 1.0)))
    return errors


class Gan(TwoNetworks):
    def forward(self, gradients):
        return self.one(gradients) + self.two(gradients), self.two(gradients)


def losses_of_one_forward(rank, world):
    """As in manual optimization of Lightning, which prepares each backward."""
    errors = []
    with attached("allreduce", Gan(), {"find_unused_parameters": True}, accumulation="mean") as (ddp, _):
        for i in range(3):
            for turn, loss in zip((ddp.module.one, ddp.module.two), ddp(micro(rank, i)), strict=True):
                turn.zero_grad()
                ddp.require_forward_param_sync = True
                ddp.reducer.prepare_for_backward([loss])
                loss.backward(retain_graph=True)
                found = {name: p.grad.double() for name, p in turn.named_parameters()}
                errors.append(error(found, exact_mean(world, [i], lambda _: 1.0)))
    return errors


@pytest.mark.parametrize(
    ("accumulation", "within"), [("mean", True), ("mean", False), (2, False), ("weighted", True), ("weighted", False)]
)
def test_a_second_synchronized_backward_with_gradients_kept_is_refused(run, accumulation, within):
    texts = run(_kept_gradients, accumulation, within)
    clear = [text for text in texts if text.startswith("accumulation: gradients were not cleared since the last")]
    assert clear
    assert all("no_sync()" in text for text in clear)


def _kept_gradients(rank, world, accumulation, within):
    with attached("int8", accumulation=accumulation) as (ddp, attachment):

        def forward(i):
            if accumulation == "weighted":
                attachment.add_weight(1)
            return ddp(micro(rank, i))

        for i in range(2):
            ddp.zero_grad()
            loss = forward(i)
            loss.backward(retain_graph=True)
        if within:
            # As Lightning does before each backward of manual optimization.
            ddp.require_forward_param_sync = True
            ddp.reducer.prepare_for_backward([])
        else:
            loss = forward(2)
        # The first rank to raise it ends the others, which may lose their connection first.
        with pytest.raises((ValueError, lc.HookError)) as refused:
            loss.backward()
    return str(refused.value)


def scaling_hook(state, bucket):
    """A user's own, which does what the averaging of DDP does."""
    return default_hooks.allreduce_hook(state, bucket)


@pytest.mark.parametrize(("accumulation", "as_option"), [("mean", True), (4, False), ("weighted", True)])
def test_users_functions(run, accumulation, as_option):
    for found, name in run(_user_function, accumulation, as_option):
        assert found <= 1e-6
        assert name.endswith("scaling_hook")


def _user_function(rank, world, accumulation, as_option):
    hook = scaling_hook if as_option else lc.ScaleByGradAccumulation(scaling_hook, accumulation)
    options = {"accumulation": accumulation} if as_option else {}
    with attached(hook, hook_state=None, **options) as (ddp, attachment):
        for i in range(4):
            if accumulation == "weighted":
                attachment.add_weight(1)
            backward(ddp, i, rank, sync=i == 3)
        return error(grads(ddp), exact_mean(world, range(4), lambda _: 4.0)), attachment.name


@pytest.mark.parametrize("hook", ["allreduce", scaling_hook])
def test_a_rank_that_gave_no_weight_fails_on_all(run, hook):
    at_fault, other = run(_no_weight, hook)[::-1]
    assert "failed on rank 1 at step 0" in at_fault or hook is scaling_hook
    assert ": 1 micro-batches of this step have no weight. Call add_weight(num_tokens)" in at_fault
    assert "1 micro-batches of this step on other ranks have no weight" in other


def _no_weight(rank, world, hook):
    with attached(hook, accumulation="weighted") as (ddp, attachment):
        for i in range(2):
            if rank == 0 or i == 0:
                attachment.add_weight(3)
            if i == 0:
                backward(ddp, i, rank, sync=False)
        with pytest.raises(ValueError if hook is scaling_hook else lc.HookError) as failure:
            backward(ddp, 1, rank)
        return str(failure.value)


def steps_without_tokens(rank, world):
    """On one rank, and on all."""
    errors = []
    with attached("fp16", accumulation="weighted") as (ddp, attachment):
        attachment.add_weight(4 * rank)
        (ddp(micro(rank, 0)) * rank).backward()
        only = {name: gradient.double() / 4 for name, gradient in micro(1, 0).items()}
        errors.append(error(grads(ddp), only) / 1e3)  # of fp16
        ddp.zero_grad()
        attachment.add_weight(0)
        (ddp(micro(rank, 1)) * 0).backward()
        errors.append(float(sum(g.abs().sum() for g in grads(ddp).values())))
    return errors


def test_ranks_that_step_alone_use_their_own_weights(run):
    for found, sent in run(_alone):
        assert found <= 1e-6
        assert sent == 0


def _alone(rank, world):
    hook = lc.PostLocalSGD(start_localSGD_iter=0, period=100, post_local_gradient_allreduce=False)
    model = Params(SMALL)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with ignoring(ENDED), attached(hook, model, accumulation="weighted", optimizers=[optimizer]) as (ddp, attachment):
        for i in range(2):
            attachment.add_weight(rank + 1)
            backward(ddp, i, rank, sync=i == 1)
        own = {n: (micro(rank, 0)[n].double() + micro(rank, 1)[n].double()) / (2 * (rank + 1)) for n in SMALL}
        return error(grads(ddp), own), attachment.metrics()["bytes_sent"]


def ranks_out_of_data(rank, world):
    found = 0.0
    with attached("allreduce", accumulation="weighted") as (ddp, attachment), ddp.join():
        for i in range(2 + rank):
            attachment.add_weight(3)
            backward(ddp, i, rank)
            ranks = range(world) if i < 2 else (1,)
            expected = {n: sum(micro(r, i)[n].double() for r in ranks) / (3 * len(ranks)) for n in SMALL}
            # join() divides by the number of ranks that there were.
            found = max(found, error(grads(ddp), expected))
            ddp.zero_grad()
    return found


@pytest.mark.parametrize("accumulation", ["mean", "framework"])
def test_sparse_gradients(run, accumulation):
    for found in run(_sparse, accumulation):
        assert found <= 1e-6


def _sparse(rank, world, accumulation):
    model = nn.Embedding(8, 3, sparse=True)
    with attached(lc.ScaleByGradAccumulation("allreduce", accumulation), model) as (ddp, _):
        for i in range(3):
            with contextlib.nullcontext() if i == 2 else ddp.no_sync():
                ddp(torch.tensor([i, rank])).sum().backward()
        expected = torch.zeros(8, 3, dtype=torch.float64)
        for r in range(world):
            for i in range(3):
                expected[i] += 1 / (3 if accumulation == "mean" else 1) / world
                expected[r] += 1 / (3 if accumulation == "mean" else 1) / world
        return error({"weight": model.weight.grad.to_dense().double()}, {"weight": expected})


def test_state_is_that_of_the_hook_inside(run):
    for first, second, name in run(_state):
        assert first == second
        assert name == "powersgd"


def _state(rank, world):
    powersgd = lc.PowerSGD(start_powerSGD_iter=0)
    with attached(powersgd, accumulation="mean") as (ddp, attachment):
        backward(ddp, 0, rank)
        state = attachment.state_dict()
    with attached(powersgd) as (_, plain):
        plain.load_state_dict(state)
        again = plain.state_dict()
    with attached(lc.ScaleByGradAccumulation(powersgd, "sum")) as (_, scaled):
        scaled.load_state_dict(again)
        third = scaled.state_dict()
        return state["hook"]["options"], third["hook"]["options"], scaled.name


@pytest.mark.parametrize("hook", [lc.PowerSGD(start_powerSGD_iter=0), lc.Int8(min_bytes=0, block_size=32)])
def test_error_feedback_is_in_units_of_what_is_communicated(run, hook):
    """The factor changes from window to window; what is sent and what is owed is the sum of all means."""
    for found in run(_telescoping, hook):
        assert found <= 1e-5


def _telescoping(rank, world, hook):
    windows = (range(4), range(4, 5), range(5, 8))
    sums = {name: [0.0, 0.0] for name in SMALL}
    with attached(hook, accumulation="mean") as (ddp, attachment):
        for window in windows:
            for i in window:
                backward(ddp, i, rank, sync=i == window[-1])
            num_micro_batches = len(window)
            exact = exact_mean(world, window, lambda _, n=num_micro_batches: n)
            for name, found in grads(ddp).items():
                sums[name] = [sums[name][0] + found, sums[name][1] + exact[name]]
            ddp.zero_grad()
        entries = attachment.state_dict()["hook"]["state"]["entries"]
    for name, entry in entries.items():
        sums[name][0] = sums[name][0] + entry["residual"].double()
    assert entries
    return max(float((found - exact).norm() / exact.norm()) for found, exact in sums.values())


def new_units_and_a_scaler(rank, world):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    with attached("powersgd", accumulation="mean", grad_scaler=scaler) as (ddp, _):
        for i in range(3):
            with contextlib.nullcontext() if i == 2 else ddp.no_sync():
                scaler.scale(ddp(micro(rank, i))).backward()
        found = {name: gradient / scaler.get_scale() for name, gradient in grads(ddp).items()}
        return error(found, exact_mean(world, range(3), lambda _: 3.0))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: lc.ScaleByGradAccumulation("bf16", "avg"), "accumulation must be one of 'framework', 'mean'"),
        (lambda: lc.ScaleByGradAccumulation("bf16", 0), "an integer of at least 1, got 0"),
        (lambda: lc.ScaleByGradAccumulation("bf16", True), "got True"),
        (lambda: lc.ScaleByGradAccumulation("bf17"), "unknown hook 'bf17'"),
        (lambda: lc.ScaleByGradAccumulation(lambda bucket: None), "must take"),
        (lambda: lc.Cast(lc.ScaleByGradAccumulation("powersgd")), "cannot be inside another hook"),
        (lambda: lc.Schedule({0: lc.ScaleByGradAccumulation("bf16")}), "cannot be inside another hook"),
        (lambda: lc.PerParameter({"*": lc.ScaleByGradAccumulation("bf16")}), "cannot be inside another hook"),
        (lambda: lc.ScaleByGradAccumulation(lc.ScaleByGradAccumulation("bf16")), "cannot be inside another hook"),
    ],
)
def test_refusals(make, text):
    with pytest.raises(ValueError, match=text):
        make()


def test_refusals_when_attached(run):
    for texts in run(_refusals):
        assert "has an accumulation already" in texts[0]
        assert "loss_divided_by must be a positive number or a function, got 0" in texts[1]
        assert "add_weight() is for accumulation='weighted'" in texts[2]
        assert "of shape [2]" in texts[3]
        assert "got -1" in texts[4]
        assert texts[5] == "exact_state must be True or False, got 'yes'"
        assert len(texts) == 8
        assert all("a PerParameter that averages both models and gradients" in text for text in texts[6:])


def _refusals(rank, world):
    ddp = DistributedDataParallel(Params(SMALL))
    scaled = lc.ScaleByGradAccumulation("bf16")
    texts = [
        _text(lambda: lc.attach(ddp, scaled, accumulation="sum")),
        _text(lambda: lc.attach(ddp, "bf16", accumulation="sum", loss_divided_by=0)),
    ]
    local_sgd = lc.PostLocalSGD(post_local_gradient_allreduce=False)
    mixed = lc.PerParameter({"first": local_sgd, "*": "bf16"})
    with attached(scaled) as (_, attachment):
        texts.append(_text(lambda: attachment.add_weight(1)))
    with attached("bf16", accumulation="weighted") as (_, attachment):
        texts += [_text(lambda: attachment.add_weight(torch.ones(2))), _text(lambda: attachment.add_weight(-1))]
    texts.append(_text(lambda: lc.attach(ddp, "bf16", exact_state="yes")))
    for hook in (mixed, lc.Cast(mixed, "bf16")):
        texts.append(_text(lambda hook=hook: lc.attach(ddp, hook, accumulation="weighted")))
    return texts


def _text(function):
    with pytest.raises(ValueError) as failure:  # noqa: PT011  # the text is looked at by the caller
        function()
    return str(failure.value)


def test_an_integer_beside_the_division_of_a_framework_warns(run):
    assert run(_divided_twice) == [["accumulation=4 divides gradients by 4, but th"], []]


def _divided_twice(rank, world):
    warns = pytest.warns() if rank == 0 else contextlib.nullcontext([])
    with warns as caught, attached("allreduce", accumulation=4, loss_divided_by=2) as (ddp, _):
        for i in range(2):
            ddp.zero_grad()
            backward(ddp, i, rank)
    return [str(warning.message)[:45] for warning in caught]


def test_config_is_picklable_and_hashable():
    hook = lc.ScaleByGradAccumulation(scaling_hook, "sum")
    assert pickle.loads(pickle.dumps(hook)) == hook
    assert len({hook, lc.ScaleByGradAccumulation("bf16", 3), lc.ScaleByGradAccumulation(lc.BF16(), 3)}) == 2


@pytest.mark.parametrize("outside", [False, True])
def test_compiled_models(run, outside):
    for found in run(_compiled, outside):
        assert found <= 1e-5


@ignoring(OF_COMPILING)
def _compiled(rank, world, outside):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    data = torch.randn(world, 3, 5, 4, generator=torch.Generator().manual_seed(1))
    for x in data.flatten(0, 1):
        (model(x).square().sum() / 3 / world).backward()
    expected = {f"{n}": p.grad.double() for n, p in model.named_parameters()}
    model.zero_grad()
    inner = model if outside else torch.compile(model, backend="aot_eager")
    with attached("allreduce", inner, {"bucket_cap_mb": 25}, accumulation="mean") as (ddp, _):
        forward = torch.compile(ddp, backend="aot_eager") if outside else ddp
        for i in range(3):
            with contextlib.nullcontext() if i == 2 else ddp.no_sync():
                forward(data[rank, i]).square().sum().backward()
        return error({n: p.grad.double() for n, p in model.named_parameters()}, expected)


def penalty(ddp, loss):
    (sum(p.sum() for p in ddp.parameters()) * 0.5).backward()


def gradients_of_parameters(ddp, loss):
    torch.autograd.grad(sum(p.square().sum() for p in ddp.parameters()), list(ddp.parameters()))


def gradients_of_the_loss(ddp, loss):
    torch.autograd.grad(loss, list(ddp.parameters()))


def gradients_of_a_forward(ddp, loss):
    with ddp.no_sync():  # or DDP synchronizes the next backward, whatever it is
        torch.autograd.grad(ddp(micro(0, 0)), list(ddp.parameters()))


@pytest.mark.parametrize(
    ("between", "accumulation"),
    [
        *((penalty, "mean"), (gradients_of_parameters, "mean"), (gradients_of_the_loss, "mean")),
        (gradients_of_a_forward, "weighted"),
    ],
)
def test_what_comes_between_a_synchronized_backward_and_the_step(run, between, accumulation):
    """It changes what it changes without scaling."""
    for errors in run(_between, between, accumulation):
        assert max(errors) <= 1e-5


def _between(rank, world, between, accumulation):
    errors = []
    with attached("allreduce", accumulation=accumulation) as (ddp, attachment):
        for window in (range(3), range(3, 5)):
            for i in window:
                if accumulation == "weighted":
                    attachment.add_weight(1)
                with contextlib.nullcontext() if i == window[-1] else ddp.no_sync():
                    loss = ddp(micro(rank, i))
                    loss.backward(retain_graph=True)
            expected = exact_mean(world, window, lambda _, n=window: len(n))
            errors.append(error(grads(ddp), expected))
            between(ddp, loss)
            if between is penalty:
                expected = {name: gradient + 0.5 for name, gradient in expected.items()}
            errors.append(error(grads(ddp), expected))
            ddp.zero_grad()
    return errors


@pytest.mark.parametrize(("label", "bound"), [("allreduce", 1e-6), ("int8", 2e-2), ("powersgd", 1), ("schedule", 2e-2)])
def test_ranks_agree_when_they_have_not_as_many_micro_batches(run, label, bound):
    """The mean of the ranks' means."""
    (first, errors), (second, _) = run(_uneven_windows, label)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert errors <= bound


def _uneven_windows(rank, world, label):
    with attached(HOOKS[label], accumulation="mean") as (ddp, _):
        for i in range(2 + 2 * rank):
            backward(ddp, i, rank, sync=i == 1 + 2 * rank)
        expected = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SMALL.items()}
        for r in range(world):
            for i in range(2 + 2 * r):
                for name in SMALL:
                    expected[name] += micro(r, i)[name].double() / (2 + 2 * r) / world
        return {name: p.grad for name, p in ddp.module.named_parameters()}, error(grads(ddp), expected)


def another_wrapper_in_the_middle_of_a_window(rank, world):
    with attached("allreduce", accumulation="mean") as (ddp, attachment):
        for i in range(2):
            backward(ddp, i, rank, sync=False)
        other = DistributedDataParallel(ddp.module)
        attachment.move_to(other)
        backward(other, 2, rank)
        return error(grads(other), exact_mean(world, range(3), lambda _: 3.0))


def weights_of_evaluation_and_of_numpy(rank, world):
    with attached("allreduce", accumulation="weighted") as (ddp, attachment):
        with torch.no_grad():
            attachment.add_weight(1000)
            ddp(micro(rank, 0))
        attachment.add_weight(np.int64(3))
        attachment.add_weight(np.float32(1))
        backward(ddp, 0, rank)
        return error(grads(ddp), exact_mean(world, [0], lambda _: 4.0))


SCENARIOS = [
    *(gradients_kept_over_the_end_of_an_epoch, networks_that_are_cleared_by_turns, steps_without_tokens),
    *(ranks_out_of_data, another_wrapper_in_the_middle_of_a_window, weights_of_evaluation_and_of_numpy),
    *(new_units_and_a_scaler, losses_of_one_forward),
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_gradients_are_exact(run, scenario):
    for found in run(scenario):
        bound = 1e-5 if scenario is new_units_and_a_scaler else 1e-6
        assert max(found if isinstance(found, list) else [found]) <= bound


def test_a_divisor_without_effect_warns(run):
    assert run(_without_effect) == ["loss_divided_by=4 does nothing with accumulation='framework'"] * 2


def _without_effect(rank, world):
    with pytest.warns() as caught, attached("allreduce", loss_divided_by=4):
        pass
    return str(caught[0].message).split(",")[0]
