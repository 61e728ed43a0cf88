"""Run by `test_accumulation_hosts.py`: Accelerate and `transformers.Trainer` in two processes."""

import importlib.util
import os
import sys
import warnings

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import GradientAccumulationPlugin
from accumulation_task import (
    EPOCHS,
    HOOKS,
    LR,
    NUM_BATCHES,
    RUNS,
    WINDOW,
    WINDOWS,
    batch,
    difference,
    loss,
    make_model,
    num_tokens,
    refusal,
    sum_over_tokens,
)
from torch.utils.data import DataLoader, Dataset, SequentialSampler

from accelerate_integration import CommHookKwargs, use_comm_hook


class Run:
    """Models that are trained within `accelerator.accumulate`; of each batch Accelerate gives a rank its own."""

    def __init__(
        self, accumulation="mean", hook="allreduce", precision="64", num_models=1, scaler=None, each=False, **ddp
    ):
        self.dtype = torch.float64 if precision == "64" else torch.float32
        self.handler = CommHookKwargs(hook=HOOKS.get(hook, hook), accumulation=accumulation, **ddp)
        # Accelerators of one process share what they are made with.
        AcceleratorState._reset_state()
        self.accelerator = Accelerator(
            cpu=True,
            mixed_precision="bf16" if precision == "bf16" else "no",
            kwargs_handlers=[self.handler],
            gradient_accumulation_plugin=GradientAccumulationPlugin(WINDOW, sync_each_batch=each),
        )
        self.accelerator.scaler = scaler
        self.plain = [make_model(self.dtype, seed=3 + k) for k in range(num_models)]
        setups = [self.accelerator.prepare(m, torch.optim.SGD(m.parameters(), lr=LR)) for m in self.plain]
        self.models, self.optimizers = [m for m, _ in setups], [o for _, o in setups]
        self.loader = self.accelerator.prepare(DataLoader(range(NUM_BATCHES * self.accelerator.num_processes)))

    def backward(self, k, i, weighs, name_model):
        model, rank = self.models[k], self.accelerator.process_index
        if weighs:
            value = sum_over_tokens(model, rank, i, self.dtype)
            self.handler.add_weight(torch.tensor(num_tokens(rank, i)), model if name_model else None)
        else:
            value = loss(model, batch(rank, i, self.dtype))
        self.accelerator.backward(value)

    def train(self, weighs=False, takes=lambda k, i: True, name_model=True):
        for _ in range(EPOCHS):
            for numbers in self.loader:
                i = numbers.item() // self.accelerator.num_processes
                with self.accelerator.accumulate(*self.models):
                    for k, optimizer in enumerate(self.optimizers):
                        if takes(k, i):
                            self.backward(k, i, weighs, name_model)
                        optimizer.step()
                        optimizer.zero_grad()
        return self.close()

    def close(self):
        result = {
            "change": difference(self.plain[0], make_model(self.dtype)),
            "other": difference(self.plain[-1], make_model(self.dtype, seed=2 + len(self.plain))),
            "hook": self.models[0]._get_ddp_logging_data()["comm_hook"],
            "steps": self.handler.attachments[0].metrics()["steps"],
        }
        for attachment in self.handler.attachments:
            attachment.close()
        self.accelerator.free_memory()
        return result


def warned(function):
    """Its result, with the warnings about accumulation."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = function()
    return {**result, "warnings": [str(w.message) for w in caught if "accumulation=" in str(w.message)]}


class OwnBackward(Run):
    """In the second window of each epoch the loss's own `backward`, which divides by nothing."""

    def backward(self, k, i, weighs, name_model):
        if i // WINDOW == 1:
            loss(self.models[k], batch(self.accelerator.process_index, i, self.dtype)).backward()
        else:
            super().backward(k, i, weighs, name_model)


class ForwardsFirst(Run):
    """All forwards of a window before all backwards, of which the last one synchronizes."""

    def train(self, weighs=False):
        rank = self.accelerator.process_index
        (model,), (optimizer,) = self.models, self.optimizers
        for window in WINDOWS * EPOCHS:
            losses = []
            with self.accelerator.no_sync(model):
                for i in window:
                    if weighs:
                        losses.append(sum_over_tokens(model, rank, i, self.dtype))
                        self.handler.add_weight(num_tokens(rank, i))
                    else:
                        losses.append(loss(model, batch(rank, i, self.dtype)))
            for each in losses[:-1]:
                self.accelerator.backward(each)
            with self.accelerator.trigger_sync_in_backward(model):
                self.accelerator.backward(losses[-1])
            optimizer.step()
            optimizer.zero_grad()
        return self.close()


def accelerate_refusals():
    two, plain = Run("weighted", num_models=2), Run("sum")
    calls = {
        "refused: not weighted": lambda: plain.handler.add_weight(1.0),
        "refused: no model named": lambda: two.train(True, name_model=False),
        "refused: no weight": Run("weighted").train,
        "refused: not prepared": lambda: CommHookKwargs(hook="bf16", accumulation="weighted").add_weight(1.0),
        # Last: accelerators of one process share this.
        "refused: each synchronizes": lambda: Run(each=True).train(),
    }
    results = {name: refusal(call) for name, call in calls.items()}
    two.close(), plain.close()
    return results


def accelerate_results():
    results = {run: Run(*run).train() for run in RUNS}
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    return results | {
        "scaled": Run("mean", "powersgd", scaler=scaler).train(),
        "sum": Run("sum").train(),
        "integer": warned(Run(WINDOW).train),
        "own backward": OwnBackward().train(),
        "weighted": Run("weighted").train(True),
        "forwards first": ForwardsFirst().train(),
        "forwards first, weighted": ForwardsFirst("weighted").train(True),
        "two models": Run(num_models=2).train(takes=lambda k, i: k == 0 or i % 2),
        "two models, weighted": Run("weighted", num_models=2).train(True, takes=lambda k, i: k == 0 or i % 2),
        **accelerate_refusals(),
    }


class Rows(Dataset):
    """All micro-batches of two ranks, row by row, in the order in which they get them."""

    def __init__(self, dtype):
        self.rows = torch.cat([batch(rank, i, dtype) for i in range(NUM_BATCHES) for rank in range(2)])

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"x": self.rows[index]}


class WithLoss(torch.nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.net = make_model(dtype)

    def forward(self, x):
        return {"loss": loss(self.net, x)}


class WithTokens(WithLoss):
    """Divides by the tokens of all micro-batches and ranks, as models of transformers do; a row is one."""

    def forward(self, x, labels, **kwargs):
        return {"loss": loss(self.net, x) * len(x) / kwargs.get("num_items_in_batch", len(x))}


class Labelled(Rows):
    def __getitem__(self, index):
        return {"x": self.rows[index], "labels": torch.tensor([1])}


def hf(folder, accumulation="mean", hook="allreduce", precision="64", model_class=WithLoss):
    from transformers import Trainer, TrainingArguments

    class InOrder(Trainer):
        def _get_train_sampler(self, dataset=None):
            return SequentialSampler(self.train_dataset)

    dtype = torch.float64 if precision == "64" else torch.float32
    os.environ.pop("ACCELERATE_MIXED_PRECISION", None)  # where transformers 4 leaves bf16 to the next trainer
    arguments = TrainingArguments(
        folder,
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=WINDOW,
        learning_rate=LR,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=0,
        bf16=precision == "bf16",
        use_cpu=True,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
    )
    AcceleratorState._reset_state()
    model = model_class(dtype)
    dataset = (Labelled if model_class is WithTokens else Rows)(dtype)
    trainer = InOrder(model, arguments, train_dataset=dataset)
    handler = use_comm_hook(trainer, HOOKS.get(hook, hook), accumulation=accumulation)
    try:
        trainer.train()
        return {
            "change": difference(model.net, make_model(dtype)),
            "hook": trainer.model_wrapped._get_ddp_logging_data()["comm_hook"],
            "steps": handler.attachments[0].metrics()["steps"],
        }
    finally:
        for attachment in handler.attachments:
            attachment.close()


def hf_results(folder):
    results = {run: hf(folder, *run) for run in RUNS}
    return results | {
        "sum": hf(folder, "sum"),
        "integer": warned(lambda: hf(folder, WINDOW)),
        "tokens": hf(folder, model_class=WithTokens),
        "refused: sum": refusal(hf, folder, "sum", model_class=WithTokens),
        "refused: weighted": refusal(hf, folder, "weighted", model_class=WithTokens),
        "refused: no weight": refusal(hf, folder, "weighted"),
    }


def main():
    folder = sys.argv[1]
    warnings.filterwarnings("ignore")
    torch.distributed.init_process_group("gloo")
    results = {"accelerate": accelerate_results()}
    if importlib.util.find_spec("transformers") is not None:
        results["transformers"] = hf_results(folder)
    torch.save(results, f"{folder}/{torch.distributed.get_rank()}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
