"""Tensors on another device than the one where ranks communicate, and another current or default device."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from cuda_dry_training import Training, Way, without_cuda
from hooks_under_test import INT8
from pool import ignoring
from stream_order import Order, recorded
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import lightning_commhooks as lc
from lightning_commhooks.codecs.codec import seed_tensor
from lightning_commhooks.collectives import averaging
from lightning_commhooks.hooks.powersgd import random_factors
from lightning_commhooks.interface.bucket import Bucket, Slot
from lightning_commhooks.interface.precision import all_finite, spoil_unless_
from lightning_commhooks.interface.state import StateWriter
from lightning_commhooks.runtime import source
from lightning_commhooks.sources.attach import source_of
from lightning_commhooks.sources.ddp import DDPSource

CPU = torch.device("cpu")


@pytest.fixture
def training(monkeypatch):
    """`training(hook)`: on NCCL, which refuses CPU tensors."""
    order = Order()
    with without_cuda(monkeypatch, 2, order) as (waits, edges), recorded(monkeypatch, order):

        def start(hook):
            trained = Training(hook, Way(2, torch.float32), edges)
            for step in range(3):
                trained.step(step, waits)
            return trained

        yield start


def test_optimizer_state_on_cpu_is_averaged(training):
    """As NAdam's `mu_product`."""
    trained = training(lc.PostLocalSGD(start_localSGD_iter=1, period=2, post_local_gradient_allreduce=False))
    for state in trained.optimizer.state.values():
        state["mu_product"] = torch.ones((), device=CPU)
    with trained.attachment.averaged_optimizer_state(trained.optimizer):
        assert {state["mu_product"].device for state in trained.optimizer.state.values()} == {CPU}
    trained.attachment.average_weights()


def test_cpu_tensors_are_sent_from_the_device_of_the_group(training):
    trained = training(lc.Int8(**INT8))
    group = trained.runtime.bound.group
    on_cpu = torch.ones(4, device=CPU)
    averaging.average_([on_cpu, torch.ones(4, device=group.device)], group)
    averaging.share_([on_cpu, torch.ones(3, dtype=torch.int64, device=CPU)], group)
    for kind, shape in (("exact", (2, 4)), ("mean", (4,))):
        saved = StateWriter(group, kind).per_rank(on_cpu)
        assert (saved.device, saved.shape) == (CPU, shape)


def test_offloaded_gradients_become_nan(training, monkeypatch):
    """On a device, the function refuses tensors of two devices, which fake tensors do not check."""
    training(lc.AllReduce())
    add, seen = torch._foreach_add_, []

    def checked(tensors, others):
        for tensor, other in zip(tensors, others, strict=True):
            assert (tensor.device, tensor.dtype) == (other.device, other.dtype)
            seen.append(tensor.device.type)
        add(tensors, others)

    monkeypatch.setattr(torch, "_foreach_add_", checked)
    finite = torch.ones((), dtype=torch.bool, device="cuda")
    spoil_unless_(finite, [torch.ones(2, device=device) for device in ("cpu", "cuda", "cpu")])
    assert sorted(seen) == ["cpu", "cpu", "cuda"]


def test_ranks_agree_on_the_device_of_the_model(training, monkeypatch):
    """The current one may be another: then all ranks of a host would use its first."""
    current, used = [None], []

    @contextlib.contextmanager
    def on(device):
        current[0] = device
        yield
        current[0] = None

    @contextlib.contextmanager
    def agreeing(group, what):
        yield {}
        used.append(current[0])

    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(source, "raise_on_all_ranks", agreeing)
    training(lc.AllReduce())
    ranks = DDPSource(dist.group.WORLD)
    ranks.device = torch.device("cuda", 1)
    with ranks.agreeing("attach()"):
        pass
    assert used == [torch.device("cuda", 1)]


def test_device_of_a_model_in_ddp(training):
    training(lc.AllReduce())
    ddp = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(ddp)
    ddp.module, ddp.process_group = nn.Linear(2, 2, device="cuda"), dist.group.WORLD
    assert source_of(ddp).device == torch.device("cuda", 0)


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")
def test_device_of_a_model_in_fsdp1():
    """Ranks agree there before anything else; parameters may be offloaded to the CPU."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = FullyShardedDataParallel(nn.Linear(2, 2), device_id=CPU)
        model.compute_device = torch.device("cuda", 1)
        assert source_of(model).device == torch.device("cuda", 1)
    finally:
        dist.destroy_process_group()


def test_default_device():
    """`torch.set_default_device` is about the user's tensors."""
    flat, slots = torch.zeros(6), [Slot("a", (2, 3), 0)]
    bucket = Bucket(flat, slots, 0, True, 0)
    with torch.device("meta"):
        made = [
            seed_tensor(1, CPU),
            random_factors(["a"], (2, 3), flat, 0, 0),
            bucket.used(slots, flat),
            all_finite(flat),
            all_finite(flat[:0]),
        ]
    assert {tensor.device for tensor in made} == {CPU}


def test_parameters_that_fsdp2_makes_later():
    """On the meta device, until `to_empty`."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with torch.device("meta"):
            model = nn.Linear(4, 4)
        fully_shard(model)
        with ignoring(".*does nothing: training runs in one process"):
            attachment = lc.attach(model, "bf16")
        model.to_empty(device="cpu")
        nn.init.ones_(model.weight)
        nn.init.zeros_(model.bias)
        model(torch.ones(2, 4)).sum().backward()
        assert model.weight.grad.to_local().eq(2).all()
        attachment.close()
    finally:
        dist.destroy_process_group()
