"""What every hook owes: a new one is tested here as soon as it is registered."""

import io
import math
import pickle

import pytest
import torch
from driver import (
    BY_BUCKET,
    HOOKS,
    ROUNDING,
    SHAPES,
    attached,
    backward,
    distance,
    full_rank_gradients,
    low_rank_gradients,
    mean_gradients,
    mean_residuals,
    norm,
    outputs,
    owes,
    same,
)

import lightning_commhooks as lc

# Error of one step on gradients of rank 2, as a fraction of the gradients' norm. Not stated: exact.
FP16, BF16 = 2**-10, 2**-7
ERROR = {
    "bf16": BF16,
    "bf16+float32": BF16,
    "fp16": FP16,
    "fp16+float32": FP16,
    # Exact but for rounding, which the power iteration amplifies by the angle between Q and the gradient.
    "powersgd": 1e-4,
    "powersgd+batch": 1e-4,
    "cast": 16 * BF16,
    "schedule": BF16,
    "int8": 2 / 127,
    "int4": 2 / 7,
    "quantize_per_tensor": 0.1,
    "quantize_per_channel": 0.05,
    "per_parameter": 2 / 127,
    "batched_powersgd": 1.0,  # a projection: never more than the gradient itself
    "noop": 2.0,
}
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(params=HOOKS)
def label(request):
    return request.param


@pytest.fixture
def hook(label):
    return HOOKS[label]


def gradient_norm(world, step, dtype=torch.float32):
    return max(norm(low_rank_gradients(rank, step, SHAPES, dtype)) for rank in range(world))


def test_ranks_agree_and_error_is_bounded(run, world, label, hook):
    results = run(outputs, hook, low_rank_gradients, 3, world=world)
    for step in range(3):
        means = [means[step] for means, _, _ in results]
        if label == "noop":
            assert all(same(means[rank], low_rank_gradients(rank, step, SHAPES)) for rank in range(world))
            continue
        assert all(same(means[0], other) for other in means[1:])
        expected = mean_gradients(low_rank_gradients, world, step, SHAPES)
        bound = ERROR.get(label, 0) + 1e-5
        assert distance(means[0], expected) <= bound * gradient_norm(world, step)


def exact_in(dtype, label):
    """Whether the stated error is nothing but rounding, and so vanishes in this dtype."""
    return dtype == torch.float64 and label in ("powersgd", "powersgd+batch")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(run, label, hook, dtype):
    results = run(outputs, hook, low_rank_gradients, 2, SHAPES, dtype)
    expected = mean_gradients(low_rank_gradients, 2, 1, SHAPES, dtype)
    for means, _, _ in results:
        assert all(mean.dtype == dtype for mean in means[1].values())
    if label != "noop":
        assert same(results[0][0][1], results[1][0][1])
    # Factors of float16 gradients travel in bfloat16.
    rounding = 8 * max(torch.finfo(dtype).eps, BF16 if dtype == torch.float16 and "powersgd" in label else 0)
    bound = min(ERROR.get(label, 0), 1e-10 if exact_in(dtype, label) else 2) + rounding
    assert distance(results[0][0][1], expected) <= bound * gradient_norm(2, 1, dtype)


@pytest.mark.parametrize("steps", [3, 6])
@pytest.mark.parametrize("label", [label for label, hook in HOOKS.items() if owes(hook)])
def test_error_feedback_loses_nothing(run, world, label, steps):
    (means, state, _), *_ = run(outputs, HOOKS[label], full_rank_gradients, steps, world=world)
    owed = mean_residuals(state, SHAPES)
    assert norm(owed) > 0.1 or label == "schedule"
    received = {name: sum(mean[name].double() for mean in means) + owed[name] for name in SHAPES}
    expected = [mean_gradients(full_rank_gradients, world, step, SHAPES) for step in range(steps)]
    total = {name: sum(mean[name] for mean in expected) for name in SHAPES}
    rounding = 1e-6 if "powersgd" in label else BF16
    assert distance(received, total) <= rounding * sum(norm(mean) for mean in expected)


def with_rng(rank, world, hook):
    torch.manual_seed(rank)
    before = torch.get_rng_state()
    results = [outputs(rank, world, hook, full_rank_gradients, 4)[0] for _ in range(2)]
    return results, torch.equal(before, torch.get_rng_state())


def test_deterministic_and_global_rng_untouched(run, hook):
    for (once, again), untouched in run(with_rng, hook):
        assert all(same(a, b) for a, b in zip(once, again, strict=True))
        assert untouched


def zero_gradients(rank, step, shapes, dtype):
    return {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}


@pytest.mark.parametrize("find_unused", [False, True])
def test_zero_gradients(run, hook, find_unused):
    options = {"find_unused_parameters": find_unused}
    for means, _, _ in run(outputs, hook, zero_gradients, 4, SHAPES, torch.float32, options):
        assert all(not mean.any() for step in means for mean in step.values())


def equal_states(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal_states(a[key], b[key]) for key in a)
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def interrupted(rank, world, hook, options, steps, stop):
    """Outputs of `steps` steps, with the state saved and loaded into a new model at `stop`."""
    means, state = [], None
    for first, last in [(0, stop), (stop, steps)]:
        with attached(hook, dtype=torch.float64, **options) as (ddp, attachment):
            if state is not None:
                attachment.load_state_dict(state)
            for step in range(first, last):
                means.append(backward(ddp, full_rank_gradients(rank, step, SHAPES, torch.float64)))
            file = io.BytesIO()
            torch.save(attachment.state_dict(), file)
            file.seek(0)
            state = torch.load(file, weights_only=True)
    return means, state, attachment.metrics()


@pytest.mark.parametrize(
    ("rebuild", "exact"),
    [(False, True), (True, False), (True, True)],
    ids=["same_buckets-exact", "rebuilt_buckets-mean", "rebuilt_buckets-exact"],
)
def test_resumed_run_continues_as_if_uninterrupted(run, label, hook, rebuild, exact):
    if rebuild and label in BY_BUCKET:
        if exact:
            pytest.skip("its result depends on the buckets, which DDP builds anew")
        rebuild = False
    if (rebuild or not exact) and not owes(hook):
        pytest.skip("it has nothing to save")
    options = {"find_unused_parameters": not rebuild, "exact_state": exact}
    whole = run(outputs, hook, full_rank_gradients, 8, SHAPES, torch.float64, options)
    parts = run(interrupted, hook, options, 8, 3)
    for (expected, state, metrics), (means, resumed, _) in zip(whole, parts, strict=True):
        for step, (a, b) in enumerate(zip(expected, means, strict=True)):
            if exact:
                assert same(a, b)
            elif label not in ROUNDING:
                assert distance(a, b) <= 1e-10 * norm(a)
            elif step < 6:  # later other roundings have grown
                assert distance(a, b) <= max(4 * BF16, ERROR[label] * 2) * norm(a)
        assert resumed["steps"] == state["steps"] == metrics["steps"] == 8
    if label != "noop":
        assert all(equal_states(state, parts[0][1]) for _, state, _ in parts)


STEPS = 5


def with_bad_step(rank, world, hook, bad_step, at, value):
    """Outputs of the good steps, with a bad one between them or none; state, count, and what the bad one gave."""
    means, bad = [], None
    with attached(hook, find_unused_parameters=True) as (ddp, attachment):
        for step in range(STEPS):
            if step == bad_step:
                gradients = full_rank_gradients(rank, 100, SHAPES)
                if rank == world - 1:
                    gradients[at].view(-1)[-1] = value
                bad = backward(ddp, gradients)
            means.append(backward(ddp, full_rank_gradients(rank, step, SHAPES)))
        return means, attachment.state_dict()["hook"], attachment.metrics()["nonfinite_steps"], bad


def with_bad_steps(rank, world, hook, bad_steps):
    """The same for each of `bad_steps`, in one call."""
    return [with_bad_step(rank, world, hook, *arguments) for arguments in bad_steps]


# The step before which it comes, the parameter and its value; first none, then what all hooks are tried with.
BAD_STEPS = [
    (None, None, None),
    (3, "first", float("inf")),
    (3, "bias", float("nan")),
    (1, "row", float("-inf")),
    (0, "conv", float("inf")),
]


def test_step_with_inf_or_nan_on_one_rank_never_happened(run, world, label, hook):
    if label == "schedule":
        pytest.skip("its phases depend on the number of steps; see test_checkpoint.py")
    # 2 ranks, and hooks that remember something, suffice for what is particular.
    bad_steps = BAD_STEPS if world == 2 and owes(hook) else BAD_STEPS[:2]
    for (expected, good_state, none, _), *others in run(with_bad_steps, hook, bad_steps, world=world):
        for (means, state, one, bad), tried in zip(others, bad_steps[1:], strict=True):
            assert all(same(a, b) for a, b in zip(expected, means, strict=True)), tried
            assert equal_states(good_state, state), tried
            finite = [bool(mean.isfinite().all()) for mean in bad.values()]
            assert label == "noop" or not all(finite), tried
            if owes(hook):
                assert not any(finite), "all gradients of the step, so that no optimizer takes it"
                assert (none, one) == (0, 1)


def scaled_and_not(rank, world, hook):
    """Outputs without a scaler, and with one whose scale grows and shrinks, divided by the scale."""
    results = []
    for scales in ([1.0] * 8, [2.0**16, 2.0**17, 2.0**17, 2.0**5, 1.0, 3.0, 2.0**10, 2.0**9]):
        scaler = torch.amp.GradScaler("cpu") if scales[0] > 1 else None
        means = []
        with attached(hook, grad_scaler=scaler) as (ddp, attachment):
            for step, scale in enumerate(scales):
                gradients = full_rank_gradients(rank, step, SHAPES)
                if scaler is None:
                    means.append(backward(ddp, gradients))
                    continue
                ddp.zero_grad()
                scaler.scale(torch.ones(()))  # makes the scale; the loss is of float64 here
                scaler.update(scale)
                (ddp(gradients) * scaler.get_scale()).backward()
                means.append({name: p.grad / scaler.get_scale() for name, p in ddp.module.named_parameters()})
            results.append((means, attachment.state_dict(), attachment.metrics()))
    return results


def test_loss_scale_makes_no_difference(run, label, hook):
    for (plain, state, _), (scaled, scaled_state, metrics) in run(scaled_and_not, hook):
        overflowed = "fp16" in label and metrics["numel_overflowed"]
        bound = {"cast": 32 * BF16, "schedule": 2 * BF16, "per_parameter": 2 * BF16}.get(
            label, ERROR[label] if "16" in label else 1e-5
        )
        for step, (a, b) in enumerate(zip(plain, scaled, strict=True)):
            if not (overflowed and step < 3):
                assert distance(a, b) <= bound * norm(a)
        a, b = mean_residuals(state, SHAPES), mean_residuals(scaled_state, SHAPES)
        assert distance(a, b) <= bound * norm(plain[0]) + bound * norm(a)


def train_and_save(rank, world, hook, steps, state, exact):
    """Mean residuals just after loading, those at the end, and the outputs."""
    with attached(hook, dtype=torch.float64, exact_state=exact) as (ddp, attachment):
        if state is not None:
            attachment.load_state_dict(state)
        loaded = attachment.state_dict()
        means = [backward(ddp, full_rank_gradients(rank, step, SHAPES, torch.float64)) for step in range(steps)]
        return loaded, attachment.state_dict(), means


@pytest.mark.parametrize("exact", [False, True], ids=["mean", "exact"])
def test_resume_on_another_number_of_ranks_keeps_what_is_owed(run, label, hook, exact):
    if not exact and not owes(hook):
        pytest.skip("it has nothing to save")
    state, previous = None, None
    for world in (2, 4, 1, 2):
        results = run(train_and_save, hook, 3, state, exact, world=world)
        loaded, state, means = results[0]
        if previous is not None:
            a, b = (mean_residuals(s, SHAPES) for s in (previous, loaded))
            # A 16-bit gradient has its memory in float32.
            assert distance(a, b) <= (1e-8 if label == "cast" else 1e-12) * (1 + norm(a))
            assert loaded["steps"] == previous["steps"]
        if label != "noop":
            assert all(same(means[-1], others[-1]) for _, _, others in results)
        assert all(mean.isfinite().all() for mean in means[-1].values())
        # What was owed and what came in went out or is owed.
        expected = [mean_gradients(full_rank_gradients, world, step, SHAPES, torch.float64) for step in range(3)]
        owed, still_owed = mean_residuals(loaded, SHAPES), mean_residuals(state, SHAPES)
        if label != "noop":
            came = {n: owed[n] + sum(mean[n] for mean in expected) for n in SHAPES}
            went = {n: still_owed[n] + sum(mean[n] for mean in means) for n in SHAPES}
            bound = BF16 if "16" in label or label in ("cast", "schedule", "per_parameter") else 1e-12
            bound = ERROR[label] if "quantize" in label else bound
            assert distance(came, went) <= bound * sum(norm(mean) for mean in expected)
        previous = state


def test_config_is_frozen_hashable_and_pickles(hook):
    assert pickle.loads(pickle.dumps(hook)) == hook
    with pytest.raises(AttributeError):
        hook.anything = 1
    if not isinstance(hook, lc.Schedule):  # holds a dict
        assert hash(hook) == hash(pickle.loads(pickle.dumps(hook)))


def ring(world, num_bytes):
    return 2 * (world - 1) / world * num_bytes


def powersgd_elements(world):
    dense = factors = 0
    for shape in SHAPES.values():
        n, m = (shape[0], torch.Size(shape[1:]).numel()) if len(shape) > 1 else (1, torch.Size(shape).numel())
        compressed = len(shape) > 1 and (n + m) * min(n, m, 2) * 2 < n * m
        dense += 0 if compressed else n * m
        factors += (n + m) * min(n, m, 2) if compressed else 0
    return dense, factors


def encoded(world, dense_names, block_size, block_bytes):
    """Bytes of a two-shot average in blocks, each parameter beginning one; of small ones and the rest in float32."""
    small = {name for name, shape in SHAPES.items() if torch.Size(shape).numel() < block_size}
    dense_names = small.union(dense_names)
    rest = sum(torch.Size(shape).numel() for name, shape in SHAPES.items() if name in dense_names)
    blocks = sum(-(-torch.Size(s).numel() // block_size) for name, s in SHAPES.items() if name not in dense_names)
    owned = -(-blocks // world) if world > 2 else blocks / world
    return ring(world, 4 * rest) + 2 * (world - 1) * owned * block_bytes


NUMEL = sum(torch.Size(shape).numel() for shape in SHAPES.values())
SIDE = int((NUMEL - 1) ** 0.5) + 1
ONE_D = {name for name, shape in SHAPES.items() if len(shape) < 2}
POLICY = {"first", "third", "second"}  # by "bf16" and "powersgd" in `per_parameter`
DENSE, FACTORS = powersgd_elements(2)
# Bytes that each of w ranks sends per step with one bucket of float32 gradients.
BYTES = {
    "allreduce": lambda w: ring(w, 4 * NUMEL),
    "post_localsgd": lambda w: ring(w, 4 * NUMEL),  # in its warm-up
    "allgather": lambda w: (w - 1) * 4 * NUMEL,
    "noop": lambda w: 0,
    "fp16": lambda w: ring(w, 2 * NUMEL),
    "bf16": lambda w: ring(w, 2 * NUMEL),
    "fp16+float32": lambda w: 2 * (w - 1) * 2 * -(-NUMEL // w),
    "bf16+float32": lambda w: 2 * (w - 1) * 2 * -(-NUMEL // w),
    "powersgd": lambda w: ring(w, 4 * (DENSE + FACTORS)),
    "powersgd+batch": lambda w: ring(w, 4 * (DENSE + FACTORS)),
    "batched_powersgd": lambda w: ring(w, 4 * 2 * 2 * SIDE),
    "cast": lambda w: ring(w, 2 * (DENSE + FACTORS)),
    "schedule": lambda w: ring(w, 2 * NUMEL),
    "int8": lambda w: encoded(w, ONE_D, 128, 128 + 4),
    "int4": lambda w: encoded(w, {}, 64, 32 + 4),
    "quantize_per_tensor": lambda w: 2 * (w - 1) * (8 + (-(-NUMEL // w) if w > 2 else NUMEL / 2 - 4)),
    "quantize_per_channel": lambda w: (
        2 * (w - 1) * (512 + 8) * (math.ceil(math.ceil(NUMEL / 512) / w) if w > 2 else math.ceil(NUMEL / 512) / 2)
    ),
    "per_parameter": lambda w: (
        ring(w, 2 * 2 * 24 * 40)
        + ring(w, 4 * 2 * (24 + 40))
        + encoded(w, ONE_D | POLICY, 128, 132)
        - ring(w, 4 * 3 * 24 * 40)
    ),
}


def test_counted_bytes_equal_the_formula(run, world, label, hook):
    assert label in BYTES, f"state the bytes that {label!r} sends"
    for _, _, metrics in run(
        outputs, hook, full_rank_gradients, 2, SHAPES, torch.float32, {"bucket_cap_mb": 25}, world=world
    ):
        assert metrics["steps"] == 2
        assert metrics["bytes_dense"] == pytest.approx(2 * ring(world, 4 * NUMEL))
        assert metrics["bytes_sent"] == pytest.approx(2 * BYTES[label](world))
        ratio = metrics["bytes_dense"] / metrics["bytes_sent"] if metrics["bytes_sent"] else float("inf")
        assert metrics["compression_ratio"] == pytest.approx(ratio)
        assert (metrics["collectives"] > 0) == (label != "noop")
        counted = metrics["numel_compressed"] + metrics["numel_uncompressed"]
        assert counted == (0 if label == "noop" else 2 * NUMEL)
