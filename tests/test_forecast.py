"""`Attachment.forecast`: bytes of a whole run against those of a real one; what is said, and when there is nothing."""

import dataclasses
import warnings

import pytest
import torch
import torch.distributed as dist
from driver import HOOKS, SHAPES, Params, attached, backward, closing_texts, full_rank_gradients
from local_sgd_driver import ALONE, zero_lr
from pool import ignoring
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import lightning_commhooks as lc
from lightning_commhooks.ddp.forecast import FIRST_STEPS
from lightning_commhooks.ddp.seen import SeenOptimizers

NUM_STEPS = 40
RANK_2 = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 11}
POST = lc.PostLocalSGD(period=4, start_localSGD_iter=6, post_local_gradient_allreduce=False)
BY_NAME = {name: lc.get_hook(name) for name in lc.available_hooks()}
WITH_OPTIONS = {
    "auto": lc.Auto(candidates=["bf16"], warmup_steps=1, timed_steps=1),
    "late powersgd": lc.PowerSGD(**RANK_2),
    "late powersgd, half": lc.PowerSGD(**RANK_2, num_iters_per_step=1),
    "late batched": lc.BatchedPowerSGD(**RANK_2),
    "int8 factors": lc.Cast(lc.PowerSGD(**RANK_2), "int8"),
    "schedule": lc.Schedule({0: "bf16", 7: lc.PowerSGD(**RANK_2), 15: POST, 30: "int8"}),
    "policy": lc.PerParameter({"*ir*": lc.PowerSGD(**RANK_2), "*": lc.Int8(min_bytes=0, block_size=8)}),
    "divided": lc.ScaleByGradAccumulation(lc.Int8(min_bytes=0, block_size=8), "mean"),
    "weighted": lc.ScaleByGradAccumulation("int8", "weighted"),
    "post_localsgd": POST,
    "post_localsgd, states": dataclasses.replace(POST, optimizer_state="average"),
    "within subgroups": lc.PostLocalSGD(period=3, start_localSGD_iter=5, subgroup_size=2),
    "hierarchical": lc.HierarchicalLocalSGD(period_group_size_dict={2: 2, 6: None}, **ALONE),
    "diloco": lc.DiLoCo(period=7, fragments=3, **ALONE),
    "diloco, int4": lc.DiLoCo(period=5, pseudo_gradient="int4", **ALONE),
    "diloco, bf16": lc.DiLoCo(period=50, pseudo_gradient="bf16", start_localSGD_iter=2),
}
ALL = {**BY_NAME, **{f"{label} (late)": hook for label, hook in HOOKS.items()}, **WITH_OPTIONS}
# What hooks say that are attached to a few ranks of one machine, for a few steps.
SAID = ("hook=", "training ended after", "hook='.*' ended while")


def whole_run(rank, world, hook, num_steps):
    """The forecast after a few steps, made on rank 0 alone, and the metrics before and after it, and at the end."""
    ddp = DistributedDataParallel(Params(SHAPES), bucket_cap_mb=4e-3)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=1e-3)
    with ignoring(*SAID):
        attachment = lc.attach(ddp, hook, optimizers=[optimizer])
        asked_after = 12 if isinstance(hook, lc.Auto) else FIRST_STEPS
        for step in range(num_steps):
            if step == asked_after:
                before = attachment.metrics()
                forecast = attachment.forecast(num_steps) if rank == 0 else None
                after = attachment.metrics()
            if getattr(hook, "accumulation", None) == "weighted":
                attachment.add_weight(1.0)
            backward(ddp, full_rank_gradients(rank, step, SHAPES))
            optimizer.step()
        metrics = attachment.metrics()
        attachment.close()
    if rank:
        return None
    total = {name.name: getattr(forecast.total, name.name) for name in dataclasses.fields(forecast.total)}
    return total, forecast.compression_ratio, before == after, metrics


@pytest.mark.parametrize("hook", [pytest.param(hook, id=label) for label, hook in ALL.items()])
def test_a_whole_run_is_as_forecast(run, hook, world):
    total, ratio, is_unchanged, metrics = run(whole_run, hook, NUM_STEPS, world=world)[0]
    assert is_unchanged
    assert total == pytest.approx({name: metrics[name] for name in total}, rel=0.01)
    assert ratio == pytest.approx(metrics["compression_ratio"], rel=0.01)


def two_networks(rank, world, hook):
    """Two optimizers take turns, as in a GAN."""
    ddp = DistributedDataParallel(Params(SHAPES), bucket_cap_mb=4e-3, find_unused_parameters=True)
    names = [list(SHAPES)[:4], list(SHAPES)[4:]]
    optimizers = [torch.optim.SGD([ddp.module.get_parameter(name) for name in own], lr=0.1) for own in names]
    with ignoring(*SAID):
        attachment = lc.attach(ddp, hook, optimizers=optimizers)
        for step in range(61):
            if step == 5:
                forecast = attachment.forecast(61)
            gradients = full_rank_gradients(rank, step, SHAPES)
            backward(ddp, {name: gradients[name] for name in names[step % 2]})
            optimizers[step % 2].step()
        metrics = attachment.metrics()
        attachment.close()
    return forecast.bytes_sent, metrics["bytes_sent"]


def test_optimizers_that_take_turns(run):
    (forecast, sent), _ = run(two_networks, lc.PostLocalSGD(period=4, **ALONE))
    assert forecast == pytest.approx(sent, rel=0.01)


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([], (0, [])),
        (["a"], (0, [["a"]])),
        (["a", "a", "a"], (2, [["a"]])),
        (["a", "b", "a"], (1, [["b"], ["a"]])),
        (["a", "b", "a", "b"], (2, [["a"], ["b"]])),
        (["ab", "ab"], (1, [["a", "b"]])),
        (["", "a", "a"], (2, [["a"]])),
        (["a", "", "", "a", "", "", "a"], (4, [[], [], ["a"]])),
    ],
)
def test_which_optimizers_step(steps, expected):
    seen = SeenOptimizers()
    for step, optimizers in enumerate(steps):
        for optimizer in optimizers:
            seen.add(optimizer, step)
    assert seen.cycle() == expected


WIDE = {"wide": (300, 500), "bias": (500,)}
NARROW = {"narrow": (3, 200), "square": (6, 6), "bias": (1000,)}
START = "start_powerSGD_iter"
AT_ONCE = {START: 0}


def told(rank, world, hook, num_left, shapes, resumed_at=0):
    """What is said and warned of after each step, and when the hook is closed."""
    said = []
    with attached(hook, shapes) as (ddp, attachment):
        optimizer = zero_lr(ddp)
        attachment.add_optimizer(optimizer)
        if resumed_at:
            attachment.load_state_dict({**attachment.state_dict(), "steps": resumed_at})
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(FIRST_STEPS + 2):
                backward(ddp, full_rank_gradients(rank, step, shapes))
                optimizer.step()
                attachment.tell_forecast(said.append, num_left)
                assert bool(said) == (rank == 0 and step + 1 >= FIRST_STEPS)
        texts = [str(warning.message) for warning in caught]
        return said, texts, closing_texts(attachment)


POWERSGD = lc.PowerSGD(matrix_approximation_rank=4, start_powerSGD_iter=1000)
GOOD = {
    "late": (
        (POWERSGD, 1197, WIDE),
        "PowerSGD(matrix_approximation_rank=4): 99.7% of the gradients are compressed from step 1,000 of 1,200 on; "
        "40.7x fewer bytes then, 1.19x over the run",
    ),
    "resumed": (
        (POWERSGD, 197, WIDE, 900),
        "PowerSGD(matrix_approximation_rank=4): 99.7% of the gradients are compressed from step 1,000 of 1,100 on; "
        "40.7x fewer bytes then, 1.95x over the rest of the run",
    ),
    "resumed later": (
        (POWERSGD, 297, WIDE, 1100),
        "PowerSGD(matrix_approximation_rank=4): 99.7% of the gradients are compressed from step 1,100 to 1,400; 40.7x "
        "fewer bytes",
    ),
    "no total": (
        (POWERSGD, None, WIDE),
        "PowerSGD(matrix_approximation_rank=4): 99.7% of the gradients are compressed from step 1,000 on; 40.7x fewer "
        "bytes then",
    ),
    "at once": (("bf16", 97, WIDE), "'bf16': 100% of the gradients are compressed in all 100 steps; 2x fewer bytes"),
    "plain": (("allreduce", 97, WIDE), "'allreduce': as many bytes as plain DDP in all 100 steps"),
    "alone": (
        (lc.PostLocalSGD(period=8, post_local_gradient_allreduce=False), 997, WIDE),
        "PostLocalSGD(post_local_gradient_allreduce=False): ranks step alone from step 100 of 1,000 on; 8x fewer bytes "
        "then, 4.72x over the run",
    ),
    "phases": (
        (lc.Schedule({0: "allreduce", 10: "bf16", 50: "fp16", 60: dataclasses.replace(POWERSGD, **AT_ONCE)}), 97, WIDE),
        "'schedule': until step 10 as many bytes as plain DDP; until step 60 2x fewer bytes; from step 60 of 100 on "
        "40.7x fewer bytes, 2.78x over the run",
    ),
}


@pytest.mark.parametrize("label", GOOD)
def test_one_line(run, label):
    arguments, expected = GOOD[label]
    (said, warned, _), others = run(told, *arguments)
    (line,) = said
    assert line == f"Forecast for communication hook {expected}"
    assert warned == []
    assert others[:2] == ([], [])


NOTHING = {
    "beyond the end": (
        (lc.PowerSGD(), 197, WIDE),
        "training ends after 200 steps, and hook='powersgd' compresses from start_powerSGD_iter=1000 on; set it to "
        "about a tenth of training, 20 here",
    ),
    "just before the end": (
        (lc.PowerSGD(start_powerSGD_iter=195), 197, WIDE),
        "training ends after 200 steps, and hook='powersgd' saves 2.5% of the bytes that plain DDP sends, because it "
        "begins to at step 195 only; set start_powerSGD_iter to about a tenth of training, 20",
    ),
    "last phase": (
        (lc.Schedule({0: "allreduce", 396: "bf16"}), 397, WIDE),
        "training ends after 400 steps, and hook='schedule' saves 0.5% of the bytes that plain DDP sends, because it "
        "begins to at step 396 only; let it begin after about a tenth of training, 40 steps",
    ),
    "min_bytes": (
        ("int8", None, {"first": (100, 100), "second": (100, 100)}),
        "hook='int8' compresses nothing, no bucket has min_bytes=131072 bytes of gradients with block_size=512 "
        "elements or more in two dimensions (compress_1d=False); the largest has 40000: lower min_bytes to that, or "
        "use hook='bf16'",
    ),
    "blocks": (
        ("int8", None, {"first": (10, 10), "second": (1000,)}),
        "hook='int8' compresses nothing, no bucket has min_bytes=131072 bytes of gradients with block_size=512 "
        "elements or more in two dimensions (compress_1d=False); lower block_size, or use hook='bf16'",
    ),
    "no matrix": (
        (lc.PowerSGD(start_powerSGD_iter=0, matrix_approximation_rank=8), None, NARROW),
        "hook='powersgd' compresses nothing, no gradient is a matrix that shrinks enough at "
        "matrix_approximation_rank=8; lower it to 1, or use hook='bf16'",
    ),
    "no matrix at any rank": (
        (lc.PowerSGD(start_powerSGD_iter=0), None, {"bias": (1000,)}),
        "hook='powersgd' compresses nothing, no gradient is a matrix that shrinks enough at "
        "matrix_approximation_rank=1; lower min_compression_rate, or use hook='bf16'",
    ),
    "few matrices": (
        (lc.PowerSGD(start_powerSGD_iter=0), None, {"some": (30, 30), "bias": (100_000,)}),
        "hook='powersgd' compresses only 0.89%, few gradients are matrices that shrink enough at "
        "matrix_approximation_rank=1; lower min_compression_rate, or use hook='bf16'",
    ),
    "alone too late": (
        (lc.PostLocalSGD(post_local_gradient_allreduce=False), 47, WIDE),
        "training ends after 50 steps, and hook='post_localsgd' averages gradients over all ranks until "
        "start_localSGD_iter=100; set it to about a tenth of training, 5 here",
    ),
    "never averaged": (
        (lc.PostLocalSGD(period=64, **ALONE), 47, WIDE),
        "training ends after 50 steps, and hook='post_localsgd' has never averaged models, the first period of steps "
        "has not ended",
    ),
    "resumed": (
        (lc.PowerSGD(), 97, WIDE, 500),
        "training ends after 600 steps, and hook='powersgd' compresses from start_powerSGD_iter=1000 on; set it to "
        "about a tenth of training, 60 here",
    ),
}


@pytest.mark.parametrize("label", NOTHING)
def test_a_warning_in_time_and_once(run, label):
    arguments, expected = NOTHING[label]
    (_, warned, closing), others = run(told, *arguments)
    assert warned == [expected]
    assert [text for text in closing if "ended while" not in text] == []
    assert others[:2] == ([], [])


def test_a_run_that_is_shorter_than_told_is_warned_of_at_its_end(run):
    (_, warned, (text,)), _ = run(told, lc.PowerSGD(start_powerSGD_iter=10), 997, WIDE)
    assert warned == []
    assert text.startswith(f"training ended after {FIRST_STEPS + 2} steps, and hook='powersgd' compresses from {START}")


class OnTheHost(lc.BoundHook):
    """Sends as much as its numbers need."""

    def reduce(self, flat, bucket):
        if flat.sum().item() != 0:
            self.group.all_reduce_mean_(flat)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Host(lc.CommHook):
    name = "host"

    def bind(self, group):
        return OnTheHost(group)


def no_forecast(rank, world):
    results = []
    for hook in (Host(), default_hooks.allreduce_hook, lc.Auto()):
        with attached(hook) as (ddp, attachment):
            for step in range(4):
                backward(ddp, full_rank_gradients(rank, step, SHAPES))
                attachment.tell_forecast(results.append, 10)
            results.append(attachment.forecast(10))
            backward(ddp, full_rank_gradients(rank, 4, SHAPES))
    alone = [dist.new_group([each]) for each in range(world)][rank]
    with attached("bf16", process_group=alone) as (ddp, attachment):
        backward(ddp, full_rank_gradients(rank, 0, SHAPES))
        results.append(attachment.forecast(10))
    dist.destroy_process_group(alone)
    return results


def test_no_forecast_is_no_error(run):
    assert run(no_forecast) == [[None] * 4] * 2


def sparse(rank, world):
    model = torch.nn.Sequential(torch.nn.Embedding(20, 8, sparse=True), torch.nn.Linear(8, 8))
    ddp = DistributedDataParallel(model)
    with ignoring(*SAID):
        attachment = lc.attach(ddp, "bf16")
        for _ in range(3):
            ddp(torch.arange(4)).sum().backward()
        forecast = attachment.forecast(10)
        attachment.close()
    return forecast


def test_no_forecast_of_sparse_gradients(run):
    assert run(sparse) == [None] * 2


def refused(rank, world):
    with attached("bf16") as (_, attachment), pytest.raises(ValueError, match="num_steps must be an integer of at"):
        attachment.forecast(0)


def test_number_of_steps_is_checked(run):
    run(refused)
