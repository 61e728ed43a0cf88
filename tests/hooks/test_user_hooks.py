"""Stock and user-written DDP hooks run unchanged; what DDP would refuse is refused with advice."""

import functools
import math

import pytest
import torch
import torch.distributed as dist
from driver import SHAPES, Params, backward, distance, full_rank_gradients, mean_gradients, norm
from pool import ignoring
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook, quantization_hooks
from torch.nn.parallel import DistributedDataParallel
from versions import has

import lightning_commhooks as lc
from lightning_commhooks.sources.ddp import resolve_hook
from lightning_commhooks.sources.ddp_model import registered_name

MATRICES = {name: shape for name, shape in SHAPES.items() if shape and 0 not in shape}


def own(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    state["calls"] += 1
    return default_hooks.allreduce_hook(None, bucket)


class Callable:
    def __call__(self, state, bucket):
        return default_hooks.allreduce_hook(None, bucket)

    def method(self, state, bucket):
        return self(state, bucket)


def twice(factor, state, bucket):
    return default_hooks.allreduce_hook(None, bucket).then(lambda done: factor * done.value())


def means_of(rank, world, kind):
    hook, state = {
        "bf16": (default_hooks.bf16_compress_hook, None),
        "fp16_powersgd": (
            default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook),
            powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=16, start_powerSGD_iter=2),
        ),
        "own": (own, {"calls": 0}),
        "object": (Callable(), None),
        "method": (Callable().method, None),
        "partial": (functools.partial(twice, 1), None),
    }[kind]
    ddp = DistributedDataParallel(Params(MATRICES))
    with ignoring("PyTorch's powerSGD_hook hangs or aborts as soon as DDP has two"):  # it has one
        attachment = lc.attach(ddp, hook, hook_state=state)
    means = [backward(ddp, full_rank_gradients(rank, step, MATRICES)) for step in range(4)]
    if kind == "own":
        assert state["calls"] == 4
    assert attachment.name in registered_name(ddp)
    with pytest.raises(ValueError, match="not a hook of this library"):
        attachment.compression_stats()
    attachment.load_state_dict(attachment.state_dict())
    attachment.close()
    return means, attachment.metrics()


@pytest.mark.parametrize("kind", ["bf16", "fp16_powersgd", "own", "object", "method", "partial"])
def test_runs(run, kind):
    for means, metrics in run(means_of, kind):
        for step in range(4):
            expected = mean_gradients(full_rank_gradients, 2, step, MATRICES)
            assert distance(means[step], expected) <= (0.01 if "16" in kind else 1e-6) * norm(expected)
        assert metrics["steps"] == 4
        assert metrics["bytes_dense"] == 4 * 4 * sum(torch.Size(shape).numel() for shape in MATRICES.values())
        assert math.isnan(metrics["bytes_sent"])
        assert math.isnan(metrics["compression_ratio"])


def no_bucket(state, gradients):
    pass


def three(state, bucket, more):
    pass


def wrong_bucket(state, bucket: int):
    pass


def wrong_result(state, bucket) -> torch.Tensor:
    pass


def string_annotations(state, bucket: "dist.GradBucket") -> "torch.futures.Future[torch.Tensor]":
    pass


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        (3, "hook must be a name, a CommHook or a callable"),
        (None, "hook must be a name, a CommHook or a callable"),
        (no_bucket, r"no_bucket\(state, gradients\) needs a parameter named 'bucket'"),
        (three, r"three\(state, bucket, more\) must take \(state, bucket\)"),
        (wrong_bucket, "parameter 'bucket' is annotated <class 'int'>; DDP wants dist.GradBucket"),
        (wrong_result, r"return value is annotated .*; DDP wants torch.futures.Future\[torch.Tensor\]"),
        (string_annotations, "as text .drop `from __future__ import annotations`"),
    ],
)
def test_refused_without_a_model(hook, message):
    with pytest.raises(ValueError, match=message):
        resolve_hook(hook)


def warns_on_gloo(rank, world):
    texts = []
    wrapped = default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook)
    quantization = () if has("torch", "2.15") else (quantization_hooks.quantization_pertensor_hook,)
    for hook in (powerSGD_hook.powerSGD_hook, wrapped, *quantization):
        with pytest.warns(UserWarning, match="on the gloo backend; use hook=") as caught:
            lc.attach(DistributedDataParallel(Params(MATRICES)), hook)
        texts += [str(w.message) for w in caught]
    return texts


def test_warns_of_stock_hooks_that_fail_on_gloo(run):
    for texts in run(warns_on_gloo):
        assert "use hook='powersgd'" in texts[0]
        assert "powerSGD_hook hangs or aborts" in texts[1]
        assert not texts[2:] or "use hook='bf16'" in texts[2]
