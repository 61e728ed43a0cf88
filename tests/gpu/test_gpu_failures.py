"""A rank that fails or is killed is an error on the others within seconds: on CPU, and on CUDA devices the same."""

import pytest
from forks import PATIENCE
from gpu_steps import PLACES, launch

# PLACES have the mark: pytest.mark.gpu
SOON = 20 * PATIENCE


@pytest.mark.parametrize(("device", "backend"), PLACES)
@pytest.mark.parametrize(("what", "says"), [("raises", "out of numbers"), ("killed", "")])
def test_others_end_soon(what, says, device, backend):
    first, last = launch("gpu_failures_runner.py", device, backend, what, timeout=SOON + 30)
    texts = f"rank 0: {first.errors[-3000:]}\nrank 1: {last.errors[-3000:]}"
    assert first.output == last.output == "step 3\n", texts
    assert last.code == (-9 if what == "killed" else 1) or (what == "raises" and last.code), texts
    assert says in last.errors, texts
    assert first.code is not None, f"rank 0 still waits after {SOON} s\n{texts}"
    assert first.code != 0, texts
    assert first.at - last.at < SOON, texts
