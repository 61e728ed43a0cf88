"""Which gradient elements a hook sends as they are: known from what it gives to collectives, not from the hook."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_commhooks.collectives.group import Group
from lightning_commhooks.collectives.steps import Steps, T


def counted(steps: Steps[T], gradients: Tensor, ranks: Group) -> Steps[T]:
    """Let a hook reduce gradients, and count how it sent their elements: see `Counters.numel_uncompressed`.

    Args:
        steps: what the hook's method has returned.
        gradients: of one bucket, flat, or the values of a sparse one.
        ranks: the collectives that the hook was given.
    """
    tally, dtype, numel = ranks.tally, gradients.dtype, gradients.numel()
    sent, between = tally.sent, tally.between_nodes
    numbers, numbers_between = tally.numbers.copy(), tally.numbers_between_nodes.copy()
    done = yield from steps
    if tally.sent > sent:
        given = tally.numbers - numbers
        if 0 < ranks.inter_node_share(around_ring=True) < 1 and tally.between_nodes > between:
            given = tally.numbers_between_nodes - numbers_between
        as_they_are = sum(num for form, num in given.items() if _is_as_precise(form, dtype))
        ranks.counters.numel_uncompressed += min(numel, as_they_are)
        ranks.counters.numel_compressed += max(0, numel - as_they_are)
    return done


def _is_as_precise(form: torch.dtype, dtype: torch.dtype) -> bool:
    are_floating_point = form.is_floating_point and dtype.is_floating_point
    return form == dtype or (are_floating_point and form.itemsize >= dtype.itemsize)
