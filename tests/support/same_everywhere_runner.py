"""The same training in one of several frameworks, in each of two processes, which may be alone on their nodes.

    python same_everywhere_runner.py DEVICE FRAMEWORK FOLDER

Parameters by hook go to a file. `transformers` has a model of its own.
"""

import os
import sys
import warnings

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import lightning_commhooks as lc
from lightning_commhooks.testing.processes import take_gpu

# Now, since Lightning deletes a variable at the end of a `fit`.
WORLD, LOCAL = (int(os.environ.get(name, 1)) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
STEPS = 30
ALONE = {"start_localSGD_iter": 10, "post_local_gradient_allreduce": False}
POWERSGD = lc.PowerSGD(start_powerSGD_iter=10, matrix_approximation_rank=2)
HOOKS = {
    "allreduce": lc.AllReduce(),
    "powersgd": POWERSGD,
    "schedule": lc.Schedule({0: "bf16", 20: POWERSGD}),
    "diloco": lc.DiLoCo(period=8, fragments=2, **ALONE),
}


class Model(torch.nn.Module):
    """PowerSGD begins with random numbers that depend on parameters' names: the same everywhere."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(32, 48), torch.nn.Tanh(), torch.nn.Linear(48, 32))

    def forward(self, x):
        return self.net(x)


def make_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)


def loss(model, x):
    return (model(x) - x.sin() * 2).square().mean()


class Batches(Dataset):
    """The batches of one rank."""

    def __init__(self, rank):
        generator = torch.Generator().manual_seed(rank)
        self.batches = torch.randn(STEPS, 8, 32, generator=generator)

    def __len__(self):
        return STEPS

    def __getitem__(self, index):
        return self.batches[index]


def places(device):
    """What Fabric and a `Trainer` are told."""
    return {"accelerator": {"cuda": "gpu"}.get(device, device), "devices": LOCAL, "num_nodes": WORLD // LOCAL}


def plain(hook, device):
    module = Model().to(device)
    model, optimizer = torch.nn.parallel.DistributedDataParallel(module), make_optimizer(module)
    attachment = lc.attach(model, hook, optimizers=[optimizer])
    for x in Batches(dist.get_rank()):
        optimizer.zero_grad()
        loss(model, x.to(device)).backward()
        optimizer.step()
    attachment.average_weights()
    attachment.close()
    return module


def accelerate(hook, device):
    from accelerate import Accelerator

    from accelerate_integration import CommHookKwargs

    handler = CommHookKwargs(hook=hook)
    accelerator = Accelerator(cpu=device == "cpu", kwargs_handlers=[handler])
    module = Model()
    model, optimizer = accelerator.prepare(module, make_optimizer(module))
    for x in Batches(accelerator.process_index):
        optimizer.zero_grad()
        accelerator.backward(loss(model, x.to(device)))
        optimizer.step()
    accelerator.wait_for_everyone()
    handler.attachments[0].close()
    return module


def fabric(hook, device):
    from lightning.fabric import Fabric

    strategy = lc.CompressedDDPFabricStrategy(hook=hook)
    fabric = Fabric(**places(device), strategy=strategy)
    fabric.launch()
    module = Model()
    model, optimizer = fabric.setup(module, make_optimizer(module))
    for x in Batches(fabric.global_rank):
        optimizer.zero_grad()
        fabric.backward(loss(model, x.to(device)))
        optimizer.step()
    fabric.barrier()
    strategy.attachments[0].close()
    return module


def lightning(hook, device):
    import lightning as L

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Model().net

        def training_step(self, x):
            return loss(self.net, x)

        def configure_optimizers(self):
            return make_optimizer(self.net)

    trainer = L.Trainer(
        **places(device),
        strategy=lc.CompressedDDPStrategy(hook=hook),
        max_epochs=1,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()
    trainer.fit(module, DataLoader(Batches(trainer.global_rank), batch_size=None))
    return module


def transformers(hook, device):
    from hf_runner import CONFIG, Counting
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    from accelerate_integration import use_comm_hook

    torch.manual_seed(5)
    model = GPT2LMHeadModel(GPT2Config(**CONFIG, bos_token_id=0, eos_token_id=0))
    quiet = {"report_to": [], "save_strategy": "no", "disable_tqdm": True}
    options = {"max_steps": STEPS, "per_device_train_batch_size": 4, "learning_rate": 2e-2, "logging_steps": 1}
    arguments = TrainingArguments(sys.argv[3], use_cpu=device == "cpu", dataloader_pin_memory=False, **quiet, **options)
    trainer = Trainer(model=model, args=arguments, train_dataset=Counting(0, 200))
    use_comm_hook(trainer, hook)
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert losses[-1] < losses[0]
    return model


def main():
    device, framework, folder = sys.argv[1:]
    rank = int(os.environ["RANK"])
    warnings.simplefilter("ignore")
    if device == "cuda":
        take_gpu(rank, WORLD)
    if framework == "plain":
        dist.init_process_group("gloo" if device == "cpu" else "nccl")
    found = {}
    for name, hook in HOOKS.items() if framework != "transformers" else [("powersgd", POWERSGD)]:
        found[name] = [p.detach().cpu().clone() for p in globals()[framework](hook, device).parameters()]
    found["backend"] = str(dist.get_backend())
    torch.save(found, f"{folder}/{framework}-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
