"""Local SGD under `Accelerator` in each of two processes; results as a file."""

import shutil
import sys
import warnings
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from small_task import batch, loss, make_model

import lightning_commhooks as lc
from accelerate_integration import CommHookKwargs

PERIOD = 4
ALONE = {"start_localSGD_iter": 0, "post_local_gradient_allreduce": False}
HOOKS = {
    "post_localsgd": lc.PostLocalSGD(period=PERIOD, **ALONE),
    "diloco, delay": lc.DiLoCo(period=PERIOD, delay=3, **ALONE),
}


class Run:
    """One Accelerator with a model, AdamW and a scheduler."""

    def __init__(self, hook, accumulation=1, scaler=None, **options):
        torch.manual_seed(0)
        self.handler = CommHookKwargs(hook=hook, **options)
        self.accelerator = Accelerator(
            cpu=True, kwargs_handlers=[self.handler], gradient_accumulation_steps=accumulation
        )
        self.accelerator.scaler = scaler
        self.plain = make_model()
        self.accumulation = accumulation
        optimizer = torch.optim.AdamW(self.plain.parameters(), lr=0.02)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        # In both orders, as Accelerate allows.
        self.optimizer, self.model, self.scheduler = self.accelerator.prepare(optimizer, self.plain, scheduler)
        self.rank = self.accelerator.process_index

    def train(self, steps, factor=lambda rank, number: 1.0):
        """Parameters after each step."""
        trajectory = []
        for step in steps:
            for i in range(self.accumulation):
                number = 100 * step + i
                with self.accelerator.accumulate(self.model):
                    self.accelerator.backward(loss(self.model, batch(self.rank, number)) * factor(self.rank, number))
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()
            trajectory.append(self.parameters())
        return trajectory

    def parameters(self):
        return {name: p.detach().clone() for name, p in self.plain.named_parameters()}

    def evaluate(self):
        self.model.eval()
        with torch.no_grad():
            value = loss(self.model, batch(9, 9)).item()
        self.model.train()
        return value

    def evaluate_average(self):
        self.accelerator.wait_for_everyone()
        return self.evaluate()

    def close(self):
        self.handler.attachments[0].average_weights()
        self.handler.attachments[0].close()
        self.accelerator.free_memory()


def trajectories():
    results = {}
    for name, hook in HOOKS.items():
        run = Run(hook, accumulation=3)
        results[name] = run.train(range(10))
        run.close()
    return results


def overflows():
    """Parameters, and whether a step was skipped, with a scaler and inf on one rank now and then."""
    bad = {(1, 200), (0, 300), (1, 700), (0, 800)}
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
    run = Run(HOOKS["post_localsgd"], scaler=scaler)
    trajectory, skipped, scales = [], [], []
    for step in range(12):
        trajectory += run.train([step], lambda rank, number: float("inf") if (rank, number) in bad else 1.0)
        skipped.append(run.accelerator.optimizer_step_was_skipped)
        scales.append(scaler.get_scale())
    run.close()
    return {"trajectory": trajectory, "skipped": skipped, "scales": scales}


def evaluations(resync):
    """Train 6 steps with an evaluation and a barrier in the middle of a period, 6 more, and end."""
    run = Run(HOOKS["post_localsgd"], resync=resync)
    before = run.train(range(6))[-1]
    value = run.evaluate_average()
    during = run.parameters()
    after = run.train(range(6, 11))
    run.accelerator.wait_for_everyone()
    end = {name: p.clone() for name, p in run.accelerator.unwrap_model(run.model).state_dict().items()}
    results = {"before": before, "value": value, "during": during, "after": after, "end": end}
    results["sent"] = run.handler.attachments[0].metrics()["bytes_evaluation"]
    run.close()
    return results


def undisturbed():
    run = Run(HOOKS["post_localsgd"])
    trajectory = run.train(range(11))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.accelerator.get_state_dict(run.model)
    run.close()
    return {"trajectory": trajectory, "warnings": [str(w.message) for w in caught]}


def within_a_step():
    """Gradients when the same model is evaluated between forward and backward."""
    run = Run(HOOKS["post_localsgd"])
    run.train(range(2))
    value = loss(run.model, batch(run.rank, 7))
    run.evaluate()
    run.accelerator.backward(value)
    mine = [p.grad.clone() for p in run.plain.parameters()]
    run.optimizer.zero_grad()
    reference = make_model()
    reference.load_state_dict(run.plain.state_dict())
    loss(reference, batch(run.rank, 7)).backward()
    expected = [p.grad for p in reference.parameters()]
    run.close()
    return max((a - b).abs().max().item() for a, b in zip(mine, expected, strict=True))


def states(folder, exact):
    """Save after 6 steps, in the middle of a period; go on, and from the checkpoint again."""
    results = {}
    for name, hook in HOOKS.items():
        run = Run(hook, exact_state=exact, resync=not exact)
        run.train(range(6))
        run.evaluate_average()
        path = f"{folder}/{name}-{exact}"
        run.accelerator.save_state(path)
        sent = run.handler.attachments[0].metrics()["bytes_evaluation"]
        whole = run.train(range(6, 14))
        run.close()
        run = Run(hook, exact_state=exact)
        run.accelerator.load_state(path)
        results[name] = {
            "whole": whole,
            "sent": sent,
            "resumed": run.train(range(6, 14)),
            "files": sorted(map(str, Path(path).iterdir())),
        }
        run.close()
    return results


def foreign_state(folder):
    """Loading a checkpoint without hook state, and one with it without the handler."""
    run = Run(HOOKS["diloco, delay"])
    run.train(range(2))
    path = Path(folder, "foreign")
    run.accelerator.save_state(path)
    run.accelerator.wait_for_everyone()
    plain = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs()])
    model = make_model()
    prepared = plain.prepare(model, torch.optim.AdamW(model.parameters()), run.scheduler.scheduler)
    plain.load_state(path)
    same = all(torch.equal(a, b) for a, b in zip(model.parameters(), run.plain.parameters(), strict=True))
    plain.wait_for_everyone()
    if run.rank == 0:
        (path / "lightning_commhooks.bin").unlink()
    plain.wait_for_everyone()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.accelerator.load_state(path)
    run.train(range(3))
    run.close()
    return {"same": same, "prepared": len(prepared), "warnings": [str(w.message) for w in caught]}


def refusals():
    # Both with warnings of their own.
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer

    texts = []
    for optimizer_first in (True, False):
        accelerator = Accelerator(cpu=True, kwargs_handlers=[CommHookKwargs(hook=HOOKS["post_localsgd"])])
        model = make_model()
        if optimizer_first:  # Accelerate itself cannot take a ZeroRedundancyOptimizer here
            plain = torch.optim.SGD(model.parameters(), lr=0.1)
            optimizer = PostLocalSGDOptimizer(optim=plain, averager=PeriodicModelAverager(period=4))
        else:
            optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
        try:
            accelerator.prepare(*((optimizer, model) if optimizer_first else (model, optimizer)))
        except ValueError as error:
            texts.append(str(error))
        accelerator.free_memory()
    return texts


def broken_on_one_rank(folder):
    """What each rank says of a file that rank 1 cannot read."""
    run = Run(HOOKS["post_localsgd"])
    own = Path(folder, f"own-{run.rank}")
    own.mkdir()
    if run.rank:
        (own / "lightning_commhooks.bin").write_bytes(b"nothing that torch could load")
    else:
        shutil.copy(f"{folder}/post_localsgd-True/lightning_commhooks.bin", own)
    text = ""
    try:
        run.handler.events(run.accelerator).read(own)
    except ValueError as error:
        text = str(error)
    run.close()
    return text


def in_one_process(path):
    """What a checkpoint of two processes evaluates to in one, where there is no DDP."""
    run = Run(HOOKS["post_localsgd"])
    run.accelerator.load_state(path)
    return run.evaluate()


def main(folder):
    results = {
        "trajectories": trajectories(),
        "overflows": overflows(),
        "evaluations": {resync: evaluations(resync) for resync in (False, True)},
        "undisturbed": undisturbed(),
        "within_a_step": within_a_step(),
        "states": {exact: states(folder, exact) for exact in (False, True)},
        "foreign_state": foreign_state(folder),
        "broken_on_one_rank": broken_on_one_rank(folder),
        "refusals": refusals(),
    }
    accelerator = Accelerator(cpu=True)
    torch.save(results, f"{folder}/{accelerator.process_index}.pt")
    accelerator.end_training()


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message="training ended after")
    main(sys.argv[1])
