"""Where ranks agree that all of them go on: for what comes before any collective that could be aborted."""

from __future__ import annotations

import pprint
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist

from lightning_commhooks.collectives.errors import HookError

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


@contextmanager
def raise_on_all_ranks(process_group: dist.ProcessGroup, what: str) -> Iterator[dict[str, object]]:
    """Raise on all ranks when the body raises on one of them. Collective; the body is not.

    Args:
        process_group: the ranks.
        what: is done in the body, for messages.

    Yields:
        a dictionary for what has to be the same on all ranks, by name; compared by how it prints.

    Raises:
        HookError: the body raised on another rank, or that cannot be reached.
        ValueError: ranks have put different values into the dictionary.
    """
    same: dict[str, object] = {}
    try:
        yield same
    except Exception as failure:
        with suppress(RuntimeError):  # a peer has failed too
            _gather(process_group, (f"{what} failed on rank {dist.get_rank()}: {failure!r}", {}))
        raise
    try:
        told = _gather(process_group, ("", {name: _text(value) for name, value in same.items()}))
    except RuntimeError as lost:
        raise HookError(f"{what} failed on another rank, which has its own error: {lost}") from lost
    for problem, _ in told:
        if problem:
            raise HookError(problem)
    for rank, (_, theirs) in enumerate(told):
        for name, text in told[0][1].items():
            if theirs[name] != text:
                first, other = (dist.get_global_rank(process_group, i) for i in (0, rank))
                raise ValueError(
                    f"{what}: {name} must be the same on all ranks, is {_on_one_line(text)} on rank {first} and "
                    f"{_on_one_line(theirs[name])} on rank {other}. Look for what differs between machines: command "
                    "line, configuration file, environment variables"
                )


def _text(value: object) -> str:
    # An item for each line, since only then sets are sorted; and no addresses, which differ between processes.
    return _ADDRESS.sub("", pprint.pformat(value, width=1, sort_dicts=False))


def _on_one_line(text: str) -> str:
    return re.sub(r"(?<=[(\[{]) | (?=[)\]}])", "", " ".join(text.split()))


def _gather(process_group: dist.ProcessGroup, own: tuple[str, dict[str, str]]) -> list[tuple[str, dict[str, str]]]:
    told = [own] * process_group.size()
    if len(told) > 1:
        dist.all_gather_object(told, own, group=process_group)
    return told
