"""Frameworks with a hook, one device on each of two nodes: on CPU, and on CUDA devices the same, which may be one."""

import importlib.util
import json

import pytest
from gpu_steps import launch_well, needs_one

PLACES = [
    pytest.param("cpu", "gloo", id="cpu"),
    pytest.param("cuda", "nccl", marks=[pytest.mark.gpu, needs_one], id="nccl"),
]


@pytest.mark.parametrize(("device", "backend"), PLACES)
@pytest.mark.parametrize("framework", ["lightning", "accelerate", "transformers"])
def test_framework(framework, device, backend, tmp_path):
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"needs {framework}")
    environment = {"ACCELERATE_USE_CPU": "true"} if device == "cpu" else {}
    outputs = launch_well("gpu_frameworks_runner.py", device, framework, str(tmp_path), timeout=90, **environment)
    for output in outputs:
        found = json.loads(output.splitlines()[-1])
        assert backend in found["backend"]
        assert found["device"] == device
        assert found["world"] == 2
        assert found["sums"][0] == found["sums"][1]
        assert found["losses"][-1] < found["losses"][0]
        assert found["steps"] == 12
        assert found["ratio"] > 3
