"""Models of known gradients, sharded in every way, and what their gradients become with a hook."""

import contextlib

import torch
import torch.distributed as dist
from driver import full_rank_gradients, mean_gradients
from pool import ignoring
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import debug

import lightning_commhooks as lc
from lightning_commhooks.runtime.runtime import Runtime
from lightning_commhooks.sources.fsdp import ShardedSource

# 24 * 41 and 7 are no multiples of 2 or 4 rows or blocks.
SHAPES = {"matrix": (40, 24), "odd": (41, 24), "vector": (7,), "wide": (16, 512)}
NAMES = {f"{block}.{name}": shape for block in ("first", "second") for name, shape in SHAPES.items()}
WAYS1 = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
WAYS2 = ("full", "grad_op")
INT8 = lc.Int8(min_bytes=0, block_size=128, use_error_feedback=False, compress_1d=True)
HOOKS = {
    "allreduce": "allreduce",
    "bf16": "bf16",
    "fp16": "fp16",
    "bf16+float32": lc.BF16(accumulate_dtype="float32"),
    "fp16+float32": lc.FP16(accumulate_dtype="float32"),
    "int8": INT8,
    "int8+stochastic": lc.Int8(
        min_bytes=0, block_size=128, rounding="stochastic", use_error_feedback=False, compress_1d=True
    ),
}
UNITS = {"fp16": 2**-11, "bf16": 2**-8}
NO_SHARD_IS_DEPRECATED = "The `NO_SHARD` sharding strategy is deprecated"


class Block(nn.Module):
    """A unit whose gradients are the arguments of `forward`; FSDP replaces parameters by plain tensors meanwhile."""

    def __init__(self):
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))

    def forward(self, gradients):
        return sum((getattr(self, name) * g).sum().double() for name, g in gradients.items())


class Blocks(nn.Module):
    """Two units whose gradients are the arguments of `forward`, exactly."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, gradients):
        return sum(
            block({name: gradients[f"{prefix}.{name}"] for name in SHAPES})
            for prefix, block in (("first", self.first), ("second", self.second))
        )


def shard1(way, device="cpu", **options):
    """A model in FSDP version 1."""
    if "HYBRID" in way:
        options["device_mesh"] = init_device_mesh(device, (2, dist.get_world_size() // 2))
    with ignoring(NO_SHARD_IS_DEPRECATED):
        return FullyShardedDataParallel(
            Blocks().to(device),
            sharding_strategy=ShardingStrategy[way],
            device_id=torch.device(device) if device == "cpu" else torch.cuda.current_device(),
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            use_orig_params=True,
            **options,
        )


def shard2(way, device="cpu", mesh=None, **options):
    """A model in FSDP version 2."""
    world = dist.get_world_size()
    if way == "hybrid":
        mesh = init_device_mesh(device, (2, world // 2), mesh_dim_names=("replicas", "shards"))
    mesh = mesh or init_device_mesh(device, (world,))
    model = Blocks().to(device)
    for module in (model.first, model.second, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=2 if way == "partly" else way != "grad_op", **options)
    return model


def shard(way, device="cpu", **options):
    return (shard1 if way.isupper() or way.startswith("_") else shard2)(way, device, **options)


def reduced(model, rank, step=0, make=full_rank_gradients):
    """Whole gradients after a backward with the given ones on each rank, float64, by name."""
    device = next(model.parameters()).device
    gradients = {name: g.to(device) for name, g in make(rank, step, NAMES).items()}
    model.zero_grad()
    model(gradients).backward()
    return whole_gradients(model)


def whole_gradients(model):
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            found = {name: p.grad.double().cpu() for name, p in model.named_parameters()}
        return {name.replace("_fsdp_wrapped_module.", ""): g for name, g in found.items()}
    return {name: p.grad.full_tensor().double().cpu() for name, p in model.named_parameters()}


class AllRanks(ShardedSource):
    """Shares of no model in particular."""

    def check(self, model):
        pass

    def connect(self, model, runtime):
        pass


def runtime(hook):
    """What runs a hook for all ranks."""
    return Runtime(hook, AllRanks(dist.group.WORLD))


@contextlib.contextmanager
def leaving_no_groups():
    """Destroy the process groups of device meshes."""
    yield
    dist.barrier()
    dist.destroy_process_group()
    # PyTorch looks meshes up by what is in them, and would give another test in this process the groups of this one.
    debug._clear_python_sharding_prop_cache()
    debug._clear_fast_path_sharding_prop_cache()


def of_each(world, make=full_rank_gradients):
    """Mean of gradients over ranks, and of their magnitudes."""
    ranks = [make(rank, 0, NAMES) for rank in range(world)]
    magnitude = {name: sum(g[name].double().abs() for g in ranks) / world for name in NAMES}
    return mean_gradients(make, world, 0, NAMES), magnitude


def errors(gradients, world):
    """Largest error of an element in units of the mean magnitude, and of a tensor in units of the largest one."""
    mean, magnitude = of_each(world)
    relative = max(((gradients[name] - mean[name]).abs() / magnitude[name]).max().item() for name in NAMES)
    largest = max(g.max() for g in magnitude.values())
    absolute = max((gradients[name] - mean[name]).abs().max() for name in NAMES) / largest
    return relative, absolute.item()


def measured(rank, world, ways, device="cpu"):
    """Errors and metrics of every hook for every way to shard, one dictionary for each rank."""
    results = {}
    with leaving_no_groups():
        for way in ways:
            results[way, "none"] = {"errors": errors(reduced(shard(way, device), rank), world)}
            for label, hook in HOOKS.items():
                model = shard(way, device)
                attachment = lc.attach(model, hook)
                found = errors(reduced(model, rank), world)
                results[way, label] = {"errors": found, "metrics": attachment.metrics()}
                attachment.close()
    return results


def mixed(dtype):
    return MixedPrecision(reduce_dtype=dtype)
