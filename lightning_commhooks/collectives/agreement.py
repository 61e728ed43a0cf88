"""Agreement between ranks before the first collective that could be aborted."""

from __future__ import annotations

import math
import os
import pprint
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from lightning_commhooks.basics.announce import announce
from lightning_commhooks.collectives.errors import HookError

ATTACH = "attach()"
# Seconds that ranks wait in attach() for the remaining ranks.
_PATIENCE = "COMMHOOKS_ATTACH_TIMEOUT_SECONDS"
_DEFAULT_PATIENCE, _SECONDS_TO_WARN = 120.0, 5.0
_LONGEST_PAUSE, _LONGEST_PAUSE_LATER = 0.05, 1.0
_SECONDS_TO_ASK = 1.0
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
# How often all ranks of each group have waited for each other.
_num_waits: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()


def store_of(process_group: dist.ProcessGroup) -> Store | None:
    """Return the store of a group; `None` for a backend without a store, and for a single rank."""
    if process_group.size() == 1:
        return None
    try:
        store: Store | None = process_group.get_group_store()
        if store is not None:
            store.check(["lightning_commhooks"])  # raises if the store is a placeholder
    except RuntimeError:
        return None
    return store


def wait_for_all_ranks(
    process_group: dist.ProcessGroup,
    operation: str,
    why_missing: Callable[[list[int]], str | None] = lambda missing: None,
    timeout: float = math.inf,
) -> None:
    """Wait until all ranks have called an operation, before its first collective. Collective, through the store.

    Without this, a collective could match an unrelated collective of the missing ranks, and hang or end their
    processes.

    Args:
        process_group: the ranks.
        operation: the operation, for messages.
        why_missing: returns the reason why the missing ranks of the group will not call it, if it knows one. Then, or
            after the timeout, a `HookError` is raised.
        timeout: seconds to wait for them, except in `attach()`.
    """
    store = store_of(process_group)
    if store is None:
        return
    number, rank, size = _num_waits.get(process_group, 0), process_group.rank(), process_group.size()
    prefix = f"lightning_commhooks/{number}"
    store.set(f"{prefix}/{rank}", operation)
    if store.add(f"{prefix}/arrived", 1) == size:
        store.set(f"{prefix}/all", operation)
    begin, pause, has_warned, missing = time.monotonic(), 1e-3, False, list(range(size))
    patience = _patience() if operation == ATTACH else timeout
    has_left = False
    try:
        while not store.check([f"{prefix}/all"]):
            waited = time.monotonic() - begin
            if waited > min(_SECONDS_TO_WARN, patience):
                missing = [one for one in missing if not store.check([f"{prefix}/{one}"])]
                names = _named(process_group, missing)
                if missing and not has_warned:
                    announce(f"rank {dist.get_rank()} waits in {operation} for {names}. {_what_to_write(operation)}")
                    has_warned = True
                reason = f"not called it within {patience:g} s" if waited > patience else why_missing(missing)
                if missing and reason:
                    has_left = True
                    if _leave(store, prefix, size):
                        _forget(store, f"{prefix}/{rank}")
                        has = "has" if len(missing) == 1 else "have"
                        raise HookError(
                            f"{operation} must be called on all ranks, and {names} {has} {reason}. "
                            f"{_what_to_write(operation)}"
                        )
                    break
            time.sleep(pause)
            # Hundreds of ranks may poll one store.
            pause = min(2 * pause, _LONGEST_PAUSE_LATER if has_warned else _LONGEST_PAUSE)
    except BaseException:
        # Such as an interrupt by the user. The next try must not count this rank twice.
        with suppress(RuntimeError):  # the store may be gone
            if not has_left and not store.check([f"{prefix}/all"]):
                store.add(f"{prefix}/arrived", -1)
                _forget(store, f"{prefix}/{rank}")
        raise
    _num_waits[process_group] = number + 1
    # The store may outlive the process group.
    keys = [str(rank), "arrived", "all", "left"] if store.add(f"{prefix}/left", 1) == size else [str(rank)]
    for key in keys:
        _forget(store, f"{prefix}/{key}")


def _leave(store: Store, prefix: str, size: int) -> bool:
    """Stop waiting, and return whether this rank may: not if all ranks have arrived meanwhile."""
    if store.add(f"{prefix}/arrived", -1) >= size - 1:
        store.set(f"{prefix}/all", "")
        return False
    # If another rank stops waiting just when the last one arrives, the number no longer shows that all have arrived;
    # then one of those two ranks is about to say so.
    time.sleep(_LONGEST_PAUSE)
    return not store.check([f"{prefix}/all"])


class Notes:
    """Notes between ranks of a group, in its store under a rank-uniform prefix; does nothing without a store."""

    def __init__(self, process_group: dist.ProcessGroup, prefix: str) -> None:
        self._store, self._prefix = store_of(process_group), f"lightning_commhooks/{prefix}"
        self._told: set[str] = set()

    def tell(self, name: str, text: str) -> None:
        """Leave a note."""
        self._told.add(name)
        self._ask(lambda store: store.set(f"{self._prefix}/{name}", text))

    def forget(self, name: str) -> None:
        """Remove one of this rank's notes: the store may outlive the process group."""
        if name in self._told:
            self._ask(lambda store: _forget(store, f"{self._prefix}/{name}"))

    def of(self, name: str) -> str:
        """Return the note of that name; empty if there is none."""
        key, found = f"{self._prefix}/{name}", [""]
        self._ask(lambda store: found.append(store.get(key).decode()) if store.check([key]) else None)
        return found[-1]

    def _ask(self, what: Callable[[Store], object]) -> None:
        """Use the store with a short timeout: the process that hosts it may be gone, or not answer."""
        store = self._store
        if store is None:
            return

        def ask() -> None:
            with suppress(RuntimeError):
                what(store)

        asking = threading.Thread(target=ask, name="lightning_commhooks note", daemon=True)
        with suppress(RuntimeError):  # the interpreter is shutting down
            asking.start()
            asking.join(_SECONDS_TO_ASK)


def num_waits(process_group: dist.ProcessGroup) -> int:
    """Return how often the ranks of a group have waited for each other; rank-uniform after collective operations."""
    return _num_waits.get(process_group, 0)


def _forget(store: Store, key: str) -> None:
    with suppress(RuntimeError, NotImplementedError):  # some stores cannot delete
        store.delete_key(key)


def _patience() -> float:
    text = os.environ.get(_PATIENCE, "")
    try:
        seconds = float(text) if text else _DEFAULT_PATIENCE
    except ValueError:
        seconds = math.nan
    if not seconds > 0:
        raise ValueError(f"the environment variable {_PATIENCE} must be a number of seconds above 0, got {text!r}")
    return seconds


def _named(process_group: dist.ProcessGroup, ranks: list[int]) -> str:
    try:
        names = ", ".join(str(dist.get_global_rank(process_group, rank)) for rank in ranks[:8])
    except ValueError as unknown:
        raise HookError(
            "the process group of the hook was destroyed: call state_dict() before destroy_process_group(), and attach "
            "another hook to a newly wrapped model in the new group"
        ) from unknown
    return f"rank{'s' if len(ranks) > 1 else ''} {names}{' and others' if len(ranks) > 8 else ''}"


def _what_to_write(operation: str) -> str:
    if operation == ATTACH:
        return f"Call it on every rank, not under `if rank == 0:`. If a rank has to be that late, set {_PATIENCE}"
    return "Call it on every rank after the same number of steps, and write files under `if rank == 0:` after that"


@contextmanager
def raise_on_all_ranks(process_group: dist.ProcessGroup, operation: str) -> Iterator[dict[str, object]]:
    """Raise on all ranks when the body raises on one of them: there a `HookError`. Collective; the body is not.

    Yields a dictionary for values that must be the same on all ranks, by name; compared by their printed form. If they
    differ, a `ValueError` is raised.
    """
    same: dict[str, object] = {}
    try:
        yield same
    except Exception as failure:
        with suppress(RuntimeError):  # a peer has failed too, or has not arrived
            wait_for_all_ranks(process_group, operation)
            _gather(process_group, (f"{operation} failed on rank {dist.get_rank()}: {failure!r}", {}))
        raise
    wait_for_all_ranks(process_group, operation)
    try:
        told = _gather(process_group, ("", {name: _text(value) for name, value in same.items()}))
    except RuntimeError as lost:
        raise HookError(f"{operation} failed on another rank, which has its own error: {lost}") from lost
    for problem, _ in told:
        if problem:
            raise HookError(problem)
    for rank, (_, theirs) in enumerate(told):
        for name in {**told[0][1], **theirs}:
            one, other = (_on_one_line(values.get(name, "missing")) for values in (told[0][1], theirs))
            if one != other:
                first, second = (dist.get_global_rank(process_group, i) for i in (0, rank))
                raise ValueError(
                    f"{operation}: {name} must be the same on all ranks, is {one} on rank {first} and {other} on rank "
                    f"{second}. Compare the command lines, configuration files and environment variables of the "
                    "machines"
                )


def _text(value: object) -> str:
    # One item on each line, since pprint then sorts sets; without addresses, which differ between processes.
    return _ADDRESS.sub("", pprint.pformat(value, width=1, sort_dicts=False))


def _on_one_line(text: str) -> str:
    return re.sub(r"(?<=[(\[{]) | (?=[)\]}])", "", " ".join(text.split()))


def _gather(process_group: dist.ProcessGroup, own: tuple[str, dict[str, str]]) -> list[tuple[str, dict[str, str]]]:
    told = [own] * process_group.size()
    if len(told) > 1:
        dist.all_gather_object(told, own, group=process_group)
    return told
