"""Run by `test_gpu_frameworks.py` in each of two processes, each alone on its node: frameworks train with a hook.

    python gpu_frameworks_runner.py DEVICE FRAMEWORK FOLDER

Prints a line of JSON: the backend, number of ranks, losses, the sum of weights on each rank, metrics.
"""

import json
import os
import sys
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_commhooks as lc
from lightning_commhooks.testing.processes import take_gpu

DEVICE, FRAMEWORK, FOLDER = sys.argv[1:]
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
HOOK = lc.Int8(min_bytes=0, block_size=64)
STEPS = 12


def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8 * WORLD * STEPS, 16, generator=generator)
    return TensorDataset(x, x[:, :4].sin())


def network():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))


def loss_of(model, batch):
    x, y = batch
    return (model(x) - y).square().mean()


def of_lightning():
    import lightning.pytorch as pl

    losses = []

    class Regression(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = network()

        def training_step(self, batch, batch_idx):
            loss = loss_of(self.net, batch)
            losses.append(loss.detach())
            return loss

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=0.01)

    strategy = lc.CompressedDDPStrategy(HOOK)
    trainer = pl.Trainer(
        accelerator={"cuda": "gpu"}.get(DEVICE, DEVICE),
        devices=1,
        num_nodes=WORLD,
        strategy=strategy,
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=FOLDER,
    )
    model = Regression()
    found = {}

    class Look(pl.Callback):
        def on_train_end(self, trainer, pl_module):
            found.update(say(pl_module, losses, trainer.strategy.attachment.metrics()))

    trainer.callbacks.append(Look())
    trainer.fit(model, DataLoader(data(), batch_size=8))
    return found


def of_accelerate():
    from accelerate import Accelerator

    from accelerate_integration import CommHookKwargs

    handler = CommHookKwargs(hook=HOOK)
    accelerator = Accelerator(cpu=DEVICE == "cpu", kwargs_handlers=[handler], mixed_precision="no")
    model = network()
    loader = DataLoader(data(), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=0.01), loader)
    losses = []
    for batch in loader:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        accelerator.backward(loss)
        optimizer.step()
        losses.append(loss.detach())
    found = say(model, losses, handler.attachments[0].metrics())
    handler.attachments[0].close()
    accelerator.end_training()
    return found


def of_transformers():
    from hf_runner import CONFIG, Counting
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    from accelerate_integration import use_comm_hook

    torch.manual_seed(5)
    model = GPT2LMHeadModel(GPT2Config(**CONFIG, bos_token_id=0, eos_token_id=0))
    arguments = TrainingArguments(
        output_dir=FOLDER,
        max_steps=STEPS,
        per_device_train_batch_size=4,
        learning_rate=2e-2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=DEVICE == "cpu",
        dataloader_pin_memory=False,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Counting(0, 200))
    handler = use_comm_hook(trainer, HOOK)
    found = {}

    from transformers import TrainerCallback

    class Look(TrainerCallback):
        def on_train_end(self, args, state, control, model=None, **_):
            losses = [torch.tensor(row["loss"]) for row in state.log_history if "loss" in row]
            found.update(say(model, losses, handler.attachments[0].metrics()))

    trainer.add_callback(Look())
    trainer.train()
    return found


def say(model, losses, metrics):
    """What is to be printed; collective."""
    parameters = list(model.parameters())
    total = sum(p.detach().double().sum() for p in parameters).reshape(1)
    sums = [torch.zeros_like(total) for _ in range(WORLD)]
    dist.all_gather(sums, total)
    return {
        "backend": str(dist.get_backend()),
        "device": parameters[0].device.type,
        "world": dist.get_world_size(),
        "losses": [float(loss) for loss in losses],
        "sums": [one.item() for one in sums],
        "ratio": metrics["compression_ratio"],
        "steps": metrics["steps"],
    }


if DEVICE == "cuda":
    take_gpu(RANK, WORLD)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    print(json.dumps(globals()[f"of_{FRAMEWORK}"]()), flush=True)
if dist.is_initialized():
    dist.destroy_process_group()
