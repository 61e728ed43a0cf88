"""A rank that fails or is killed is an error on the others within seconds: on CPU, and on CUDA devices the same."""

import pytest
from forks import PATIENCE
from gpu_steps import PLACES, launch

# PLACES have the mark: pytest.mark.gpu
SOON = 20 * PATIENCE


@pytest.mark.parametrize(("device", "backend"), PLACES)
@pytest.mark.parametrize(("what", "says"), [("raises", "out of numbers"), ("killed", "")])
def test_others_end_soon(what, says, device, backend):
    # PyTorch waits four times as many milliseconds, a minute by default, before an error of NCCL ends a process.
    soon = {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1000"}
    ranks = launch("gpu_failures_runner.py", device, backend, what, timeout=SOON + 30, **soon)
    (first_code, first_output, first_errors, first_at), (last_code, last_output, last_errors, last_at) = ranks
    texts = f"rank 0: {first_errors[-3000:]}\nrank 1: {last_errors[-3000:]}"
    assert first_output == last_output == "step 3\n", texts
    assert last_code == (-9 if what == "killed" else 1) or (what == "raises" and last_code), texts
    assert says in last_errors, texts
    assert first_code is not None, f"rank 0 still waits after {SOON} s\n{texts}"
    assert first_code != 0, texts
    assert first_at - last_at < SOON, texts
