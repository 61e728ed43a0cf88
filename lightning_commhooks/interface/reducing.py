"""Around a hook's methods: whether they are generators, and which gradient elements are sent as they are."""

from __future__ import annotations

from collections.abc import Generator

import torch
from torch import Tensor

from lightning_commhooks.collectives.group import Group
from lightning_commhooks.collectives.steps import Steps, T, Wait

_AS_IN = "as in `yield from ranks.all_reduce_mean_(bucket.flat)`"


def started(steps: Steps[T], hook: object, method: str) -> Steps[T]:
    """Return what a hook's method returns.

    Raises:
        TypeError: that is no generator, so nothing would wait for its collectives; or it yields something else.
    """
    name = f"{type(hook).__name__}.{method}"
    if not isinstance(steps, Generator):
        raise TypeError(
            f"{name} is no generator, it returned {type(steps).__name__}: begin each collective by `yield from`, "
            f"{_AS_IN}; if there is none, end with `return` and a `yield` after it"
        )
    failure: Exception | None = None
    while True:
        try:
            waits = next(steps) if failure is None else steps.throw(failure)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]
        finally:
            failure = None  # it would keep the frames that it has collected
        if not isinstance(waits, Wait):
            raise TypeError(f"{name} yields {type(waits).__name__}: write `yield from`, not `yield`, {_AS_IN}")
        try:
            yield waits
        except Exception as reason:
            failure = reason


def counted(steps: Steps[T], gradients: Tensor, ranks: Group) -> Steps[T]:
    """Let a hook reduce gradients, and count how it sent their elements: see `Counters.numel_uncompressed`.

    Args:
        steps: the generator of the hook's method.
        gradients: of one bucket, flat, or the values of a sparse one.
        ranks: the collectives given to the hook.
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
