"""Run by `test_hf_trainer_fsdp.py` in each of two or four processes: a `transformers.Trainer` with FSDP.

    python hf_fsdp_runner.py FOLDER

As in `fsdp_accelerate_runner.py`, Accelerate is told that it uses FSDP on CPU. Two processes are one model in two
shards, four are two replicas of that. The results are files, one for each process.
"""

import os
import sys
import warnings
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

import hf_runner
import torch
from accelerate import FullyShardedDataParallelPlugin
from accelerate.state import PartialState
from accelerate.utils import DistributedType, gather_object
from fsdp_accelerate_runner import pretend
from hf_runner import ALONE, every
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import Trainer, TrainerCallback

import lightning_commhooks as lc
from accelerate_integration import use_comm_hook

POWERSGD = lc.PowerSGD(start_powerSGD_iter=2, min_compression_rate=1)


class Sharding(Trainer):
    """A trainer that shards its model, over all ranks or over two of four."""

    fsdp_version = 2

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        plugin = FullyShardedDataParallelPlugin(
            **({"fsdp_version": 2} if self.fsdp_version == 2 else {"sharding_strategy": "FULL_SHARD"}),
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["GPT2Block"],
            cpu_ram_efficient_loading=False,
            use_orig_params=None if self.fsdp_version == 2 else True,
        )
        state = self.accelerator.state
        state.fsdp_plugin = plugin
        if self.accelerator.num_processes == 4:
            from accelerate.parallelism_config import ParallelismConfig

            sizes = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
            state.parallelism_config, state.device_mesh = sizes, sizes.build_device_mesh("cpu")
        pretend(DistributedType.FSDP, torch.device("cpu"))
        self.is_fsdp_enabled = True


class Sharding1(Sharding):
    fsdp_version = 1


def weights(trainer):
    if isinstance(trainer.model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(trainer.model):
            return [p.detach().clone() for p in trainer.model.parameters()]
    return [p.full_tensor().detach().clone() for p in trainer.model.parameters()]


def num_models(trainer):
    return len({tuple(one) for one in gather_object([[p.double().sum().item() for p in weights(trainer)]])})


class Models(TrainerCallback):
    """How many models the ranks have, when a checkpoint was saved and after steps."""

    def __init__(self):
        self.steps, self.found = {}, None

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.steps[state.global_step] = num_models(self.trainer)


def make(folder, hook, kind=Sharding, **options):
    return hf_runner.make(folder, hook, kind, **options)


def whole_and_resumed(folder, name, hook, **options):
    """Train 11 steps, evaluating and saving after 6; and again from there."""
    path = f"{folder}/{name}"
    trainer, handle = make(path, hook, **options, **every(6))
    watch = Models()
    watch.trainer = trainer
    trainer.add_callback(watch)
    with redirect_stderr(StringIO()) as err:
        trainer.train()
    result = {
        "whole": weights(trainer),
        "models": {**watch.steps, "end": num_models(trainer)},
        "eval": [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry],
        "log": [entry for entry in trainer.state.log_history if "comm/bytes_sent" in entry],
        "forecasts": err.getvalue().count("Forecast"),
        "hook_files": sorted(file.name for file in Path(path, "checkpoint-6").glob("comm_hook*")),
        "metrics": handle and handle.attachments[0].metrics(),
    }
    result["evaluated_later"] = trainer.evaluate()["eval_loss"]
    end(handle)
    trainer, handle = make(f"{path}-again", hook, **options)
    trainer.train(resume_from_checkpoint=f"{path}/checkpoint-6")
    result["resumed"] = weights(trainer)
    end(handle)
    return result


def with_fsdp1(folder, hook):
    """Weights after 3 steps with FSDP 1, whose parts of PyTorch neither save on CPU nor take a norm of float64."""
    trainer, handle = make(folder, hook, Sharding1, model=hf_runner.make_model().float(), max_steps=3)
    trainer.train()
    result = {"whole": weights(trainer), "metrics": handle and handle.attachments[0].metrics()}
    end(handle)
    return result


def end(handle):
    for attachment in handle.attachments if handle else ():
        attachment.close()


def best_model(folder):
    """The best checkpoint is loaded at the end; a second `train` continues with the same hook."""
    options = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True}
    hook = lc.PostLocalSGD(period=4, **ALONE)
    trainer, handle = make(f"{folder}/best", hook, **options, **every(3), max_steps=9)
    trainer.train()
    best = trainer.evaluate()["eval_loss"]
    evals = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    trainer.train()
    result = {"num_attachments": len(handle.attachments), "steps": handle.attachments[0].num_steps}
    end(handle)
    return {**result, "best": best, "evals": evals}


def refused(function, *args, **options):
    try:
        function(*args, **options)
    except ValueError as error:
        return str(error)


def refusals(folder):
    trainer, _ = make(f"{folder}/refusals", None, Sharding)
    other, _ = make(f"{folder}/refusals", "bf16", Sharding)
    return {
        "option": refused(use_comm_hook, trainer, "bf16", accumulation="mean"),
        "hook": refused(use_comm_hook, trainer, "ef_sign"),
        "twice": refused(use_comm_hook, other, "fp16"),
        "powersgd": refused(use_comm_hook, trainer, "powersgd"),
    }


def main():
    warnings.simplefilter("ignore")
    folder = sys.argv[1]
    if os.environ["WORLD_SIZE"] == "2":
        int8 = lc.Int8(min_bytes=0, block_size=64, use_error_feedback=False, compress_1d=True)
        results = {
            "dense1": with_fsdp1(folder, None),
            "bf16": with_fsdp1(folder, "bf16"),
            "dense2": whole_and_resumed(folder, "dense2", None),
            "int8": whole_and_resumed(folder, "int8", int8),
            "refusals": refusals(folder),
        }
    else:
        exact = {"exact_state": True}
        results = {
            "dense": whole_and_resumed(folder, "dense", None),
            "allreduce": whole_and_resumed(folder, "allreduce", "allreduce", monitor={"closing_line": False}),
            "powersgd": whole_and_resumed(folder, "powersgd", POWERSGD, shard_hook="bf16", **exact),
            "post_localsgd": whole_and_resumed(folder, "post_localsgd", lc.PostLocalSGD(period=4, **ALONE), **exact),
            "diloco": whole_and_resumed(folder, "diloco", lc.DiLoCo(period=4, **ALONE), resync=True),
            "best": best_model(folder),
        }
    torch.save(results, f"{folder}/{PartialState().process_index}.pt")
    PartialState().wait_for_everyone()
    PartialState().destroy_process_group()


if __name__ == "__main__":
    main()
