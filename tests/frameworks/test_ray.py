"""Ray Train with two workers on a Ray that is started once; the runs are in ray_runner.py."""

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from forks import FOLDER, alone, run_alone
from test_examples import check_line, check_page

MISSING = [
    name for name in ("ray", "pyarrow", "lightning", "accelerate", "sklearn") if importlib.util.find_spec(name) is None
]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"needs {MISSING}: pip install '.[ray,accelerate]'")

EPOCHS, SAVED = 5, 2  # of 4 steps each


class Results:
    """What the workers wrote, by label."""

    def __init__(self, out):
        self.out = out

    def __call__(self, label, rank=0):
        return json.loads((self.out / f"{label}.{rank}.json").read_text())

    def both(self, label):
        """Rank 0's results, after a check that the model is the same on rank 1, in another process."""
        mine, other = self(label), self(label, 1)
        assert mine["params"] == other["params"]
        assert all(map(math.isfinite, mine["params"]))
        assert mine["pid"] != other["pid"]
        return mine


@pytest.fixture(scope="module")
def ray(tmp_path_factory):
    out = tmp_path_factory.mktemp("ray")
    run_alone(FOLDER / "ray_runner.py", out, environment=alone(), timeout=300)
    return Results(out)


def test_strategy_trains_with_its_hook(ray):
    whole, dense = ray.both("whole"), ray.both("dense")
    assert (whole["world_size"], whole["rank"], ray("whole", 1)["rank"]) == (2, 0, 1)
    assert whole["comm_hook"] == "lightning_commhooks:powersgd"
    assert dense["comm_hook"] == "lightning_commhooks:allreduce"
    assert whole["metrics"]["steps"] == whole["global_step"] == 4 * EPOCHS
    assert whole["loss"] < dense["loss"] / 2, "after one epoch"
    assert dense["metrics"]["bytes_sent"] == dense["metrics"]["bytes_dense"]
    assert whole["metrics"]["bytes_sent"] < whole["metrics"]["bytes_dense"] / 2


def test_worker_that_is_killed_is_replaced_and_the_run_ends_as_if_nothing_was(ray):
    """By `FailureConfig`, from the last checkpoint of `RayTrainReportCallback`."""
    assert (ray.out / "died").exists()
    restarted = ray.both("restarted")
    assert restarted["metrics"]["steps"] == 4 * (EPOCHS - 3), "of the new processes, since the end of the third epoch"
    assert restarted["global_step"] == 4 * EPOCHS
    assert restarted["params"] == ray("whole")["params"]


def test_another_run_goes_on_from_a_checkpoint(ray):
    """With a strategy that the driver has made."""
    resumed = ray.both("resumed")
    assert resumed["comm_hook"] == "lightning_commhooks:powersgd"
    assert resumed["metrics"]["steps"] == 4 * (EPOCHS - SAVED)
    assert resumed["params"] == ray("whole")["params"]


def test_attach_to_a_prepared_model(ray):
    whole, resumed = ray.both("loop"), ray.both("loop-resumed")
    assert whole["comm_hook"] == "lightning_commhooks:powersgd"
    assert whole["metrics"]["bytes_sent"] < whole["metrics"]["bytes_dense"] / 2
    assert (whole["metrics"]["steps"], resumed["metrics"]["steps"]) == (12, 6)
    assert resumed["params"] == whole["params"]
    assert (whole["nodes"], whole["node_rank"]) == ([[0, 1]], "0"), "by NODE_RANK, which Ray sets"


def test_accelerate(ray):
    whole, resumed = ray.both("accelerate"), ray.both("accelerate-resumed")
    assert whole["num_processes"] == 2
    assert whole["comm_hook"] == "lightning_commhooks:powersgd"
    assert whole["metrics"]["bytes_sent"] < whole["metrics"]["bytes_dense"] / 2
    assert (whole["metrics"]["steps"], resumed["metrics"]["steps"]) == (8, 4)
    assert resumed["params"] == whole["params"]


def test_scripts_of_the_page(ray):
    found = json.loads((ray.out / "documented.json").read_text())
    assert found["epochs"] == 2
    assert any("hook" in key.lower() for key in found["train"]), found["train"]
    assert found["loop"] == ["epoch", "hook", "model"]
    assert found["sent"] > 0


def test_example(ray):
    stdout = (ray.out / "example.txt").read_text()
    check_line(stdout, "powersgd", 5)
    check_page("ray/digits.py", stdout)


@pytest.mark.parametrize(
    ("label", "text"),
    [
        ("hook", "CompressedRayDDPStrategy: unknown hook 'powersdg'"),
        ("timeout", "does not take timeout=datetime.timedelta(seconds=9): Ray makes the process group"),
        ("backend", "does not take process_group_backend='gloo': Ray makes the process group"),
        ("start_method", "does not take start_method='spawn': Ray has started the workers"),
        ("ddp_comm_hook", "pass it as hook=..."),
        ("unknown", "has no option 'kwargs', and neither has DistributedDataParallel"),
    ],
)
def test_refused_when_made(ray, label, text):
    refused = json.loads((ray.out / "refusals.json").read_text())
    assert refused[label].startswith("MisconfigurationException: CompressedRayDDPStrategy")
    assert text in refused[label]


def test_mistakes_in_a_worker(ray):
    for rank in (0, 1):
        errors = ray("errors", rank)
        assert "hooks attach to torch.nn.parallel.DistributedDataParallel, not to Sequential" in errors["plain"]
        assert "RayLightningEnvironment" in errors["environment"]


def test_strategy_is_of_the_package_that_ray_chose(ray):
    bases = json.loads((ray.out / "refusals.json").read_text())["bases"]
    assert "lightning.pytorch.strategies.ddp.DDPStrategy" in bases
    if importlib.util.find_spec("pytorch_lightning") is None:
        return
    code = """
import sys
sys.modules["lightning"] = None  # import fails
import pytorch_lightning as pl
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from lightning_commhooks import *
print(issubclass(CompressedRayDDPStrategy, pl.strategies.DDPStrategy))
print(issubclass(CompressedRayDDPStrategy._callback_class, pl.Callback))
try:
    CompressedRayDDPStrategy(hook="nothing")
except MisconfigurationException:
    print(True)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=alone())
    assert done.stdout.split() == ["True", "True", "True"], done.stderr


def test_nothing_is_left(ray):
    folder = (ray.out / "folder.txt").read_text()
    assert not Path(folder).exists()
    running = []
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            running.append(process.read_bytes().decode(errors="replace"))
        except (FileNotFoundError, ProcessLookupError):
            continue
    assert [command for command in running if folder in command] == []
