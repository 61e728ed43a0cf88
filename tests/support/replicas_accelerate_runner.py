"""Run by `test_fsdp_accelerate.py` in each of four processes: a hook between two replicas; prints one line of JSON.

    python replicas_accelerate_runner.py FOLDER

Accelerate is told that it uses FSDP: see fsdp_accelerate_runner.py.
"""

import json
import sys
import warnings

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, gather_object
from torch import nn

import lightning_commhooks as lc
from accelerate_integration import use_comm_hook

HOOK = lc.PowerSGD(start_powerSGD_iter=1, matrix_approximation_rank=2, min_compression_rate=0.5)


def made():
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=10, cpu_ram_efficient_loading=False
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    accelerator.state.fsdp_plugin = plugin
    accelerator.state.parallelism_config = sizes = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    accelerator.state.device_mesh = sizes.build_device_mesh("cpu")
    for state in (PartialState._shared_state, AcceleratorState._shared_state):
        state.update(distributed_type=DistributedType.FSDP, device=torch.device("cpu"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return accelerator, model, optimizer


def train(accelerator, model, optimizer, steps):
    for step in steps:
        generator = torch.Generator().manual_seed(10 * step + accelerator.process_index)
        accelerator.backward(model(torch.randn(4, 8, generator=generator)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return [p.full_tensor().detach().clone() for p in model.parameters()]


def begin_again(accelerator, handle):
    handle.attachments[0].close()
    accelerator.free_memory()
    AcceleratorState._reset_state()
    return made()


def local(folder):
    """Replicas that step alone: whether a resumed run is the same, and a barrier shows the average on all of them."""
    hook = lc.DiLoCo(period=2, post_local_gradient_allreduce=False)
    options = {"exact_state": True, "resync": True}
    accelerator, *model = made()
    handle = use_comm_hook(accelerator, hook, **options)
    train(accelerator, *model, range(3))
    accelerator.save_state(folder)
    expected = train(accelerator, *model, range(3, 6))
    averagings = handle.attachments[0].metrics()["averagings"]
    accelerator, *model = begin_again(accelerator, handle)
    handle = use_comm_hook(accelerator, hook, **options)
    accelerator.load_state(folder)
    resumed = train(accelerator, *model, range(3, 6))
    same = all(torch.equal(a, b) for a, b in zip(resumed, expected, strict=True))
    own = train(accelerator, *model, range(6, 7))
    differ = len({tuple(one) for one in gather_object([own[1].tolist()])})
    accelerator.wait_for_everyone()
    shown = [p.full_tensor().detach() for p in model[0].parameters()]
    alike = len({tuple(one) for one in gather_object([shown[1].tolist()])})
    begin_again(accelerator, handle)
    return {"same": same, "averagings": averagings, "differ": differ, "alike": alike}


def main():
    accelerator, *model = made()
    handle = use_comm_hook(accelerator, HOOK, shard_hook="bf16", exact_state=True)
    train(accelerator, *model, range(3))
    accelerator.save_state(sys.argv[1])
    expected = train(accelerator, *model, range(3, 6))
    metrics = handle.attachments[0].metrics()
    accelerator, *model = begin_again(accelerator, handle)
    handle = use_comm_hook(accelerator, HOOK, shard_hook="bf16", exact_state=True)
    accelerator.load_state(sys.argv[1])
    resumed = train(accelerator, *model, range(3, 6))
    same = all(torch.equal(a, b) for a, b in zip(resumed, expected, strict=True))
    begin_again(accelerator, handle)
    of_local = local(sys.argv[1] + "/local")
    if accelerator.is_main_process:
        print(json.dumps({"same": same, "metrics": metrics, "local": of_local}))
    accelerator.wait_for_everyone()
    accelerator.end_training()


warnings.simplefilter("ignore")
main()
