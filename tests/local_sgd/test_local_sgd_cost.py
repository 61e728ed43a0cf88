"""Cost of averages for evaluation and checkpoints: when ranks average, and what is counted."""

import copy
import gc
import weakref

import pytest
import torch
from local_sgd_driver import ALONE, copied, local, same, snapshot
from test_local_sgd import batch
from torch import nn

import lightning_commhooks as lc
from lightning_commhooks.testing.rules import _measuring

NEVER = lc.PostLocalSGD(period=1000, **ALONE)
# Numbers that ranks tell each other before they average.
AGREEMENT = 64


class Run:
    """A model with BatchNorm and AdamW, and what was sent since the last call of `sent`."""

    def __init__(self, rank, ddp, attachment, module, optimizer):
        self.rank, self.ddp, self.attachment = rank, ddp, attachment
        self.module, self.optimizer = module, optimizer
        self.num_steps = 0
        self._before = {}
        self.sent()

    def step(self):
        self.optimizer.zero_grad()
        self.ddp(batch(self.rank, self.num_steps, "both")).square().sum().backward()
        self.optimizer.step()
        self.num_steps += 1

    def sent(self):
        """Bytes of training, and of evaluation."""
        before, self._before = self._before, self.attachment.metrics()
        return tuple(self._before[key] - before.get(key, 0.0) for key in ("bytes_sent", "bytes_evaluation"))

    def look(self):
        """The average of the model."""
        with self.attachment.averaged_weights():
            return copied(self.module.state_dict().items())

    def look_at_state(self):
        """The average of the optimizer's state."""
        with self.attachment.averaged_optimizer_state(self.optimizer):
            return snapshot(self.module, [self.optimizer])

    def own(self):
        """What this rank has."""
        return copied(self.module.state_dict().items()) | snapshot(self.module, [self.optimizer])


def with_a_run(rank, world, function, *args, hook=NEVER, steps=3):
    """What a function returns of a run that has taken some steps."""
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
    with local(module, hook, [optimizer]) as (ddp, attachment):
        run = Run(rank, ddp, attachment, module, optimizer)
        for _ in range(steps):
            run.step()
        run.sent()
        return function(run, *args)


def ring(world, numel):
    return 2 * (world - 1) / world * 8 * numel


# Parameters and statistics; Adam's two moments.
MODEL = 6 * 4 + 4 + 2 * 4 + 4 * 3 + 3 + 2 * 4
STATE = 2 * (MODEL - 2 * 4)


def of_model(world):
    return ring(world, MODEL)


def of_state(world):
    return ring(world, STATE)


# Again ------------------------------------------------------------------------------------------------------


def look_again(run):
    own = run.own()
    seen, costs = [], []
    for _ in range(3):
        seen.append(run.look() | moments(run.look_at_state()))
        costs.append(run.sent())
        assert same(own, run.own())
    for _ in range(2):
        run.attachment.average_weights()
        run.attachment.average_optimizer_state(run.optimizer)
        seen.append(copied(run.module.state_dict().items()) | moments(run.own()))
        costs.append(run.sent())
    return seen, costs, own


def moments(state):
    return {name: value for name, value in state.items() if "exp_avg" in name}


def test_ranks_average_again_each_time_and_see_the_same(run):
    results = run(with_a_run, look_again, world=4)
    for seen, costs, own in results:
        assert not same(seen[0], {name: own[name] for name in seen[0]})
        assert all(same(again, results[0][0][0]) for again in seen)
        # Nothing differs after an average that is permanent.
        assert costs == [(0, of_model(4) + of_state(4))] * 4 + [(0, 0)]


def evaluated(run):
    """Two checkpoints are saved within an evaluation, and one while the average is shown."""
    costs = []
    with run.attachment.averaged_weights():
        costs.append(run.sent())
        for _ in range(2):
            run.look()
            run.look_at_state()
            costs.append(run.sent())
    run.attachment.show_average()
    costs.append(run.sent())
    with run.attachment.averaged([run.optimizer]):
        costs.append(run.sent())
    own = run.module[0].weight.clone()
    run.ddp(batch(run.rank, 9, "both"))
    costs.append(run.sent())
    return costs, torch.equal(own, run.module[0].weight)


def test_checkpoints_within_an_evaluation_send_the_optimizers_state_alone(run):
    model, state = of_model(2), of_state(2)
    for costs, is_same in run(with_a_run, evaluated):
        assert costs == [(0, model), (0, state), (0, state), (0, model), (0, model + state), (0, 0)]
        assert not is_same, "each rank's own model is back"


# What was changed -------------------------------------------------------------------------------------------


def statistics_without_gradients(run):
    with torch.no_grad():
        run.ddp(batch(run.rank, 8, "both"))


def weights_on_one_rank(run):
    if run.rank == 1:
        values = run.module.state_dict().items()
        run.module.load_state_dict({n: torch.ones_like(t) if t.is_floating_point() else t for n, t in values})


def changed(run, change):
    run.attachment.show_average()
    change(run)
    with run.attachment.averaged_weights():
        pass
    run.ddp(batch(run.rank, 8, "both"))  # each rank's own is back
    run.sent()
    own = run.own()
    seen = run.look()
    assert same(own, run.own())
    return own, seen, run.sent()


@pytest.mark.parametrize(("change", "world"), [(statistics_without_gradients, 2), (weights_on_one_rank, 4)])
def test_what_one_rank_has_changed_is_averaged_on_all_ranks(run, world, change):
    results = run(with_a_run, changed, change, world=world)
    for own, seen, cost in results:
        assert cost == (0, of_model(world))
        for key, value in seen.items():
            if value.is_floating_point():
                mean = sum(rank[0][key] for rank in results) / world
                torch.testing.assert_close(value, mean, rtol=0, atol=1e-12, msg=key)
                assert torch.equal(value, results[0][1][key])
            else:
                assert torch.equal(value, own[key])


def loaded_state(run):
    run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))  # other tensors of the same values
    if run.rank == 1:
        run.optimizer.state[run.module[0].weight]["exp_avg"].zero_()
    own, seen = run.own(), run.look_at_state()
    return run.sent(), own, seen


def test_state_that_was_loaded_is_averaged(run):
    results = run(with_a_run, loaded_state)
    for cost, _, seen in results:
        assert cost == (0, of_state(2))
        mean = (results[0][1]["0.weight.exp_avg"] + results[1][1]["0.weight.exp_avg"]) / 2
        torch.testing.assert_close(seen["0.weight.exp_avg"], mean, rtol=0, atol=1e-12)


def weights_loaded_meanwhile(run, how):
    """Whether weights are there that were loaded on all ranks while the average was in place, and go on to be."""
    loaded = {name: torch.ones_like(value) for name, value in run.module.state_dict().items()}
    if how == "with":
        with run.attachment.averaged_weights():
            run.module.load_state_dict(loaded)
    else:
        run.attachment.show_average()
        run.module.load_state_dict(loaded)
        run.ddp.eval()(batch(run.rank, 8, "both"))
    after = copied(run.module.state_dict().items())
    return same(after, loaded), same(run.look(), loaded)


@pytest.mark.parametrize("how", ["with", "shown"])
def test_loaded_weights_are_not_overwritten_by_a_ranks_own(run, how):
    assert run(with_a_run, weights_loaded_meanwhile, how) == [(True, True)] * 2


# Memory -----------------------------------------------------------------------------------------------------


def memory(run, how):
    """Whether each rank's own model and state are in memory while averages are shown, and afterwards."""
    own = run.attachment.runtime.local.models._own
    if how == "with":
        with run.attachment.averaged([run.optimizer]):
            kept = [weakref.ref(values) for values in own.values()]
    else:
        run.attachment.show_average()
        kept = [weakref.ref(values) for values in own.values()]
        run.ddp(batch(run.rank, 8, "both")) if how == "forward" else run.attachment.close()
    gc.collect()
    return len(kept), any(ref() is not None for ref in kept)


@pytest.mark.parametrize("how", ["with", "forward", "close"])
def test_memory_is_free_afterwards(run, how):
    assert run(with_a_run, memory, how) == [(1 + (how == "with"), False)] * 2


# The method's own averages ----------------------------------------------------------------------------------

OPTIONS = {"optimizer_state": "average", **ALONE}
OWN = {
    "post": lc.PostLocalSGD(period=3, **OPTIONS),
    "diloco": lc.DiLoCo(period=3, **OPTIONS),
    "schedule": lc.Schedule({0: "bf16", 3: lc.DiLoCo(period=3, **OPTIONS)}),
}


def after_a_period(run):
    """What is sent by all that looks at a model just after its ranks have averaged."""
    with _measuring() as sent:
        run.look()
        run.look_at_state()
        run.attachment.show_average()
        run.attachment.average_weights()
        run.attachment.average_optimizer_state(run.optimizer)
    own = run.own()
    return run.sent(), sum(sent), own


@pytest.mark.parametrize("name", OWN)
def test_what_a_method_has_just_averaged_is_looked_at_for_nothing(run, name):
    for steps in (6, 12):
        results = run(a_run_of, OWN[name], steps, after_a_period, world=4)
        for sent, measured, own in results:
            assert sent == (0, 0)
            assert measured <= 3 * 3 * AGREEMENT, "by which ranks know that nothing differs, for each look at the model"
            assert same({n: own[n] for n in results[0][2]}, results[0][2])


def a_run_of(rank, world, hook, steps, function, *args):
    return with_a_run(rank, world, function, *args, hook=hook, steps=steps)


def look_once(run):
    run.look()
    run.look_at_state()
    return run.sent()


def test_of_a_model_in_fragments_the_last_one_is_not_sent(run):
    whole = lc.DiLoCo(period=4, **ALONE)
    parts = lc.DiLoCo(period=4, fragments=2, average_buffers=False, **ALONE)
    for _, sent in run(a_run_of, whole, 4, look_once):
        assert sent == of_state(2), "which DiLoCo leaves alone"
    for _, sent in run(a_run_of, parts, 4, look_once):
        # The first weight is about half of the model.
        assert sent == ring(2, 6 * 4) + of_state(2)


def end(run):
    with _measuring() as sent:
        run.attachment.average_weights()
        run.attachment.average_weights(everything=True)
    first = run.sent(), sum(sent)
    run.module[0].weight.data.fill_(run.rank)  # as what averages over time does, at the end
    run.attachment.average_weights(everything=True)
    return first, run.sent(), run.module[0].weight.detach().clone()


def test_everything_is_sent_at_the_end_only_if_it_differs(run):
    for (first, measured), second, weight in run(a_run_of, OWN["post"], 6, end, world=4):
        assert first == (0, 0)
        assert measured <= 3 * 3 * AGREEMENT
        assert second == (0, of_model(4))
        assert torch.equal(weight, torch.full_like(weight, 1.5))


# Counts -----------------------------------------------------------------------------------------------------


def counted(rank, world, hook, exact):
    """What is counted in a run with evaluations and checkpoints, and what ranks gave to PyTorch's collectives."""
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(6, 512), nn.BatchNorm1d(512), nn.Linear(512, 3)).double()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
    with local(module, hook, [optimizer], exact_state=exact) as (ddp, attachment):
        run = Run(rank, ddp, attachment, module, optimizer)
        parts = {}
        with _measuring() as sent:
            for _ in range(9):
                run.step()
        parts["train"] = run.sent(), sum(sent)
        with _measuring() as sent:
            run.look()
            run.look_at_state()
        parts["look"] = run.sent(), sum(sent)
        with _measuring() as sent:
            attachment.state_dict()
        parts["state"] = run.sent(), sum(sent)
        metrics = attachment.metrics()
    return parts, metrics


CASES = {
    "post": lc.PostLocalSGD(period=4, **ALONE),
    "diloco": lc.DiLoCo(period=4, fragments=2, pseudo_gradient="bf16", **ALONE),
    "powersgd": lc.PowerSGD(start_powerSGD_iter=0, min_compression_rate=1),
}


@pytest.mark.parametrize("exact", [False, True], ids=["mean", "exact"])
@pytest.mark.parametrize(("name", "world"), [("post", 2), ("diloco", 4), ("powersgd", 2)])
def test_counts_are_what_is_sent(run, world, name, exact):
    found = run(counted, CASES[name], exact, world=world)
    for part in ("train", "look", "state"):
        training, evaluation = (sum(parts[part][0][k] for parts, _ in found) for k in (0, 1))
        measured = sum(parts[part][1] for parts, _ in found)
        # DDP's own, of buffers and of buckets that it has built anew, are no hook's.
        tolerance = 0.03 * measured + world * (world - 1) * AGREEMENT
        if part == "train":
            assert evaluation == 0
            if name in ("post", "diloco"):
                assert measured == pytest.approx(training, abs=tolerance)
            assert training > 0
        else:
            assert training == 0
            assert measured == pytest.approx(evaluation, abs=tolerance)
        has_sent = {"train": True, "look": name in ("post", "diloco")}
        has_sent["state"] = exact if name in ("post", "diloco") else True
        assert (measured > 100 * world) == has_sent[part], part
    for _, metrics in found:
        assert metrics["compression_ratio"] == pytest.approx(metrics["bytes_dense"] / metrics["bytes_sent"])


def closing_lines(rank, world, hook):
    lines = []

    def train(run):
        monitor = lc.Monitor(run.attachment, measure_link=False, error_every_n_steps=0)
        run.step()
        lines.append(monitor.summary())
        run.look()
        run.look_at_state()
        lines.append(monitor.summary())
        return monitor.values(), run.attachment.metrics()

    return with_a_run(rank, world, train, hook=hook), lines


def test_the_closing_line_says_what_evaluation_and_checkpoints_sent(run):
    hook = lc.PostLocalSGD(period=4, **ALONE)
    for (values, metrics), (before, after) in run(closing_lines, hook):
        assert "evaluation" not in before
        rest = "472 B sent in 1 step instead of 408 B (1.16 times as many)"
        assert before == f"Communication hook 'post_localsgd': {rest}"
        # Averaged in the last step: what each rank keeps is Adam's state.
        assert metrics["bytes_evaluation"] == of_state(2)
        assert after == f"{before}; evaluation and checkpoints sent {of_state(2):.0f} B more"
        assert values["comm/bytes_sent"] == metrics["bytes_sent"] == of_model(2)
