"""FSDP strategies with Lightning's real `Trainer` on CPU; started by test_fsdp_lightning.py.

    python fsdp_lightning_runner.py PACKAGE OUT NUM_DEVICES WAY...

A way is a sharding strategy of FSDP version 1, or `FSDP2`. Every fit writes `OUT/<label>.<rank>.json`.
"""

import json
import sys
import warnings

import lightning_runner
import torch
import torch.distributed as dist
from lightning_runner import OUT, CompressedDDP, pl
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import lightning_commhooks as lc

NUM_DEVICES = int(sys.argv[3])
SUFFIX = "" if sys.argv[1] == "lightning.pytorch" else "PL"
CompressedFSDP = getattr(lc, f"CompressedFSDPStrategy{SUFFIX}")
CompressedModelParallel = getattr(lc, f"CompressedModelParallelStrategy{SUFFIX}")
HOOKS = {
    "allreduce": "reduce_scatter",
    "bf16": "bf16",
    "int8": lc.Int8(min_bytes=0, block_size=64, use_error_feedback=False, compress_1d=True),
}
# What is trained where, if not with both of the others.
LABELS = {"FULL_SHARD": ["bf16"], "HYBRID_SHARD": ["allreduce", "bf16"]}


class Classifier(lightning_runner.Classifier):
    def configure_model(self):
        if isinstance(self.trainer.strategy, CompressedModelParallel) and not self.is_sharded:
            replicas = "replicas" in self.device_mesh.mesh_dim_names
            mesh = self.device_mesh["replicas", "data_parallel"] if replicas else self.device_mesh["data_parallel"]
            for layer in (*self.net[::2], self.net):
                fully_shard(layer, mesh=mesh)

    @property
    def is_sharded(self):
        return any(hasattr(p, "full_tensor") for p in self.parameters())


def data():
    return lightning_runner.data(4, batch_size=8)


def make_strategy(way, hook, **options):
    if way == "FSDP2":
        return CompressedModelParallel(hook=hook, data_parallel_size=NUM_DEVICES, tensor_parallel_size=1, **options)
    mesh = {"device_mesh": (2, NUM_DEVICES // 2)} if "HYBRID" in way else {}
    options = {"auto_wrap_policy": {nn.Linear}, "state_dict_type": "sharded", **mesh}
    return CompressedFSDP(hook=hook, sharding_strategy=way, **options)


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


class Look(pl.Callback):
    """Keeps the weights at the end, and the losses of validation; saves a checkpoint after some epochs."""

    def __init__(self, saves):
        self.saves, self.losses, self.params = saves, [], None

    def on_validation_end(self, trainer, module):
        self.losses.append(float(trainer.callback_metrics["loss"]))

    def on_train_epoch_end(self, trainer, module):
        if trainer.current_epoch in self.saves:
            trainer.save_checkpoint(OUT / self.saves[trainer.current_epoch])

    def on_train_end(self, trainer, module):
        self.params = whole_parameters(trainer.strategy.model)


def fit(label, strategy, ckpt_path=None, saves=(), more=lambda trainer: {}, **options):
    """Train, and write the weights and the losses; `saves` are names of checkpoints by epoch."""
    pl.seed_everything(1)
    module, look = Classifier(), Look(dict(saves))
    options = {"enable_checkpointing": False, "num_sanity_val_steps": 0, **options}
    trainer = make_trainer(strategy, callbacks=[look], **options)
    trainer.fit(module, data(), data(), ckpt_path=ckpt_path)
    write(label, trainer, params=look.params, losses=look.losses, **more(trainer))
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
    sizes = {"data_parallel_size": NUM_DEVICES, "tensor_parallel_size": 1, "replicas": 2}

    def strategy():
        within = {"shard_hook": "bf16", "gather_hook": "int8"}
        return CompressedModelParallel(hook=hook, exact_state=True, **within, **sizes)

    _, trainer = fit("replicas-whole", strategy(), max_epochs=2, saves={0: "replicas.ckpt"})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.save_checkpoint(OUT / "later.ckpt")
    told = [str(one.message) for one in caught if "state of hook" in str(one.message)]
    files = sorted(file.name for file in (OUT / "replicas.ckpt").glob("comm_hook*"))

    def more(trainer):
        return {"files": files, "batches": trainer.num_training_batches, "told": told}

    fit("replicas-resumed", strategy(), OUT / "replicas.ckpt", more=more, max_epochs=2)


def accumulating_with_replicas():
    """A start that is a share of the run, where Lightning averages each batch of a window."""
    hook = lc.PowerSGD(start_powerSGD_iter=0.5, matrix_approximation_rank=2, min_compression_rate=0.5)
    strategy = CompressedModelParallel(hook, replicas=2, data_parallel_size=NUM_DEVICES, tensor_parallel_size=1)

    def more(trainer):
        return {"start": strategy.attachment.hook.start_powerSGD_iter, "optimizer_steps": trainer.global_step}

    fit("accumulating", strategy, max_epochs=4, accumulate_grad_batches=2, more=more)


def local_between_replicas():
    """Replicas that step alone, ranks of DDP in subgroups as large that do, and half of a run and the rest of it."""
    local = {"period": 3, "outer_lr": 0.5}
    sizes = {"data_parallel_size": NUM_DEVICES, "tensor_parallel_size": 1, "replicas": 2}

    def strategy(**options):
        hook = lc.DiLoCo(post_local_gradient_allreduce=False, **local)
        return CompressedModelParallel(hook=hook, **sizes, **options)

    exact = {"resync": True, "exact_state": True}
    fit("local-ddp", CompressedDDP(hook=lc.DiLoCo(subgroup_size=NUM_DEVICES // 2, **local)), max_epochs=4)
    fit("local-replicas", strategy(), max_epochs=4)
    fit("local-whole", strategy(**exact), max_epochs=4, saves={1: "local.ckpt"})
    fit("local-resumed", strategy(**exact), OUT / "local.ckpt", max_epochs=4)


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
        accumulating_with_replicas()
        local_between_replicas()
    for way in sys.argv[4:]:
        for label in LABELS.get(way, ("bf16", "int8")):
            fit(f"{way}-{label}", make_strategy(way, HOOKS[label]))
        if way in ("SHARD_GRAD_OP", "FSDP2"):
            checkpoint(way)
        if way == "FSDP2":
            fit("gathered", make_strategy(way, "bf16", gather_hook="int4", gather_differences=True), max_epochs=2)
    if "SHARD_GRAD_OP" in sys.argv:
        refuse_full_checkpoint()
    if sys.argv[1] == "lightning.pytorch":
        fit("string", "fsdp_bf16")
    dist.barrier()


main()
