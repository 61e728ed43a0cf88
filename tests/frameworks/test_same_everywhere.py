"""The same model, data, seed and hook end with the same parameters in every framework."""

import pytest
import torch
from torchrun import run_twice

pytest.importorskip("lightning")
pytest.importorskip("accelerate")
from same_everywhere_runner import HOOKS, Model  # after the check

FRAMEWORKS = ["lightning", "fabric", "accelerate"]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Parameters by framework, rank and hook."""
    folder = tmp_path_factory.mktemp("everywhere")
    for framework in ["plain", *FRAMEWORKS]:
        run_twice("same_everywhere_runner.py", "cpu", framework, folder)
    return {
        framework: [torch.load(folder / f"{framework}-{rank}.pt") for rank in range(2)]
        for framework in ["plain", *FRAMEWORKS]
    }


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("hook", HOOKS)
def test_ends_as_plain_ddp_does(results, framework, hook):
    for rank in range(2):
        for mine, plain in zip(results[framework][rank][hook], results["plain"][rank][hook], strict=True):
            torch.testing.assert_close(mine, plain, rtol=0, atol=1e-6)


@pytest.mark.parametrize("hook", HOOKS)
def test_has_learned_something_of_its_own(results, hook):
    trained, dense = results["plain"][0][hook], results["plain"][0]["allreduce"]
    assert all((p - q).abs().max() > 1e-2 for p, q in zip(trained, Model().parameters(), strict=True))
    if hook != "allreduce":
        assert max((p - q).abs().max() for p, q in zip(trained, dense, strict=True)) > 1e-6
