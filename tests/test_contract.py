"""What every hook owes: a new one is tested here as soon as it is registered."""

import io
import pickle

import pytest
import torch
from driver import (
    HOOKS,
    SHAPES,
    attached,
    backward,
    distance,
    full_rank_gradients,
    low_rank_gradients,
    mean_gradients,
    norm,
    outputs,
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


def residuals(state, shapes):
    """Mean residual by name, wherever it is in a nested state; zero where there is none."""
    total = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}

    def visit(part):
        for key, value in part.items():
            if key == "entries":
                for name, entry in value.items():
                    if "residual" in entry:
                        total[name] += entry["residual"].view(shapes[name])
            elif isinstance(value, dict):
                visit(value)

    visit(state)
    return total


def owes(hook):
    """Whether a hook has error feedback: its own field or that of a hook inside says so."""
    inner = hook.hooks.values() if hasattr(hook, "hooks") else [getattr(hook, "hook", None)]
    return getattr(hook, "use_error_feedback", False) or any(owes(h) for h in inner if h is not None)


@pytest.mark.parametrize("steps", [3, 6])
@pytest.mark.parametrize("label", [label for label, hook in HOOKS.items() if owes(hook)])
def test_error_feedback_loses_nothing(run, world, label, steps):
    (means, state, _), *_ = run(outputs, HOOKS[label], full_rank_gradients, steps, world=world)
    owed = residuals(state["hook"], SHAPES)
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


@pytest.mark.parametrize("rebuild", [False, True], ids=["same_buckets", "rebuilt_buckets"])
def test_resumed_run_continues_as_if_uninterrupted(run, label, hook, rebuild):
    if rebuild and label == "batched_powersgd":
        pytest.skip("its result depends on the buckets, which DDP builds anew")
    options = {"find_unused_parameters": not rebuild}
    whole = run(outputs, hook, full_rank_gradients, 6, SHAPES, torch.float64, options)
    parts = run(interrupted, hook, options, 6, 3)
    for (expected, state, metrics), (means, resumed, _) in zip(whole, parts, strict=True):
        for a, b in zip(expected, means, strict=True):
            assert distance(a, b) <= (2 * BF16 if label == "cast" else 1e-10) * norm(a)
        assert resumed["steps"] == state["steps"] == metrics["steps"] == 6
    if label != "noop":
        assert all(equal_states(state, parts[0][1]) for _, state, _ in parts)


def wrong_states(rank, world):
    messages = []
    with attached("powersgd") as (ddp, attachment):
        backward(ddp, full_rank_gradients(rank, 0, SHAPES))
        state = attachment.state_dict()
        for change in ({"hook": "bf16"}, {"format": 99}):
            with pytest.raises(ValueError, match="state") as error:
                attachment.load_state_dict({**state, **change})
            messages.append(str(error.value))
        backward(ddp, full_rank_gradients(rank, 1, SHAPES))
    return messages


def test_state_of_another_hook_or_format_is_refused(run):
    for other_hook, other_format in run(wrong_states):
        assert "the state is of bf16" in other_hook
        assert "PowerSGD(" in other_hook
        assert "99" in other_format


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


NUMEL = sum(torch.Size(shape).numel() for shape in SHAPES.values())
SIDE = int((NUMEL - 1) ** 0.5) + 1
DENSE, FACTORS = powersgd_elements(2)
# Bytes that each of w ranks sends per step with one bucket of float32 gradients.
BYTES = {
    "allreduce": lambda w: ring(w, 4 * NUMEL),
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
