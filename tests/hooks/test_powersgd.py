"""PowerSGD against PyTorch's hook and against a plain float64 reference."""

from unittest import mock

import pytest
import torch
from driver import (
    SHAPES,
    attached,
    backward,
    closing_texts,
    distance,
    full_rank_gradients,
    norm,
    outputs,
    same,
)
from reference import powersgd
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

import lightning_commhooks as lc
from lightning_commhooks.hooks import powersgd as algorithm
from lightning_commhooks.hooks.powersgd import random_factors
from lightning_commhooks.interface.bucket import Slot

START, STEPS = 2, 7
ONE_BUCKET = {"bucket_cap_mb": 25}


def preset_stock(state, bucket):
    """PyTorch's hook, beginning with our Q."""
    stock, names = state
    if stock.iter == START and 0 not in stock.q_memory_dict:
        by_shape = {}
        for parameter in bucket.parameters():
            n, m = parameter.shape[0] if parameter.dim() else 1, 0
            m = parameter.numel() // n
            r = min(n, m, stock.matrix_approximation_rank)
            if parameter.dim() > 1 and (n + m) * r * stock.min_compression_rate < n * m:
                start = random_factors([names[parameter]], (r, m), parameter.detach(), 0, 0)[0]
                by_shape.setdefault((n, m), []).append((torch.zeros(n, r, dtype=parameter.dtype), start.t()))
        pairs = [pair for same_shape in by_shape.values() for pair in same_shape]
        stock.p_memory_dict[0] = torch.cat([p.reshape(-1) for p, _ in pairs])
        stock.q_memory_dict[0] = torch.cat([q.reshape(-1) for _, q in pairs])
    return powerSGD_hook(stock, bucket)


def against_stock(rank, world, matrix_rank, batch):
    options = {
        "matrix_approximation_rank": matrix_rank,
        "start_powerSGD_iter": START,
        "batch_tensors_with_same_shape": batch,
    }
    # The stock hook takes no scalars, and nothing that is empty.
    shapes = {name: shape for name, shape in SHAPES.items() if torch.Size(shape).numel() and shape}
    results = []
    for hook in (lc.PowerSGD(**options), preset_stock):
        with attached("noop", shapes, torch.float64, **ONE_BUCKET) as (ddp, unused):
            unused.close()
            ddp = torch.nn.parallel.DistributedDataParallel(ddp.module, **ONE_BUCKET)
            state = None
            if hook is preset_stock:
                stock = PowerSGDState(None, **options)
                state = stock, {p: name for name, p in ddp.module.named_parameters()}
            attachment = lc.attach(ddp, hook, hook_state=state)
            means = [backward(ddp, full_rank_gradients(rank, t, shapes, torch.float64)) for t in range(STEPS)]
            stats = stock.compression_stats() if state else attachment.compression_stats()
            attachment.close()
            results.append((means, stats))
    return results


BATCHES = pytest.mark.parametrize(("batch", "world"), [(False, 4), (True, 2)], ids=["single", "batch"])


@BATCHES
@pytest.mark.parametrize("matrix_rank", [1, 4])
def test_equal_to_stock_hook_step_by_step(run, world, matrix_rank, batch):
    for (ours, our_stats), (stock, stock_stats) in run(against_stock, matrix_rank, batch, world=world):
        for a, b in zip(ours, stock, strict=True):
            for name in a:
                torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=1e-10)
        assert our_stats == pytest.approx(stock_stats)
        assert our_stats[1] > our_stats[2] > 0


@pytest.mark.parametrize(
    ("feedback", "warm", "world"), [(False, False, 2), (False, True, 2), (True, False, 4), (True, True, 4)]
)
def test_equal_to_reference_with_many_buckets(run, world, feedback, warm):
    hook = lc.PowerSGD(
        matrix_approximation_rank=2, start_powerSGD_iter=1, use_error_feedback=feedback, warm_start=warm, random_seed=7
    )
    expected = powersgd(hook, full_rank_gradients, world, STEPS, SHAPES)
    for means, _, _ in run(outputs, hook, full_rank_gradients, STEPS, SHAPES, torch.float64, world=world):
        for a, b in zip(means, expected, strict=True):
            assert distance(a, b) <= 1e-9 * norm(b)


@BATCHES
@pytest.mark.parametrize("feedback", [False, True], ids=["no_feedback", "feedback"])
def test_half_iterations_equal_reference(run, world, feedback, batch):
    """With a bad step, which does not count; else the next one would begin with the other factor."""
    hook = lc.PowerSGD(
        matrix_approximation_rank=2,
        start_powerSGD_iter=1,
        num_iters_per_step=1,
        use_error_feedback=feedback,
        random_seed=7,
        batch_tensors_with_same_shape=batch,
    )
    expected = powersgd(hook, full_rank_gradients, world, STEPS, SHAPES, bad_before=3)
    for means in run(with_a_bad_step, hook, world=world):
        for a, b in zip(means, expected, strict=True):
            assert distance(a, b) <= 1e-9 * norm(b)


@pytest.mark.parametrize("num_iters", [1, 2])
def test_matrices_in_many_blocks_equal_reference(run, num_iters):
    """On CPU they are multiplied in blocks, of which matrices this small are one."""
    hook = lc.PowerSGD(matrix_approximation_rank=2, start_powerSGD_iter=1, num_iters_per_step=num_iters)
    expected = powersgd(hook, full_rank_gradients, 2, STEPS, SHAPES, bad_before=3)
    for means in run(with_a_bad_step, hook, 100):
        for a, b in zip(means, expected, strict=True):
            assert distance(a, b) <= 1e-9 * norm(b)


@pytest.mark.parametrize(("offsets", "is_view"), [((5,), True), ((0, 9, 18), True), ((0, 6, 18), False)])
def test_matrices_that_are_multiplied_as_one_are_copied_only_if_unequally_spaced(offsets, is_view):
    slots = [(Slot(f"matrix {at}", (2, 3), at),) for at in offsets]
    flat = torch.arange(30.0)[2:]
    stacked = algorithm._Matrices(slots, 2, 3, True)._stack(flat)
    assert torch.equal(stacked, torch.stack([flat[at : at + 6].view(2, 3) for at in offsets]))
    assert (stacked.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()) is is_view


@pytest.mark.parametrize("num_iters", [1, 2])
def test_memory_does_not_hold_on_to_uncompressed_gradients(run, num_iters):
    hook = lc.PowerSGD(matrix_approximation_rank=2, start_powerSGD_iter=0, num_iters_per_step=num_iters)
    for sizes in run(bytes_of_factors, hook, {"matrix": (40, 24), "vector": (10_000,)}):
        assert sizes
        assert max(sizes) <= 2 * 40 * 4


def bytes_of_factors(rank, world, hook, shapes):
    with attached(hook, shapes, bucket_cap_mb=25) as (ddp, attachment):
        for step in range(3):
            backward(ddp, full_rank_gradients(rank, step, shapes))
        memory = attachment.bound.memory["matrix"]
        return [own.untyped_storage().nbytes() for kind, own in memory.items() if kind != "residual"]


def with_a_bad_step(rank, world, hook, block_numel=algorithm.BLOCK_NUMEL):
    means = []
    with (
        mock.patch.object(algorithm, "BLOCK_NUMEL", block_numel),
        attached(hook, dtype=torch.float64) as (ddp, _),
    ):
        for step in range(STEPS):
            if step == 3:
                bad = full_rank_gradients(rank, 100, SHAPES, torch.float64)
                bad["first"].view(-1)[rank] = float("inf")
                assert not backward(ddp, bad)["first"].isfinite().all()
            means.append(backward(ddp, full_rank_gradients(rank, step, SHAPES, torch.float64)))
    return means


def resumed_with(rank, world, before, after, shapes):
    """Outputs after other options than before, and the factor that was saved; or what is said against it."""
    with attached(before, shapes, torch.float64) as (ddp, attachment):
        for step in range(3):
            backward(ddp, full_rank_gradients(rank, step, shapes, torch.float64))
        state = attachment.state_dict()
    with attached(after, shapes, torch.float64) as (ddp, attachment):
        try:
            attachment.load_state_dict(state)
        except lc.StateError as error:
            return str(error)
        mean = backward(ddp, full_rank_gradients(rank, 3, shapes, torch.float64))["only"]
        return mean, state["hook"]["state"]["entries"]["only"]["factor"]


def test_half_iterations_go_on_from_whole_ones_and_not_the_other_way(run):
    whole, half = (lc.PowerSGD(start_powerSGD_iter=0, num_iters_per_step=num) for num in (2, 1))
    shapes = {"only": (32, 64)}
    for text in run(resumed_with, half, whole, shapes):
        assert "it has the factor_p of 'only' and the hook has none now" in text
    for mean, q in run(resumed_with, whole, half, shapes):
        q = q / q.norm()
        torch.testing.assert_close(mean @ q.t() @ q, mean, rtol=1e-10, atol=1e-10)
        assert mean.norm() > 0.1


def sent_in_turn(rank, world, hook):
    """Collectives and elements of factors of each step, for one matrix."""
    found = []
    with attached(hook, {"only": (32, 64)}) as (ddp, attachment):
        for step in range(4):
            before = attachment.metrics()
            backward(ddp, full_rank_gradients(rank, step, {"only": (32, 64)}))
            after = attachment.metrics()
            found.append(tuple(after[key] - before[key] for key in ("collectives", "bytes_sent")))
        return found, attachment.compression_stats()


def test_half_iterations_send_one_factor_in_one_collective(run):
    hook = lc.PowerSGD(matrix_approximation_rank=2, start_powerSGD_iter=0, num_iters_per_step=1)
    for found, (rate, before, after) in run(sent_in_turn, hook):
        p, q = (1, 4 * 2 * 32), (1, 4 * 2 * 64)
        assert found == [p, q, p, q]
        assert (before, after) == (4 * 32 * 64, 2 * 2 * (32 + 64))
        assert rate == before / after


def test_random_seed_changes_the_result(run):
    a, b = (
        run(outputs, lc.PowerSGD(start_powerSGD_iter=0, random_seed=seed), full_rank_gradients, 1)[0][0][0]
        for seed in (0, 1)
    )
    assert not same(a, b)
    assert distance(a, b) > 0.01 * norm(a)


def close_early(rank, world, shapes, steps, start):
    with attached(lc.PowerSGD(start_powerSGD_iter=start), shapes) as (ddp, attachment):
        for step in range(steps):
            backward(ddp, full_rank_gradients(rank, step, shapes))
        return closing_texts(attachment), attachment.compression_stats()


def test_warns_when_training_ends_before_compression(run):
    (texts, stats), (other_texts, _) = run(close_early, SHAPES, 10, 10)
    assert len(texts) == 1
    assert "after 10 steps, and hook='powersgd' compresses from start_powerSGD_iter=10 on; " in texts[0]
    assert texts[0].endswith("let it begin after about a tenth of training, 1: hook=PowerSGD(start_powerSGD_iter=1)")
    assert not other_texts
    assert stats == (0, 0, 0)
    for texts, (rate, _, _) in run(close_early, SHAPES, 11, 10):
        assert not texts
        assert rate > 2


def test_warns_when_no_matrix_shrinks(run):
    ((text,), _), (other_texts, _) = run(close_early, {"small": (3, 2)}, 1, 0)
    assert "no gradient is a matrix that shrinks enough at matrix_approximation_rank=1; lower min_" in text
    assert not other_texts


@pytest.mark.parametrize("hook_class", [lc.PowerSGD, lc.BatchedPowerSGD])
@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("matrix_approximation_rank", 0, "at least 1"),
        ("matrix_approximation_rank", 1.5, "integer"),
        ("matrix_approximation_rank", True, "integer"),
        ("start_powerSGD_iter", -1, "at least 0"),
        ("compression_stats_logging_frequency", 0, "at least 1"),
        ("num_iters_per_step", 0, "at least 1"),
        ("num_iters_per_step", 3, "1 or 2"),
        ("num_iters_per_step", 1.0, "integer"),
        ("num_iters_per_step", True, "integer"),
        ("orthogonalization_epsilon", -1e-3, r"\[0, 1\)"),
        ("orthogonalization_epsilon", 1.0, r"\[0, 1\)"),
        ("orthogonalization_epsilon", float("nan"), r"\[0, 1\)"),
        ("orthogonalization_epsilon", "x", r"\[0, 1\)"),
        ("use_error_feedback", "no", "True or False"),
        ("warm_start", 1, "True or False"),
        ("random_seed", "abc", "integer"),
    ],
)
def test_options_are_validated(hook_class, field, value, allowed):
    with pytest.raises(ValueError, match=f"{field} must be .*{allowed}.*, got {value!r}"):
        hook_class(**{field: value})


@pytest.mark.parametrize("hook_class", [lc.PowerSGD, lc.BatchedPowerSGD])
def test_half_iterations_need_a_warm_start(hook_class):
    with pytest.raises(ValueError, match=r"num_iters_per_step=1 .* needs warm_start=True"):
        hook_class(num_iters_per_step=1, warm_start=False)


def test_batching_is_validated():
    with pytest.raises(ValueError, match="batch_tensors_with_same_shape must be True or False, got 'false'"):
        lc.PowerSGD(batch_tensors_with_same_shape="false")


@pytest.mark.parametrize("value", [0, float("nan"), "2"])
def test_min_compression_rate_is_validated(value):
    with pytest.raises(ValueError, match=f"min_compression_rate must be above 0, got {value!r}"):
        lc.PowerSGD(min_compression_rate=value)
