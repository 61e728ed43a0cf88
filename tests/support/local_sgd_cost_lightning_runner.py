"""What Lightning's real `Trainer` sends to validate and to save, for test_local_sgd_cost_hosts.py."""

import logging
import warnings

from lightning_runner import OUT, CompressedDDP, pl, write
from local_sgd_lightning_runner import ALONE, VALIDATION, Regression, train

import lightning_commhooks as lc
from lightning_commhooks.testing.rules import _measuring

HOOKS = {
    "post": lc.PostLocalSGD(period=4, **ALONE),
    "averaged": lc.PostLocalSGD(period=4, optimizer_state="average", **ALONE),
}


class Costs(pl.Callback):
    """Bytes sent so far at certain places: of training, of evaluation, and given to PyTorch's collectives.

    Put before the callback that saves.
    """

    def __init__(self, sent):
        self._sent = sent
        self.costs = []

    def note(self, trainer, place):
        metrics = trainer.strategy.attachment.metrics()
        counted = metrics["bytes_sent"], metrics.get("bytes_evaluation", 0)
        self.costs.append([place, trainer.global_step, *counted, sum(self._sent)])

    def on_train_batch_start(self, trainer, *_):
        self.note(trainer, "train")

    def on_train_batch_end(self, trainer, *_):
        self.note(trainer, "save")  # after this

    def on_validation_start(self, trainer, *_):
        self.note(trainer, "validate")

    def on_validation_end(self, trainer, *_):
        self.note(trainer, "save")

    def on_train_end(self, trainer, *_):
        self.note(trainer, "end")


def costs():
    for name, hook in HOOKS.items():
        for every in (3, 4):
            for resync in (False, True):
                label = f"{name}-{every}-{resync}"
                by_step = pl.callbacks.ModelCheckpoint(
                    dirpath=OUT / label, filename="{step}", save_top_k=-1, every_n_train_steps=every
                )
                by_loss = pl.callbacks.ModelCheckpoint(
                    dirpath=OUT / label, filename="best-{step}", monitor="loss", save_on_train_epoch_end=False
                )
                with _measuring() as sent:
                    noted = Costs(sent)
                    strategy, module = CompressedDDP(hook=hook, resync=resync), Regression("adamw", norm=True)
                    more = [noted, by_step, by_loss]
                    options = {"validation": VALIDATION, "val_check_interval": every}
                    trainer = train(label, strategy, module, batches=12, more=more, **options)
                    noted.note(trainer, "after")
                write(f"{label}-costs", trainer.global_rank, costs=noted.costs)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    warnings.filterwarnings("ignore", module=r"lightning\.|pytorch_lightning\.|lightning_fabric\.")
    costs()
