"""What Fabric makes of accumulated micro-batches; for `accumulation_lightning_runner.py`."""

import torch
from accumulation_task import (
    EPOCHS,
    HOOKS,
    LR,
    NUM_BATCHES,
    RUNS,
    WINDOW,
    batch,
    difference,
    loss,
    make_model,
    num_tokens,
    refusal,
    sum_over_tokens,
)
from lightning.fabric import Fabric

import lightning_commhooks as lc

# Gradients of this times the loss are finite in float16, and so are means of them, but not their sums.
LARGE = 7.5e4


class Run:
    """Fabric with models that are trained on the micro-batches that `takes` says, and accumulate by themselves."""

    def __init__(self, accumulation="mean", hook="allreduce", precision="64", num_models=1, lr=LR, **options):
        self.strategy = lc.CompressedDDPFabricStrategy(hook=HOOKS.get(hook, hook), accumulation=accumulation, **options)
        self.dtype = torch.float64 if precision == "64" else torch.float32
        amp = "bf16-mixed" if precision == "bf16" else "32-true"
        self.fabric = Fabric(accelerator="cpu", devices=2, strategy=self.strategy, precision=amp)
        self.fabric.launch()
        self.plain = [make_model(self.dtype, seed=3 + k) for k in range(num_models)]
        setups = [self.fabric.setup(m, torch.optim.SGD(m.parameters(), lr=lr)) for m in self.plain]
        self.models, self.optimizers = [m for m, _ in setups], [o for _, o in setups]

    def backward(self, k, i, divided_by, name_model=True):
        model, rank = self.models[k], self.fabric.global_rank
        if divided_by == "tokens":
            value = sum_over_tokens(model, rank, i, self.dtype)
            self.strategy.add_weight(num_tokens(rank, i), model if name_model else None)
        else:
            value = loss(model, batch(rank, i, self.dtype)) / divided_by
        self.fabric.backward(value)

    def train(self, divided_by=1, takes=lambda k, i: True, all_sync=False, name_model=True):
        for i in list(range(NUM_BATCHES)) * EPOCHS:
            steps = i % WINDOW == WINDOW - 1 or i == NUM_BATCHES - 1
            for k, model in enumerate(self.models):
                with self.fabric.no_backward_sync(model, enabled=not (steps or all_sync)):
                    if takes(k, i):
                        self.backward(k, i, divided_by, name_model)
                if steps:
                    self.optimizers[k].step()
                    self.optimizers[k].zero_grad()
        return self.close()

    def close(self):
        for attachment in self.strategy.attachments:
            attachment.close()
        models = [model._forward_module for model in self.models]
        changes = [difference(m, make_model(self.dtype, seed=3 + k)) for k, m in enumerate(self.plain)]
        return {
            "change": changes[0],
            "other": changes[-1],
            "hook": models[0]._get_ddp_logging_data()["comm_hook"],
            "steps": self.strategy.attachments[0].metrics()["steps"],
        }


def refusals():
    two = Run("weighted", num_models=2)
    plain = Run("mean")
    runs = {
        "refused: not weighted": lambda: plain.strategy.add_weight(1.0),
        "refused: no model named": lambda: two.train("tokens", name_model=False),
        "refused: each synchronizes": lambda: Run().train(all_sync=True),
        "refused: no weight": Run("weighted").train,
    }
    texts = {name: refusal(run) for name, run in runs.items()}
    two.close(), plain.close()
    return texts


def results():
    runs = {run: Run(*run).train() for run in RUNS}
    return runs | {
        "divided": Run(loss_divided_by=WINDOW).train(divided_by=WINDOW),
        "divided, framework": Run("framework", loss_divided_by=WINDOW).train(divided_by=WINDOW),
        "large": Run("mean", "fp16", "32", lr=LR / LARGE).train(divided_by=1 / LARGE),
        "sum": Run("sum", loss_divided_by=lambda: WINDOW).train(divided_by=WINDOW),
        "integer": Run(WINDOW).train(),
        "weighted": Run("weighted").train("tokens"),
        "two models": Run(num_models=2).train(takes=lambda k, i: k == 0 or i % 2),
        "two models, weighted": Run("weighted", num_models=2).train("tokens", takes=lambda k, i: k == 0 or i % 2),
        **refusals(),
    }
