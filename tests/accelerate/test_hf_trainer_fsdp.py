"""`use_comm_hook` on a real `transformers.Trainer` with FSDP, in two and four real processes."""

import pytest
import torch
from torchrun import run_twice
from versions import has

pytest.importorskip("transformers")
pytest.importorskip("accelerate.parallelism_config")
pytestmark = pytest.mark.skipif(not has("transformers", "5"), reason="the runner's trainer is one of transformers 5")


def launch(folder, num_processes):
    run_twice("hf_fsdp_runner.py", folder, num_processes=num_processes, PYTHONWARNINGS="ignore")
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(num_processes)]


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return launch(tmp_path_factory.mktemp("shards"), 2)


@pytest.fixture(scope="module")
def replicas(tmp_path_factory):
    return launch(tmp_path_factory.mktemp("replicas"), 4)


def distance(one, other):
    return max((a - b).abs().max().item() for a, b in zip(one["whole"], other["whole"], strict=True))


@pytest.mark.parametrize(("name", "dense", "ratio"), [("bf16", "dense1", 2), ("int8", "dense2", 7)])
def test_between_shards(shards, name, dense, ratio):
    found = shards[0][name]
    assert found["metrics"]["compression_ratio"] == pytest.approx(ratio, rel=0.05)
    assert 1e-7 < distance(found, shards[0][dense]) < 0.02


def test_with_allreduce_between_replicas_it_is_plain_fsdp2(replicas):
    for rank in replicas:
        assert distance(rank["allreduce"], rank["dense"]) == 0
        assert rank["allreduce"]["eval"] == rank["dense"]["eval"]
    (entry,) = replicas[0]["allreduce"]["log"]
    assert entry["comm/compression_ratio"] == 1


@pytest.mark.parametrize("name", ["dense", "powersgd", "post_localsgd", "diloco"])
def test_resumes_bit_by_bit(replicas, name):
    for rank, result in enumerate(replicas):
        found = result[name]
        if name == "diloco":
            # With resync=True the run continued from the average, which is what the checkpoint has.
            assert len(found["hook_files"]) == 2, rank
        assert all(map(torch.equal, found["whole"], found["resumed"])), rank


def test_each_shard_has_its_own_hook_state(replicas):
    files = [f"comm_hook_0-{shard}-of-2.pt" for shard in (0, 1)]
    assert [replicas[0][name]["hook_files"] for name in ("dense", "allreduce", "powersgd")] == [[], [], files]
    assert replicas[0]["powersgd"]["metrics"]["shard_compression_ratio"] == pytest.approx(4), "of float64"
    assert replicas[0]["powersgd"]["metrics"]["compression_ratio"] > 2


@pytest.mark.parametrize("name", ["post_localsgd", "diloco"])
def test_evaluation_and_the_end_of_training_have_the_average(replicas, name):
    models = replicas[0][name]["models"]
    assert [models[step] for step in (3, 4, 5, 8, 11)] == [2, 1, 2, 1, 2]
    assert models["end"] == 1
    losses = [rank[name]["eval"] for rank in replicas]
    assert all(one == losses[0] for one in losses)
    assert all(rank[name]["evaluated_later"] == losses[0][-1] for rank in replicas)


def test_the_forecast_is_shown_once(replicas):
    for name in ("allreduce", "powersgd", "diloco"):
        assert [rank[name]["forecasts"] for rank in replicas] == [1, 0, 0, 0]


def test_the_best_model_and_a_second_training(replicas):
    best = replicas[0]["best"]
    assert best["best"] == max(best["evals"])
    assert (best["num_attachments"], best["steps"]) == (1, 18)


def test_refuses(shards):
    found = shards[0]["refusals"]
    assert found["option"].startswith("accumulation: hooks save no state of sharded gradients")
    assert "With FSDP these work" in found["hook"]
    assert "this trainer has the communication hook BF16(" in found["twice"]
    assert "hook='powersgd' does not work with FSDP" in found["powersgd"]
