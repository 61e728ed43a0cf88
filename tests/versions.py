"""Marks of tests that need more than the oldest versions."""

import importlib.metadata

import pytest
import torch
from packaging.version import Version
from torch.distributed.fsdp import FSDPModule

HAS_FSDP2_HOOKS = hasattr(FSDPModule, "set_custom_reduce_scatter")
NO_FSDP2_HOOKS = f"FSDP2 takes hooks from PyTorch 2.9 on; this is {torch.__version__}"
needs_fsdp2_hooks = pytest.mark.skipif(not HAS_FSDP2_HOOKS, reason=NO_FSDP2_HOOKS)


def has(distribution, version):
    """Whether a distribution is installed, and not older."""
    try:
        return Version(importlib.metadata.version(distribution)) >= Version(version)
    except importlib.metadata.PackageNotFoundError:
        return False


# What FSDP1 of PyTorch 2.8 says while older models are collected as garbage, without hooks as well.
SAID_BY_FSDP1 = () if has("torch", "2.9") else ("Deallocating Tensor that still has live PyObject references",)

needs_complex_ddp = pytest.mark.skipif(
    not has("torch", "2.10"), reason="https://github.com/pytorch/pytorch/issues/158753: no complex parameters in DDP"
)

HAS_LIGHTNING_2_6 = has("lightning", "2.6")


def needs_lightning_2_6(reason):
    return pytest.mark.skipif(not HAS_LIGHTNING_2_6, reason=f"before Lightning 2.6 {reason}")


NO_STATIC_MANUAL = "ranks differ after manual optimization with a static graph, without hooks as well"
NO_TRACELESS_FINDER = "training begins at the second batch after the learning rate finder, without hooks as well"
# Of `Trainer.validate`: what older versions load is not restricted.
WEIGHTS_ONLY = {"weights_only": True} if HAS_LIGHTNING_2_6 else {}

needs_accelerate_with_fsdp2 = pytest.mark.skipif(
    not (has("accelerate", "1.6") and HAS_FSDP2_HOOKS), reason="FSDP2 needs Accelerate 1.6, and its hooks PyTorch 2.9"
)
