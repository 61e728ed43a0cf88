"""Run by `test_accelerate.py` in each of two processes: train with `CommHookKwargs`, print one line of JSON."""

import gc
import json
import pickle
import sys
import tempfile
import warnings
import weakref
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import (
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DistributedType,
    broadcast_object_list,
    gather_object,
)
from torch.utils.data import DataLoader

from accelerate_integration import CommHookKwargs, CommHookTracker
from lightning_commhooks import HookError, PostLocalSGD, PowerSGD

HOOKS = {
    "name": "allreduce",
    "alias": "batched_power_sgd",
    "enum": DDPCommunicationHookType.BF16,
    "configured": PowerSGD(start_powerSGD_iter=2),
}


def train(accelerator: Accelerator, model: torch.nn.Module, steps: int) -> torch.nn.Module:
    """Prepare the model, train it on other data on each rank, return what Accelerate made of it."""
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    torch.manual_seed(accelerator.process_index)
    for _ in range(steps):
        optimizer.zero_grad()
        accelerator.backward(model(torch.randn(4, 64)).square().mean())
        optimizer.step()
    return model


def with_scaler() -> list[float]:
    """Sums of the parameters without and with a scaler, which Accelerate itself makes on GPUs only."""
    sums = []
    for scale in (None, 2.0**12):
        torch.manual_seed(0)
        handler = CommHookKwargs(hook=PowerSGD(start_powerSGD_iter=1))
        accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
        accelerator.scaler = scale and torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)
        model = torch.nn.Linear(64, 64)
        model = train(accelerator, model, steps=8)
        sums.append(sum(p.double().abs().sum().item() for p in model.parameters()))
        handler.attachments[0].close()
        accelerator.free_memory()
    return sums


def two_models() -> dict:
    """Each model has a state of its own; clipping, accumulation and uneven batches on the way."""
    handler = CommHookKwargs(hook=PowerSGD(start_powerSGD_iter=1, min_compression_rate=1))
    dataloaders = DataLoaderConfiguration(even_batches=False)
    accelerator = Accelerator(
        cpu=True, kwargs_handlers=[handler], gradient_accumulation_steps=2, dataloader_config=dataloaders
    )
    torch.manual_seed(0)
    models = [torch.nn.Linear(16, 24), torch.nn.Linear(24, 16)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    # 5 batches: rank 0 has one more than rank 1.
    loader = DataLoader(torch.randn(20, 16), batch_size=4)
    *models, first, second, loader = accelerator.prepare(*models, *optimizers, loader)
    num_batches = 0
    # On CPU processes Accelerate warns and does not join.
    accelerator.state.distributed_type = DistributedType.MULTI_GPU
    with accelerator.join_uneven_inputs(models[:1], even_batches=False):
        for x in loader:
            num_batches += 1
            with accelerator.accumulate(models[0]):
                accelerator.backward(models[0](x).square().mean())
                accelerator.clip_grad_norm_(models[0].parameters(), 0.1)
                first.step()
                first.zero_grad()
    accelerator.state.distributed_type = DistributedType.MULTI_CPU
    for x in torch.randn(4, 8, 24):
        accelerator.backward(models[1](x).square().mean())
        second.step()
        second.zero_grad()
    result = {
        "batches": gather_object([num_batches]),
        "steps": [attachment.metrics()["steps"] for attachment in handler.attachments],
        "entries": [list(a.state_dict()["hook"]["state"]["entries"]) for a in handler.attachments],
        "sums": gather_object([sum(p.double().sum().item() for m in models for p in m.parameters())]),
    }
    for attachment in handler.attachments:
        attachment.close()
    accelerator.free_memory()
    return result


def mixed_precision() -> dict:
    """bf16 autocast, with a hook that has memory."""
    torch.manual_seed(0)
    handler = CommHookKwargs(hook=PowerSGD(start_powerSGD_iter=1))
    # Accelerators of one process share what they are made with.
    AcceleratorState._reset_state()
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", kwargs_handlers=[handler])
    model = torch.nn.Sequential(torch.nn.Linear(64, 64))  # Accelerate converts what the model itself returns
    dtypes = []
    handle = model[0].register_forward_hook(lambda module, inputs, output: dtypes.append(str(output.dtype)))
    before = sum(p.double().abs().sum().item() for p in model.parameters())
    prepared = train(accelerator, model, steps=5)
    handle.remove()
    result = {
        "dtypes": sorted(set(dtypes)),
        "comm_hook": prepared._get_ddp_logging_data()["comm_hook"],
        "compressed": handler.attachments[0].metrics()["numel_compressed"],
        "sums": gather_object([sum(p.double().abs().sum().item() for p in model.parameters())]),
        "before": before,
    }
    handler.attachments[0].close()
    accelerator.free_memory()
    AcceleratorState._reset_state()
    return result


def pickled() -> dict:
    """An accelerator with a model, an optimizer and a tracker, and what comes back."""
    handler = CommHookKwargs(hook="int8", accumulation="mean")
    accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
    model = train(accelerator, torch.nn.Linear(64, 64), steps=2)  # the accelerator has the module inside only
    CommHookTracker(accelerator, handler, measure_link=False)
    twin, twin_model = pickle.loads(pickle.dumps((accelerator, model)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        twin.backward(twin_model(torch.randn(4, 64)).square().mean())
    new = twin.ddp_handler
    train(twin, torch.nn.Linear(64, 64), steps=3)
    result = {
        "same": twin.state.__dict__ == accelerator.state.__dict__ and new == handler and new is not handler,
        "warnings": gather_object([[str(warning.message) for warning in caught]]),
        "steps": [attachment.metrics()["steps"] for attachment in (*handler.attachments, *new.attachments)],
    }
    for attachment in (*handler.attachments, *new.attachments):
        attachment.close()
    accelerator.free_memory()
    return result


def freed() -> dict:
    """A second model after `free_memory`, while the first still exists; a checkpoint of another number."""
    handler = CommHookKwargs(hook="int8", strict_state=False)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
    module = torch.nn.Linear(64, 64)
    first = train(accelerator, module, steps=2)
    accelerator.free_memory()
    second = train(accelerator, module, steps=3)
    with tempfile.TemporaryDirectory() as own:
        folder = broadcast_object_list([own])[0]
        accelerator.save_state(folder)
        accelerator.wait_for_everyone()
        accelerator.load_state(folder)
        steps = [handler.attachments[-1].state_dict()["steps"]]
        path = Path(folder, "lightning_commhooks.bin")
        saved = torch.load(path)
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            torch.save({"attachments": 2 * saved["attachments"]}, path)
        accelerator.wait_for_everyone()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            accelerator.load_state(folder)
        accelerator.wait_for_everyone()
        steps.append(handler.attachments[-1].state_dict()["steps"])
        # Prepared again, after another one.
        accelerator.free_memory()
        third = torch.nn.Linear(64, 64)
        third, _, again = accelerator.prepare(third, torch.optim.SGD(third.parameters(), lr=0.1), second)
        accelerator.save_state(folder)
        accelerator.wait_for_everyone()
        both = len(torch.load(path)["attachments"]), again is second
    texts = [text for one in caught if "communication hooks" in (text := str(one.message))]
    del first, second, third, again
    for attachment in handler.attachments:
        attachment.close()
    accelerator.free_memory()
    return {"states": len(saved["attachments"]), "steps": steps, "texts": texts, "both": both}


def collected() -> list[bool]:
    """Whether a model is collected with its accelerator, without `free_memory`."""
    gone = []
    for accumulation in ("framework", "mean"):
        accelerator = Accelerator(cpu=True, kwargs_handlers=[CommHookKwargs(hook="bf16", accumulation=accumulation)])
        model = train(accelerator, torch.nn.Linear(64, 64), steps=2)
        reference = weakref.ref(model)
        del accelerator, model
        gc.collect()
        gone.append(reference() is None)
    return gone


def unwrapped() -> dict:
    """The usual end of a script: the main process unwraps the model under the same name, and saves it."""
    handler = CommHookKwargs(hook=PostLocalSGD(start_localSGD_iter=0, period=4, post_local_gradient_allreduce=False))
    accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
    inner = torch.nn.Linear(64, 64)
    model = train(accelerator, inner, steps=6)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        model = accelerator.unwrap_model(model)
    saved = sum(p.double().sum().item() for p in inner.parameters())
    with tempfile.TemporaryDirectory() as own:
        folder = broadcast_object_list([own])[0]
        accelerator.save_state(folder)
        accelerator.wait_for_everyone()
        num_states = len(torch.load(Path(folder, "lightning_commhooks.bin"))["attachments"])
        accelerator.wait_for_everyone()
    accelerator.end_training()
    accelerator.free_memory()
    is_closed = handler.attachments[0].is_closed
    del model
    return {
        "states": num_states,
        "sums": [saved, sum(p.double().sum().item() for p in inner.parameters())],
        "closed": [is_closed, handler.attachments[0].is_closed],
    }


def loaded_on_one_rank() -> str:
    """The error of a rank that loads alone, or goes on to train meanwhile. It ends the process group."""
    handler = CommHookKwargs(hook="int8")
    accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
    model = train(accelerator, torch.nn.Linear(64, 64), steps=2)
    with tempfile.TemporaryDirectory() as own:
        folder = broadcast_object_list([own])[0]
        accelerator.save_state(folder)
        accelerator.wait_for_everyone()
        try:
            if accelerator.is_main_process:
                accelerator.load_state(folder)
            else:
                accelerator.backward(model(torch.randn(4, 64)).square().mean())
        except HookError as error:
            return str(error)
    return "no error"


def main() -> None:
    results = {"two_models": two_models(), "mixed_precision": mixed_precision(), "pickled": pickled()}
    results["freed"], results["collected"] = freed(), collected()
    for key, hook in HOOKS.items():
        torch.manual_seed(0)
        handler = CommHookKwargs(hook=hook, bucket_cap_mb=1, find_unused_parameters=True)
        accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
        model = train(accelerator, model, steps=5)
        total = sum(p.double().sum().item() for p in model.parameters())
        results[key] = {
            "comm_hook": model._get_ddp_logging_data()["comm_hook"],
            "find_unused_parameters": model.find_unused_parameters,
            "steps": handler.attachments[0].metrics()["steps"],
            "sums": gather_object([total]),
        }
        handler.attachments[0].close()
        accelerator.free_memory()
    results["scaled"] = with_scaler()
    if accelerator.is_main_process:
        print(json.dumps(results))
    print(json.dumps(loaded_on_one_rank()), flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    if sys.argv[1:] == ["unwrapped"]:
        print(json.dumps(unwrapped()), flush=True)
    else:
        main()
