"""Run by `test_fsdp_accelerate.py` in each of two or four processes: `use_comm_hook(accelerator, ...)`.

    python fsdp_accelerate_runner.py FOLDER

Prints one line of JSON. On CPU Accelerate 1.15 wraps models in DDP even if it is given an FSDP plugin. Here it is told
that it does use FSDP; everything after that is its own. Four processes are two replicas of two shards.
"""

import json
import os
import sys
import warnings

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, gather_object
from torch import nn

import lightning_commhooks as lc
from accelerate_integration import use_comm_hook

VERSIONS = (1, 2)
POWERSGD = lc.PowerSGD(start_powerSGD_iter=1, matrix_approximation_rank=2, min_compression_rate=0.5)


def with_fsdp(version, num_replicas=1):
    plugin = FullyShardedDataParallelPlugin(
        **({"fsdp_version": version} if version == 2 else {"sharding_strategy": "FULL_SHARD"}),
        auto_wrap_policy="size_based_wrap",
        min_num_params=10,
        cpu_ram_efficient_loading=False,
        use_orig_params=None if version == 2 else True,
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    accelerator.state.fsdp_plugin = plugin
    if num_replicas > 1:
        from accelerate.parallelism_config import ParallelismConfig

        sizes = ParallelismConfig(dp_replicate_size=num_replicas, dp_shard_size=2)
        accelerator.state.parallelism_config, accelerator.state.device_mesh = sizes, sizes.build_device_mesh("cpu")
    pretend(DistributedType.FSDP, torch.device("cpu"))  # FSDP 1 does not take "cpu:0" for it
    return accelerator


def pretend(kind, device):
    """Accelerate copies one state to the other now and then."""
    for state in (PartialState._shared_state, AcceleratorState._shared_state):
        state.update(distributed_type=kind, device=device)


def prepared(accelerator):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4))
    return accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def train(accelerator, model, optimizer, steps=range(3)):
    for step in steps:
        generator = torch.Generator().manual_seed(10 * step + accelerator.process_index)
        accelerator.backward(model(torch.randn(4, 8, generator=generator)).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def end(accelerator, handle):
    for attachment in handle.attachments if handle else ():
        attachment.close()
    accelerator.free_memory()
    AcceleratorState._reset_state()


def whole(accelerator, model):
    if hasattr(model, "set_custom_reduce_scatter"):
        return accelerator.get_state_dict(model)
    from torch.distributed.fsdp import FullyShardedDataParallel

    with FullyShardedDataParallel.summon_full_params(model):
        return {name: p.detach().clone() for name, p in model.named_parameters()}


def refused(accelerator, hook="bf16", **options):
    try:
        use_comm_hook(accelerator, hook, **options)
    except ValueError as error:
        return str(error)


def of_version(version):
    results = {}
    weights = {}
    for hook in (None, "bf16", lc.Int8(min_bytes=0, block_size=64, use_error_feedback=False, compress_1d=True)):
        accelerator = with_fsdp(version)
        model, optimizer = prepared(accelerator)
        handle = hook and use_comm_hook(accelerator, hook)
        train(accelerator, model, optimizer)
        state = whole(accelerator, model)
        weights[hook and handle.hook.name] = torch.cat([p.float().reshape(-1) for p in state.values()]) if state else 0
        if handle is not None:
            (attachment,) = handle.attachments
            results[attachment.name] = attachment.metrics()
            results["twice"] = refused(accelerator, "fp16")
        end(accelerator, handle)
    if accelerator.is_main_process:
        for name in ("bf16", "int8"):
            results[name]["distance"] = ((weights[name] - weights[None]).norm() / weights[None].norm()).item()
    return results


def of_versions():
    results = {f"version{version}": of_version(version) for version in VERSIONS}
    early = with_fsdp(VERSIONS[-1])
    results["refusals"] = [refused(early), refused(early, resync=True), refused(early, gather_differences=True)]
    AcceleratorState._reset_state()
    pretend(DistributedType.MULTI_CPU, torch.device("cpu"))
    AcceleratorState._reset_state()
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin())
    model = accelerator.prepare(nn.Linear(2, 2))
    results["on_cpu"] = [accelerator.distributed_type.value, type(model).__name__]
    results["in_ddp"] = refused(accelerator)
    everywhere = gather_object([results[f"version{VERSIONS[-1]}"]["bf16"]["bytes_sent"]])
    assert len(set(everywhere)) == 1, everywhere
    return results


def resumed(folder, hook, **options):
    """Whether a run that resumes from its third step is the same as one that goes on; and its metrics and models."""
    weights = []
    for is_resumed in (False, True):
        accelerator = with_fsdp(2, num_replicas=2)
        model, optimizer = prepared(accelerator)
        handle = use_comm_hook(accelerator, hook, exact_state=True, **options)
        if is_resumed:
            accelerator.load_state(folder)
        else:
            train(accelerator, model, optimizer)
            accelerator.save_state(folder)
        train(accelerator, model, optimizer, range(3, 6))
        weights.append([p.full_tensor().detach().clone() for p in model.parameters()])
        if not is_resumed:
            metrics = handle.attachments[0].metrics()
            end(accelerator, handle)
    train(accelerator, model, optimizer, range(6, 7))
    result = {"same": all(map(torch.equal, *weights)), "metrics": metrics, "differ": num_models(model)}
    accelerator.wait_for_everyone()
    result["shown"] = num_models(model)
    end(accelerator, handle)
    return result


def num_models(model):
    return len({tuple(one) for one in gather_object([[*model.parameters()][1].full_tensor().tolist()])})


def later(folder):
    """Models that are prepared one after another, and one that takes the place of them."""
    accelerator = with_fsdp(2, num_replicas=2)
    model, optimizer = prepared(accelerator)
    first = use_comm_hook(accelerator, POWERSGD)
    other = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    other, its_optimizer = accelerator.prepare(other, torch.optim.SGD(other.parameters(), lr=0.1))
    both = use_comm_hook(accelerator, POWERSGD)
    result = {
        "attachments": [len(both.attachments), both.attachments.index(first.attachments[0])],
        "resync": refused(accelerator, POWERSGD, resync=True),
        "another": refused(accelerator, "int8"),
    }
    train(accelerator, model, optimizer)
    train(accelerator, other, its_optimizer)
    accelerator.save_state(f"{folder}/both")
    accelerator.load_state(f"{folder}/both")
    accelerator.free_memory()
    next_model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    next_model, optimizer = accelerator.prepare(next_model, torch.optim.SGD(next_model.parameters(), lr=0.1))
    trainer = {"__name__": "transformers.trainer"}
    exec("def call(function, *args): return function(*args)", trainer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        handle = trainer["call"](use_comm_hook, accelerator, POWERSGD)
    result["warnings"] = [str(one.message) for one in caught if "Trainer" in str(one.message)]
    train(accelerator, next_model, optimizer)
    accelerator.save_state(f"{folder}/next")
    accelerator.load_state(f"{folder}/next")
    result["steps"] = handle.attachments[0].num_steps
    for attachment in both.attachments:
        attachment.close()
    end(accelerator, handle)
    return result


def of_replicas(folder):
    alone = lc.DiLoCo(period=2, post_local_gradient_allreduce=False)
    return {
        "powersgd": resumed(f"{folder}/powersgd", POWERSGD, shard_hook="bf16", gather_hook="int8"),
        "local": resumed(f"{folder}/local", alone, resync=True),
        "later": later(folder),
    }


def main():
    warnings.simplefilter("ignore")
    results = of_versions() if os.environ["WORLD_SIZE"] == "2" else of_replicas(sys.argv[1])
    if PartialState().is_main_process:
        print(json.dumps(results), flush=True)
    PartialState().wait_for_everyone()
    PartialState().destroy_process_group()


if __name__ == "__main__":
    main()
