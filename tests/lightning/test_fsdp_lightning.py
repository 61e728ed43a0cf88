"""FSDP strategies with the real `Trainer` on CPU, where Lightning runs them; scenarios in fsdp_lightning_runner.py."""

import functools
import math
import pickle
import sys

import pytest

pytest.importorskip("lightning")

from forks import FOLDER
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel
from test_lightning import launch as launch_runner
from torch.distributed.fsdp import MixedPrecision

import lightning_commhooks as lc

torch = pytest.importorskip("torch")
launch = functools.partial(launch_runner, runner=FOLDER / "fsdp_lightning_runner.py")
FSDP2 = "FSDP2"


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return launch(tmp_path_factory.mktemp("two"), "2", "FULL_SHARD", "SHARD_GRAD_OP", FSDP2)


def check(results, way, label, num_devices=2):
    ranks = [results(f"{way}-{label}", rank) for rank in range(num_devices)]
    assert all(rank["params"] == ranks[0]["params"] for rank in ranks)
    assert all(map(math.isfinite, ranks[0]["params"]))
    distance = results.distance(f"{way}-{label}", "dense")
    if label == "allreduce":
        assert distance < 1e-5
    else:
        assert 1e-6 < distance < (2e-2 if label == "int8" else 5e-3)
    return ranks[0]


@pytest.mark.parametrize("way", ["SHARD_GRAD_OP", FSDP2])
@pytest.mark.parametrize(("label", "ratio"), [("bf16", 2), ("int8", 3)])
def test_trains_as_ddp_does(two, way, label, ratio):
    result = check(two, way, label)
    assert result["strategy"] == ("CompressedModelParallelStrategy" if way == "FSDP2" else "CompressedFSDPStrategy")
    assert result["metrics"]["steps"] == 4
    # Shares of small units do not fill their blocks of 64.
    assert result["metrics"]["compression_ratio"] == pytest.approx(ratio, rel=0.01 if label != "int8" else 0.3)


def test_gathers_changes_of_weights(two):
    gathered, other = two("gathered", 0), two("gathered", 1)
    assert gathered["params"] == other["params"]
    assert gathered["metrics"]["gather_compression_ratio"] > 3, "the first gather is in full"
    assert two.distance("gathered", "dense-2") < 2e-2


@pytest.mark.parametrize("way", ["SHARD_GRAD_OP", FSDP2])
def test_second_fit_and_checkpoint(two, way):
    second = two(f"{way}-second")
    assert second["same"]
    assert second["saved"]
    assert second["step"] == 8
    assert second["metrics"] == two(f"{way}-first")["metrics"]
    assert two.distance(f"{way}-second", "dense-2") < 5e-3 < two.distance(f"{way}-second", f"{way}-first")


def test_full_checkpoint_on_cpu_is_refused(two):
    for rank in (0, 1):
        message = two("refused", rank)["message"]
        assert message.startswith("MisconfigurationException: CompressedFSDPStrategy: on CPU")
        assert "state_dict_type='sharded'" in message


def test_strategy_string(two):
    assert two("string")["strategy"] == "CompressedFSDPStrategy"
    assert two("string")["metrics"]["compression_ratio"] == pytest.approx(2)
    assert two.distance("string", "FULL_SHARD-bf16") < 1e-6


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """Of the standalone package."""
    pytest.importorskip("pytorch_lightning")
    ways = ["HYBRID_SHARD", "FSDP2"]
    return launch(tmp_path_factory.mktemp("four"), "4", *ways, package="pytorch_lightning", world=4)


def test_between_replicas(four):
    """A hook with memory, and its share of the state in sharded checkpoints."""
    whole, resumed = four("replicas-whole"), four("replicas-resumed")
    assert resumed["files"] == ["comm_hook-0-of-2.pt", "comm_hook-1-of-2.pt"]
    assert resumed["params"] == whole["params"] == four("replicas-whole", 3)["params"]
    assert resumed["batches"] == 2
    (told,) = resumed["told"]
    assert "the state of hook 'powersgd' is gone after fit(), and not in" in told
    metrics = whole["metrics"]
    assert metrics["steps"] == 4
    assert metrics["numel_compressed"] > 0
    assert metrics["shard_compression_ratio"] == pytest.approx(2)
    assert metrics["gather_compression_ratio"] > 1.2, "shares fill no block"
    assert four.distance("replicas-whole", "dense-2") < 0.5


def test_a_share_of_the_run_counts_batches_where_each_is_averaged(four):
    found = four("accumulating")
    assert (found["optimizer_steps"], found["metrics"]["steps"]) == (4, 8)
    assert found["start"] == 4


def test_replicas_that_step_alone(four):
    ddp, sharded, whole, resumed = (four(f"local-{name}", 0) for name in ("ddp", "replicas", "whole", "resumed"))
    torch.testing.assert_close(sharded["params"], ddp["params"], rtol=1e-5, atol=1e-6)
    # Validation sees the average.
    torch.testing.assert_close(sharded["losses"], ddp["losses"], rtol=1e-5, atol=1e-6)
    assert sharded["metrics"]["averagings"] == ddp["metrics"]["averagings"] == 3, "in 8 steps, and at the end"
    assert four("local-replicas", 3)["params"] == sharded["params"], "training ends with the average"
    assert resumed["params"] == whole["params"], "resumes bit by bit"
    assert resumed["losses"] == whole["losses"][2:]


def test_hybrid_on_four_ranks_of_the_standalone_package(four):
    results = four
    for label in ("allreduce", "bf16"):
        result = check(results, "HYBRID_SHARD", label, 4)
        assert result["metrics"] is None, "FSDP reduces by itself"
        assert result["strategy"] == "CompressedFSDPStrategyPL"
    for label in ("bf16", "int8"):
        assert check(results, "FSDP2", label, 4)["strategy"] == "CompressedModelParallelStrategyPL"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hook": "powersgd"}, "hook='powersgd' does not work with FSDP"),
        ({"hook": "powersdg", "replicas": 2}, "did you mean 'powersgd'"),
        ({"hook": "bf16", "replicas": 0}, "replicas must be an integer of at least 1"),
        ({"hook": "bf16", "shard_hook": "bf16"}, "shard_hook is for .* more; here hook= is the hook of the reduce-sc"),
        ({"hook": "bf16", "gather_hook": "topk"}, "unknown gather_hook='topk'. With FSDP these work: bf16, fp16, fp8,"),
        ({"hook": "bf16", "gather_differences": True}, "gather_differences=True needs a gather_hook"),
        ({"hook": "bf16", "resync": True}, "resync is for replicas=2 or more"),
        ({"hook": "powersgd", "replicas": 2, "resync": "x"}, "resync must be True or False, got 'x'"),
        ({"hook": "powersgd", "replicas": 4, "data_parallel_size": 30}, "replicas=4 do not divide .*_size=30"),
        ({"hook": lc.ScaleByGradAccumulation("int8"), "replicas": 4}, "is for DistributedDataParallel; leave it out"),
        ({"hook": lc.DiLoCo(period_seconds=1.0), "replicas": 2}, "the Trainer makes all wait for each other"),
        ({"hook": "powersgd", "replicas": 2, "shard_hook": "topk"}, "unknown shard_hook='topk'. With FSDP these work"),
        (
            {"hook": "powersgd", "replicas": 2, "shard_hook": "powersgd"},
            "Strategy: shard_hook='powersgd' does not work",
        ),
        ({"hook": "reduce_scatter", "replicas": 2}, "use 'allreduce' between replicas"),
    ],
)
def test_refusals_of_replicas(arguments, message):
    with pytest.raises(MisconfigurationException, match=message):
        lc.CompressedModelParallelStrategy(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"hook": "powersgd"},
            "CompressedFSDPStrategy: hook='powersgd' does not work with FSDP; these do: allreduce, b",
        ),
        (
            {"hook": "bf61"},
            r"unknown hook='bf61'; did you mean 'bf16'\? With FSDP these work: allreduce, bf16, fp16, fp8,",
        ),
        ({"hook": lc.Int8()}, "error feedback is for fully_shard. Set use_error_feedback=False, compress_1d=True"),
        ({"hook": "bf16", "sharding": "FULL_SHARD"}, "has no option 'sharding', and neither has FSDP"),
        ({"hook": "bf16", "resync": True}, "has no option 'resync'"),
        ({"hook": "int8", "sharding_strategy": "HYBRID_SHARD"}, r"'bf16', 'fp16' and 'allreduce' do, by MixedPrec"),
        (
            {"hook": lc.BF16(accumulate_dtype="float32"), "sharding_strategy": "HYBRID_SHARD"},
            "takes no communication hook with ShardingStrategy.HYBRID_SHARD",
        ),
        (
            {
                "hook": "bf16",
                "sharding_strategy": "HYBRID_SHARD",
                "mixed_precision": MixedPrecision(reduce_dtype=torch.float16),
            },
            "reduce_dtype=torch.float16 contradict",
        ),
    ],
)
def test_refusals_name_the_fix(arguments, message):
    with pytest.raises(MisconfigurationException, match=message):
        lc.CompressedFSDPStrategy(**{"auto_wrap_policy": {torch.nn.Linear}, **arguments})


def test_hybrid_strategies_reduce_in_the_dtype_of_the_hook():
    given = MixedPrecision(param_dtype=torch.bfloat16)
    strategy = lc.CompressedFSDPStrategy(
        hook="fp16", sharding_strategy="HYBRID_SHARD", mixed_precision=given, auto_wrap_policy={torch.nn.Linear}
    )
    assert strategy.mixed_precision_config == MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float16)
    assert lc.CompressedFSDPStrategy(hook="fp16", mixed_precision=given).mixed_precision_config is given


def test_pickles_and_keeps_arguments():
    strategy = pickle.loads(pickle.dumps(lc.CompressedFSDPStrategy(hook=lc.BF16(), limit_all_gathers=False)))
    assert strategy.hook == lc.BF16()
    assert strategy.kwargs["limit_all_gathers"] is False
    assert strategy.attachment is None
    with pytest.raises(MisconfigurationException, match="CompressedModelParallelStrategy: hook='noop' does not work"):
        lc.CompressedModelParallelStrategy(hook="noop")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("name", "arguments", "hook"),
    [
        ("CompressedFSDPStrategy", ["hook=bf16", "sharding_strategy=SHARD_GRAD_OP"], lc.BF16()),
        (
            "CompressedModelParallelStrategy",
            ["hook=lightning_commhooks.FP16", "hook.accumulate_dtype=float32"],
            lc.FP16(accumulate_dtype="float32"),
        ),
    ],
)
def test_cli(monkeypatch, name, arguments, hook):
    monkeypatch.setattr(sys, "argv", ["main.py"])
    args = ["--trainer.logger=false", f"--trainer.strategy=lightning_commhooks.{name}", "--trainer.accelerator=cpu"]
    args += [f"--trainer.strategy.{argument}" for argument in arguments]
    made = LightningCLI(BoringModel, run=False, save_config_callback=None, seed_everything_default=False, args=args)
    assert type(made.trainer.strategy) is getattr(lc, name)
    assert made.trainer.strategy._hook == hook
