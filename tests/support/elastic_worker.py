"""What test_elastic.py puts around a script of the docs, in each process that torchrun starts.

`DISTURB` is a list in JSON of what goes wrong: in which attempt, on which rank, after how many steps or in which write
of a checkpoint, and whether the process dies there or stays until somebody kills it.
"""

import json
import os
import signal
import time
from pathlib import Path

import torch
from fsspec.implementations.local import LocalFileOpener
from torch.optim.optimizer import register_optimizer_step_post_hook

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ATTEMPT = int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def disturb():
    """Let come what is to go wrong in this process."""
    for trouble in json.loads(os.environ["DISTURB"]):
        if trouble["attempt"] == ATTEMPT and trouble["rank"] >= WORLD:
            time.sleep(600)  # until torchrun restarts this process, with the node that is late on a busy machine
        if (trouble["rank"], trouble["attempt"]) == (RANK, ATTEMPT):
            _watch_steps(trouble) if "step" in trouble else _watch_writes(trouble["write"])


def _watch_steps(trouble):
    steps = []

    def after_step(*_):
        steps.append(None)
        if len(steps) == trouble["step"]:
            if "stays" not in trouble:
                _die(f"after step {len(steps)}")
            Path(trouble["stays"]).touch()
            time.sleep(600)

    register_optimizer_step_post_hook(after_step)


def _watch_writes(last):
    """Die in the middle of a checkpoint, as Lightning and as Accelerate write one: a file, or several in a folder."""
    write, save, written = LocalFileOpener.write, torch.save, []

    def part_of_a_file(self, content, *args):
        written.append(None)
        if len(written) == last:
            write(self, content[: len(content) // 2])
            self.flush()
            _die("in a file")
        return write(self, content, *args)

    def some_of_the_files(content, file, *args, **kwargs):
        if Path(str(file)).name == "optimizer.bin":
            written.append(None)
            if len(written) == last:
                _die("between files")
        return save(content, file, *args, **kwargs)

    LocalFileOpener.write = part_of_a_file
    torch.save = some_of_the_files


def _die(where):
    print(f"rank {RANK} of attempt {ATTEMPT} dies {where}", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def record(model, attachment, inputs, targets):
    """Write how the run ended."""
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(model.net(inputs), targets).item()
    found = {
        "loss": loss,
        "parameters": torch.cat([p.detach().view(-1) for p in model.parameters()]).tolist(),
        "world_size": int(os.environ["WORLD_SIZE"]),
        "steps": attachment.metrics()["steps"],
        "compressed": attachment.metrics()["numel_compressed"],
    }
    Path(f"ended.{RANK}.json").write_text(json.dumps(found))
