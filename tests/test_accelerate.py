"""`CommHookKwargs` under torchrun in two real processes, and its refusals."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs

from accelerate_integration import CommHookKwargs
from lightning_commhooks import PowerSGD

RUNNER = Path(__file__).parent / "accelerate_runner.py"


@pytest.fixture(scope="module")
def results():
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(RUNNER.parents[1]), "PYTHONWARNINGS": "ignore"}
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [sys.executable, *launch, str(RUNNER)],
        capture_output=True,
        text=True,
        timeout=120,
        env=env,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))


def test_scaler_of_the_accelerator_is_used(results):
    plain, scaled = results["scaled"]
    assert scaled == pytest.approx(plain, rel=1e-5)


@pytest.mark.parametrize(
    ("key", "hook"),
    [("name", "allreduce"), ("alias", "batched_powersgd"), ("enum", "bf16"), ("configured", "powersgd")],
)
def test_trains_with_the_hook(results, key, hook):
    result = results[key]
    assert result["comm_hook"] == f"lightning_commhooks:{hook}"
    assert result["find_unused_parameters"] is True
    assert result["steps"] == 5
    assert result["sums"][0] == result["sums"][1]


def test_ddp_fields_reach_ddp_and_no_others():
    handler = CommHookKwargs(hook="bf16", bucket_cap_mb=7)
    assert handler.to_kwargs() == {"bucket_cap_mb": 7}


def test_accelerate_still_looks_handlers_up_by_exact_class():
    # When this fails, Accelerate accepts subclasses: CommHookKwargs.__class__ can go.
    class Subclass(DistributedDataParallelKwargs):
        pass

    from accelerate import Accelerator

    with pytest.raises(KeyError):
        Accelerator(cpu=True, kwargs_handlers=[Subclass()])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "needs hook="),
        ({"hook": "powersdg"}, "did you mean 'powersgd'"),
        ({"hook": PowerSGD}, "did you mean PowerSGD\\(\\)"),
        ({"hook": "bf16", "hook_state": object()}, "hook_state"),
        ({"hook": "bf16", "comm_hook": DDPCommunicationHookType.FP16}, "hook=PowerSGD"),
        ({"hook": "bf16", "comm_wrapper": DDPCommunicationHookType.FP16}, "hook=Cast"),
    ],
)
def test_refusals_name_the_fix(fields, message):
    with pytest.raises(ValueError, match=message):
        CommHookKwargs(**fields)
