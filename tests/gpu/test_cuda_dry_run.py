"""Every hook on CUDA, where there is none: nothing mixes devices, and nothing waits but what is in a table."""

import dataclasses
from dataclasses import dataclass

import broken_hooks
import pytest
import torch
from cuda_dry_replicas import TrainingOfReplicas
from cuda_dry_training import Training, Way, train, without_cuda
from hooks_under_test import CASES, INT8, RANK_2

import lightning_commhooks as lc

LOCAL = {"start_localSGD_iter": 2, "post_local_gradient_allreduce": False}

# What `CASES` has not.
MORE = {
    "noop": lc.Noop(),
    "fp8": lc.FP8(min_bytes=0, block_size=128, rounding="stochastic"),
    "int4+hadamard": lc.Int4(min_bytes=0, rotation="hadamard", use_error_feedback=False),
    "quantize_per_channel+all_gather": lc.QuantizePerChannel(protocol="all_gather"),
    "powersgd+late": lc.PowerSGD(**RANK_2 | {"start_powerSGD_iter": 3}, orthogonalization_epsilon=1e-8),
    "powersgd+cold": lc.PowerSGD(**RANK_2, warm_start=False, use_error_feedback=False),
    "powersgd+half+batch": lc.PowerSGD(**RANK_2, num_iters_per_step=1, batch_tensors_with_same_shape=True),
    "batched_powersgd+half": lc.BatchedPowerSGD(**RANK_2, num_iters_per_step=1),
    "powersgd in int8": lc.Cast(lc.PowerSGD(**RANK_2, min_compression_rate=1), "int8"),
    "post_localsgd+local": lc.PostLocalSGD(**LOCAL, period=2, optimizer_state="average"),
    "hierarchical_localsgd": lc.HierarchicalLocalSGD(**LOCAL, period_group_size_dict={1: 2, 2: None}),
    "diloco": lc.DiLoCo(**LOCAL, period=2, fragments=2, optimizer_state="reset"),
    "diloco+bf16": lc.DiLoCo(period=2, subgroup_size=2, pseudo_gradient="bf16"),
    "diloco+int8": lc.DiLoCo(**LOCAL, period=2, pseudo_gradient="int8"),
    "diloco beside": lc.DiLoCo(**LOCAL, period=3, delay=1, fragments=2, pseudo_gradient="int8", error_feedback=True),
    "diloco eager": lc.DiLoCo(**LOCAL, period=2, eager=True),
    "local before": lc.Schedule({0: lc.PostLocalSGD(**LOCAL, period=2), 4: "int8"}),
    "a user's": broken_hooks.TopK(),
    "auto": lc.Auto(candidates=[lc.Int8(**INT8)], warmup_steps=1, timed_steps=1),
}
# Until the last hook has taken over; of others, both halves of PowerSGD and a period of local steps.
NUM_STEPS = {
    "auto": 9,
    "diloco beside": 9,
    "diloco eager": 9,
    "powersgd+half inside": 9,
    "schedule": 7,
    "local before": 7,
}


def early(hook):
    """The same hook, which begins within a few steps what it does with small gradients."""
    names = [field.name for field in dataclasses.fields(hook)] if dataclasses.is_dataclass(hook) else []
    starts = [name for name in names if name.startswith("start_") and name.endswith("_iter") and getattr(hook, name)]
    changes = dict.fromkeys(starts, 2) | {name: 0 for name in names if name == "min_bytes"}
    return dataclasses.replace(hook, **changes) if changes else hook


HOOKS = {label: early(case.hook) for label, case in CASES.items()} | MORE

WAYS = {
    "1": Way(1, torch.bfloat16, accumulation="mean", clears=False, is_short=True),
    "2": Way(2, torch.float16, accumulation="weighted", clears=False, exact_state=True),
    "4": Way(4, torch.float32, find_unused_parameters=True, scales=True),
}
WAY_OF_REPLICAS = Way(2, torch.float32, exact_state=True)
# One of each kind, in all ways; of others, by turns, one with many ranks.
ALL_WAYS = {"int8", "powersgd", "post_localsgd", "schedule"}
RUNS = [(label, way) for i, label in enumerate(HOOKS) for way in (WAYS if label in ALL_WAYS else "24"[i % 2])]


@dataclass(frozen=True)
class Allowed:
    """A place that may wait for the device.

    Attributes:
        file: of this library, relative to it.
        function: name of the function.
        during: beginnings of what the test is about then.
        why: the reason.
    """

    file: str
    function: str
    during: tuple[str, ...]
    why: str

    def allows(self, wait):
        return (wait.file, wait.function) == (self.file, self.function) and wait.during.startswith(self.during)


STATE, STEPS, OPTIMIZER = ("state",), ("first steps", "last steps"), ("optimizer",)
ALLOWED = [
    Allowed(
        "collectives/group.py",
        "all_gather_numbers",
        ("attach", *STATE, *OPTIMIZER, "average"),
        "ranks agree on numbers of the host: what was compiled, is averaged or loaded, and all optimizers have",
    ),
    Allowed("collectives/averaging.py", "check", (*STATE, *OPTIMIZER), "what was begun a delay before is taken over"),
    Allowed("collectives/counters.py", "as_dict", ("metrics",), "what metrics() returns is numbers"),
    Allowed("collectives/counters.py", "ms", ("metrics", *STEPS), "the event has come, or `Auto` compares times, once"),
    Allowed("runtime/attachment.py", "residual_norm", ("metrics",), "it returns a number"),
    Allowed("runtime/finite_steps.py", "wait", ("",), "was the step before finite? There is the next forward to do"),
    Allowed("runtime/micro_batches.py", "_nonzero", STEPS, "gradients are there after a step: were they set to zero?"),
    Allowed("interface/error_sample.py", "last_finite", ("metrics", *STEPS[:1]), "metrics() or, once, `Auto` wants it"),
    Allowed("interface/models.py", "digest_of", STATE, "ranks begin again: do they have the same model?"),
    Allowed("interface/state.py", "per_rank", STATE, "a state is on the CPU"),
    Allowed("interface/state.py", "shared", STATE, "a state is on the CPU"),
    Allowed("wrappers/_turns.py", "_used_ones", STEPS[:1], "the first step of a phase: who is to be handed over"),
    Allowed("wrappers/auto.py", "_agreed", STEPS[:1], "all ranks choose the same, once"),
]
OF_SHARDS = Allowed("runtime/checkpoint.py", "load", STATE, "does the state fit on the ranks of all shards?")
ran, used = set(), set()


@pytest.fixture
def found(monkeypatch):
    """`found(hook, way, num_steps)`: the waits of a run."""

    def found(hook, way, num_steps, kind=Training):
        with without_cuda(monkeypatch, way.world) as (waits, edges):
            train(hook, way, num_steps, waits, edges, kind)
        return waits.found

    return found


def test_every_hook_is_here():
    missing = set(lc.available_hooks()) - {hook.name for hook in HOOKS.values()}
    assert not missing, "give them an entry, with options that show what they do within a few steps, in MORE above"


@pytest.mark.parametrize(("label", "way"), RUNS)
def test_hook(label, way, found):
    waits = found(HOOKS[label], WAYS[way], NUM_STEPS.get(label, 4))
    rows = {wait: [row for row in ALLOWED if row.allows(wait)] for wait in waits}
    ran.add((label, way))
    used.update(*rows.values())
    places = sorted({str(wait) for wait in waits if not rows[wait]})
    hint = "these wait for the device: let them not, or enter them in ALLOWED above with the reason"
    assert not places, "\n".join([hint, *places])


@pytest.mark.parametrize("label", ["int8", "powersgd", "schedule", "diloco beside"])
def test_hook_between_replicas(label, found):
    """On the stream on which FSDP2 reduces, where DDP's runs on one of the hook."""
    waits = found(HOOKS[label], WAY_OF_REPLICAS, NUM_STEPS.get(label, 4), TrainingOfReplicas)
    allowed = [*ALLOWED, OF_SHARDS]
    places = sorted({str(wait) for wait in waits if not any(row.allows(wait) for row in allowed)})
    assert not places, "\n".join(["these wait for the device", *places])


def test_every_row_is_used():
    assert len(ran) < len(RUNS) or used == set(ALLOWED), "these wait no more: delete their rows"
