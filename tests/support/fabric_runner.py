"""Run by `test_fabric.py` in each of two processes: `CompressedDDPFabricStrategy`, results as a file."""

import copy
import gc
import sys
import warnings
import weakref

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from lightning.fabric.utilities.exceptions import MisconfigurationException
from small_task import batch, loss, make_model

import lightning_commhooks as lc
from lightning_commhooks import CompressedDDPFabricStrategy

ALONE = {"start_localSGD_iter": 0, "post_local_gradient_allreduce": False}
HOOKS = {
    "powersgd": lc.PowerSGD(start_powerSGD_iter=2, min_compression_rate=1),
    "post_localsgd": lc.PostLocalSGD(period=4, **ALONE),
    "diloco, delay": lc.DiLoCo(period=4, delay=3, fragments=2, **ALONE),
}


def parameters(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


class Run:
    """One Fabric with two models and an optimizer each, the second of which steps every other time."""

    def __init__(self, hook, **options):
        self.strategy = CompressedDDPFabricStrategy(hook=hook, find_unused_parameters=False, **options)
        self.fabric = Fabric(accelerator="cpu", devices=2, strategy=self.strategy)
        self.fabric.launch()
        self.plain = [make_model(3), make_model(4)]
        setups = [self.fabric.setup(m, torch.optim.AdamW(m.parameters(), lr=0.02)) for m in self.plain]
        self.models, self.optimizers = [m for m, _ in setups], [o for _, o in setups]
        self.rank = self.fabric.global_rank

    def train(self, steps):
        """Parameters of both models after each step of both."""
        trajectory = []
        for step in steps:
            for k in (0, 1) if step % 2 else (0,):
                self.fabric.backward(loss(self.models[k], batch(self.rank, 10 * step + k)))
                self.optimizers[k].step()
                self.optimizers[k].zero_grad()
            if step % 2:
                trajectory.append([parameters(model) for model in self.plain])
        return trajectory

    def evaluate(self):
        self.fabric.barrier()
        values = []
        for model in self.models:
            model.eval()
            with torch.no_grad():
                values.append(loss(model, batch(9, 9)).item())
            model.train()
        return values

    def state(self):
        models = {f"model{k}": model for k, model in enumerate(self.models)}
        return {**models, **{f"optimizer{k}": o for k, o in enumerate(self.optimizers)}, "step": 6}

    def close(self):
        for attachment in self.strategy.attachments:
            attachment.average_weights()
            attachment.close()


def run_with(name, folder, exact):
    """Train, evaluate, save in the middle of a period; go on, and from the checkpoint again."""
    run = Run(HOOKS[name], exact_state=exact, resync=not exact)
    before = run.train(range(6))
    values = run.evaluate()
    path = f"{folder}/{name}-{exact}.ckpt"
    run.fabric.save(path, run.state())
    whole = run.train(range(6, 14))
    registered = run.models[0]._forward_module._get_ddp_logging_data()["comm_hook"]
    steps = [attachment.metrics()["steps"] for attachment in run.strategy.attachments]
    twin = copy.deepcopy(run.strategy)
    assert twin.hook == run.strategy.hook == HOOKS[name]
    assert twin.attachments == []
    assert [a.is_closed for a in run.strategy.attachments] == [False, False]
    run.close()
    run = Run(HOOKS[name], exact_state=exact)
    state = {**run.state(), "step": 0}
    rest = run.fabric.load(path, state)
    resumed = run.train(range(6, 14))
    run.close()
    return {
        "before": before,
        "values": values,
        "whole": whole,
        "resumed": resumed,
        "rest": sorted(rest),
        "step": state["step"],
        "registered": registered,
        "steps": steps,
    }


def undisturbed(name, folder):
    run = Run(HOOKS[name])
    trajectory = run.train(range(14))
    run.fabric.save(f"{folder}/{name}.ckpt", run.state())
    saved = [attachment.metrics()["bytes_evaluation"] for attachment in run.strategy.attachments]
    run.fabric.barrier()
    end = [parameters(model) for model in run.plain]
    run.close()
    return {"trajectory": trajectory, "end": end, "saved": saved}


def checkpoints(folder):
    """Ours in a plain Fabric, and one of a plain Fabric in ours."""
    fabric = Fabric(accelerator="cpu", devices=2, strategy=DDPStrategy())
    fabric.launch()
    module = make_model()
    model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters()))
    rest = fabric.load(f"{folder}/diloco, delay-True.ckpt", {"model0": model, "optimizer0": optimizer})
    fabric.save(f"{folder}/plain.ckpt", {"model0": model})
    with pytest.raises(
        ValueError, match=r"not to _FabricModule; attach\(model\.get_submodule\('_forward_module'\), hook\)"
    ):
        lc.attach(model, "int8")
    run = Run(HOOKS["diloco, delay"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.fabric.load(f"{folder}/plain.ckpt", {"model0": run.models[0]})
    same = parameters(run.plain[0]).keys() == parameters(module).keys() and all(
        torch.equal(a, b) for a, b in zip(run.plain[0].parameters(), module.parameters(), strict=True)
    )
    try:
        other = Run(lc.PowerSGD(start_powerSGD_iter=2))
        other.fabric.load(f"{folder}/diloco, delay-True.ckpt", {"model0": other.models[0]})
    except MisconfigurationException as error:
        refused = str(error)
    run.close()
    other.close()
    return {"rest": sorted(rest), "warnings": [str(w.message) for w in caught], "same": same, "refused": refused}


def by_name(folder):
    """A checkpoint of two models into models that are set up in the other order, into one of them, into others."""
    path, hook = f"{folder}/by_name.ckpt", HOOKS["diloco, delay"]
    run = Run(hook, exact_state=True)
    run.train(range(6))
    run.fabric.save(path, run.state())
    run.fabric.save(f"{folder}/one.ckpt", {"model1": run.models[1]})
    whole = run.train(range(6, 14))
    run.close()
    run = Run(hook, exact_state=True)
    run.models.reverse(), run.optimizers.reverse(), run.plain.reverse()
    run.fabric.load(path, run.state())
    resumed = run.train(range(6, 14))
    run.fabric.load(f"{folder}/one.ckpt", {"model1": run.models[1]})
    with pytest.raises(MisconfigurationException) as refused:
        run.fabric.load(f"{folder}/one.ckpt", {"model0": run.models[0], "model1": run.models[1]}, strict=False)
    run.close()
    run = Run(hook, exact_state=True, strict_state=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.fabric.load(f"{folder}/one.ckpt", {"model0": run.models[0], "model1": run.models[1]}, strict=False)
    loaded = [int(attachment.state_dict()["steps"]) for attachment in run.strategy.attachments]
    run.close()
    return {
        **{"whole": whole, "resumed": resumed, "refused": str(refused.value), "loaded": loaded},
        "warnings": [str(warning.message) for warning in caught],
    }


def sharded():
    from torch.distributed.optim import ZeroRedundancyOptimizer

    fabric = Fabric(accelerator="cpu", devices=2, strategy=CompressedDDPFabricStrategy(hook=HOOKS["post_localsgd"]))
    fabric.launch()
    module = make_model()
    try:
        fabric.setup(module, ZeroRedundancyOptimizer(module.parameters(), torch.optim.SGD, lr=0.1))
    except MisconfigurationException as error:
        return str(error)


def replaced():
    """Whether optimizers of earlier models still exist on a `Fabric` that sets up several models one by one."""
    fabric = Fabric(accelerator="cpu", devices=2, strategy=CompressedDDPFabricStrategy(hook="bf16"))
    fabric.launch()
    found = []
    for _ in range(2):
        module = make_model()
        model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters()))
        found.append(weakref.ref(optimizer.optimizer))
        del model, optimizer, module
        gc.collect()
    return [one() is not None for one in found]


def main():
    folder = sys.argv[1]
    warnings.filterwarnings("ignore", message="training ended after")
    results = {(name, exact): run_with(name, folder, exact) for name in HOOKS for exact in (False, True)}
    results["undisturbed"] = {name: undisturbed(name, folder) for name in HOOKS}
    results["checkpoints"] = checkpoints(folder)
    results["by name"] = by_name(folder)
    results["sharded"] = sharded()
    results["replaced"] = replaced()
    torch.save(results, f"{folder}/{torch.distributed.get_rank()}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
