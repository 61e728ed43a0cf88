"""Tests of peers that are known to fail, and why; anything else that fails with a hook only is a defect.

What is known of a test is also what it says when it fails: failing in another way is a difference, and so is passing.
"""

from dataclasses import dataclass
from fnmatch import fnmatch

WITHOUT = "none"


@dataclass(frozen=True)
class Expected:
    """Tests that fail, by a pattern of names, in set-ups, by a pattern too; `says` is part of the traceback."""

    tests: str
    setups: str
    says: str
    reason: str


_ON_CPU = [
    # On CPU PyTorch itself fails: there is nothing to compare with.
    Expected("*SyncBatchNorm*", WITHOUT, "SyncBatchNorm layers only work with GPU", "SyncBatchNorm is for GPUs"),
    Expected("*_sync_bn*", WITHOUT, "SyncBatchNorm layers only work with GPU", "SyncBatchNorm is for GPUs"),
    Expected("test_ddp_inference", WITHOUT, "SyncBatchNorm layers only work with GPU", "SyncBatchNorm is for GPUs"),
    Expected("test_ddp_apply_optim_in_backward*", WITHOUT, "accelerator device", "uses the streams of a GPU"),
    Expected("test_ddp_native_mixed_precision_*grad_as_bucket*", WITHOUT, "support events", "uses events of a GPU"),
    Expected("test_ddp_device", WITHOUT, "None is not", "is about `device_ids`, which DDP on CPU has none of"),
    Expected("test_ddp_logging_data_gpu", WITHOUT, "'' != ", "asserts the number of the GPU"),
    Expected("test_ddp_hook_pickling_powerSGD", WITHOUT, "Weights only load", "loads what `weights_only` refuses"),
]
_WITH_HOOK = [
    Expected("test_ddp_comm_hook_logging", "?*", "String comparison failed", "asserts that DDP logs no hook"),
    Expected(
        "test_ddp_grad_div_uneven_inputs",
        "?*",
        "divide_by_initial_world_size=False",
        "join() tells no hook, PyTorch's or ours, how many ranks are left: hooks divide by all",
    ),
    Expected(
        "test_ddp_native_mixed_precision_ignored_params",
        "?*",
        "has the communication hook '_reducer_allreduce_and_upcast_hook'",
        "DDP(mixed_precision=...) registers a hook of its own, and takes one",
    ),
    Expected(
        "test_ddp_profiling_torch_profiler",
        "?*",
        "Expected 6 but got 0",
        "counts collectives of the training thread; those of a hook are issued by another, which the profiler omits",
    ),
]

# Their models are refused, keep hooks of the test's own, or see no forward.
NO_HOOK = {
    "test_DistributedDataParallel_requires_grad",
    "test_accumulate_gradients_no_sync_allreduce_hook",
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
    "test_ddp_model_diff_num_params_across_ranks",
    "test_ddp_python_error_logged",
}


def expected_failure(test, setup):
    """What is known of this test in this set-up; `None`: it should pass."""
    table = _ON_CPU if setup == WITHOUT else _WITH_HOOK
    return next((each for each in table if fnmatch(test, each.tests) and fnmatch(setup, each.setups)), None)
