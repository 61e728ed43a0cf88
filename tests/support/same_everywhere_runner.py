"""Run by `test_same_everywhere.py` in each of two processes: the same training in one of four frameworks."""

import sys
import warnings

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import lightning_commhooks as lc

STEPS = 30
ALONE = {"start_localSGD_iter": 10, "post_local_gradient_allreduce": False}
POWERSGD = lc.PowerSGD(start_powerSGD_iter=10, matrix_approximation_rank=2)
HOOKS = {
    "allreduce": lc.AllReduce(),
    "powersgd": POWERSGD,
    "int4": lc.Int4(min_bytes=0),
    "schedule": lc.Schedule({0: "bf16", 20: POWERSGD}),
    "post_localsgd": lc.PostLocalSGD(period=8, **ALONE),
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


def plain(hook):
    module = Model()
    model, optimizer = torch.nn.parallel.DistributedDataParallel(module), make_optimizer(module)
    attachment = lc.attach(model, hook, optimizers=[optimizer])
    for x in Batches(dist.get_rank()):
        optimizer.zero_grad()
        loss(model, x).backward()
        optimizer.step()
    attachment.average_weights()
    attachment.close()
    return module


def accelerate(hook):
    from accelerate import Accelerator

    from accelerate_integration import CommHookKwargs

    handler = CommHookKwargs(hook=hook)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
    module = Model()
    model, optimizer = accelerator.prepare(module, make_optimizer(module))
    for x in Batches(accelerator.process_index):
        optimizer.zero_grad()
        accelerator.backward(loss(model, x))
        optimizer.step()
    accelerator.wait_for_everyone()
    handler.attachments[0].close()
    return module


def fabric(hook):
    from lightning.fabric import Fabric

    strategy = lc.CompressedDDPFabricStrategy(hook=hook)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    module = Model()
    model, optimizer = fabric.setup(module, make_optimizer(module))
    for x in Batches(fabric.global_rank):
        optimizer.zero_grad()
        fabric.backward(loss(model, x))
        optimizer.step()
    fabric.barrier()
    strategy.attachments[0].close()
    return module


def lightning(hook):
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
        accelerator="cpu",
        devices=2,
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


def main():
    train = {"plain": plain, "accelerate": accelerate, "fabric": fabric, "lightning": lightning}[sys.argv[1]]
    warnings.simplefilter("ignore")
    if train is plain:
        dist.init_process_group("gloo")
    results = {name: [p.detach().clone() for p in train(hook).parameters()] for name, hook in HOOKS.items()}
    torch.save(results, f"{sys.argv[2]}/{sys.argv[1]}-{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
