"""Run by `test_topk_plugin.py` on two ranks that have examples/topk_plugin installed; each writes `FOLDER/<rank>.json`.

python topk_plugin_runner.py FOLDER
"""

import json
import sys
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import yaml
from torch.nn.parallel import DistributedDataParallel

import lightning_commhooks as lc


def strategies():
    """The hooks of a strategy's name, and of configurations with a name and with options."""
    from lightning.pytorch import Trainer

    trainer = Trainer(strategy="ddp_topk", accelerator="cpu", devices=2, logger=False, enable_checkpointing=False)
    options = {"class_path": "topk_plugin.TopK", "init_args": {"ratio": 0.5}}
    return [repr(found.strategy.hook) for found in (trainer, *map(configured, ("topk", options)))]


def configured(hook):
    from lightning.pytorch.cli import LightningCLI
    from lightning.pytorch.demos.boring_classes import BoringModel

    strategy = {"class_path": "lightning_commhooks.CompressedDDPStrategy", "init_args": {"hook": hook}}
    config = {"trainer": {"strategy": strategy, "logger": False, "accelerator": "cpu", "devices": 2}}
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file, warnings.catch_warnings():
        # Lightning calls jsonargparse in a way that it deprecates.
        warnings.simplefilter("ignore", DeprecationWarning)
        yaml.safe_dump(config, file)
        file.flush()
        arguments = [f"--config={file.name}"]
        options = {"run": False, "save_config_callback": None, "seed_everything_default": False}
        return LightningCLI(BoringModel, **options, args=arguments).trainer


def trained(steps=100):
    """Losses of a small regression, and what ranks sent."""
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(200, 1))
    attachment = lc.attach(model, "topk")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.002)
    inputs = torch.randn(64, 200)[dist.get_rank() :: dist.get_world_size()]
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(inputs).flatten() - inputs[:, 0]).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    attachment.close()
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    for weight in weights:
        dist.broadcast(weight, 0)
    is_same = all(torch.equal(ours, first) for ours, first in zip(model.parameters(), weights, strict=True))
    return {"losses": losses, "is_same": is_same, "sent": attachment.metrics()["bytes_sent"] / steps}


def main():
    sys.argv, (_, folder) = sys.argv[:1], sys.argv
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    found = trained()
    dist.destroy_process_group()
    if rank == 0:
        found |= {"names": lc.available_hooks(), "hooks": strategies()}
    Path(folder, f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
