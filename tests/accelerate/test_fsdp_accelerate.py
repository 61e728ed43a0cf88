"""`use_comm_hook(accelerator, ...)` for Accelerate's FSDP plugin, in two real processes; and its refusals."""

import json

import pytest

pytest.importorskip("accelerate")

import torch
from accelerate import Accelerator
from accelerate.utils import DDPCommunicationHookType, DistributedType
from torchrun import run_twice

import lightning_commhooks as lc
from accelerate_integration import use_comm_hook


def launch(folder, num_processes):
    stdout = run_twice("fsdp_accelerate_runner.py", folder, num_processes=num_processes, PYTHONWARNINGS="ignore")
    return json.loads(next(line for line in stdout.splitlines() if line.startswith("{")))


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return launch(tmp_path_factory.mktemp("fsdp"), num_processes=2)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(("name", "ratio", "largest"), [("bf16", 2, 5e-3), ("int8", 3.2, 2e-2)])
def test_trains_with_the_hook(results, version, name, ratio, largest):
    metrics = results[f"version{version}"][name]
    assert metrics["steps"] == 3
    assert metrics["compression_ratio"] == pytest.approx(ratio, rel=0.01 if name == "bf16" else 0.2)
    assert 1e-7 < metrics["distance"] < largest
    assert "already" in results[f"version{version}"]["twice"]


def test_on_cpu_accelerate_uses_ddp_with_any_plugin(results):
    # When this fails, Accelerate has FSDP on CPU: fsdp_accelerate_runner.py need not pretend.
    assert results["on_cpu"] == ["MULTI_CPU", "DistributedDataParallel"]
    assert "CommHookKwargs(hook='bf16')" in results["in_ddp"]
    assert "on CPU, Accelerate does so whatever FSDP plugin" in results["in_ddp"]


def test_refuses_too_early_and_options_without_effect(results):
    early, option, alone = results["refusals"]
    assert "call use_comm_hook(accelerator, ...) after prepare()" in early
    assert "gather_differences=True needs a gather_hook" in alone
    assert option.startswith("resync: hooks save no state of sharded gradients and do not know")


def test_between_replicas_of_a_parallelism_config(tmp_path):
    pytest.importorskip("accelerate.parallelism_config")
    found = launch(tmp_path, num_processes=4)
    gradients, local = found["powersgd"], found["local"]
    assert gradients["same"], "resumed bit by bit"
    assert local["same"]
    assert (gradients["differ"], gradients["shown"]) == (1, 1)
    assert (local["differ"], local["shown"]) == (2, 1), "after a barrier one of them may save"
    assert local["metrics"]["averagings"] == 4
    assert gradients["metrics"]["steps"] == 6
    assert gradients["metrics"]["numel_compressed"] > 0
    assert gradients["metrics"]["shard_compression_ratio"] == pytest.approx(2)
    assert gradients["metrics"]["gather_compression_ratio"] > 1.2, "shares fill no block"
    later = found["later"]
    assert later["attachments"] == [2, 0], "the first model keeps its hook"
    assert "resync=True): give all models of an accelerator one value" in later["resync"]
    assert "already" in later["another"]
    assert later["steps"] == 3
    assert len(later["warnings"]) == 1
    assert "Call use_comm_hook(trainer, ...) before train() instead" in later["warnings"][0]
    for folder, num in {"powersgd": 1, "both": 2, "next": 1}.items():
        files = sorted(file.name for file in (tmp_path / folder).glob("comm_hook*"))
        assert files == [f"comm_hook_{k}-{i}-of-2.pt" for k in range(num) for i in (0, 1)]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("DEEPSPEED", "DeepSpeed averages gradients itself"),
        ("MULTI_GPU", r"kwargs_handlers=\[CommHookKwargs\(hook='bf16'\)\]"),
    ],
)
def test_refuses_what_is_not_fsdp(monkeypatch, kind, message):
    accelerator = Accelerator(cpu=True)
    monkeypatch.setattr(accelerator.state, "distributed_type", DistributedType[kind])
    with pytest.raises(ValueError, match=message):
        use_comm_hook(accelerator, "bf16")


def test_one_process_says_that_it_does_nothing():
    with pytest.warns(UserWarning, match=r"hook='bf16'\) does nothing: training runs in one process"):
        handle = use_comm_hook(Accelerator(cpu=True), "bf16")
    assert handle.attachments == []


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        ("powersgd", "hook='powersgd' does not work with FSDP; these do"),
        (DDPCommunicationHookType.POWER_SGD, "hook='power_sgd' does not work with FSDP"),
        (lc.Int8(), "Set compress_1d=True"),
        (None, "COMMHOOKS_HOOK"),
    ],
)
def test_refuses_hooks(monkeypatch, hook, message):
    accelerator = Accelerator(cpu=True)
    monkeypatch.setattr(accelerator.state, "distributed_type", DistributedType.FSDP)
    monkeypatch.setattr(accelerator, "_models", [torch.nn.Linear(2, 2)])
    with pytest.raises(ValueError, match=message):
        use_comm_hook(accelerator, hook)
