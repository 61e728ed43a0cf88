"""An `Accelerator` as one replica of a run with torchft, a process of its own; started by test_torchft_accelerate.py.

    python torchft_accelerator.py FOLDER NAME OPTIONS

See torchft_replica.py.
"""

from contextlib import nullcontext
from time import sleep

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchft_replica import (
    BUCKET_CAP_MB,
    HOOKS,
    PERIOD,
    Notes,
    batch,
    die_in_average,
    factor_of,
    fault_tolerance,
    loss_of,
    make_model,
    make_optimizer,
    run_replica,
    watch_buckets,
)

from accelerate_integration import CommHookKwargs


class Losses(nn.Module):
    """The loss of a batch of a replica at the replicas' step, which may be another one before the forward."""

    def __init__(self, name, handler):
        super().__init__()
        self.model, self.name, self.handler, self.attempts = make_model(), name, handler, 0

    def forward(self, micro):
        """`micro`: number of the batch in the replicas' step."""
        self.attempts += 1
        return loss_of(self.model, *batch(self.name, self.handler.manager.current_step(), micro))


def main(folder, name, options):
    buckets, is_local = watch_buckets(options), options.is_local
    handler = CommHookKwargs(
        hook=HOOKS[options.hook], fault_tolerance=fault_tolerance(name), bucket_cap_mb=BUCKET_CAP_MB
    )
    accelerator = Accelerator(cpu=True, kwargs_handlers=[handler], gradient_accumulation_steps=options.micros)
    model = Losses(name, handler)
    optimizer = make_optimizer(model, 0 if is_local else 0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))
    data = DataLoader(TensorDataset(torch.arange(30)), batch_size=2, shuffle=True)
    ddp, optimizer, schedule, data = accelerator.prepare(model, optimizer, schedule, data)
    if options.checkpoint is not None:
        accelerator.load_state(options.checkpoint)
    notes = Notes(folder, name)
    notes.meet(options.begins_with)
    manager, skipped, left_out = handler.manager, 0, ["not with local steps"] if is_local else []
    num_local = 0
    if is_local and options.dies:
        die_in_average(options.dies[0], lambda: manager)
    ddp.eval()  # as with dropout that is frozen
    while manager.current_step() < notes.num_steps:
        sleep(0.02 / (PERIOD if is_local else 1))  # a process starts in a few dozen steps
        before = manager.current_step()
        for micro in [num_local] if is_local else range(options.micros):
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
        step = manager.current_step()
        if step == before:
            continue
        (attachment,) = handler.attachments
        parameters = [*model.parameters()]
        with attachment.averaged_weights() if is_local else nullcontext():
            notes.write(step - 1, parameters, attachment, lr=schedule.get_last_lr()[0], local=num_local)
        num_local = 0
        if step in options.saves:
            accelerator.save_state(folder / f"{name}-{step}")
    batches = [one.tolist() for (one,) in data]
    more = {"attempts": model.attempts, "skipped": skipped, "batches": batches}
    notes.end(model.parameters(), handler.attachments[0], buckets, **more)
    accelerator.end_training()


if __name__ == "__main__":
    run_replica(main)
