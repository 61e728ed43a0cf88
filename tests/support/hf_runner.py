"""Run by `test_hf_trainer.py` in each of two processes: `use_comm_hook`, results as a file."""

import glob
import os
import shutil
import sys
import warnings
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from versions import has

import lightning_commhooks as lc
from accelerate_integration import CommHookTrainerMixin, use_comm_hook

if not has("transformers", "5"):
    # Trainers of several processes load what they resume from to "cpu:0", which PyTorch does not know, hook or not.
    torch.serialization.register_package(
        100, lambda storage: None, lambda storage, location: storage if location == "cpu:0" else None
    )

ALONE = {"start_localSGD_iter": 0, "post_local_gradient_allreduce": False}
HOOKS = {
    "powersgd": lc.PowerSGD(start_powerSGD_iter=2, min_compression_rate=1),
    "post_localsgd": lc.PostLocalSGD(period=4, **ALONE),
    "diloco": lc.DiLoCo(period=4, **ALONE),
}
OF_HOOK = ("exact_state", "strict_state", "resync", "shard_hook", "monitor")
CONFIG = {"vocab_size": 32, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}


class Counting(Dataset):
    """Pieces of 0, 1, 2, ..., 31, 0, ... with another step each."""

    def __init__(self, first, last):
        self.numbers = range(first, last)

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, index):
        number = self.numbers[index]
        piece = (torch.arange(16) * (1 + number % 5) + number) % 32
        return {"input_ids": piece, "labels": piece}


def make_model():
    torch.manual_seed(5)
    config = GPT2Config(**CONFIG, bos_token_id=0, eos_token_id=0, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    return GPT2LMHeadModel(config).double()


def make(folder, hook=None, trainer_class=Trainer, **arguments):
    """A trainer, and its handler."""
    arguments = {
        "max_steps": 11,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": 2e-3,
        "eval_strategy": "no",
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "ddp_find_unused_parameters": False,
        "ddp_bucket_cap_mb": 1,
        **arguments,
    }
    options = {key: arguments.pop(key) for key in OF_HOOK if key in arguments}
    model = arguments.pop("model", None) or make_model()
    trainer = trainer_class(
        model,
        TrainingArguments(folder, **arguments),
        train_dataset=Counting(0, 300),
        eval_dataset=Counting(300, 332),
        **({"model_init": arguments["model_init"]} if "model_init" in arguments else {}),
    )
    if hook is None:
        return trainer, getattr(trainer, "comm_hook_handler", None)
    return trainer, use_comm_hook(trainer, hook, **options)


def every(steps):
    """Save and evaluate every few steps."""
    return {"save_strategy": "steps", "save_steps": steps, "eval_strategy": "steps", "eval_steps": steps}


def parameters(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def close(handler):
    for attachment in handler.attachments:
        attachment.close()


class Keep(TrainerCallback):
    """Keeps a copy of the first checkpoint, which `save_total_limit` deletes."""

    def __init__(self, folder):
        self.folder = folder

    def on_save(self, args, state, control, **kwargs):
        name = f"checkpoint-{state.global_step}"
        torch.distributed.barrier()
        if state.global_step == 6 and state.is_world_process_zero:
            shutil.copytree(f"{args.output_dir}/{name}", f"{self.folder}/{name}")


def whole_and_resumed(name, folder, exact):
    """Train 11 steps, evaluating and saving after 6, in the middle of a period; and again from there."""
    path = f"{folder}/{name}-{exact}"
    options = {"exact_state": exact, "resync": not exact, "save_total_limit": 1, **every(6)}
    trainer, handler = make(path, HOOKS[name], **options)
    trainer.add_callback(Keep(f"{path}-kept"))
    trainer.train()
    torch.distributed.barrier()
    ddp = trainer.model_wrapped
    result = {
        "whole": parameters(trainer),
        "eval": [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry],
        "final_eval": trainer.evaluate()["eval_loss"],
        "registered": ddp._get_ddp_logging_data()["comm_hook"],
        "settings": [ddp.find_unused_parameters, ddp.bucket_bytes_cap],
        "steps": handler.attachments[0].metrics()["steps"],
        "sent": handler.attachments[0].metrics().get("bytes_evaluation"),
        "numel": sum(p.numel() for p in trainer.model.parameters()),
        "checkpoints": sorted(glob.glob("checkpoint-*", root_dir=path)),
    }
    close(handler)
    trainer, handler = make(f"{path}-again", HOOKS[name], exact_state=exact)
    torch.distributed.barrier()
    trainer.train(resume_from_checkpoint=f"{path}-kept/checkpoint-6")
    result["resumed"] = parameters(trainer)
    close(handler)
    return result


def undisturbed(name, folder):
    trainer, handler = make(f"{folder}/undisturbed-{name}", HOOKS[name])
    trainer.train()
    result = parameters(trainer)
    close(handler)
    return result


def best_model(folder):
    """The best checkpoint is loaded at the end; a second `train` goes on with the same hook."""
    if not has("transformers", "5"):
        for step in (3, 6, 9, 12):  # A rank takes no checkpoint for the best whose folder another one has yet to make.
            os.makedirs(f"{folder}/best/checkpoint-{step}", exist_ok=True)
    options = {"load_best_model_at_end": True, "max_steps": 9, **every(3)}
    trainer, handler = make(f"{folder}/best", HOOKS["post_localsgd"], **options)
    trainer.train()
    best = min(entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry)
    again = trainer.evaluate()["eval_loss"]
    trainer.args.max_steps = 12
    trainer.train()
    steps = [attachment.metrics()["steps"] for attachment in handler.attachments]
    result = {"best": best, "again": again, "steps": steps, "end": parameters(trainer)}
    close(handler)
    return result


class Mixed(CommHookTrainerMixin, Trainer):
    comm_hook = "bf16"


def subclass_and_search(folder):
    """A trainer of one's own; and a new accelerator, as a search of hyperparameters makes one for each trial."""
    trainer, handler = make(f"{folder}/mixed", trainer_class=Mixed, max_steps=2)
    trainer.train()
    names = [trainer.model_wrapped._get_ddp_logging_data()["comm_hook"]]
    trainer.accelerator.free_memory()
    trainer.model_wrapped = trainer.model = make_model()
    trainer.optimizer = None
    trainer.create_accelerator_and_postprocess()
    trainer.train()
    names.append(trainer.model_wrapped._get_ddp_logging_data()["comm_hook"])
    twice = ""
    try:
        use_comm_hook(trainer, "fp16")
    except ValueError as error:
        twice = str(error)
    close(handler)
    return {"names": names, "twice": twice}


def evaluated_before(folder):
    """The number of hooks at work after training, or the error, where the trainer has evaluated before."""
    trainer, handler = make(f"{folder}/before", "bf16", max_steps=2)
    trainer.evaluate()
    try:
        trainer.train()
    except ValueError as error:
        return str(error)
    result = len(handler.attachments)
    close(handler)
    return result


class SaveNow(TrainerCallback):
    """Saves a checkpoint as those callbacks of transformers do that are asked to by a signal."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 6:
            self.own = parameters(self.trainer)
            self.trainer._save_checkpoint(self.trainer.model, trial=None)


def saved_by_callback(folder):
    """This rank's parameters in the middle of a period, and those of a checkpoint that a callback has saved there."""
    trainer, handler = make(f"{folder}/callback", HOOKS["post_localsgd"], max_steps=7)
    trainer.add_callback(callback := SaveNow())
    callback.trainer = trainer
    trainer.train()
    close(handler)
    torch.distributed.barrier()
    double = {"dtype" if has("transformers", "4.56") else "torch_dtype": torch.float64}
    saved = GPT2LMHeadModel.from_pretrained(f"{folder}/callback/checkpoint-6", **double)
    return {"own": callback.own, "saved": {name: p.detach().clone() for name, p in saved.named_parameters()}}


def hook_after_training(folder):
    """The error of a hook for a trainer that has trained without one."""
    trainer, _ = make(f"{folder}/late", max_steps=1)
    trainer.train()
    use_comm_hook(trainer, "bf16")
    try:
        trainer.train()
    except ValueError as error:
        return str(error)


def without_state(folder):
    """Resume from a checkpoint of a trainer without hook."""
    torch.distributed.barrier()
    trainer, handler = make(f"{folder}/none", HOOKS["powersgd"], max_steps=8)
    if trainer.is_world_process_zero():
        shutil.copytree(f"{folder}/powersgd-True-kept/checkpoint-6", f"{folder}/none/checkpoint-6")
        Path(f"{folder}/none/checkpoint-6/lightning_commhooks.bin").unlink()
    torch.distributed.barrier()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train(resume_from_checkpoint=f"{folder}/none/checkpoint-6")
    close(handler)
    return [str(w.message) for w in caught]


def main():
    folder = sys.argv[1]
    warnings.filterwarnings("ignore", message="training ended after")
    torch.distributed.init_process_group("gloo")
    results = {(name, exact): whole_and_resumed(name, folder, exact) for name in HOOKS for exact in (False, True)}
    results["undisturbed"] = {name: undisturbed(name, folder) for name in HOOKS}
    results["best_model"] = best_model(folder)
    results["subclass_and_search"] = subclass_and_search(folder)
    results["without_state"] = without_state(folder)
    results["evaluated_before"] = evaluated_before(folder)
    results["saved_by_callback"] = saved_by_callback(folder)
    results["hook_after_training"] = hook_after_training(folder)
    torch.save(results, f"{folder}/{torch.distributed.get_rank()}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
