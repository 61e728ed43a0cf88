"""Every hook on CUDA, where there is none: nothing mixes devices, and nothing waits but what is in a table."""

import dataclasses
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from cuda_dry_run import dry_run
from cuda_dry_training import GradientEdges, Variant, train
from hooks_under_test import CASES, INT8, RANK_2
from pool import ignoring
from torch.testing._internal.distributed.fake_pg import FakeStore

import lightning_commhooks as lc
from lightning_commhooks.codecs.codec import Kernels
from lightning_commhooks.collectives import group
from lightning_commhooks.ddp import runtime

LOCAL = {"start_localSGD_iter": 2, "post_local_gradient_allreduce": False}

# What `CASES` has not.
MORE = {
    "noop": lc.Noop(),
    "fp8": lc.FP8(min_bytes=0, block_size=128, rounding="stochastic"),
    "int8 without": lc.Int8(**INT8, use_error_feedback=False),
    "int4+hadamard": lc.Int4(min_bytes=0, rotation="hadamard"),
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
    "local before": lc.Schedule({0: lc.PostLocalSGD(**LOCAL, period=2), 4: "int8"}),
    "auto": lc.Auto(candidates=["bf16", lc.Int8(**INT8)], warmup_steps=1, timed_steps=1),
}
NUM_STEPS = {"auto": 13, "powersgd+half inside": 9}


def early(hook):
    """The same hook, which begins within a few steps what it does with small gradients."""
    names = [field.name for field in dataclasses.fields(hook)] if dataclasses.is_dataclass(hook) else []
    starts = [name for name in names if name.startswith("start_") and name.endswith("_iter") and getattr(hook, name)]
    changes = dict.fromkeys(starts, 2) | {name: 0 for name in names if name == "min_bytes"}
    return dataclasses.replace(hook, **changes) if changes else hook


HOOKS = {label: early(case.hook) for label, case in CASES.items()} | MORE

VARIANTS = {
    "1": Variant(1, torch.float32, find_unused_parameters=True, accumulation="mean", clears=False),
    "2": Variant(2, torch.float32, find_unused_parameters=True, exact_state=True),
    "2 in bfloat16, weighted": Variant(2, torch.bfloat16, accumulation="weighted", clears=False),
    "4 in float16, scaled": Variant(4, torch.float16, scales=True, find_unused_parameters=True, accumulation=2),
}


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


ALLOWED = []


@pytest.fixture
def found(monkeypatch):
    """`found(hook, variant, num_steps)`: the waits of a run."""

    def found(hook, variant, num_steps):
        edges = GradientEdges()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=variant.world)
        monkeypatch.setattr(group, "compiled", lambda hook_codec, *_: Kernels(hook_codec))
        # Of the fake process group, which is to be NCCL here.
        monkeypatch.setattr(runtime, "backend_for", lambda *_: dist.Backend.NCCL)
        monkeypatch.setattr(torch.autograd.graph, "get_gradient_edge", edges)
        try:
            with dry_run(monkeypatch) as waits, ignoring("hook=", "training ended after", "accumulation=2 divides"):
                train(hook, variant, num_steps, waits, edges)
        finally:
            dist.destroy_process_group()
        return waits.found

    return found


def test_every_hook_is_here():
    missing = set(lc.available_hooks()) - {hook.name for hook in HOOKS.values()}
    assert not missing, "give them an entry, with options that show what they do within a few steps, in MORE above"


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("label", HOOKS)
def test_hook(label, variant, found):
    waits = found(HOOKS[label], VARIANTS[variant], NUM_STEPS.get(label, 7))
    places = sorted({str(wait) for wait in waits if not any(row.allows(wait) for row in ALLOWED)})
    assert not places, "these wait for the device: let them not, or enter them in ALLOWED above with the reason"
