"""On a CUDA device, where there is one: codecs, and every hook on one rank of NCCL."""

import pytest
import torch
import torch.distributed as dist
from codec_reference import error_bound
from driver import HOOKS, NOT_AVERAGING, SHAPES, TOO_EARLY, Params, distance, full_rank_gradients
from pool import ignoring
from torch.nn.parallel import DistributedDataParallel

import lightning_commhooks as lc
from lightning_commhooks.codecs import AffineCodec, FP8Codec, Int4Codec, Int8Codec
from lightning_commhooks.codecs.codec import Kernels, compiled

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CODECS = [
    Int8Codec(),
    Int8Codec(rounding="stochastic"),
    Int4Codec(),
    Int4Codec(rotation="hadamard"),
    FP8Codec(),
    FP8Codec(format="e5m2", rounding="stochastic"),
    AffineCodec(),
    AffineCodec(block_size=None),
]


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_codec(codec):
    device = torch.device("cuda")
    size = codec.block_size or 2**16
    x = torch.randn(2**16, device=device).pow(3).view(-1, size)
    out, one, seed = torch.empty_like(x), torch.ones((), device=device), 7
    kernels = compiled(codec, device, {1}, feedback=False)
    assert kernels is not None
    for run in (kernels, Kernels(codec)):
        finite = run.decode_mean(run.encode(x, None, one, seed)[None], one, out)
        assert finite
        # Products may be rounded in fewer bits there.
        assert ((out - x).abs() <= error_bound(codec, x) * (1.05 if codec.block_size == 64 else 1) + 1e-6).all()


@pytest.fixture
def _nccl(tmp_path):
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_nccl")
@pytest.mark.parametrize("label", HOOKS)
def test_hook(label):
    """One rank's gradients come back as they were, but for what the hook leaves out."""
    device = torch.device("cuda", 0)
    ddp = DistributedDataParallel(Params(SHAPES).to(device), device_ids=[0], bucket_cap_mb=4e-3)
    with ignoring(NOT_AVERAGING, TOO_EARLY):
        attachment = lc.attach(ddp, HOOKS[label])
        for step in range(3):
            gradients = full_rank_gradients(0, step, SHAPES)
            ddp.zero_grad()
            ddp({name: g.to(device) for name, g in gradients.items()}).backward()
            means = {name: p.grad.cpu() for name, p in ddp.module.named_parameters()}
            assert all(mean.isfinite().all() for mean in means.values())
            if "powersgd" not in label and label not in ("cast", "schedule", "per_parameter"):
                zero = {name: torch.zeros_like(g) for name, g in gradients.items()}
                assert distance(means, gradients) <= 0.3 * distance(gradients, zero)
        attachment.close()


@pytest.mark.usefixtures("_nccl")
@pytest.mark.parametrize(
    "hook", ["allreduce", "fp16", lc.Int8(min_bytes=0), lc.PowerSGD(start_powerSGD_iter=0), "noop"]
)
def test_weights_on_the_device(hook):
    device = torch.device("cuda", 0)
    ddp = DistributedDataParallel(Params(SHAPES).to(device), device_ids=[0], bucket_cap_mb=4e-3)
    with ignoring(NOT_AVERAGING, TOO_EARLY):
        attachment = lc.attach(ddp, hook, accumulation="weighted")
        for weight in (2, 6):
            gradients = full_rank_gradients(0, 0, SHAPES)
            attachment.add_weight(torch.tensor(weight, device=device))
            ddp({name: g.to(device) for name, g in gradients.items()}).backward()
        found, expected = ddp.module.bias.grad.cpu(), gradients["bias"] / 4
        assert (found - expected).norm() <= 1e-2 * expected.norm()
        attachment.close()


@pytest.mark.usefixtures("_nccl")
@pytest.mark.parametrize("hook", ["allreduce", "fp16", "noop"])
def test_many_tokens_and_gradients_in_16_bit(hook):
    """Their number is beyond float16."""
    device = torch.device("cuda", 0)
    ddp = DistributedDataParallel(Params(SHAPES, torch.float16).to(device), device_ids=[0], bucket_cap_mb=4e-3)
    with ignoring(NOT_AVERAGING, TOO_EARLY):
        attachment = lc.attach(ddp, hook, accumulation="weighted")
        gradients = {name: 1e3 * g for name, g in full_rank_gradients(0, 0, SHAPES).items()}
        attachment.add_weight(torch.tensor(100_000, device=device))
        ddp({name: g.to(device, torch.float16) for name, g in gradients.items()}).backward()
        found, expected = ddp.module.bias.grad.cpu().float(), gradients["bias"] / 1e5
        assert (found - expected).norm() <= 1e-2 * expected.norm()
        attachment.close()


@pytest.mark.usefixtures("_nccl")
@pytest.mark.parametrize("hook", ["allreduce", lc.Int8(min_bytes=0), lc.PowerSGD(start_powerSGD_iter=0)])
def test_times_and_errors(hook):
    """One step in ten is timed, by events that nothing waits for."""
    device = torch.device("cuda", 0)
    ddp = DistributedDataParallel(Params(SHAPES).to(device), device_ids=[0], bucket_cap_mb=4e-3)
    with ignoring(NOT_AVERAGING, TOO_EARLY):
        attachment = lc.attach(ddp, hook)
        attachment.sample_error(1, None)
        for step in range(21):
            gradients = full_rank_gradients(0, step, SHAPES)
            ddp.zero_grad()
            ddp({name: g.to(device) for name, g in gradients.items()}).backward()
        torch.cuda.synchronize()
        metrics = attachment.metrics()
        assert metrics["timed_steps"] == 3
        assert metrics["codec_ms"] > 0
        assert metrics["exposed_ms"] >= 0
        zero = {name: torch.zeros_like(g) for name, g in gradients.items()}
        means = {name: p.grad.cpu() for name, p in ddp.module.named_parameters()}
        exact = distance(means, gradients) / distance(gradients, zero)
        assert metrics["relative_error"] == pytest.approx(exact, rel=1e-3, abs=1e-6)
        attachment.close()


@pytest.mark.usefixtures("_nccl")
def test_auto_chooses():
    device = torch.device("cuda", 0)
    ddp = DistributedDataParallel(Params(SHAPES).to(device), device_ids=[0], bucket_cap_mb=4e-3)
    with ignoring(NOT_AVERAGING, TOO_EARLY):
        attachment = lc.attach(ddp, lc.Auto(candidates=["bf16", "int8"], warmup_steps=2, timed_steps=3))
        for step in range(20):
            gradients = full_rank_gradients(0, step, SHAPES)
            ddp.zero_grad()
            ddp({name: g.to(device) for name, g in gradients.items()}).backward()
        assert attachment.bound.chosen is not None
        attachment.close()
