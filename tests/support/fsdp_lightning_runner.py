"""FSDP strategies with Lightning's real `Trainer` on CPU; started by test_fsdp_lightning.py.

    python fsdp_lightning_runner.py PACKAGE OUT NUM_DEVICES WAY...

A way is a sharding strategy of FSDP version 1, or `FSDP2`. Every fit writes `OUT/<label>.<rank>.json`.
"""

import importlib
import json
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.utils.data import DataLoader, TensorDataset

import lightning_commhooks as lc

pl = importlib.import_module(sys.argv[1])
OUT, NUM_DEVICES = Path(sys.argv[2]), int(sys.argv[3])
SUFFIX = "" if sys.argv[1] == "lightning.pytorch" else "PL"
CompressedFSDP = getattr(lc, f"CompressedFSDPStrategy{SUFFIX}")
CompressedModelParallel = getattr(lc, f"CompressedModelParallelStrategy{SUFFIX}")
HOOKS = {
    "allreduce": "reduce_scatter",
    "bf16": "bf16",
    "int8": lc.Int8(min_bytes=0, block_size=64, use_error_feedback=False, compress_1d=True),
}


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))

    def configure_model(self):
        if isinstance(self.trainer.strategy, CompressedModelParallel) and not self.is_sharded:
            replicas = "replicas" in self.device_mesh.mesh_dim_names
            mesh = self.device_mesh["replicas", "data_parallel"] if replicas else self.device_mesh["data_parallel"]
            for layer in (*self.net[::2], self.net):
                fully_shard(layer, mesh=mesh)

    @property
    def is_sharded(self):
        return any(hasattr(p, "full_tensor") for p in self.parameters())

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("loss", self.training_step(batch, batch_idx), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 16, generator=generator)
    return DataLoader(TensorDataset(x, x[:, :4].argmax(dim=1)), batch_size=8)


def make_strategy(way, hook):
    if way == "FSDP2":
        return CompressedModelParallel(hook=hook, data_parallel_size=NUM_DEVICES, tensor_parallel_size=1)
    mesh = {"device_mesh": (2, NUM_DEVICES // 2)} if "HYBRID" in way else {}
    kind = "full" if way == "NO_SHARD" else "sharded"
    policy = {nn.Linear}
    return CompressedFSDP(hook=hook, sharding_strategy=way, auto_wrap_policy=policy, state_dict_type=kind, **mesh)


def make_trainer(strategy, **options):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return pl.Trainer(
        accelerator="cpu", devices=NUM_DEVICES, strategy=strategy, **quiet, **{"max_epochs": 1, **options}
    )


def whole_parameters(model):
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model):
            return torch.cat([p.detach().view(-1) for p in model.parameters()]).tolist()
    return torch.cat(
        [getattr(p, "full_tensor", lambda p=p: p)().detach().view(-1) for p in model.parameters()]
    ).tolist()


def write(label, trainer, **values):
    attachment = getattr(trainer.strategy, "attachment", None)
    values["strategy"] = type(trainer.strategy).__name__
    values["metrics"] = attachment and attachment.metrics()
    (OUT / f"{label}.{trainer.global_rank}.json").write_text(json.dumps(values))


def fit(label, strategy, **options):
    pl.seed_everything(1)
    module, trainer = Classifier(), make_trainer(strategy, enable_checkpointing=False, **options)
    kept = []

    class Look(pl.Callback):
        def on_train_end(self, trainer, module):
            kept.append(whole_parameters(trainer.strategy.model))

    trainer.callbacks.append(Look())
    trainer.fit(module, data(), data())
    write(label, trainer, params=kept[0], closed=getattr(trainer.strategy, "attachment", None) is None)
    return module, trainer


def checkpoint(way):
    """A checkpoint in the middle, evaluation, a second fit."""
    module, trainer = fit(f"{way}-first", make_strategy(way, "bf16"))
    before = trainer.strategy.attachment
    trainer.validate(module, data(), verbose=False)
    same = trainer.strategy.attachment is before and before.is_closed
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, data(), data())
    trainer.save_checkpoint(OUT / f"{way}.ckpt")
    params = whole_parameters(trainer.strategy.model)
    write(
        f"{way}-second",
        trainer,
        params=params,
        same=same,
        step=trainer.global_step,
        saved=(OUT / f"{way}.ckpt").exists(),
    )


def with_replicas():
    """Half of a run and the rest of it from its checkpoint, and the whole run, with a hook between two replicas."""
    hook = lc.PowerSGD(start_powerSGD_iter=1, matrix_approximation_rank=2, min_compression_rate=0.5)

    def strategy():
        sizes = {"data_parallel_size": NUM_DEVICES, "tensor_parallel_size": 1, "replicas": 2}
        return CompressedModelParallel(hook=hook, shard_hook="bf16", exact_state=True, **sizes)

    class Save(pl.Callback):
        def on_train_epoch_end(self, trainer, module):
            if trainer.current_epoch == 0:
                trainer.save_checkpoint(OUT / "replicas.ckpt")

    _, trainer = fit("replicas-whole", strategy(), max_epochs=2, callbacks=[Save()])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.save_checkpoint(OUT / "later.ckpt")
    told = [str(one.message) for one in caught if "state of hook" in str(one.message)]
    pl.seed_everything(1)
    kept = []

    class Look(pl.Callback):
        def on_train_end(self, trainer, module):
            kept.append(whole_parameters(trainer.strategy.model))

    trainer = make_trainer(strategy(), enable_checkpointing=False, max_epochs=2, callbacks=[Look()])
    trainer.fit(Classifier(), data(), data(), ckpt_path=OUT / "replicas.ckpt")
    files = sorted(file.name for file in (OUT / "replicas.ckpt").glob("comm_hook*"))
    write("replicas-resumed", trainer, params=kept[0], files=files, batches=trainer.num_training_batches, told=told)


def local_between_replicas():
    """Replicas that step alone, ranks of DDP in subgroups as large that do, and half of a run and the rest of it."""
    local = {"period": 3, "outer_lr": 0.5}
    sizes = {"data_parallel_size": NUM_DEVICES, "tensor_parallel_size": 1, "replicas": 2}

    def strategy(**options):
        hook = lc.DiLoCo(post_local_gradient_allreduce=False, **local)
        return CompressedModelParallel(hook=hook, **sizes, **options)

    def run(label, strategy, *callbacks, ckpt_path=None):
        kept, losses = [], []

        class Look(pl.Callback):
            def on_validation_end(self, trainer, module):
                losses.append(float(trainer.callback_metrics["loss"]))

            def on_train_end(self, trainer, module):
                kept.append(whole_parameters(trainer.strategy.model))

        pl.seed_everything(1)
        options = {"max_epochs": 4, "enable_checkpointing": False, "num_sanity_val_steps": 0}
        trainer = make_trainer(strategy, callbacks=[*callbacks, Look()], **options)
        trainer.fit(Classifier(), data(), data(), ckpt_path=ckpt_path)
        write(label, trainer, params=kept[0], losses=losses)

    class Save(pl.Callback):
        def on_train_epoch_end(self, trainer, module):
            if trainer.current_epoch == 1:
                trainer.save_checkpoint(OUT / "local.ckpt")

    ddp = getattr(lc, f"CompressedDDPStrategy{SUFFIX}")
    run("local-ddp", ddp(hook=lc.DiLoCo(subgroup_size=NUM_DEVICES // 2, **local)))
    run("local-replicas", strategy())
    run("local-whole", strategy(resync=True, exact_state=True), Save())
    run("local-resumed", strategy(resync=True, exact_state=True), ckpt_path=OUT / "local.ckpt")


def refuse_full_checkpoint():
    """What the user is told where PyTorch would crash."""
    strategy = CompressedFSDP(hook="bf16", auto_wrap_policy={nn.Linear})
    trainer = make_trainer(strategy, enable_checkpointing=False)
    trainer.fit(Classifier(), data())
    message = ""
    try:
        trainer.save_checkpoint(OUT / "full.ckpt")
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    write("refused", trainer, message=message)


def main():
    warnings.simplefilter("ignore")
    fit("dense", "ddp")
    fit("dense-2", "ddp", max_epochs=2)
    if NUM_DEVICES == 4:
        with_replicas()
        local_between_replicas()
    for way in sys.argv[4:]:
        for label, hook in HOOKS.items():
            if "HYBRID" not in way or label != "int8":
                fit(f"{way}-{label}", make_strategy(way, hook))
        if way in ("SHARD_GRAD_OP", "FSDP2"):
            checkpoint(way)
    if "SHARD_GRAD_OP" in sys.argv:
        refuse_full_checkpoint()
    if sys.argv[1] == "lightning.pytorch":
        fit("string", "fsdp_bf16")
    dist.barrier()


main()
