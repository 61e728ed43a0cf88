"""Hooks for both versions of FSDP on CPU: bounds, bytes, PyTorch's own hooks, refusals."""

import gc
import types
import warnings

import pytest
import torch
import torch.distributed as dist
from driver import same
from fsdp_driver import (
    HOOKS,
    INT8,
    NAMES,
    NO_SHARD_IS_DEPRECATED,
    UNITS,
    WAYS1,
    WAYS2,
    errors,
    leaving_no_groups,
    measured,
    mixed,
    reduced,
    shard,
    shard1,
    shard2,
    whole_gradients,
)
from pool import ignoring
from torch import nn
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import lightning_commhooks as lc
from lightning_commhooks.hooks.allreduce import predivide_factor
from lightning_commhooks.sources.fsdp import resolve_sharded_hook, sharded_hooks

WAYS = (*WAYS1, *WAYS2)
_measured = {}


@pytest.fixture
def results(run, world):
    if world not in _measured:
        _measured[world] = run(measured, WAYS, world=world, timeout=120)
    return _measured[world]


def bound(label, way, world):
    """Of the error of an element, in units of the mean magnitude over ranks; see `allreduce.reduce_scatter`."""
    name = label.split("+")[0]
    if name not in UNITS:
        return 1e-6
    # gloo sums in 16 bit; float32 is rounded for the way there and, unless ranks keep what they summed, the way back.
    num_roundings = 1 if way != "NO_SHARD" else 2 if "+" in label else world
    return UNITS[name] * num_roundings * 1.01


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("label", ["none", "allreduce", "bf16", "fp16", "bf16+float32", "fp16+float32"])
def test_error_is_within_the_bound(results, world, way, label):
    for result in results:
        relative, _ = result[way, label]["errors"]
        limit = bound(label, way, world)
        assert relative <= limit
        # A bound that leaves room for another mistake is none.
        assert label in ("none", "allreduce") or relative > limit / world / 4


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("label", "levels"), [("int8", 254), ("int8+stochastic", 127)])
def test_error_of_int8(results, way, label, levels):
    for result in results:
        _, absolute = result[way, label]["errors"]
        # Twice where gradients are not sharded, and each time of the largest of a block on each rank.
        assert 0.1 / levels < absolute <= (2 if way == "NO_SHARD" else 1) * 1.5 / levels


@pytest.mark.parametrize("way", WAYS)
def test_bytes(results, world, way):
    # Version 1 fills up each unit so that all ranks have as much, version 2 the rows of each parameter.
    numel = 2 * -(-sum(torch.Size(shape).numel() for shape in NAMES.values()) // 2 // world) * world
    if way in WAYS2:
        numel = sum(-(-shape[0] // world) * world * torch.Size(shape[1:]).numel() for shape in NAMES.values())
    dense = 4 * numel * (world - 1) / world * (2 if way == "NO_SHARD" else 1)
    for label, ratio in {"allreduce": 1, "bf16": 2, "fp16+float32": 2, "int8": 4 * 128 / 132}.items():
        metrics = results[0][way, label]["metrics"]
        assert metrics["steps"] == 1
        assert metrics["bytes_dense"] == pytest.approx(dense, rel=0.01)
        assert metrics["compression_ratio"] == pytest.approx(ratio, rel=0.03)
        compressed, plain = metrics["numel_compressed"], metrics["numel_uncompressed"]
        assert (compressed, plain) == ((0, numel) if label == "allreduce" else (numel, 0)) or way == "NO_SHARD"


def stock(rank, world):
    found = {}
    for way, function in [
        ("FULL_SHARD", default_hooks.reduce_scatter_hook),
        ("NO_SHARD", default_hooks.allreduce_hook),
    ]:
        theirs, ours = shard1(way), shard1(way)
        theirs.register_comm_hook(default_hooks.DefaultState(dist.group.WORLD), function)
        lc.attach(ours, "reduce_scatter")
        a, b = reduced(theirs, rank), reduced(ours, rank)
        found[way] = max(((a[name] - b[name]).abs() / a[name].abs().clamp_min(1e-3)).max().item() for name in NAMES)
    crashing = shard1("FULL_SHARD")
    crashing.register_comm_hook(default_hooks.LowPrecisionState(dist.group.WORLD), default_hooks.bf16_compress_hook)
    try:
        reduced(crashing, rank)
    except Exception as error:
        found["bf16_compress_hook"] = str(error)
    return found


def test_equals_the_hooks_of_pytorch_that_run_on_cpu(run, world):
    found = run(stock, world=world)[0]
    assert max(found["FULL_SHARD"], found["NO_SHARD"]) < 1e-4
    # When this fails, PyTorch's run on CPU: compare with them.
    assert found["bf16_compress_hook"] == "unknown parameter type", "of the stream in record_stream()"


def test_divides_as_pytorch():
    for size in range(1, 130):
        assert predivide_factor(size) == default_hooks.DefaultState._get_gradient_predivide_factor(size)


def large_and_small(rank, step, shapes, dtype=torch.float32):
    return {name: torch.full(shape, 1e5 if "matrix" in name else 1e-6, dtype=dtype) for name, shape in shapes.items()}


def extreme(rank, world):
    model = shard1("FULL_SHARD")
    attachment = lc.attach(model, "fp16")
    found = reduced(model, rank, make=large_and_small)
    assert attachment.metrics()["numel_overflowed"] == 0
    return found


def test_fp16_neither_overflows_nor_underflows(run):
    for found in run(extreme, world=4):
        for name, g in found.items():
            assert (g / (1e5 if "matrix" in name else 1e-6) - 1).abs().max() < 0.07


def accumulated(rank, world):
    model = shard1("FULL_SHARD")
    attachment = lc.attach(model, "bf16")
    gradients = [{name: (i + 1.0) * (rank + 1) * torch.ones(shape) for name, shape in NAMES.items()} for i in range(3)]
    with model.no_sync():
        model(gradients[0]).backward()
    assert attachment.metrics()["steps"] == 0
    model(gradients[1]).backward()  # reduces the sum of both
    model(gradients[2]).backward()  # and adds to it
    totals = {g.unique().item() for g in whole_gradients(model).values()}
    return totals, attachment.metrics()["steps"]


def test_accumulation(run):
    assert run(accumulated) == [({6 * 1.5}, 2)] * 2


def mixed_precision(rank, world):
    """Gradients that come in bfloat16 already: nothing to cast, but float32 in the end."""
    model = shard1("FULL_SHARD", mixed_precision=mixed(torch.bfloat16))
    attachment = lc.attach(model, "bf16")
    found = errors(reduced(model, rank), world)[0]
    return found, {p.grad.dtype for p in model.parameters() if p.grad is not None}, attachment.metrics()


def test_gradients_in_16_bit(run):
    relative, dtypes, metrics = run(mixed_precision)[0]
    assert relative <= 2.02 * UNITS["bf16"]
    assert dtypes == {torch.float32}
    assert metrics["compression_ratio"] == pytest.approx(2)
    assert metrics["numel_compressed"] == 0


def lifecycle(rank, world, way):
    model = shard(way)
    attachment = lc.attach(model, "bf16")
    with pytest.raises(ValueError, match=r"has (a|the) communication hook .*already"):
        lc.attach(model, "fp16")
    reduced(model, rank)
    attachment.close()
    attachment.close()
    assert attachment.is_closed
    assert attachment.metrics()["steps"] == 1
    if way in WAYS2:
        assert same(reduced(model, rank), reduced(shard(way), rank)), "by FSDP2 itself"
    else:
        with pytest.raises(lc.HookError, match="was closed; attach another one"):
            reduced(model, rank)
    quiet = shard(way)
    small = lc.attach(quiet, "int8")
    reduced(quiet, rank)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        small.close()
    other = lc.attach(quiet, "fp16")
    relative = errors(reduced(quiet, rank), world)[0]
    del quiet
    gc.collect()
    assert other.is_closed
    return relative, [str(warning.message) for warning in caught]


@pytest.mark.parametrize("way", ["FULL_SHARD", "full"])
def test_attaching_closing_and_warning(run, way):
    results = run(lifecycle, way)
    assert all(relative <= UNITS["fp16"] * 1.01 for relative, _ in results)
    assert "hook='int8' compressed nothing" in results[0][1][0]
    assert results[1][1] == []


def refusals(rank, world):
    with leaving_no_groups():
        for way in ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"):
            with pytest.raises(ValueError, match=r"no communication hook with HYBRID_SHARD.*MixedPrecision\(reduce_d"):
                lc.attach(shard1(way), "bf16")
        with pytest.raises(ValueError, match=r"not to Linear; wrap the model first.* or shard it by FSDP"):
            lc.attach(nn.Linear(2, 2), "bf16")
        with pytest.raises(ValueError, match="replicate_group is for fully_shard: Distributed"):
            lc.attach(DistributedDataParallel(nn.Linear(2, 2)), "bf16", replicate_group=dist.group.WORLD)
        with pytest.raises(ValueError, match="shard it with one of them"):
            lc.attach(nn.ModuleList([shard1("FULL_SHARD"), shard2("full")]), "bf16")
        taken = shard1("FULL_SHARD")
        taken.register_comm_hook(None, lambda state, grad, output: None)
        with pytest.raises(ValueError, match="has a communication hook already, and FSDP takes one"):
            lc.attach(taken, "bf16")
        alone = [dist.new_group([r]) for r in range(world)][rank]
        with ignoring(NO_SHARD_IS_DEPRECATED, "FSDP is switching to use `NO_SHARD`"):
            model = shard1("FULL_SHARD", process_group=alone)
        with pytest.raises(ValueError, match=f"process group of one rank out of {world}"):
            lc.attach(model, "bf16")


def test_models_that_are_refused(run):
    run(refusals, world=4)


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        (
            "powersgd",
            "hook='powersgd' does not work with FSDP; these do: allreduce, bf16, fp16, fp8, int4, int8, reduc",
        ),
        (lc.PowerSGD(), "hook='powersgd' does not work"),
        (lc.PostLocalSGD(), "hook='post_localsgd' does not work"),
        (lc.Cast("int8", "bf16"), "hook='cast' does not work"),
        ("bf61", "did you mean 'bf16'"),
        (lc.BF16, r"did you mean BF16\(\)\?"),
        (3, "hook must be a name or a CommHook, got 3; such as hook='bf16'"),
        (default_hooks.bf16_compress_hook, "must be a name or a CommHook, got <function bf16_compress_hook"),
        (lc.Int8(), "Set use_error_feedback=False, compress_1d=True"),
        (
            lc.Int8(use_error_feedback=False),
            r"Int8\(compress_1d=False\) does not work with FSDP.*Set compress_1d=True$",
        ),
    ],
)
def test_hooks_that_are_refused(hook, message):
    with pytest.raises(ValueError, match=message):
        resolve_sharded_hook(hook)


OPTIONS = {
    "hook_state": object(),
    "grad_scaler": torch.amp.GradScaler("cpu"),
    "exact_state": True,
    "optimizers": [],
    "accumulation": "mean",
    "loss_divided_by": 2,
}


def other_options(rank, world):
    with leaving_no_groups():
        for way in ("FULL_SHARD", "full"):
            model = shard(way)
            for name, value in OPTIONS.items():
                with pytest.raises(ValueError, match=f"^{name} is for Distributed.* leave it out with FSDP"):
                    lc.attach(model, "bf16", **{name: value})
            with pytest.raises(ValueError, match="hook='powersgd' does not work with FSDP"):
                lc.attach(model, "powersgd")
            lc.attach(model, "bf16", accumulation="framework", loss_divided_by=1).close()


def test_options_for_ddp_are_refused(run):
    run(other_options)


def what_does_not_apply(rank, world):
    with leaving_no_groups():
        for way in ("FULL_SHARD", "full"):
            model = shard(way)
            attachment = lc.attach(types.SimpleNamespace(_orig_mod=model), "bf16")  # as torch.compile returns it
            assert repr(attachment) == "Attachment(hook=BF16(accumulate_dtype=None, hierarchy=None), steps=0)"
            assert attachment.is_attached_to(model)
            reduced(model, rank)
            for method, *args in [
                ("state_dict",),
                ("shared_state_dict",),
                ("load_state_dict", {}),
                ("reset_state",),
                ("sample_error",),
                ("measure_link",),
                ("compression_stats",),
                ("move_to", model),
            ]:
                with pytest.raises(
                    ValueError, match=rf"^{method}\(\): not available with FSDP, which hands over gradients flat"
                ):
                    getattr(attachment, method)(*args)
            with pytest.raises(ValueError, match="was attached without"):
                attachment.add_weight(1)
            attachment.tell_forecast(print, 5)
            attachment.average_weights()
            with attachment.averaged_weights():
                pass
            assert (attachment.bound, attachment.forecast(), attachment.unfrozen()) == (None, None, [])
            assert not any((attachment.averages_models, attachment.models_differ, attachment.has_state))
            monitor = lc.Monitor(attachment)
            reduced(model, rank)
            assert set(monitor.values()) == {"comm/bytes_sent", "comm/compression_ratio"}
            assert attachment.steps_not_compressed() == {}
            assert attachment.metrics()["steps"] == attachment.num_steps == 2


def test_what_does_not_apply_to_shares_says_so(run):
    run(what_does_not_apply)


def test_hooks_by_name():
    for name in sharded_hooks():
        hook = resolve_sharded_hook(name)
        assert hook.name == name or (name, hook.name) == ("reduce_scatter", "allreduce")
        assert resolve_sharded_hook(hook) is hook
    assert resolve_sharded_hook(INT8) is INT8
    assert len(HOOKS) == 7
