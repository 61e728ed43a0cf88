"""Runs of Ray Train on two workers, on a Ray of its own; started by test_ray.py.

    python ray_runner.py OUT

Every training writes `OUT/<label>.<rank>.json`. Functions for workers are of `__main__`, so that they travel with it.
"""

import contextlib
import copy
import io
import json
import os
import re
import runpy
import shutil
import signal
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from unittest import mock

# Seconds between Ray's looks at what workers have to report; they wait for it.
os.environ["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] = "0.2"

import lightning.pytorch as pl
import ray
import ray.train
import ray.train.torch
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from ray.train.lightning import RayLightningEnvironment, RayTrainReportCallback, prepare_trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_commhooks as lc
from accelerate_integration import CommHookKwargs

POWERSGD = lc.PowerSGD(matrix_approximation_rank=2, start_powerSGD_iter=2)
QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
ROOT = Path(__file__).parents[2]
EPOCHS, SAVED, DIES_IN = 5, 2, 3  # of 4 steps each
STEPS, SAVED_STEP = 12, 6


def write(out, label, **values):
    rank = ray.train.get_context().get_world_rank()
    (Path(out) / f"{label}.{rank}.json").write_text(json.dumps({"pid": os.getpid(), **values}))


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))


def numbers(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()


def of_ddp(model):
    return str(model._get_ddp_logging_data().get("comm_hook", ""))


def chosen(metrics):
    return {"metrics": {key: metrics[key] for key in ("steps", "bytes_sent", "bytes_dense")}}


def examples():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 16, generator=generator)
    return TensorDataset(x, x[:, :4].argmax(dim=1))


class Classifier(pl.LightningModule):
    """Dies in the middle of an epoch, by SIGKILL on rank 1, if there is no file that says that it has done so."""

    def __init__(self, died=None):
        super().__init__()
        self.net = network()
        self.died = died

    def training_step(self, batch, batch_idx):
        is_due = self.died and not os.path.exists(self.died) and self.global_rank == 1
        if is_due and (self.current_epoch, batch_idx) == (DIES_IN, 2):
            ray.train.get_all_reported_checkpoints()  # waits until Ray has taken note of them
            Path(self.died).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9)


class Look(pl.Callback):
    """What DDP says while there is one."""

    def on_train_end(self, trainer, module):
        self.comm_hook = of_ddp(trainer.strategy.model)


def fit(out, label, strategy, checkpoint=None, epochs=EPOCHS, died=None):
    """A run of Lightning that reports a checkpoint at the end of each epoch."""
    look = Look()
    trainer = prepare_trainer(
        pl.Trainer(
            strategy=strategy,
            plugins=[RayLightningEnvironment()],
            callbacks=[look, RayTrainReportCallback()],
            accelerator="cpu",
            devices="auto",
            max_epochs=epochs,
            **QUIET,
        )
    )
    model = Classifier(died)
    data = DataLoader(examples(), batch_size=8)
    if checkpoint is None:
        trainer.fit(model, data)
    else:
        with checkpoint.as_directory() as folder:
            trainer.fit(model, data, ckpt_path=os.path.join(folder, RayTrainReportCallback.CHECKPOINT_NAME))
    write(
        out,
        label,
        params=numbers(model),
        comm_hook=look.comm_hook,
        world_size=trainer.world_size,
        rank=trainer.global_rank,
        global_step=trainer.global_step,
        loss=trainer.callback_metrics["loss"].item(),
        **chosen(strategy.attachment.metrics()),
    )


def loop(out, label, checkpoint=None):
    """A loop of one's own: a model prepared by Ray, a hook attached to it, and a checkpoint reported in the middle."""
    model = ray.train.torch.prepare_model(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    attachment = lc.attach(model, POWERSGD, exact_state=True)
    first = 0
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder, "loop.pt"), weights_only=True)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        attachment.load_state_dict(saved["hook"])
        first = saved["step"]
    rank = ray.train.get_context().get_world_rank()
    x, y = examples()[rank::2]
    for step in range(first, STEPS):
        if step == SAVED_STEP:
            report(model, optimizer, attachment, step)
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    of_hook = {"comm_hook": of_ddp(model), "nodes": attachment.runtime.bound.group.nodes()}
    of_hook["node_rank"] = os.environ.get("NODE_RANK")
    write(out, label, params=numbers(model), **of_hook, **chosen(attachment.metrics()))
    attachment.close()


def report(model, optimizer, attachment, step):
    state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    state["hook"] = attachment.state_dict()  # of all workers together: before one of them is alone
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if ray.train.get_context().get_world_rank() == 0:
            torch.save(state, Path(folder, "loop.pt"))
            checkpoint = ray.train.Checkpoint.from_directory(folder)
        ray.train.report({"epoch": "loop"}, checkpoint=checkpoint)


def accelerated(out, label, checkpoint=None):
    """Accelerate in the processes that Ray has started: two epochs, with a checkpoint after the first."""
    handler = CommHookKwargs(hook=POWERSGD, exact_state=True)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
    model = network()
    model, optimizer, data = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9), DataLoader(examples(), batch_size=8)
    )
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            accelerator.load_state(folder)
    for epoch in (0, 1) if checkpoint is None else (1,):
        for x, y in data:
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        if epoch == 0:
            with tempfile.TemporaryDirectory() as folder:
                accelerator.save_state(folder)
                saved = ray.train.Checkpoint.from_directory(folder)
                ray.train.report({"epoch": "accelerate"}, checkpoint=saved)
    (attachment,) = handler.attachments
    write(
        out,
        label,
        params=numbers(model),
        comm_hook=of_ddp(model),
        num_processes=accelerator.num_processes,
        **chosen(attachment.metrics()),
    )
    # Not `end_training()`: older releases of Ray fail when the process group is gone.
    AcceleratorState._reset_state(reset_partial_state=True)


def errors(out):
    """What is refused in a worker, and by a Trainer."""
    refused = {}
    calls = {
        "plain": lambda: lc.attach(network(), "bf16"),
        "environment": lambda: prepare_trainer(
            pl.Trainer(strategy=lc.CompressedRayDDPStrategy(hook="bf16"), accelerator="cpu", **QUIET)
        ),
    }
    for label, call in calls.items():
        try:
            call()
        except Exception as error:
            refused[label] = f"{type(error).__name__}: {error}"
    write(out, "errors", **refused)


def train(config):
    """All runs, one of which is killed; Ray then calls this again in new processes, where the others are resumed."""
    out, strategy = config["out"], config["strategy"]  # which the driver has made
    died = os.path.join(out, "died")
    if not os.path.exists(died):
        fit(out, "whole", lc.CompressedRayDDPStrategy(hook=POWERSGD, exact_state=True))
        fit(out, "dense", lc.CompressedRayDDPStrategy(hook="allreduce"), epochs=1)
        loop(out, "loop")
        accelerated(out, "accelerate")
        errors(out)
        with mock.patch.object(ray.train, "get_checkpoint", return_value=None):  # there is one of other runs
            for script in config["scripts"]:
                names = {"__name__": "of_the_page"}
                exec(script, names)
                names["train_worker"]()
    last = ray.train.get_checkpoint() if os.path.exists(died) else None
    fit(out, "restarted", copy.deepcopy(strategy), last, died=died)
    saved = by_epoch((one.metrics, one.checkpoint) for one in ray.train.get_all_reported_checkpoints())
    fit(out, "resumed", strategy, saved[SAVED - 1])
    loop(out, "loop-resumed", saved["loop"])
    accelerated(out, "accelerate-resumed", saved["accelerate"])


def by_epoch(reported):
    """The first checkpoint of each epoch."""
    found = {}
    for metrics, checkpoint in reported:
        found.setdefault(metrics.get("epoch"), checkpoint)
    return found


def refusals(out):
    """What the constructor refuses, without a Ray that runs."""
    options = {
        "hook": {"hook": "powersdg"},
        "timeout": {"hook": "bf16", "timeout": timedelta(seconds=9)},
        "backend": {"hook": "bf16", "process_group_backend": "gloo"},
        "start_method": {"hook": "bf16", "start_method": "spawn"},
        "ddp_comm_hook": {"hook": "bf16", "ddp_comm_hook": print},
        "unknown": {"hook": "bf16", "kwargs": {}},
    }
    refused = {}
    for label, given in options.items():
        try:
            lc.CompressedRayDDPStrategy(**given)
        except Exception as error:
            refused[label] = f"{type(error).__name__}: {error}"
    taken = lc.CompressedRayDDPStrategy(hook="bf16", find_unused_parameters=True, checkpoint_io=None)
    refused["bases"] = [f"{base.__module__}.{base.__name__}" for base in type(taken).__mro__]
    (out / "refusals.json").write_text(json.dumps(refused))


def scripts_of_the_page():
    text = (ROOT / "docs" / "ray.md").read_text()
    scripts = dict(re.findall(r"```python\n# (\w+)\.py\n(.*?)```", text, re.DOTALL))
    return [scripts["train"], scripts["loop"]]


def documented(out, reported):
    """What the scripts of the page reported, of which the loop came last, and whether the hook's state is in it."""
    first = next(i for i, (metrics, _) in enumerate(reported) if "sent" in metrics)
    with reported[first - 1][1].as_directory() as folder:
        saved = torch.load(Path(folder, RayTrainReportCallback.CHECKPOINT_NAME), weights_only=False)
    metrics, checkpoint = reported[first + 1]
    with checkpoint.as_directory() as folder:
        of_loop = torch.load(Path(folder, "state.pt"), weights_only=True)
    found = {"train": sorted(saved), "epochs": saved["epoch"] + 1, "loop": sorted(of_loop), "sent": metrics["sent"]}
    (out / "documented.json").write_text(json.dumps(found))


def example(out):
    """What the example prints."""
    sys.argv[1:] = ["--hook", "powersgd", "--epochs", "4", "--storage", str(out / "example")]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(ROOT / "examples" / "ray" / "digits.py"), run_name="__main__")
    (out / "example.txt").write_text(printed.getvalue())


def main(out):
    refusals(out)
    # Paths of sockets, which Ray makes there, may have no more than 107 characters.
    folder = tempfile.mkdtemp(prefix="commhooks-ray-", dir="/tmp")
    (out / "folder.txt").write_text(folder)
    try:
        ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=100 << 20, _temp_dir=folder)
        strategy = lc.CompressedRayDDPStrategy(hook=POWERSGD, exact_state=True)
        trainer = ray.train.torch.TorchTrainer(
            train,
            train_loop_config={"out": str(out), "strategy": strategy, "scripts": scripts_of_the_page()},
            scaling_config=ray.train.ScalingConfig(num_workers=2),
            run_config=ray.train.RunConfig(
                storage_path=str(out / "storage"), failure_config=ray.train.FailureConfig(max_failures=1)
            ),
        )
        documented(out, [(metrics, checkpoint) for checkpoint, metrics in trainer.fit().best_checkpoints])
        example(out)
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
