"""Run by `test_accelerate.py` in each of two processes: train with `CommHookKwargs`, print one line of JSON."""

import json
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import DDPCommunicationHookType, gather_object

from accelerate_integration import CommHookKwargs
from lightning_commhooks import PowerSGD

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


def main() -> None:
    results = {}
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
    accelerator.end_training()


if __name__ == "__main__":
    sys.exit(main())
