"""Frameworks with a hook, one device on each of two nodes: on CPU, and on CUDA devices the same, which may be one."""

import importlib.util

import pytest
import torch
from gpu_steps import launch_well, needs_one

PLACES = [
    pytest.param("cpu", "gloo", id="cpu"),
    pytest.param("cuda", "nccl", marks=[pytest.mark.gpu, needs_one], id="nccl"),
]


@pytest.mark.parametrize(("device", "backend"), PLACES)
@pytest.mark.parametrize("framework", ["lightning", "fabric", "accelerate", "transformers"])
def test_framework(framework, device, backend, tmp_path):
    if importlib.util.find_spec({"fabric": "lightning"}.get(framework, framework)) is None:
        pytest.skip(f"needs {framework}")
    environment = {"ACCELERATE_USE_CPU": "true"} if device == "cpu" else {}
    launch_well("same_everywhere_runner.py", device, framework, str(tmp_path), timeout=90, **environment)
    first, second = (torch.load(tmp_path / f"{framework}-{rank}.pt") for rank in range(2))
    assert backend in first.pop("backend")
    for hook, parameters in first.items():
        assert all(map(torch.equal, parameters, second[hook])), hook
