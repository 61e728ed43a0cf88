"""The tensors of an optimizer's state that can be averaged over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_commhooks.collectives.group import Group


def common_states(
    parameters: Mapping[str, Tensor], state: Mapping[Tensor, Any], group: Group
) -> dict[str, dict[str, Tensor]]:
    """Floating-point tensors of an optimizer's state by parameter and key, without what some rank has not got."""
    own = {name: _floating_point(state.get(p, {})) for name, p in parameters.items()}
    gathered = group.all_gather_numbers([len(tensors) for tensors in own.values()], torch.int32)
    everywhere = [len(set(numbers)) == 1 for numbers in zip(*gathered, strict=True)]
    return {name: tensors for (name, tensors), is_common in zip(own.items(), everywhere, strict=True) if is_common}


def _floating_point(state: Mapping[str, Any]) -> dict[str, Tensor]:
    if any(isinstance(v, Tensor) and v.numel() > 1 and not _is_continuous(v) for v in state.values()):
        return {}  # quantized: the mean of scales means nothing without that of the codes
    # Sorted: the order in which an optimizer makes them is its own business.
    tensors = {k: v for k, v in sorted(state.items()) if isinstance(v, Tensor) and k != "step"}
    return {k: v for k, v in tensors.items() if _is_continuous(v)}


def _is_continuous(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
