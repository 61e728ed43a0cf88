"""An `Accelerator` as one replica of a run with torchft, a process of its own; started by test_torchft_accelerate.py.

    python torchft_accelerator.py FOLDER NAME OPTIONS

`OPTIONS` are those of [`Options`][], in JSON. Writes what torchft_replica.py writes.
"""

import json
import os
import sys
from dataclasses import dataclass, field
from hashlib import sha1
from pathlib import Path
from time import sleep, time

import torch
import torchft_replica
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchft_replica import (
    BUCKET_CAP_MB,
    HOOKS,
    PERIOD,
    batch,
    die_in_average,
    factor_of,
    loss_of,
    make_model,
    make_optimizer,
    num_steps,
    watch_buckets,
)

import lightning_commhooks as lc
from accelerate_integration import CommHookKwargs

NAMES = ("one", "two", "three")


@dataclass
class Options(torchft_replica.Options):
    """What a run is about.

    Attributes:
        micros: batches whose gradients are accumulated.
        checkpoint: begin from that one; and after how many steps one is written.
    """

    micros: int = 1
    checkpoint: str | None = None
    saves: list = field(default_factory=list)

    @property
    def is_local(self):
        return self.hook.startswith("diloco")


class Losses(nn.Module):
    """The loss of a batch of a replica at the replicas' step, which may be another one before the forward."""

    def __init__(self, name, handler):
        super().__init__()
        self.model, self.name, self.handler, self.attempts = make_model(), name, handler, 0

    def forward(self, micro):
        """`micro`: number of the batch in the replicas' step."""
        self.attempts += 1
        return loss_of(self.model, *batch(self.name, self.handler.manager.current_step(), micro))


def main():
    folder, name, options = Path(sys.argv[1]), sys.argv[2], Options(**json.loads(sys.argv[3]))
    buckets = watch_buckets(options)
    replica = lc.FaultTolerance(
        replica_rank=NAMES.index(name), num_replica_groups=3, min_replica_size=2, timeout=5, hostname="127.0.0.1"
    )
    handler = CommHookKwargs(hook=HOOKS[options.hook], fault_tolerance=replica, bucket_cap_mb=BUCKET_CAP_MB)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[handler], gradient_accumulation_steps=options.micros)
    model = Losses(name, handler)
    optimizer = make_optimizer(model, 0 if options.is_local else 0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))
    data = DataLoader(TensorDataset(torch.arange(30)), batch_size=2, shuffle=True)
    ddp, optimizer, schedule, data = accelerator.prepare(model, optimizer, schedule, data)
    if options.checkpoint is not None:
        accelerator.load_state(options.checkpoint)
    (folder / f"{name}.up").touch()
    while not all((folder / f"{other}.up").exists() for other in options.begins_with):
        sleep(0.01)
    manager, skipped, left_out = handler.manager, 0, ["not with local steps"] if options.is_local else []
    num_local = 0
    if options.is_local and options.dies:
        die_in_average(options.dies[0])
    ddp.eval()  # as with dropout that is frozen
    notes = (folder / f"{name}.steps").open("a")
    while manager.current_step() < num_steps(folder / "last"):
        sleep(0.02 / (PERIOD if options.is_local else 1))  # a process starts in a few dozen steps
        before = manager.current_step()
        for micro in [num_local] if options.is_local else range(options.micros):
            with accelerator.accumulate(ddp):
                accelerator.backward(ddp(micro) * factor_of(options, handler.manager))
                if manager.current_step() == 5 and not left_out and micro == options.micros - 1:
                    left_out.append("now")  # as after a look at the norm, on all replicas
                    optimizer.zero_grad()
                    continue
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        if accelerator.optimizer_step_was_skipped or left_out == ["now"]:
            left_out.append("before")
            skipped += 1
            continue
        num_local += 1
        if manager.current_step() == before:
            continue
        step, attachment = manager.current_step(), handler.attachments[0]
        line = {
            "step": step - 1,
            "hash": sha1(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest(),
            "time": time(),
            "names": [NAMES[int(name[-1])] for name in torchft_replica.names_of(attachment)],
            "lost": attachment.metrics()["steps_not_committed"],
            "process": os.getpid(),
            "sum": sum(p.sum().item() for p in model.parameters()),
            "lr": schedule.get_last_lr()[0],
            "local": num_local,
        }
        num_local = 0
        notes.write(json.dumps(line) + "\n")
        notes.flush()
        if step in options.saves:
            accelerator.save_state(folder / f"{name}-{step}")
    end = {
        "parameters": [p.tolist() for p in model.parameters()],
        "metrics": handler.attachments[0].metrics(),
        "buckets": [*buckets.values()],
        "attempts": model.attempts,
        "skipped": skipped,
        "batches": [one.tolist() for (one,) in data],
    }
    (folder / f"{name}.end").write_text(json.dumps(end))
    accelerator.end_training()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # threads of torchft may wait for a lighthouse
