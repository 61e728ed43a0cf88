"""Run by `test_monitor_accelerate.py` in each of two processes: `CommHookTracker`, `use_comm_hook(monitor=...)`."""

import gc
import json
import sys
import weakref
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.tracking import GeneralTracker, on_main_process
from hf_runner import Mixed, make
from transformers import Trainer

from accelerate_integration import CommHookKwargs, CommHookTracker, use_comm_hook
from lightning_commhooks import PowerSGD

FOLDER = Path(sys.argv[1])
POWERSGD = PowerSGD(start_powerSGD_iter=2, min_compression_rate=1)


class OwnTracker(GeneralTracker):
    name = "own"
    requires_logging_directory = False

    def __init__(self):
        super().__init__()
        self.rows = []

    @property
    def tracker(self):
        return self.rows

    @on_main_process
    def log(self, values, step=None, **kwargs):
        self.rows.append([step, values])


def prepare(num_models, **options):
    handler = CommHookKwargs(hook=POWERSGD)
    own = OwnTracker()
    accelerator = Accelerator(cpu=True, kwargs_handlers=[handler], log_with=[own], **options)
    accelerator.init_trackers("run")
    torch.manual_seed(0)
    models = [torch.nn.Linear(64, 64) for _ in range(num_models)]
    prepared = accelerator.prepare(*models, *[torch.optim.SGD(model.parameters(), lr=0.1) for model in models])
    return accelerator, handler, own, list(zip(prepared[:num_models], prepared[num_models:], strict=True))


def train(accelerator, pairs, tracker, batches):
    torch.manual_seed(accelerator.process_index)
    for step in range(batches):
        for model, optimizer in pairs:
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.randn(4, 64)).square().mean())
                optimizer.step()
                optimizer.zero_grad()
        tracker.log(step)


def trainer_logs(path, trainer_class=Trainer, **arguments):
    """The log of a trainer, and the metrics of its hook when training had ended."""
    trainer, handler = make(path, "bf16" if trainer_class is Trainer else None, trainer_class, **arguments)
    trainer.train()
    result = {"log": trainer.state.log_history, "metrics": handler.attachments[-1].metrics()}
    for attachment in handler.attachments:
        attachment.close()
    return result


class Monitored(Mixed):
    comm_hook = POWERSGD
    comm_hook_options = {"monitor": {"error_every_n_steps": 2}}  # noqa: RUF012


def of_trainers():
    options = {
        "max_steps": 5,
        "logging_strategy": "steps",
        "logging_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 4,
    }
    results = {"trainer": trainer_logs(f"{FOLDER}/a", Monitored, **options)}
    Monitored.comm_hook_options = {"monitor": {"closing_line": False}}
    results["no_line"] = trainer_logs(f"{FOLDER}/b", Monitored, max_steps=2)
    results["off"] = trainer_logs(f"{FOLDER}/c", max_steps=2, logging_strategy="steps", logging_steps=1)
    try:
        use_comm_hook(None, "bf16", monitor={"every_n_steps": 3})
    except ValueError as error:
        results["refused"] = str(error)
    return results


def main():
    torch.distributed.init_process_group("gloo")
    results = of_trainers()
    AcceleratorState._reset_state()

    accelerator, handler, own, pairs = prepare(2)
    tracker = CommHookTracker(accelerator, handler, every_n_steps=2, measure_link=False)
    train(accelerator, pairs, tracker, batches=2)
    results["two_models"] = {"rows": own.rows, "metrics": [each.metrics() for each in handler.attachments]}
    for attachment in handler.attachments:
        attachment.close()
    accelerator.free_memory()
    reference = weakref.ref(accelerator)
    del accelerator, handler, pairs, tracker
    gc.collect()
    results["is_collected"] = reference() is None
    AcceleratorState._reset_state()

    accelerator, handler, own, pairs = prepare(1, gradient_accumulation_steps=2)
    try:
        CommHookTracker(accelerator, CommHookKwargs(hook="bf16"))
    except ValueError as error:
        results["too_early"] = str(error)
    tracker = CommHookTracker(accelerator, handler, every_n_steps=3, error_every_n_steps=1)
    train(accelerator, pairs, tracker, batches=14)
    results["before_the_end"] = len(own.rows)
    accelerator.end_training()
    results["accelerate"] = {"rows": own.rows, "metrics": handler.attachments[0].metrics()}
    Path(FOLDER, f"{accelerator.process_index}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
