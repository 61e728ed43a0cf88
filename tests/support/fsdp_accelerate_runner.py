"""Run by `test_fsdp_accelerate.py` in each of two processes: `use_comm_hook(accelerator, ...)`; one line of JSON.

On CPU Accelerate 1.15 wraps models in DDP even if it is given an FSDP plugin. Here it is told that it does use FSDP;
everything after that is its own.
"""

import json

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, gather_object
from torch import nn

import lightning_commhooks as lc
from accelerate_integration import use_comm_hook

VERSIONS = (1, 2)


def with_fsdp(version):
    plugin = FullyShardedDataParallelPlugin(
        **({"fsdp_version": version} if version == 2 else {}),
        auto_wrap_policy="size_based_wrap",
        min_num_params=10,
        cpu_ram_efficient_loading=False,
        use_orig_params=None if version == 2 else True,
        **({} if version == 2 else {"sharding_strategy": "FULL_SHARD"}),
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    accelerator.state.fsdp_plugin = plugin
    pretend(DistributedType.FSDP, torch.device("cpu"))  # FSDP 1 does not take "cpu:0" for it
    return accelerator


def pretend(kind, device):
    """Accelerate copies one state to the other now and then."""
    for state in (PartialState._shared_state, AcceleratorState._shared_state):
        state.update(distributed_type=kind, device=device)


def train(accelerator, hook):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    handle = hook and use_comm_hook(accelerator, hook)
    generator = torch.Generator().manual_seed(accelerator.process_index)
    for _ in range(3):
        accelerator.backward(model(torch.randn(4, 8, generator=generator)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    state = accelerator.get_state_dict(model) if hasattr(model, "set_custom_reduce_scatter") else whole(model)
    return handle, torch.cat([p.float().reshape(-1) for p in state.values()]) if state else None


def whole(model):
    from torch.distributed.fsdp import FullyShardedDataParallel

    with FullyShardedDataParallel.summon_full_params(model):
        return {name: p.detach().clone() for name, p in model.named_parameters()}


def of_version(version):
    results = {}
    weights = {}
    for hook in (None, "bf16", lc.Int8(min_bytes=0, block_size=64, use_error_feedback=False, compress_1d=True)):
        accelerator = with_fsdp(version)
        handle, weights[hook and handle.hook.name] = train(accelerator, hook)
        if handle is not None:
            (attachment,) = handle.attachments
            results[attachment.name] = attachment.metrics()
            try:
                use_comm_hook(accelerator, "fp16")
            except ValueError as error:
                results["twice"] = str(error)
            attachment.close()
        accelerator.free_memory()
        AcceleratorState._reset_state()
    if accelerator.is_main_process:
        for name in ("bf16", "int8"):
            results[name]["distance"] = ((weights[name] - weights[None]).norm() / weights[None].norm()).item()
    return results


def refusals():
    messages = []
    accelerator = with_fsdp(VERSIONS[-1])
    for options in ({}, {"resync": True}):
        try:
            use_comm_hook(accelerator, "bf16", **options)
        except ValueError as error:
            messages.append(str(error))
    AcceleratorState._reset_state()
    return messages


def main():
    results = {f"version{version}": of_version(version) for version in VERSIONS}
    results["refusals"] = refusals()
    pretend(DistributedType.MULTI_CPU, torch.device("cpu"))
    AcceleratorState._reset_state()
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin())
    model = accelerator.prepare(nn.Linear(2, 2))
    results["on_cpu"] = [accelerator.distributed_type.value, type(model).__name__]
    try:
        use_comm_hook(accelerator, "bf16")
    except ValueError as error:
        results["in_ddp"] = str(error)
    everywhere = gather_object([results[f"version{VERSIONS[-1]}"]["bf16"]["bytes_sent"]])
    assert len(set(everywhere)) == 1, everywhere
    if accelerator.is_main_process:
        print(json.dumps(results), flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
