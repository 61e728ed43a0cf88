"""SLURM's signal before a job's time is over: Lightning saves, has the job requeued, and the next run resumes."""

import json
import os
import signal
import time

import pytest

pytest.importorskip("lightning")

import torch
from forks import FOLDER, FORKS, PATIENCE, alone, free_port

RUNNER = FOLDER / "lightning_runner.py"
JOB = "4711"
STEPS, SIGNALED = 24, 10


class Tasks:
    """The tasks of a job, as `srun` starts them on one node."""

    def __init__(self, folder, hook, restarts):
        self.folder = folder
        port = free_port()
        self.processes = [
            FORKS.start(
                RUNNER,
                "lightning.pytorch",
                folder,
                f"slurm_{hook}",
                environment=self._environment(rank, restarts, port),
            )
            for rank in range(2)
        ]

    def _environment(self, rank, restarts, port):
        of_slurm = {
            **{"SLURM_JOB_ID": JOB, "SLURM_JOB_NAME": "train", "SLURM_NTASKS": 2, "SLURM_NTASKS_PER_NODE": 2},
            **{"SLURM_NNODES": 1, "SLURM_NODELIST": "127.0.0.1", "SLURM_PROCID": rank, "SLURM_LOCALID": rank},
            **{"SLURM_NODEID": 0, "SLURM_RESTART_COUNT": restarts, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
        }
        path = f"{self.folder}{os.pathsep}{os.environ['PATH']}"
        return alone(**{key: str(value) for key, value in of_slurm.items()}, PATH=path, TMPDIR=str(self.folder))

    def wait_for(self, name):
        deadline = time.monotonic() + 30 * PATIENCE
        while not (self.folder / name).exists():
            assert time.monotonic() < deadline, f"there is no {name}: {self.kill()}"
            time.sleep(0.02)

    def send(self, number):
        for process in self.processes:
            process.send_signal(number)

    def kill(self):
        """What SLURM does with a job that is requeued. Returns what the tasks printed."""
        for process in self.processes:
            process.kill()
        return self._close()

    def finish(self):
        for process in self.processes:
            _, errors = process.finish(60)
            assert process.returncode == 0, errors
        self._close()

    def _close(self):
        printed = ""
        for process in self.processes:
            with process:
                printed += "".join(process.printed())
        return printed

    def ended(self):
        """What rank 0 wrote at the beginning and the end, after a check that rank 1 has the same model."""
        mine, other, begun = (
            json.loads((self.folder / f"{name}.json").read_text()) for name in ("ended.0", "ended.1", "begun.0")
        )
        assert mine["params"] == other["params"]
        return {**begun, "steps": mine["metrics"]["steps"]}


def make_scontrol(folder):
    """A `scontrol` that writes what it was asked for into a file."""
    program = folder / "scontrol"
    program.write_text(f'#!/bin/sh\necho "$@" > "{folder}/asked.part"\nmv "{folder}/asked.part" "{folder}/asked"\n')
    program.chmod(0o755)


def to_the_end_of_its_time(folder, hook):
    """A job that gets the signal while rank 1 waits, in a backward, for rank 0. Returns its requeued self."""
    make_scontrol(folder)
    first = Tasks(folder, hook, restarts=0)
    for rank in range(2):
        first.wait_for(f"there.{rank}")
    time.sleep(0.5)  # then rank 1 waits in its backward
    first.send(signal.SIGUSR1)
    time.sleep(0.2)
    (folder / "signaled").touch()
    first.wait_for("asked")
    printed = first.kill()
    assert (folder / "asked").read_text() == f"requeue {JOB}\n"
    second = Tasks(folder, hook, restarts=1)
    second.finish()
    return second, printed


def test_requeued_job_goes_on_with_the_step_count(tmp_path):
    second, printed = to_the_end_of_its_time(tmp_path, "powersgd")
    assert "hpc_ckpt_1.ckpt has only the step count of hook 'powersgd': its memory is reset" in printed
    saved = torch.load(tmp_path / "hpc_ckpt_1.ckpt", weights_only=True)
    assert saved["global_step"] == saved["lightning_commhooks"]["steps"] == SIGNALED
    assert saved["lightning_commhooks"]["hook"] == {"name": "powersgd"}
    ended = second.ended()
    assert ended["global_step"] == ended["state"] == SIGNALED
    assert ended["steps"] == STEPS - SIGNALED


def test_requeued_job_goes_on_from_the_model_of_one_rank(tmp_path):
    second, printed = to_the_end_of_its_time(tmp_path, "post_localsgd")
    assert "the checkpoint has the model of rank 0, which was not averaged" in printed
    ended = second.ended()
    assert ended["global_step"] == ended["state"] == SIGNALED
