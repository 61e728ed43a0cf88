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


needs_accelerate_with_fsdp2 = pytest.mark.skipif(
    not (has("accelerate", "1.6") and HAS_FSDP2_HOOKS), reason="FSDP2 needs Accelerate 1.6, and its hooks PyTorch 2.9"
)
