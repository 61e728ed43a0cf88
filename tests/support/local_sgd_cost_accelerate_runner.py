"""What `Accelerator` and transformers' `Trainer` send to evaluate and to save, for test_local_sgd_cost_hosts.py."""

import sys
import warnings

import torch
from local_sgd_accelerate_runner import ALONE, PERIOD, Run

import lightning_commhooks as lc


class Costs:
    """Bytes of training and of evaluation since the last call, after what was done."""

    def __init__(self, attachment):
        self.attachment, self.costs = attachment, []
        self._before = (0.0, 0.0)

    def note(self, what):
        metrics = self.attachment.metrics()
        now = metrics["bytes_sent"], metrics.get("bytes_evaluation", 0.0)
        self.costs.append((what, *(a - b for a, b in zip(now, self._before, strict=True))))
        self._before = now


def accelerator(hook, steps, resync, folder):
    """What each evaluation, checkpoint and barrier sends after so many steps."""
    run = Run(hook, resync=resync)
    run.train(range(steps))
    costs = Costs(run.handler.attachments[0])
    costs.note("train")
    own = run.parameters()
    for what in ("evaluate", "save", "save", "barrier", "evaluate"):
        if what == "evaluate":
            run.evaluate_average()
        elif what == "save":
            run.accelerator.save_state(f"{folder}/{len(costs.costs)}")
        else:
            run.accelerator.wait_for_everyone()
        costs.note(what)
    run.model.train()
    run.model(torch.zeros_like(next(iter(run.plain.parameters()))[:1]))
    back = all(torch.equal(own[name], p) for name, p in run.parameters().items())
    # The other way round: saved first, twice, then evaluated.
    for what in ("save", "save", "evaluate", "end"):
        if what == "evaluate":
            run.evaluate_average()
        elif what == "save":
            run.accelerator.save_state(f"{folder}/{len(costs.costs)}")
        else:
            run.handler.events(run.accelerator).average_for_good()
        costs.note(what)
    run.close()
    return {"costs": costs.costs, "back": back}


def trainer(hook, every, folder):
    """What a trainer sends that evaluates and saves every few of 12 steps, loads the best model and ends."""
    import hf_runner
    from transformers import TrainerCallback

    options = {**hf_runner.every(every), "load_best_model_at_end": True, "max_steps": 12}
    trainer, handler = hf_runner.make(folder, hook, **options)
    attachments = []

    class Noting(TrainerCallback):
        def note(self, what, state):
            if not attachments:
                attachments.append(Costs(handler.attachments[0]))
            attachments[0].note(f"{what} {state.global_step}")

        def on_step_end(self, args, state, control, **kwargs):
            self.note("train", state)

        def on_save(self, args, state, control, **kwargs):
            self.note("evaluate and save", state)

        def on_train_end(self, args, state, control, **kwargs):
            self.note("end", state)

    trainer.add_callback(Noting())
    trainer.train()
    parameters = hf_runner.parameters(trainer)
    hf_runner.close(handler)
    size = sum(p.numel() for p in trainer.model.parameters())
    # The GPT-2 of transformers 4 has some numbers that are no parameters.
    buffers = sum(b.numel() for b in trainer.model.buffers() if b.is_floating_point())
    return {"costs": attachments[0].costs, "size": size, "buffers": buffers, "parameters": parameters}


def main():
    folder, *parts = sys.argv[1:]
    warnings.filterwarnings("ignore", message="training ended after")
    hooks = {
        "post_localsgd": lc.PostLocalSGD(period=PERIOD, **ALONE),
        "averaged": lc.PostLocalSGD(period=PERIOD, optimizer_state="average", **ALONE),
    }
    results = {}
    if "accelerator" in parts:
        for name, hook in hooks.items():
            for steps in (6, 8):
                for resync in (False, True):
                    path = f"{folder}/{name}-{steps}-{resync}"
                    results[name, steps, resync] = accelerator(hook, steps, resync, path)
    if "trainer" in parts:
        for name, hook in hooks.items():
            for every in (3, 4):
                results["trainer", name, every] = trainer(hook, every, f"{folder}/trainer-{name}-{every}")
    rank = torch.distributed.get_rank()
    torch.save(results, f"{folder}/{'-'.join(parts)}.{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
