"""Lightning's real `Trainer` as a task of a SLURM job, for test_slurm.py.

    python slurm_runner.py FOLDER HOOK

In the first run of the job, rank 0 is late in step 10: it sleeps, until the test has sent SLURM's signal to both tasks,
and rank 1 waits for it in its backward meanwhile.
"""

import json
import os
import sys
import time
import warnings
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader, TensorDataset

import lightning_commhooks as lc

FOLDER, NAME = Path(sys.argv[1]), sys.argv[2]
RESTARTS = int(os.environ["SLURM_RESTART_COUNT"])
LATE_STEP = 10
HOOKS = {
    "powersgd": lc.PowerSGD(matrix_approximation_rank=2, start_powerSGD_iter=4),
    "post_localsgd": lc.PostLocalSGD(start_localSGD_iter=4, period=4, post_local_gradient_allreduce=False),
}


class Classifier(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 4))

    def training_step(self, batch, batch_idx):
        if (RESTARTS, self.global_step) == (0, LATE_STEP):
            (FOLDER / f"there.{self.global_rank}").touch()
            deadline = time.monotonic() + 120
            while self.global_rank == 0 and not (FOLDER / "signaled").exists() and time.monotonic() < deadline:
                time.sleep(0.01)
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Record(Callback):
    """Writes where a run begins and how it ends."""

    def on_train_start(self, trainer, module):
        attachment = trainer.strategy.attachment
        self.begun = {"global_step": trainer.global_step, "state": attachment.state_dict()["steps"]}

    def on_train_end(self, trainer, module):
        parameters = torch.cat([p.detach().view(-1) for p in module.parameters()]).tolist()
        ended = {**self.begun, "parameters": parameters, "steps": trainer.strategy.attachment.metrics()["steps"]}
        (FOLDER / f"ended-{RESTARTS}.{trainer.global_rank}.json").write_text(json.dumps(ended))


def main():
    torch.manual_seed(0)
    x = torch.randn(256, 16)
    trainer = Trainer(
        accelerator="cpu",
        num_nodes=int(os.environ["SLURM_NNODES"]),
        devices=int(os.environ["SLURM_NTASKS_PER_NODE"]),
        strategy=lc.CompressedDDPStrategy(hook=HOOKS.get(NAME, NAME)),
        callbacks=[Record()],
        default_root_dir=FOLDER,
        max_epochs=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), DataLoader(TensorDataset(x, x[:, :4].argmax(dim=1)), batch_size=16))


if __name__ == "__main__":
    warnings.filterwarnings("ignore", module=r"lightning\.")
    main()
