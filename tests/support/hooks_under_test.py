"""Our hooks, each with options that show what it does within a few steps, and what is expected of it."""

import math

import torch

import lightning_commhooks as lc
from lightning_commhooks.testing.model import SHAPES
from lightning_commhooks.testing.rules import Case

NUMEL = sum(torch.Size(shape).numel() for shape in SHAPES.values())
SIDE = int((NUMEL - 1) ** 0.5) + 1
FP16, BF16 = 2**-10, 2**-7


def ring(world, num_bytes):
    """Bytes that a rank sends in an all-reduce of so many."""
    return 2 * (world - 1) / world * num_bytes


def powersgd_elements():
    """Elements that rank 2 sends as they are, those of factors, and those of the first of both."""
    dense = factors = first = 0
    for shape in SHAPES.values():
        n, m = (shape[0], torch.Size(shape[1:]).numel()) if len(shape) > 1 else (1, torch.Size(shape).numel())
        compressed = len(shape) > 1 and (n + m) * min(n, m, 2) * 2 < n * m
        dense += 0 if compressed else n * m
        factors += (n + m) * min(n, m, 2) if compressed else 0
        first += n * min(n, m, 2) if compressed else 0
    return dense, factors, first


def sizes(of_chunks):
    """Elements of parameters that fill a chunk, or do not."""
    numels = [torch.Size(shape).numel() for shape in SHAPES.values() if len(shape) > 1]
    numels += [-torch.Size(shape).numel() for shape in SHAPES.values() if len(shape) < 2]
    return [abs(numel) for numel in numels if (numel >= 256) == of_chunks]


def encoded(world, dense_names, block_size, block_bytes):
    """Bytes of a two-shot average in blocks, each parameter beginning one; of small ones and the rest in float32."""
    small = {name for name, shape in SHAPES.items() if torch.Size(shape).numel() < block_size}
    dense_names = small.union(dense_names)
    rest = sum(torch.Size(shape).numel() for name, shape in SHAPES.items() if name in dense_names)
    blocks = sum(-(-torch.Size(s).numel() // block_size) for name, s in SHAPES.items() if name not in dense_names)
    owned = -(-blocks // world) if world > 2 else blocks / world
    return ring(world, 4 * rest) + 2 * (world - 1) * owned * block_bytes


ONE_D = {name for name, shape in SHAPES.items() if len(shape) < 2}
POLICY = {"first", "third", "second"}  # by "bf16" and "powersgd" in `per_parameter`
DENSE, FACTORS, FACTORS_P = powersgd_elements()
INT8 = {"min_bytes": 0, "block_size": 128}
RANK_2 = {"start_powerSGD_iter": 0, "matrix_approximation_rank": 2}
POWERSGD = lc.PowerSGD(**RANK_2)

CASES = {
    "allreduce": Case(lc.AllReduce(), error=0, bytes_sent=lambda w: ring(w, 4 * NUMEL)),
    "allgather": Case(lc.AllGather(), error=0, bytes_sent=lambda w: (w - 1) * 4 * NUMEL),
    # Averages gradients; test_local_sgd*.py are about what comes later.
    "post_localsgd": Case(
        lc.PostLocalSGD(start_localSGD_iter=1000, post_local_gradient_allreduce=False),
        error=0,
        bytes_sent=lambda w: ring(w, 4 * NUMEL),
        goes_on_from_mean=True,
    ),
    "fp16": Case(lc.FP16(), error=FP16, rounding=FP16, bytes_sent=lambda w: ring(w, 2 * NUMEL)),
    "bf16": Case(lc.BF16(), error=BF16, rounding=BF16, bytes_sent=lambda w: ring(w, 2 * NUMEL)),
    "fp16+float32": Case(
        lc.FP16(accumulate_dtype="float32"),
        error=FP16,
        rounding=FP16,
        bytes_sent=lambda w: 2 * (w - 1) * 2 * -(-NUMEL // w),
    ),
    "bf16+float32": Case(
        lc.BF16(accumulate_dtype="float32"),
        error=BF16,
        rounding=BF16,
        bytes_sent=lambda w: 2 * (w - 1) * 2 * -(-NUMEL // w),
    ),
    # Exact but for rounding, which the power iteration amplifies by the angle between Q and the gradient.
    "powersgd": Case(POWERSGD, error=1e-4, bytes_sent=lambda w: ring(w, 4 * (DENSE + FACTORS)), goes_on_from_mean=True),
    "powersgd+batch": Case(
        lc.PowerSGD(**RANK_2, batch_tensors_with_same_shape=True),
        error=1e-4,
        bytes_sent=lambda w: ring(w, 4 * (DENSE + FACTORS)),
        goes_on_from_mean=True,
    ),
    # The first step projects on random rows: never more than the gradient itself.
    "powersgd+half": Case(
        lc.PowerSGD(**RANK_2, num_iters_per_step=1),
        bytes_sent=lambda w: ring(w, 4 * (DENSE + FACTORS_P)),
        goes_on_from_mean=True,
    ),
    # A projection: never more than the gradient itself.
    "batched_powersgd": Case(
        lc.BatchedPowerSGD(**RANK_2),
        error=1.0,
        bytes_sent=lambda w: ring(w, 4 * 2 * 2 * SIDE),
        depends_on_buckets=True,
        goes_on_from_mean=True,
    ),
    "int8": Case(lc.Int8(**INT8), error=2 / 127, bytes_sent=lambda w: encoded(w, ONE_D, 128, 128 + 4)),
    "int4": Case(
        lc.Int4(min_bytes=0, compress_1d=True),
        error=2 / 7,
        bytes_sent=lambda w: encoded(w, {}, 64, 32 + 4),
    ),
    "int2": Case(
        lc.Int2(min_bytes=0, compress_1d=True),
        error=2,
        bytes_sent=lambda w: encoded(w, {}, 256, 64 + 8),
    ),
    "chunked_topk": Case(
        lc.ChunkedTopK(k=64, chunk_size=256, decay=1),
        bytes_sent=lambda w: ring(w, 4 * sum(sizes(False))) + (w - 1) * sum(-(-n // 256) for n in sizes(True)) * 120,
    ),
    "quantize_per_tensor": Case(
        lc.QuantizePerTensor(),
        error=0.1,
        bytes_sent=lambda w: 2 * (w - 1) * (8 + (-(-NUMEL // w) if w > 2 else NUMEL / 2 - 4)),
        depends_on_buckets=True,
    ),
    "quantize_per_channel": Case(
        lc.QuantizePerChannel(),
        error=0.05,
        bytes_sent=lambda w: (
            2 * (w - 1) * (512 + 8) * (math.ceil(math.ceil(NUMEL / 512) / w) if w > 2 else math.ceil(NUMEL / 512) / 2)
        ),
        depends_on_buckets=True,
    ),
    "cast": Case(
        lc.Cast(POWERSGD, "bf16"),
        error=16 * BF16,
        rounding=BF16,
        bytes_sent=lambda w: ring(w, 2 * (DENSE + FACTORS)),
    ),
    "schedule": Case(
        lc.Schedule({0: "bf16", 2: POWERSGD, 4: "allreduce"}),
        error=BF16,
        rounding=BF16,
        bytes_sent=lambda w: ring(w, 4 * (DENSE + FACTORS)),
        goes_on_from_mean=True,
    ),
    "per_parameter": Case(
        lc.PerParameter({"*ir*": "bf16", "second": POWERSGD, "*": lc.Int8(**INT8)}),
        error=2 / 127,
        rounding=BF16,
        bytes_sent=lambda w: (
            ring(w, 2 * 2 * 24 * 40)
            + ring(w, 4 * 2 * (24 + 40))
            + encoded(w, ONE_D | POLICY, 128, 132)
            - ring(w, 4 * 3 * 24 * 40)
        ),
    ),
}
HALF = lc.PowerSGD(**RANK_2, num_iters_per_step=1)
CASES["powersgd+half inside"] = Case(
    lc.Schedule({0: lc.PerParameter({"*ir*": HALF, "second": lc.Cast(HALF, "int8"), "*": "bf16"}), 6: "bf16"}),
    rounding=BF16,
)
# These do with gradients what post_localsgd does, or int8 with another codec, by the same code; or what others do.
ALIKE = {"hierarchical_localsgd", "diloco", "fp8", "auto"}
# What it does is not to average.
NOT_AVERAGING = {"noop"}


def with_defaults(name):
    """A hook that has no line above: it is expected to do what every hook has to do."""
    try:
        return Case(lc.get_hook(name))
    except ValueError as error:
        raise ValueError(f"give hook {name!r} a line in CASES of {__name__}.py, with its options: {error}") from error


CASES |= {name: with_defaults(name) for name in lc.available_hooks() if name not in {*CASES, *ALIKE, *NOT_AVERAGING}}
