"""Ranks that step alone under a GradScaler: an overflow on one of them makes all skip the step together.

Else the ranks' scales, and the steps after which models are averaged, would go out of phase.
"""

import contextlib
import warnings

import pytest
import torch
from local_sgd_driver import ALONE, copied, local
from local_sgd_reference import Simulation
from test_local_sgd import OUTER, batch, loss, make_model, make_optimizers

import lightning_commhooks as lc

INIT_SCALE, GROWTH_INTERVAL = 2.0**10, 3
POST = lc.PostLocalSGD(period=4, **ALONE)
METHODS = {
    "post_localsgd": (POST, {"periods": {4: 4}}),
    "subgroup": (
        lc.PostLocalSGD(period=3, start_localSGD_iter=4, subgroup_size=2),
        {"periods": {3: 4}, "warmup": 4, "subgroup": 2},
    ),
    "hierarchical": (
        lc.HierarchicalLocalSGD(period_group_size_dict={2: 2, 6: 4}, **ALONE),
        {"periods": {2: 2, 6: 4}},
    ),
    "diloco": (
        lc.DiLoCo(period=4, fragments=2, post_local_gradient_allreduce=False),
        {"periods": {4: 4}, "outer": OUTER, "fragments": 2},
    ),
    "schedule": (lc.Schedule({0: "allreduce", 3: POST}), {"periods": {4: 4}, "begins_at": 3}),
}


def make_scaler(**options):
    return torch.amp.GradScaler("cpu", init_scale=INIT_SCALE, growth_interval=GROWTH_INTERVAL, **options)


def parts_of(steps, kind):
    """`(part, optimizers)` of each step: networks in turn, each with its optimizer, or both at once."""
    for step in range(steps):
        yield [("first", [0]), ("second", [1])][step % 2] if kind == "in_turn" else ("both", [0, 1])


def train(rank, world, hook, steps, overflows=(), accumulation=1, kind="in_turn", scaler=True, fused=None, **options):
    """Of each step parameters and scale; metrics, and the step counts of AdamW.

    `overflows` are `(step, rank, micro-batch)`.
    """
    model = make_model()
    optimizers = make_optimizers(model, "adamw")
    if fused:
        optimizers = [torch.optim.AdamW(part.parameters(), lr=0.02, fused=True) for part in (model.first, model.second)]
    scaler = make_scaler(enabled=scaler) if scaler is not None else None
    options = {"find_unused_parameters": kind == "in_turn", **options}
    trajectory, scales = [], []
    with local(model, hook, optimizers, grad_scaler=scaler, **options) as (ddp, attachment):
        scaler = scaler or make_scaler(enabled=False)
        for step, (part, numbers) in enumerate(parts_of(steps, kind)):
            ddp.zero_grad()
            for i in range(accumulation):
                with ddp.no_sync() if i < accumulation - 1 else contextlib.nullcontext():
                    value = loss(ddp, batch(rank, 10 * step + i, part), part) / accumulation
                    scaler.scale(value * torch.inf if (step, rank, i) in overflows else value).backward()
            for k in numbers:
                scaler.step(optimizers[k])
            scaler.update()
            trajectory.append(copied(model.named_parameters()))
            scales.append(scaler.get_scale())
        metrics = attachment.metrics()
    counts = [{int(state["step"]) for state in optimizer.state.values()} for optimizer in optimizers]
    return trajectory, scales, metrics, counts


def expected(world, steps, overflows, accumulation=1, kind="in_turn", **options):
    """The same without the steps in which some rank's gradient overflows."""
    simulation = Simulation(make_model(), world, lambda m: make_optimizers(m, "adamw"), loss, **options)
    scale, num_good, counts, num_skipped = INIT_SCALE, 0, [0, 0], 0
    trajectory, scales = [], []
    for step, (part, numbers) in enumerate(parts_of(steps, kind)):
        micro_batches = [[batch(rank, 10 * step + i, part) for i in range(accumulation)] for rank in range(world)]
        simulation.backward(micro_batches, part)
        if any(bad == step for bad, _, _ in overflows):
            scale, num_good = scale / 2, 0
            num_skipped += simulation.is_local
        else:
            for k in numbers:
                simulation.step(k)
                counts[k] += 1
            num_good += 1
            if num_good == GROWTH_INTERVAL:
                scale, num_good = scale * 2, 0
        trajectory.append([copied(model.named_parameters()) for model in simulation.models])
        scales.append(scale)
    return trajectory, scales, counts, num_skipped


def assert_as_expected(results, trajectory, scales, counts, num_skipped):
    for rank, (mine, own_scales, metrics, own_counts) in enumerate(results):
        assert metrics["nonfinite_steps"] == num_skipped
        assert own_scales == scales, f"rank {rank}"
        assert own_counts == [{count} for count in counts], f"rank {rank}"
        for step, (values, ranks) in enumerate(zip(mine, trajectory, strict=True)):
            for name, value in values.items():
                torch.testing.assert_close(value, ranks[rank][name], rtol=0, atol=1e-10, msg=f"{name} at {step}")


@pytest.mark.parametrize(
    ("method", "kind", "fused"),
    [
        *((method, ["in_turn", "both"][i % 2], False) for i, method in enumerate(METHODS)),
        pytest.param("post_localsgd", "both", True, id="fused"),
    ],
)
def test_random_overflows_never_put_ranks_out_of_phase(run, method, kind, fused):
    hook, options = METHODS[method]
    drawn = torch.rand(32, 4, generator=torch.Generator().manual_seed(5)) < 0.08
    overflows = [(step, rank, 0) for step, rank in drawn.nonzero().tolist()]
    bad_steps = {step for step, _, _ in overflows}
    assert 6 < len(bad_steps) < 16
    results = run(train, hook, 32, overflows, 1, kind, True, fused, world=4)
    assert_as_expected(results, *expected(4, 32, overflows, kind=kind, **options))


def train_with(rank, world, bad, options):
    return train(rank, world, POST, 9, [bad], 1, "both", **options)


@pytest.mark.parametrize(
    ("options", "bad"),
    [
        ({"static_graph": True}, (0, 1, 0)),
        ({"find_unused_parameters": True}, (0, 1, 0)),
        ({"gradient_as_bucket_view": True}, (3, 0, 0)),
    ],
    ids=["static_graph-first_step", "find_unused-first_step", "view-when_due"],
)
def test_overflow_in_the_first_step_and_when_averaging_is_due(run, options, bad):
    results = run(train_with, bad, options)
    trajectory, *rest = expected(2, 9, [bad], kind="both", periods={4: 2})
    assert_as_expected(results, trajectory, *rest)
    together = [all(torch.equal(ranks[0][n], ranks[1][n]) for n in ranks[0]) for ranks in trajectory]
    assert [step for step, equal in enumerate(together) if equal] == [0, 4, 8][bad[0] > 0 :]


@pytest.mark.parametrize(("kind", "micro_batch"), [("in_turn", 0), ("both", 1), ("in_turn", 2)])
def test_overflow_in_a_micro_batch_whose_gradients_are_not_synchronized(run, kind, micro_batch):
    overflows = [(1, 1, micro_batch), (4, 0, micro_batch)]
    results = run(train, POST, 12, overflows, 3, kind)
    assert_as_expected(results, *expected(2, 12, overflows, 3, kind, periods={4: 2}))


def test_overflow_of_a_cast_is_one_of_the_step(run):
    overflows = [(2, 1, 0), (6, 3, 0)]
    results = run(train, lc.Cast(POST, "bf16"), 8, overflows, 1, "both", world=4)
    _, scales, counts, _ = expected(4, 8, overflows, 1, "both", periods={4: 4})
    first = results[0][0]
    for trajectory, own_scales, _, own_counts in results:
        assert own_scales == scales
        assert own_counts == [{count} for count in counts]
        together = [all(torch.equal(a[name], b[name]) for name in a) for a, b in zip(trajectory, first, strict=True)]
        assert trajectory is first or [step for step, equal in enumerate(together) if equal] == [4]


def costs(rank, world, hook, kind):
    """What is sent in 12 steps with a scaler beyond what is without, and with a scaler that is off."""
    with_scaler, off, without = (train(rank, world, hook, 12, (), 1, kind, scaler)[2] for scaler in (True, False, None))
    return [[a[key] - without[key] for key in ("collectives", "bytes_sent", "averagings")] for a in (with_scaler, off)]


@pytest.mark.parametrize(
    ("hook", "num_local"),
    [
        (lc.PostLocalSGD(period=2, start_localSGD_iter=5, subgroup_size=2), 7),
        (lc.Schedule({0: "allreduce", 3: POST, 10: "bf16"}), 7),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_scaler_costs_one_scalar_a_local_step(run, hook, num_local):
    for with_scaler, off in run(costs, hook, "both", world=4):
        assert with_scaler == [num_local, num_local * 2 * 3 / 4 * 4, 0]
        assert off == [0, 0, 0]


def train_without_the_hooks_knowledge(rank, world):
    """Averagings and warnings of fused AdamW under a scaler that the hook was not given."""
    model, scaler = make_model(), make_scaler()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, fused=True)
    averagings = []
    with local(model, POST, [optimizer]) as (ddp, attachment), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(10):
            ddp.zero_grad()
            value = loss(ddp, batch(rank, step, "both"), "both")
            scaler.scale(value * torch.inf if (step, rank) == (1, 1) else value).backward()
            scaler.step(optimizer)
            scaler.update()
            averagings.append(attachment.metrics()["averagings"])
    return averagings, [str(one.message) for one in caught if "grad_scaler" in str(one.message)]


def test_ranks_that_skip_different_steps_average_together_and_are_told(run):
    """The steps of the rank that took most count, so that nobody is a step behind in an average."""
    for averagings, (told,) in run(train_without_the_hooks_knowledge):
        assert averagings == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2]
        assert "attach(..., grad_scaler=scaler)" in told
