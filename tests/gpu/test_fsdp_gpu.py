"""FSDP hooks on two ranks of NCCL, which may share a CUDA device."""

import json

import pytest
from fsdp_driver import HOOKS, UNITS, WAYS1, WAYS2
from gpu_steps import NCCL, launch_well, needs_one

pytestmark = [pytest.mark.gpu, needs_one]


@pytest.fixture(scope="module", params=NCCL)
def results(request):
    return json.loads(launch_well("fsdp_gpu_runner.py", "cuda", request.param)[0].splitlines()[-1])


@pytest.mark.parametrize("way", [*WAYS1, *WAYS2])
@pytest.mark.parametrize("label", HOOKS)
def test_errors_and_bytes(results, way, label):
    result = results[f"{way} {label}"]
    relative, absolute = result["errors"]
    name = label.split("+")[0]
    if name == "int8":
        assert absolute < 2 * 1.5 / 127
    else:
        # The sum over 2 ranks is rounded too.
        assert relative < 2.02 * UNITS.get(name, 1e-6)
    expected = {"allreduce": 1, "int8": 4 * 128 / 132}.get(name, 2)
    assert result["metrics"]["compression_ratio"] == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_as_exact_as_the_hooks_of_pytorch(results, name):
    assert results[f"FULL_SHARD {name}"]["errors"][0] <= 1.01 * results[f"stock {name}"]["errors"][0]
