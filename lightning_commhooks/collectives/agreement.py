"""Where ranks agree that all of them go on: for what comes before any collective that could be aborted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist

from lightning_commhooks.collectives.errors import HookError


@contextmanager
def together(process_group: dist.ProcessGroup, what: str) -> Iterator[None]:
    """Raise on all ranks when the body raises on one of them. Collective; the body is not.

    Args:
        process_group: the ranks.
        what: is done in the body, for messages.

    Raises:
        HookError: the body raised on another rank, or that cannot be reached.
    """
    try:
        yield
    except Exception as failure:
        with suppress(RuntimeError):  # a peer has failed too
            _gather(process_group, f"{what} failed on rank {dist.get_rank()}: {failure!r}")
        raise
    try:
        problems = _gather(process_group, "")
    except RuntimeError as lost:
        raise HookError(f"{what} failed on another rank, which has its own error: {lost}") from lost
    for problem in filter(None, problems):
        raise HookError(problem)


def _gather(process_group: dist.ProcessGroup, problem: str) -> list[str]:
    problems = [problem] * process_group.size()
    if len(problems) > 1:
        dist.all_gather_object(problems, problem, group=process_group)
    return problems
