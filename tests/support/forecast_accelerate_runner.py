"""Run by `test_forecast_accelerate.py` in each of two processes: what is said of a run after its first steps."""

import contextlib
import json
import logging
import sys
import warnings
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from hf_runner import close, make
from transformers import TrainerCallback

import lightning_commhooks as lc
from accelerate_integration import CommHookKwargs, CommHookTracker

FOLDER = Path(sys.argv[1])
FRACTION = lc.PowerSGD(start_powerSGD_iter=0.34, min_compression_rate=1)
POWERSGD = lc.PowerSGD(start_powerSGD_iter=4, min_compression_rate=1)


class Lines(logging.Handler):
    """Keeps what is logged of a forecast."""

    def __init__(self):
        super().__init__(logging.INFO)
        self.lines = []

    def emit(self, record):
        if record.getMessage().startswith("Forecast"):
            self.lines.append(record.getMessage())


LINES = Lines()
logging.getLogger("lightning_commhooks").addHandler(LINES)
logging.getLogger("lightning_commhooks").setLevel(logging.INFO)


def heard(run):
    """What `run()`, which returns an attachment's metrics, has said."""
    LINES.lines = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        metrics = run()
    texts = [str(warning.message) for warning in caught if "hook=" in str(warning.message)]
    return {"lines": LINES.lines, "warned": texts, "metrics": metrics}


def accelerated(hook, num_steps=0, batches=8, told=None, **options):
    """Train by an accelerator; with a tracker unless `num_steps` is 0."""
    handler = CommHookKwargs(hook=hook, num_steps=told)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[handler], **options)
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    tracker = None
    if num_steps != 0:
        tracker = CommHookTracker(accelerator, handler, num_steps=num_steps, measure_link=False, closing_line=False)
    for step in range(batches):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.randn(4, 64)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        if tracker is not None:
            tracker.log(step)
    metrics = handler.attachments[0].metrics()
    close(handler)
    accelerator.free_memory()
    AcceleratorState._reset_state()
    return metrics


def of_trainer(name, hook, resume=None, **arguments):
    """Train by a trainer."""
    trainer, handler = make(f"{FOLDER}/{name}", hook, **arguments)
    torch.distributed.barrier()
    trainer.train(resume_from_checkpoint=resume)
    torch.distributed.barrier()
    metrics = handler.attachments[-1].metrics()
    close(handler)
    return metrics


class After(TrainerCallback):
    """Ends training after twelve steps: by an error, or by its own rule."""

    def __init__(self, error=None):
        self.error = error

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 12:
            control.should_training_stop = True
            if self.error is not None:
                raise self.error


def ended(name, error=None):
    """End a trainer's run of 80 steps after twelve."""
    trainer, handler = make(f"{FOLDER}/{name}", lc.PowerSGD(start_powerSGD_iter=20), max_steps=80)
    trainer.add_callback(After(error))
    with contextlib.suppress(ArithmeticError):
        trainer.train()
    metrics = handler.attachments[-1].metrics()
    # After the error was dealt with.
    close(handler)
    return metrics


def main():
    torch.distributed.init_process_group("gloo")
    saving = {"save_strategy": "steps", "save_steps": 6}
    results = {
        "trainer": heard(lambda: of_trainer("whole", POWERSGD, max_steps=12, **saving)),
        "resumed": heard(lambda: of_trainer("more", POWERSGD, f"{FOLDER}/whole/checkpoint-6", max_steps=16)),
        "beyond": heard(lambda: of_trainer("beyond", lc.PowerSGD(), max_steps=20)),
        "name": heard(lambda: of_trainer("name", "powersgd", max_steps=40)),
        "fraction": heard(lambda: of_trainer("fraction", FRACTION, max_steps=12)),
        "stopped": heard(lambda: ended("stopped")),
        "broken": heard(lambda: ended("broken", ArithmeticError())),
        "epochs": heard(lambda: of_trainer("epochs", POWERSGD, max_steps=-1, num_train_epochs=1)),
    }
    AcceleratorState._reset_state()
    results |= {
        "tracker": heard(lambda: accelerated(POWERSGD, num_steps=8)),
        "accumulated": heard(lambda: accelerated(POWERSGD, num_steps=8, batches=16, gradient_accumulation_steps=2)),
        "unknown": heard(lambda: accelerated(POWERSGD, num_steps=None)),
        "tracker_beyond": heard(lambda: accelerated(lc.PowerSGD(), num_steps=20, batches=20)),
        "told": heard(lambda: accelerated(FRACTION, num_steps=12, batches=12, told=12)),
        "int8": heard(lambda: accelerated("int8")),
    }
    for label, arguments in (("refused", ("bf16", -1)), ("not_told", (FRACTION,))):
        try:
            accelerated(*arguments)
        except (ValueError, RuntimeError) as error:
            results[label] = str(error)
    Path(FOLDER, f"{torch.distributed.get_rank()}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
