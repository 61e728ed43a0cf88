"""Options of hooks in the wrong place, given to strategies; and what a Trainer of one process says."""

import pytest

pytest.importorskip("lightning")

import lightning.pytorch  # noqa: F401  # sets environment variables

import lightning_commhooks as lc

RANK_4 = "hook=PowerSGD(matrix_approximation_rank=4)"
STRATEGIES = [
    "CompressedDDPStrategy",
    "CompressedDDPStrategyPL",
    "CompressedDDPFabricStrategy",
    "CompressedRayDDPStrategy",
]
SHARDED = ["CompressedFSDPStrategy", "CompressedModelParallelStrategy"]


def refusal(name, *args, **options):
    """What a strategy says; its exception is Lightning's own."""
    if name.endswith("PL"):
        pytest.importorskip("pytorch_lightning")
    with pytest.raises(Exception, match=f"^{name}") as caught:
        getattr(lc, name)(*args, **options)
    assert type(caught.value).__name__ == "MisconfigurationException"
    return str(caught.value)


@pytest.mark.parametrize("name", STRATEGIES)
def test_strategies(name, monkeypatch):
    if "Ray" in name:
        monkeypatch.setenv("RAY_CLIENT_MODE", "0")  # as importing Ray does
        pytest.importorskip("ray.train.lightning")
    assert f"Write {RANK_4}" in refusal(name, hook="powersgd", rank=4)
    assert f"Write {RANK_4}" in refusal(name, rank=4)
    assert "did you mean 'powersgd'" in refusal(name, hook="powersdg")
    assert RANK_4 in refusal(name, "powersgd", {"rank": 4}), "positionally, as the state of a function"
    assert "did you mean 'find_unused_parameters'?" in refusal(name, "int8", find_unused_parameter=True)
    assert "did you mean 'resync'?" in refusal(name, "int8", resinc=True)
    for option in ("exact_state", "strict_state", "resync"):
        assert f"{option} must be True or False, got 'no'" in refusal(name, "int8", **{option: "no"})
    assert "it is for sharded models: for CompressedModelParallelStrategy" in refusal(name, "int8", gather_hook="int8")
    assert "Lightning and Accelerate supply it: leave it out" in refusal(name, "int8", grad_scaler=None)
    assert refusal(name).startswith(f"{name} needs hook=, the name of a hook or a configured one, such as hook='powers")


def test_options_of_fabric():
    for options, text in [
        ({"num_steps": "100"}, "num_steps must be an integer of at least 1, got '100'"),
        ({"loss_divided_by": 0}, "loss_divided_by must be a positive number or a function, got 0"),
    ]:
        assert text in refusal("CompressedDDPFabricStrategy", "int8", **options)


@pytest.mark.parametrize("name", SHARDED)
def test_sharded_strategies(name):
    assert "Write hook=Int8(" in refusal(name, hook="int8", block_size=128)
    assert "such as hook='bf16'" in refusal(name)
    assert "write hook=Int8(use_error_feedback=False" in refusal("CompressedFSDPStrategy", hook={"name": "int8"})
    assert "write hook=Int8(compress_1d=True)" in refusal("CompressedModelParallelStrategy", hook={"name": "int8"})
    assert "such as hook='bf16'" in refusal(name, hook={"name": "powersgd"})
    assert "such as hook='bf16'" in refusal(name, hook=lc.PowerSGD)
    assert "it is for DistributedDataParallel: leave it out" in refusal(name, hook="bf16", accumulation="mean")


@pytest.mark.parametrize("name", ["CompressedDDPStrategy", "CompressedDDPStrategyPL"])
def test_trainer_of_one_process(run_code, name):
    package = "pytorch_lightning" if name.endswith("PL") else "lightning.pytorch"
    pytest.importorskip(package.partition(".")[0])
    stdout = run_code(
        f"""
import warnings
from {package} import Trainer
from {package}.demos.boring_classes import BoringModel
import lightning_commhooks as lc
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    Trainer(accelerator="cpu", devices=1, max_steps=3, logger=False, enable_checkpointing=False, num_nodes=1,
            enable_progress_bar=False, enable_model_summary=False, strategy=lc.{name}(hook="int8")).fit(BoringModel())
print([str(one.message) for one in caught if "hook" in str(one.message)])
"""
    )
    assert stdout.splitlines()[-1] == "[\"hook='int8' does nothing: training runs in one process\"]"
