"""On two ranks of NCCL, which may share a CUDA device: hooks against plain DDP and PyTorch's own, overlap, waiting."""

import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from driver import (
    CASES,
    HOOKS,
    SHAPES,
    SMALL_BUCKETS,
    Params,
    attached,
    backward,
    distance,
    low_rank_gradients,
    mean_gradients,
)
from gpu_steps import NCCL, STEPS, WARM_UP, Ranks, needs_one, step_without_waiting
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook, quantization_hooks
from torch.nn.parallel import DistributedDataParallel

import lightning_commhooks as lc
from lightning_commhooks.testing.model import model_device
from lightning_commhooks.testing.rules import largest_norm

# For what profiles mean.
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

pytestmark = [pytest.mark.gpu, needs_one]
NUM_STEPS = 4
# PyTorch's PowerSGD fails on scalars and on tensors without elements.
FULL = {name: shape for name, shape in SHAPES.items() if shape and 0 not in shape}


def powersgd_state():
    return powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, matrix_approximation_rank=2)


# PyTorch's own: function and state; how much less exact ours may be, as a factor and as a part of the gradients' norm.
PEERS = {
    "allreduce": (default_hooks.allreduce_hook, None, 1.01, 1e-6),
    "fp16": (default_hooks.fp16_compress_hook, None, 1.01, 1e-6),
    "bf16": (default_hooks.bf16_compress_hook, None, 1.01, 1e-6),
    # Both are exact here but for rounding, which a power iteration makes larger.
    "powersgd": (powerSGD_hook.powerSGD_hook, powersgd_state, 1.01, 1e-4),
    # Two shots round twice.
    "quantize_per_tensor": (quantization_hooks.quantization_pertensor_hook, None, 2.5, 1e-6),
    "quantize_per_channel": (quantization_hooks.quantization_perchannel_hook, None, 2.5, 1e-6),
}


@pytest.fixture(scope="module", params=NCCL)
def ranks(request):
    ranks = Ranks(request.param)
    yield ranks
    ranks.close()


def without_ours(rank, world, label):
    """The last gradients of plain DDP, or with a hook of PyTorch's."""
    ddp = DistributedDataParallel(Params(FULL), bucket_cap_mb=SMALL_BUCKETS)
    if label is not None:
        function, make_state, *_ = PEERS[label]
        ddp.register_comm_hook(make_state() if make_state else dist.group.WORLD, function)
    return [backward(ddp, low_rank_gradients(rank, step, FULL)) for step in range(NUM_STEPS)][-1]


def with_ours(rank, world, label):
    """The same with one of our hooks."""
    with attached(HOOKS[label], shapes=FULL) as (ddp, _):
        return [backward(ddp, low_rank_gradients(rank, step, FULL)) for step in range(NUM_STEPS)][-1]


def error(gradients):
    """Of a result in the last step, as a fraction of the gradients' norm."""
    mean = mean_gradients(low_rank_gradients, 2, NUM_STEPS - 1, FULL)
    return distance(gradients, mean) / largest_norm(low_rank_gradients, 2, NUM_STEPS - 1)


@pytest.fixture(scope="module")
def plain(ranks):
    return ranks(without_ours, None, world=2)[0]


@pytest.mark.parametrize("label", CASES)
def test_as_plain_ddp_up_to_what_is_promised(ranks, plain, label):
    ours = ranks(with_ours, label, world=2)[0]
    largest = largest_norm(low_rank_gradients, 2, NUM_STEPS - 1)
    assert distance(ours, plain) <= (CASES[label].error + 1e-5) * largest


@pytest.mark.parametrize("label", PEERS)
def test_as_exact_as_pytorchs(ranks, label):
    theirs, ours = (error(ranks(function, label, world=2)[0]) for function in (without_ours, with_ours))
    _, _, factor, slack = PEERS[label]
    assert ours <= factor * theirs + slack


@pytest.mark.parametrize("label", HOOKS)
def test_no_step_waits_for_the_device(ranks, label):
    assert ranks(step_without_waiting, HOOKS[label], world=2) == 2 * [WARM_UP + STEPS]


def profiled(rank, world, hook):
    """Milliseconds of a step in which streams beside the model's own are busy, and of these beside the model's."""
    from cuda_ranks import make, step
    from cuda_trace import beside, device_work
    from torch.profiler import ProfilerActivity, profile

    model = make(hook, 1024, 8, model_device())
    data = torch.randn(2048, 1024, device="cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(6):
            step(model, data)
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            step(model, data)
            torch.cuda.synchronize()
    return beside(device_work(profiler))


@pytest.mark.parametrize(
    "hook", ["allreduce", "bf16", "int8", lc.PowerSGD(start_powerSGD_iter=2, matrix_approximation_rank=4)], ids=str
)
def test_hook_runs_beside_the_backward(ranks, hook):
    for others, both in ranks(profiled, hook, world=2):
        assert others > 0, "the hook has a stream of its own"
        assert both > 0, "what it does goes on while the backward does"
