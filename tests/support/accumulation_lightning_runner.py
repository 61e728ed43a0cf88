"""Run by `test_accumulation_hosts.py` in each of two processes: Lightning, results as a file."""

import contextlib
import sys
import warnings

import accumulation_fabric
import lightning.pytorch as pl
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
from torch.utils.data import DataLoader

import lightning_commhooks as lc


class Automatic(pl.LightningModule):
    """Batches are numbers: each rank makes its own."""

    def __init__(self, dtype):
        super().__init__()
        self.net = make_model(dtype)
        self.dtype_of_data = dtype

    def value(self, i):
        return loss(self.net, batch(self.global_rank, i, self.dtype_of_data))

    def training_step(self, i, batch_idx):
        return self.value(i)

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=LR)


class Weighted(Automatic):
    def value(self, i):
        self.trainer.strategy.add_weight(num_tokens(self.global_rank, i))
        return sum_over_tokens(self.net, self.global_rank, i, self.dtype_of_data)


class Unweighted(Automatic):
    """One rank does not say how much its second batch counts."""

    def value(self, i):
        if i != 1 or self.global_rank == 0:
            self.trainer.strategy.add_weight(1.0)
        return super().value(i)


class Manual(Automatic):
    """Backwards synchronize where the optimizer steps."""

    def __init__(self, dtype):
        super().__init__(dtype)
        self.automatic_optimization = False

    def training_step(self, i, batch_idx):
        steps = i % WINDOW == WINDOW - 1 or i == NUM_BATCHES - 1
        with contextlib.nullcontext() if steps else self.trainer.strategy.block_backward_sync():
            self.manual_backward(self.value(i))
        if steps:
            self.optimizers().step()
            self.optimizers().zero_grad()


class EachSynchronizes(Manual):
    def training_step(self, i, batch_idx):
        self.manual_backward(self.value(i))
        if i % WINDOW == WINDOW - 1 or i == NUM_BATCHES - 1:
            self.optimizers().step()
            self.optimizers().zero_grad()


class ManualWeighted(Manual, Weighted):
    pass


class Toggled(Manual):
    """The same by Lightning's context of an optimizer."""

    def training_step(self, i, batch_idx):
        steps = i % WINDOW == WINDOW - 1 or i == NUM_BATCHES - 1
        with self.optimizers().toggle_model(sync_grad=steps):
            self.manual_backward(self.value(i))
        if steps:
            self.optimizers().step()
            self.optimizers().zero_grad()


class TwoOptimizers(Manual):
    """Two networks, each with a backward of its own in each step."""

    def __init__(self, dtype):
        super().__init__(dtype)
        self.other = make_model(dtype, seed=4)

    def training_step(self, i, batch_idx):
        steps = i % WINDOW == WINDOW - 1 or i == NUM_BATCHES - 1
        self.begin(i)
        for net, optimizer in zip((self.net, self.other), self.optimizers(), strict=True):
            with optimizer.toggle_model(sync_grad=steps):
                self.manual_backward(self.value_of(net, i))
            if steps:
                optimizer.step()
                optimizer.zero_grad()

    def begin(self, i):
        pass

    def value_of(self, net, i):
        return loss(net, batch(self.global_rank, i, self.dtype_of_data))

    def configure_optimizers(self):
        return [torch.optim.SGD(net.parameters(), lr=LR) for net in (self.net, self.other)]


class TwoWeighted(TwoOptimizers):
    """The weight is that of the micro-batch, for both."""

    def begin(self, i):
        self.trainer.strategy.add_weight(num_tokens(self.global_rank, i))

    def value_of(self, net, i):
        return sum_over_tokens(net, self.global_rank, i, self.dtype_of_data)


class Scaled(pl.plugins.precision.MixedPrecision):
    """The scaler of "16-mixed", without autocast, so that everything is exact."""

    def __init__(self):
        super().__init__("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3))

    def forward_context(self):
        return contextlib.nullcontext()


class Registered(pl.Callback):
    def on_train_start(self, trainer, module):
        self.name = trainer.strategy.model._get_ddp_logging_data()["comm_hook"]


def fit(
    accumulation="mean", hook="allreduce", precision="64", module=Automatic, scaled=False, by=WINDOW, more=(), **ddp
):
    """Train two epochs; `by` batches are accumulated by the trainer, which manual optimization has to do itself."""
    dtype = torch.float64 if precision == "64" else torch.float32
    strategy = lc.CompressedDDPStrategy(hook=HOOKS.get(hook, hook), accumulation=accumulation, **ddp)
    registered = Registered()
    model = module(dtype)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        max_epochs=EPOCHS,
        strategy=strategy,
        accumulate_grad_batches=by if model.automatic_optimization else 1,
        use_distributed_sampler=False,
        callbacks=[registered, *more],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **({"plugins": [Scaled()]} if scaled else {"precision": "bf16-mixed" if precision == "bf16" else "32-true"}),
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(model, DataLoader(range(NUM_BATCHES), batch_size=None))
    result = {
        "change": difference(model.net, make_model(dtype)),
        "hook": registered.name,
        "steps": strategy.attachment.metrics()["steps"],
        "warnings": [str(w.message) for w in caught if "accumulation=" in str(w.message)],
    }
    if isinstance(model, TwoOptimizers):
        result["other"] = difference(model.other, make_model(dtype, seed=4))
    return result


def results():
    runs = {run: fit(*run) for run in RUNS}
    schedule = pl.callbacks.GradientAccumulationScheduler({0: WINDOW, 1: 3})
    return runs | {
        "scaled": fit("mean", "powersgd", scaled=True),
        "scheduler": fit(by=1, more=[schedule]),
        "scheduler, framework": fit("framework", by=1, more=[schedule]),
        "sum": fit("sum"),
        "integer": fit(WINDOW),
        "weighted": fit("weighted", module=Weighted),
        "manual": fit(module=Manual),
        "manual, integer": fit(WINDOW, module=Manual),
        "manual, weighted": fit("weighted", module=ManualWeighted),
        "toggled": fit(module=Toggled),
        "two optimizers": fit(module=TwoOptimizers, find_unused_parameters=True),
        "two optimizers, weighted": fit("weighted", module=TwoWeighted, find_unused_parameters=True),
        "refused: each synchronizes": refusal(fit, module=EachSynchronizes),
        "refused: not weighted": refusal(fit, "mean", module=Weighted),
        "refused: no weight": refusal(fit, "weighted", module=Automatic),
        "refused: no weight on one rank": refusal(fit, "weighted", module=Unweighted),
    }


def main():
    warnings.filterwarnings("ignore")
    found = {"lightning": results(), "fabric": accumulation_fabric.results()}
    torch.save(found, f"{sys.argv[1]}/{torch.distributed.get_rank()}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
