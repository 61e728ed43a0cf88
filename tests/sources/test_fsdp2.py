"""Hooks for `fully_shard` on CPU: what FSDP2 asks of a reduce-scatter, error feedback, gathered parameters."""

import itertools
import re
import warnings

import pytest
import torch
import torch.distributed as dist
from codec_reference import encoded_bytes, error_bound
from driver import full_rank_gradients, mean_gradients
from fsdp_driver import (
    HOOKS,
    NAMES,
    UNITS,
    errors,
    leaving_no_groups,
    reduced,
    runtime,
    shard,
    shard2,
    whole_gradients,
)
from pool import compiling, ignoring
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

import lightning_commhooks as lc
from lightning_commhooks.codecs import FP8Codec, Int4Codec, Int8Codec
from lightning_commhooks.codecs import codec as codecs
from lightning_commhooks.collectives.group import Backend, Group
from lightning_commhooks.hooks import quantized
from lightning_commhooks.interface.bucket import Bucket
from lightning_commhooks.sources.fsdp2 import _ReduceScatter, gather_hooks, units
from lightning_commhooks.testing.model import model_device


def test_bf16_with_float32_sums_is_more_exact_than_reduce_dtype(run):
    ours, theirs = run(against_reduce_dtype, world=4)[0]
    assert ours < UNITS["bf16"] * 1.01 < theirs


def against_reduce_dtype(rank, world):
    model, plain = shard2("full"), shard2("full", mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))
    lc.attach(model, "bf16")
    return errors(reduced(model, rank), world)[0], errors(reduced(plain, rank), world)[0]


def operations(rank, world):
    """What the reduce-scatter that FSDP2 calls makes of each operation, for each hook."""
    found = {}
    group, n = dist.group.WORLD, 640
    ranks = [torch.randn(world * n, generator=torch.Generator().manual_seed(r)) for r in range(world)]
    total = sum(ranks).view(world, n)[rank]
    ops = {1.0: dist.ReduceOp.SUM, 1 / world: dist.ReduceOp.AVG, 0.3: dist._make_nccl_premul_sum(0.3)}
    for label, hook in HOOKS.items():
        comm = _ReduceScatter(runtime(lc.get_hook(hook)))
        for factor, op in ops.items():
            out = comm.allocate((n,), dtype=torch.float32, device=torch.device("cpu"))
            for asynchronous in (False, True):
                out.fill_(torch.nan)
                work = comm(out, ranks[rank].clone(), group, op, async_op=asynchronous)
                assert (work is not None) == asynchronous
                assert work is None or (work.wait() and work.is_completed())
                found[label, factor, asynchronous] = ((out - factor * total).norm() / (factor * total).norm()).item()
    # FSDP2 has divided what it casts to float16 and asks to sum: it must not be divided again.
    smallest, sum_ = torch.full((world * n,), 2.0**-24, dtype=torch.float16), torch.empty(n, dtype=torch.float16)
    fp16 = _ReduceScatter(runtime(lc.FP16()))
    fp16(sum_, smallest, group, dist.ReduceOp.SUM)
    assert (sum_ == world * 2.0**-24).all()
    with pytest.raises(ValueError, match="communication hooks know AVG, SUM and PREMUL_SUM"):
        comm(out, ranks[rank], group, dist.ReduceOp.MAX)
    return found


def test_honours_the_operation(run):
    limits = {"allreduce": 1e-6, "fp16": 2**-11, "bf16": 2**-8, "int8": 0.02}
    for found in run(operations, world=4):
        assert len(found) == 6 * len(HOOKS)
        for (label, _, _), relative in found.items():
            assert relative < limits[label.split("+")[0]]


def policies(rank, world):
    """Options of FSDP2 that change what the hook gets."""
    found = {}
    for dtype, unit in ((torch.bfloat16, UNITS["bf16"]), (torch.float16, UNITS["fp16"])):
        for hook in ("allreduce", "bf16" if dtype == torch.bfloat16 else "fp16"):
            model = shard2("full", mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype))
            lc.attach(model, hook)
            found[f"{hook} of {dtype}"] = errors(reduced(model, rank), world)[0] / unit
            assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    for force in (False, True):
        model = shard2("full")
        for module in (model, model.first, model.second):
            module.set_gradient_divide_factor(5.0)
            module.set_force_sum_reduction_for_comms(force)
        lc.attach(model, "fp16")
        five = {name: g * 5 / world for name, g in reduced(model, rank).items()}
        found[f"divided by 5, {force}"] = errors(five, world)[0] / UNITS["fp16"]
    return found


def test_options_of_fsdp2(run):
    for found in run(policies, world=4):
        for label, distance in found.items():
            # Gradients that FSDP2 casts are divided and summed in 16 bit before they are cast back.
            assert 0.2 < distance <= (3 if " of " in label else 1.01), label


def accumulated(rank, world):
    model = shard2("full")
    attachment = lc.attach(model, "bf16")
    for i, sync in enumerate((False, True, True)):
        model.set_requires_gradient_sync(sync)
        model({name: (i + 1.0) * (rank + 1) * torch.ones(shape) for name, shape in NAMES.items()}).backward()
    return {g.unique().item() for g in whole_gradients(model).values()}, attachment.metrics()["steps"]


def test_accumulation(run):
    assert run(accumulated) == [({6 * 1.5}, 2)] * 2


def with_communication_of_its_own(rank, world):
    """What is said where a hook would replace what the user has set, and how far gradients are off where it works."""
    told, found = [], {}

    def refused(model, **options):
        with pytest.raises(ValueError, match="set_") as error:
            lc.attach(model, "bf16", **options)
        told.append(str(error.value))

    with leaving_no_groups():
        model = shard2("full")
        for unit in units(model):
            unit.set_allocate_memory_from_process_group_for_comm(True)
        refused(model)
        for unit in units(model):
            unit.set_custom_reduce_scatter(DefaultReduceScatter())
        refused(model, gather_hook="int8")
        lc.attach(model, "bf16").close()  # of the all-gather this hook knows nothing
        model = shard2("full")
        model._get_fsdp_state()._state_ctx.manual_backward_finalization = True  # as PyTorch 2.15 does
        refused(model)
        for when in ("before", "after"):
            model = shard2("full")
            if when == "after":
                lc.attach(model, "bf16")
            for name, value in (("max_input_buffers", 2), ("group", True)):
                prefix = "set_separate_reduce_scatter_" if name == "group" else "set_reduce_scatter_"
                getattr(model, prefix + name, lambda value: None)(value)  # from PyTorch 2.13 on
            if when == "before":
                lc.attach(model, "bf16")
            found[when] = errors(reduced(model, rank), world)[0] / UNITS["bf16"]
    return told, found


def test_other_communication_is_refused_by_name_or_works(run):
    for told, found in run(with_communication_of_its_own):
        assert "reduce-scatter of its own, ProcessGroupAllocReduceScatter" in told[0]
        assert "all-gather of its own, ProcessGroupAllocAllGather" in told[1]
        assert "call set_manual_backward_finalization(False)" in told[2]
        assert all(0 < units_off <= 1.01 for units_off in found.values())


def unsharded(rank, world):
    with leaving_no_groups():
        alone = init_device_mesh("cpu", (world, 1), mesh_dim_names=("replicas", "shards"))
        with pytest.raises(ValueError, match="no parameter of the model is sharded over more than one rank"):
            lc.attach(shard2("full", mesh=alone["shards"]), "bf16")


def test_a_hook_that_would_never_run_is_refused(run):
    run(unsharded)


def attach_and_reduce(model, hook, rank):
    lc.attach(model, hook)
    reduced(model, rank)


def different(rank, world):
    """What ranks are told that were given different hooks: when they attach them, or in the first backward."""
    hook, told = ["bf16", "fp16"][rank % 2], []
    with leaving_no_groups():
        for way in ("full", "FULL_SHARD", *(["hybrid"] if world == 4 else [])):
            model = shard(way)
            with pytest.raises((ValueError, lc.HookError)) as raised:
                attach_and_reduce(model, hook, rank)
            told.append(str(raised.value))
    return told


def test_ranks_with_different_hooks_are_told_both(run):
    told = run(different, world=4)
    for text in itertools.chain(*told):
        assert re.search(r"hook must be the same on all ranks, is BF16\(.*FP16\(", text)


def all_ranks():
    return Group(Backend(dist.group.WORLD), process_group=dist.group.WORLD)


def shares(group, chunks, kernels, seed):
    """This rank's share of the sum over ranks of `chunks`, shape `(w, n)`."""
    out = torch.empty(chunks.shape[1])
    bucket = Bucket(chunks.reshape(-1), 0, False, 0, (), scale=float(group.size))
    group.finish(quantized.reduce_scatter_encoded(bucket, out, group, kernels, seed))
    return out


CODECS = [Int8Codec(block_size=16), Int8Codec(block_size=16, rounding="stochastic"), Int4Codec(), FP8Codec()]


def encoded(rank, world, numel, part_numel):
    """Whether each element of a share is within the codec's bound, how close the worst is, and bytes."""
    found = []
    before, codecs.CHUNK_NUMEL = codecs.CHUNK_NUMEL, part_numel
    try:
        for codec in CODECS:
            group = all_ranks()
            kernels = group.kernels(codec, feedback=False, two_shot=True)
            group.counters.bytes_sent = 0.0
            ranks = [torch.randn(world, numel, generator=torch.Generator().manual_seed(r)).pow(3) for r in range(world)]
            result = shares(group, ranks[rank], kernels, seed=rank)
            own = [chunks[rank] for chunks in ranks]
            size = codec.block_size
            blocks = [torch.nn.functional.pad(row, (0, -numel % size)).view(-1, size) for row in own]
            bounds = sum(error_bound(codec, b).expand_as(b) for b in blocks).reshape(-1)[:numel]
            worst = ((result - sum(own)).abs() / (bounds + 1e-5)).max().item()
            found.append((worst, group.counters.bytes_sent, (world - 1) * encoded_bytes(codec, numel)))
    finally:
        codecs.CHUNK_NUMEL = before
    return found


def encoded_in_every_size(rank, world):
    sizes = itertools.product((1, 130, 2048), (2**8, 2**20))
    return [result for numel, part_numel in sizes for result in encoded(rank, world, numel, part_numel)]


def test_encoded_shares_are_within_the_bound(run):
    for result in run(encoded_in_every_size, world=4):
        assert len(result) == 6 * len(CODECS)
        for worst, sent, expected in result:
            assert worst <= 1
            assert sent == expected


def compiled_share(rank, world):
    """The same numbers, encoded by compiled functions and not."""
    chunks = torch.randn(world, 2**13, generator=torch.Generator().manual_seed(rank))
    results = []
    for context in (compiling(), ignoring()):
        with context:
            group = all_ranks()
            kernels = group.kernels(Int8Codec(), feedback=False, two_shot=True)
        results.append(shares(group, chunks, kernels, seed=0))
    return (results[0] - results[1]).abs().max().item()


def test_compiled_codec(run):
    assert max(run(compiled_share)) < 1e-6


def repeated(rank, world, rounding):
    """Distance of the mean of many reductions of the same gradients from their mean, and of one."""
    model = shard2("full")
    hook = lc.Int8(min_bytes=0, block_size=512, rounding=rounding, use_error_feedback=False, compress_1d=True)
    lc.attach(model, hook)
    runs = [reduced(model, rank) for _ in range(40)]
    mean = {name: sum(g[name] for g in runs) / len(runs) for name in NAMES}
    return errors(mean, world)[1] / errors(runs[0], world)[1]


def test_stochastic_rounding_is_right_on_average(run):
    assert run(repeated, "stochastic")[0] < 0.5
    assert run(repeated, "nearest")[0] == pytest.approx(1)


INT4 = {"block_size": 64, "min_bytes": 0, "compress_1d": True}


def remembering(rank, world, use_error_feedback):
    """Largest error of the sum of many different gradients, by the largest element of their mean; and bytes."""
    model = shard2("full")
    attachment = lc.attach(model, lc.Int4(**INT4, use_error_feedback=use_error_feedback))
    sent, owed = dict.fromkeys(NAMES, 0), dict.fromkeys(NAMES, 0)
    for step in range(30):
        found, mean = reduced(model, rank, step), mean_gradients(full_rank_gradients, world, step, NAMES)
        sent = {name: sent[name] + found[name] for name in NAMES}
        owed = {name: owed[name] + mean[name] for name in NAMES}
    largest = max(mean[name].abs().max().item() for name in NAMES)
    error = max((sent[name] - owed[name]).abs().max().item() for name in NAMES) / largest
    return error, attachment.metrics()["bytes_sent"]


def test_error_feedback_sends_all_that_is_owed(run):
    (own, num_bytes), (without, num_bytes_without) = (run(remembering, given)[0] for given in (True, False))
    # Of a step of 4 bits 1/14, and of the residual's roundings, which are lost, 1/254 of that each.
    assert own < 3 / 14 < 2 * without
    assert own < without / 2
    assert num_bytes == num_bytes_without


def with_bad_step(rank, world):
    """Errors of the step after one in which a gradient was NaN on a rank, with error feedback and without."""
    found = []
    for use_error_feedback in (True, False):
        model = shard2("full")
        lc.attach(model, lc.Int4(**INT4, use_error_feedback=use_error_feedback))

        def make(rank, step, names):
            gradients = full_rank_gradients(rank, step, names)
            if rank == 0:
                next(iter(gradients.values())).view(-1)[0] = torch.nan
            return gradients

        bad = reduced(model, rank, make=make)
        assert any(g.isnan().any() for g in bad.values())
        found.append(errors(reduced(model, rank), world))
    return found


def test_a_block_begins_anew_after_a_bad_step(run):
    for (_, own), (_, without) in run(with_bad_step, world=4):
        # What the finite blocks of the bad step have left out comes on top.
        assert without < own < 2.5 * without


class Halves(torch.nn.Module):
    """Two layers, of which some are used."""

    def __init__(self):
        super().__init__()
        self.halves = torch.nn.ModuleList([torch.nn.Linear(24, 40), torch.nn.Linear(24, 40)])

    def forward(self, x, used):
        return sum(self.halves[i](x).tanh() for i in used)


def without_some(rank, world):
    """Gradients of a step in which some of a unit's parameters have none, with error feedback and without."""
    found = []
    for use_error_feedback in (True, False):
        torch.manual_seed(0)
        model = fully_shard(Halves())
        hook = lc.attach(model, lc.Int4(**INT4, use_error_feedback=use_error_feedback))
        gradients = []
        for step, used in enumerate(([0, 1], [0], [1], [0, 1])):
            generator = torch.Generator().manual_seed(10 * step + rank)
            model.zero_grad()
            x = torch.randn(8, 24, generator=generator)
            model(x, used).square().mean().backward()
            gradients.append([p.grad.to_local() for p in model.parameters() if p.grad is not None])
        found.append(gradients)
        hook.close()
    own, plain = found
    return [all(map(torch.equal, a, b)) for a, b in zip(own, plain, strict=True)]


def test_a_step_without_some_gradients_has_no_error_feedback(run):
    # FSDP2 does not say whose gradients they are.
    assert run(without_some) == [[True, True, True, False]] * 2


GATHERS = {
    "bf16": ("bf16", 2**-8, 2),
    "fp16": ("fp16", 2**-11, 2),
    "int8": (lc.Int8(block_size=64, use_error_feedback=False, compress_1d=True), 1 / 254, 4 * 64 / 68),
    "fp8": (lc.FP8(block_size=64, use_error_feedback=False, compress_1d=True), 2**-4, 4 * 64 / 68),
}


def gathering(rank, world, way="full"):
    """Of each hook: how far gathered weights are from exact ones, by the largest; whether ranks have the same."""
    found, device = {}, model_device()
    ones = {name: torch.ones(shape, device=device) for name, shape in NAMES.items()}
    for label, (hook, _, _) in GATHERS.items():
        model, seen = shard2(way, device.type), {}
        torch.manual_seed(0)
        exact = {name: torch.randn(shape).to(device) for name, shape in NAMES.items()}
        with torch.no_grad():
            for name, p in model.named_parameters():
                shares = exact[name].chunk(world)  # by rows; the last ranks may have fewer
                p.to_local().copy_(shares[rank])

        def look(block, args, prefix, seen=seen):
            for name, p in block.named_parameters():
                seen.setdefault(f"{prefix}.{name}", []).append(p.detach().clone())

        model.first.register_forward_pre_hook(lambda block, args, look=look: look(block, args, "first"))
        # In the backward, when FSDP2 has gathered them again.
        model.first.register_forward_hook(
            lambda block, args, out, look=look: out.register_hook(lambda grad: look(block, args, "first")) and None
        )
        attachment = lc.attach(model, "allreduce", gather_hook=hook)
        model(ones).backward()
        error = max(
            (weights[0] - exact[name]).abs().max().item() / exact[name].abs().max().item()
            for name, weights in seen.items()
        )
        same = all(torch.equal(weights[0], other) for weights in seen.values() for other in weights[1:])
        digest = sum(weights[0].double().sum().item() for weights in seen.values())
        masters = all(torch.equal(p.to_local(), exact[name].chunk(world)[rank]) for name, p in model.named_parameters())
        found[label] = error, same, digest, masters, attachment.metrics()
        attachment.close()
        seen.clear()
        model(ones).backward()
        found[label] += (all(torch.equal(weights[0], exact[name]) for name, weights in seen.items()),)
    return found


def check_gathered(ranks, *, is_always_compressed=True):
    """What `gathering` found on all ranks."""
    for label, (_, bound, ratio) in GATHERS.items():
        for error, same, digest, masters, metrics, exact_after in (found[label] for found in ranks):
            assert bound / 16 < error <= bound, label
            assert same, "in forward and backward"
            assert masters
            assert exact_after, "closed"
            assert digest == ranks[0][label][2], "on all ranks"
            if is_always_compressed:
                assert metrics["gather_compression_ratio"] == pytest.approx(ratio, rel=0.1), label
            assert metrics["compression_ratio"] == 1


def test_parameters_are_gathered_in_low_precision(run):
    check_gathered(run(gathering, world=4, timeout=120))


def gathering_from_some(rank, world):
    with leaving_no_groups():
        return gathering(rank, world, "partly")


def test_weights_that_are_kept_by_some_ranks_are_encoded_once(run):
    check_gathered(run(gathering_from_some, world=4, timeout=120), is_always_compressed=False)


def below_a_block(rank, world):
    model = fully_shard(torch.nn.Linear(8, 16))
    attachment = lc.attach(model, "allreduce", gather_hook="int8")
    model(torch.ones(2, 8)).sum().backward()
    return attachment.metrics()["gather_compression_ratio"]


def test_shares_of_less_than_a_block_are_gathered_as_they_are(run):
    assert run(below_a_block) == [1, 1]


def of_two_dtypes(rank, world):
    """Compression of the gathers, and warnings, of a unit with parameters of two dtypes, with and without a policy."""
    found = []
    for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(param_dtype=torch.bfloat16)):
        model = torch.nn.Sequential(torch.nn.Linear(64, 256, dtype=torch.bfloat16), torch.nn.Linear(256, 8))
        model[0].requires_grad_(False)
        fully_shard(model, mp_policy=policy)
        attachment = lc.attach(model, "allreduce", gather_hook="int8")
        with warnings.catch_warnings(record=True) as warned, torch.autocast("cpu", dtype=torch.bfloat16):
            warnings.simplefilter("always")
            for _ in range(2):
                model(torch.ones(2, 64)).sum().backward()
        texts = [str(one.message) for one in warned if "several dtypes" in str(one.message)]
        found.append((attachment.metrics()["gather_compression_ratio"], texts))
        attachment.close()
    return found


def test_a_unit_of_two_dtypes_is_gathered_as_it_is_with_a_warning(run):
    for (plain, warned), (ratio, silent) in run(of_two_dtypes):
        assert plain == 1
        assert [text.startswith("gather_hook='int8' leaves units with several dtypes or") for text in warned] == [True]
        assert ratio > 3
        assert not silent


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        ("allreduce", "gather_hook='allreduce' sends parameters as they are"),
        ("powersgd", "gather_hook='powersgd' does not work with FSDP; these do: bf16, fp16, fp8, int4, int8, or"),
        (lc.Int8(), "gather_hook=Int8.*; it has no error feedback. Set use_error_feedback=False, compress_1d=True"),
        (lc.Int4, r"^gather_hook must be.*did you mean Int4\(use_error_feedback=False, compress_1d=True\)\?"),
        (lc.Int8(rounding="stochastic", use_error_feedback=False, compress_1d=True), "set rounding='nearest'"),
    ],
)
def test_refusals_of_gather_hooks(hook, message):
    with pytest.raises(ValueError, match=message):
        gather_hooks({"gather_hook": hook})
