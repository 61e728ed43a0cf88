"""DDP over tensor parallelism: two times two ranks, against DDP by itself, and against PowerSGD of each part."""

import warnings

import torch
import torch.distributed as dist
from fsdp_driver import leaving_no_groups
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import lightning_commhooks as lc
from lightning_commhooks.sources.replicas import load_shard, save_shard, shard_file

WORLD = 4
POWERSGD = lc.PowerSGD(start_powerSGD_iter=1, matrix_approximation_rank=2, min_compression_rate=0.1)


def parallelized(mesh):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 40), nn.ReLU(), nn.Linear(40, 16))
    parallelize_module(model, mesh["parts"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    ddp = DistributedDataParallel(model, device_mesh=mesh["replicas"])
    # DDP makes plain attributes of them in the first forward.
    return ddp, list(model.parameters())


def train(ddp, parameters, mesh, num_steps, first=0):
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for step in range(first, first + num_steps):
        # Ranks with parts of the same replica have the same batch.
        generator = torch.Generator().manual_seed(10 * step + mesh.get_local_rank("replicas"))
        ddp(torch.randn(8, 24, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in parameters]


def trained(rank, world):
    with leaving_no_groups():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "parts"))
        plain = train(*parallelized(mesh), mesh, 4)
        model = parallelized(mesh)
        lc.attach(model[0], "allreduce")
        same = all(map(torch.equal, train(*model, mesh, 4), plain))

        whole, half, resumed = (parallelized(mesh) for _ in range(3))
        attachment, first, second = (lc.attach(ddp, POWERSGD, exact_state=True) for ddp, _ in (whole, half, resumed))
        expected = train(*whole, mesh, 6)
        weights = train(*half, mesh, 3)
        second.load_state_dict(first.state_dict())
        with torch.no_grad():
            torch._foreach_copy_(resumed[1], weights)
        as_before = all(map(torch.equal, train(*resumed, mesh, 3, first=3), expected))
        names, metrics = sorted(attachment.bound.memory), attachment.metrics()
        # Gradients of a bad step on one part are bad where that part is.
        if rank == 0:
            resumed[1][0].data[0, 0] = torch.inf
        train(*resumed, mesh, 1, first=6)
        told = [None] * world
        dist.all_gather_object(told, (second.residual_norm(), second.metrics()["nonfinite_steps"]))
        return same, as_before, names, metrics["compression_ratio"], told


def test_parts_are_averaged_between_replicas(run):
    for same, as_before, names, ratio, told in run(trained, world=WORLD):
        assert same
        assert as_before, "resumed bit by bit"
        assert names == ["0.weight", "2.weight"]
        assert ratio > 1.5
        assert told[0] == told[2] == (0.0, 1), "the part with the bad gradient"
        assert told[1] == told[3]


def of_sharded_parts(rank, world, folder):
    """Whether a state is each part's own; and what is said where the number of parts is another."""
    hook = lc.DiLoCo(period=4, post_local_gradient_allreduce=False)

    def attached(mesh):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(24, 40), nn.ReLU(), nn.Linear(40, 16), nn.Tanh())
        if "parts" in mesh.mesh_dim_names:
            parallelize_module(model, mesh["parts"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(model, mesh=mesh["replicas", "shards"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        attachment = lc.attach(model, hook, optimizers=[optimizer])
        return model, optimizer, attachment, shard_file(attachment, folder, "state")

    def step(model, optimizer, num):
        for _ in range(num):
            model(torch.ones(8, 24)).square().mean().backward()
            optimizer.step()

    with leaving_no_groups():
        mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicas", "shards", "parts"))
        first, second = attached(mesh), attached(mesh)
        step(*first[:2], 6)
        save_shard(*first[2:])
        told = load_shard(*second[2:])
        before = [p.full_tensor().clone() for p in second[0].parameters()]
        step(*second[:2], 6)
        same = all(torch.equal(p.full_tensor(), old) for p, old in zip(second[0].parameters(), before, strict=True))
        averagings = second[2].metrics()["averagings"]
        whole = attached(init_device_mesh("cpu", (4, 1), mesh_dim_names=("replicas", "shards")))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            load_shard(*whole[2:])
        texts = [str(one.message) for one in caught if "not taken over" in str(one.message)]
        return first[2].shard, told, same, averagings, whole[2].state_dict()["steps"], texts


def test_state_is_of_a_part(run, tmp_path):
    for rank, (shard, told, same, averagings, steps, texts) in enumerate(run(of_sharded_parts, tmp_path, world=WORLD)):
        assert shard == (rank % 2, 2)
        assert told is None
        assert same, "with a learning rate of 0 averages change nothing"
        assert averagings == 2
        assert steps == 6
        assert ["its memory of '0.weight' cannot be resharded" in text for text in texts] == [True] * (rank == 0)
