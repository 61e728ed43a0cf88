"""Three replicas train on digits with torchft. One is killed and rejoins, and the other two keep training.

    pip install 'lightning-commhooks[lightning,torchft]' scikit-learn
    python examples/torchft/digits.py

Starts all processes on this machine, with a lighthouse. Each replica is a Trainer, with the same command as on a
separate machine: docs/replicas.md.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from hashlib import sha1
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_commhooks import CompressedDDPStrategy, FaultTolerance, PowerSGD

NUM_REPLICAS, MAX_STEPS, DIES_AT = 3, 600, 60


class Digits(LightningModule):
    """A multi-layer perceptron for 8x8 images of digits."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self.net(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Dies(Callback):
    """Kills this process after some steps if the environment has `DIES`."""

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        time.sleep(0.03)  # a step of a larger model; a process that is started again takes seconds
        if "DIES" in os.environ and trainer.global_step == DIES_AT:
            os.kill(os.getpid(), signal.SIGKILL)


def replica(folder: str) -> None:
    """Train, and print a hash of the final weights."""
    for name in ("lightning.pytorch", "lightning.fabric", "torchft.manager"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.manual_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    images, targets = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels)
    options = FaultTolerance(min_replica_size=2, timeout=10, hostname="127.0.0.1")
    hook = PowerSGD(matrix_approximation_rank=4, start_powerSGD_iter=10)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        strategy=CompressedDDPStrategy(hook=hook, fault_tolerance=options),
        callbacks=[Dies()],
        max_steps=MAX_STEPS,
        default_root_dir=Path(folder, str(options.replica_rank)),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Digits()
    trainer.fit(model, DataLoader(TensorDataset(images, targets), batch_size=32, shuffle=True))
    accuracy = (model.net(images).argmax(dim=1) == targets).float().mean()
    weights = sha1(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    print(f"replica {options.replica_rank}: step {trainer.global_step}, accuracy {accuracy:.2f}, weights {weights[:8]}")


def free_port() -> int:
    """A free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    """Start all replicas, and restart the killed one."""
    address = f"127.0.0.1:{free_port()}"
    lighthouse = shutil.which("torchft_lighthouse", path=f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}")
    assert lighthouse is not None, "torchft is not installed: pip install 'lightning-commhooks[torchft]'"
    times = {"min_replicas": 2, "quorum_tick_ms": 20, "join_timeout_ms": 5000, "heartbeat_timeout_ms": 1000}
    words = [word for name, value in times.items() for word in (f"--{name}", str(value))]
    of_all = {
        "TORCHFT_LIGHTHOUSE": f"http://{address}",
        "NUM_REPLICA_GROUPS": str(NUM_REPLICAS),
        **{"RUST_LOG": "error", "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore"},
        "OMP_NUM_THREADS": "1",
    }

    def start(rank: int, **variables: str) -> subprocess.Popen[bytes]:
        environment = {**os.environ, **of_all, "REPLICA_GROUP_ID": str(rank), "MASTER_PORT": str(free_port())}
        return subprocess.Popen([sys.executable, __file__, folder], env={**environment, **variables})

    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen([lighthouse, "--bind", address, *words], **quiet) as served,
    ):
        replicas = [start(rank, **({"DIES": "1"} if rank == 2 else {})) for rank in range(NUM_REPLICAS)]
        try:
            assert replicas[2].wait() == -signal.SIGKILL
            print(f"replica 2 was killed at step {DIES_AT}, and is started again", flush=True)
            replicas[2] = start(2)
            codes = [one.wait() for one in replicas]
        finally:
            for process in (served, *replicas):
                process.kill()
    sys.exit(any(codes))


if __name__ == "__main__":
    replica(sys.argv[1]) if len(sys.argv) > 1 else main()
