"""Processes of the command line: started here or by torchrun, and ended together when one fails."""

from __future__ import annotations

import contextlib
import math
import os
import re
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store

# A rank that has not answered for so long never will.
_TIMEOUT = timedelta(minutes=10)
# What ranks that only notice another one's failure are waited for.
_GRACE_SECONDS = 3.0
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# A child of `spawn`, which may not start children.
_CHILD = "LIGHTNING_COMMHOOKS_CHILD"
_FAILED = "lightning_commhooks/failed"
_LOST_CONNECTION = re.compile(r"Connection (reset|closed)|Broken pipe|Connection was likely closed")

USAGE_ERROR = 2
FAILURE = 1


class Failed(Exception):
    """A rank failed, and whoever is to say so has said it; `code` is the exit code."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


@dataclass(frozen=True)
class Place:
    """This process among the others.

    Attributes:
        rank: among all.
        local_rank: among those of its node.
        world_size: number of all.
        is_spawned: whether `spawn` started it.
    """

    rank: int
    local_rank: int
    world_size: int
    is_spawned: bool

    @property
    def is_first(self) -> bool:
        """Whether this one prints."""
        return self.rank == 0


@contextlib.contextmanager
def nothing_on_stdout() -> Iterator[None]:
    """Have what others print meanwhile on standard error, libraries in C++ too: some versions of gloo do."""
    sys.stdout.flush()
    with contextlib.redirect_stdout(sys.stderr):
        saved = os.dup(1)
        os.dup2(2, 1)
        try:
            yield
        finally:
            os.dup2(saved, 1)
            os.close(saved)


def launched_place() -> Place | None:
    """What a launcher says in the environment; `None` if there is none.

    Raises:
        ValueError: it says only a part.
    """
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        return None
    if missing := [name for name in _VARIABLES if name not in os.environ]:
        raise ValueError(f"{missing[0]} is not set in the environment, though RANK or WORLD_SIZE is: use torchrun")
    try:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
    except ValueError as error:
        raise ValueError(f"RANK, WORLD_SIZE and LOCAL_RANK must be integers: {error}") from error
    return Place(rank, local_rank, world_size, _CHILD in os.environ)


def spawn(num_processes: int, arguments: Sequence[str]) -> int:
    """Run the command with these arguments in several processes of this machine; the first one prints.

    Returns:
        the exit code: that of the first process that failed, or 0.
    """
    threads = str(max(1, (os.cpu_count() or 1) // num_processes))
    environment = {"OMP_NUM_THREADS": threads, **os.environ, _CHILD: "1"}
    environment |= {"WORLD_SIZE": str(num_processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    command = [sys.executable, "-m", "lightning_commhooks", *arguments]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(num_processes):
            own = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            stdout = None if rank == 0 else subprocess.DEVNULL
            processes.append(subprocess.Popen(command, env=own, stdout=stdout))
        return _wait(processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _wait(processes: list[subprocess.Popen[bytes]]) -> int:
    first, deadline = 0, math.inf
    while True:
        codes = [process.poll() for process in processes]
        if not first and any(codes):
            first, deadline = next(filter(None, codes)), time.monotonic() + _GRACE_SECONDS
        if None not in codes or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    if first < 0:
        print(f"error: a process was ended by signal {-first}", file=sys.stderr)
    return first if first >= 0 else FAILURE


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def choose_device(choice: str, place: Place) -> torch.device:
    """The device of a process.

    Raises:
        ValueError: there is no such device for each process of this node.
    """
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", place.world_size if place.is_spawned else 1))
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if choice == "cuda" and available <= max(place.local_rank, num_local - 1):
        raise ValueError(f"--device cuda: {num_local} processes on this machine, but {available} CUDA devices")
    if choice == "cpu" or available <= max(place.local_rank, num_local - 1):
        return torch.device("cpu")
    torch.cuda.set_device(place.local_rank)
    return torch.device("cuda", place.local_rank)


@contextlib.contextmanager
def joined(place: Place, device: torch.device) -> Iterator[None]:
    """Have a process group within a `with`; end all ranks when one fails, which says why.

    Raises:
        Failed: something went wrong, here or elsewhere.
    """
    backend = "nccl" if device.type == "cuda" else "gloo"
    alone = HashStore() if place.world_size == 1 else None  # several meet as the environment says
    dist.init_process_group(backend, timeout=_TIMEOUT, world_size=place.world_size, rank=place.rank, store=alone)
    store: Store = dist.distributed_c10d._get_default_store()
    try:
        yield
        dist.barrier()
    except Failed:
        raise
    except BaseException as failure:
        # Peers may wait for this rank in a collective. They notice when the process ends, so nothing is cleaned up.
        _report(failure, place, store)
        raise Failed(FAILURE) from failure
    dist.destroy_process_group()


def _report(failure: BaseException, place: Place, store: Store) -> None:
    """Say what went wrong, unless another rank has failed before: this one only lost its connection then."""
    try:
        is_first_to_fail = store.add(_FAILED, 1) == 1
    except Exception:
        is_first_to_fail = place.is_first  # the store was on rank 0, which has ended
    if is_first_to_fail:
        if os.environ.get("COMMHOOKS_TRACEBACK"):
            traceback.print_exception(failure)
        print(f"error on rank {place.rank}: {_reason(failure)}", file=sys.stderr, flush=True)


def _reason(failure: BaseException) -> str:
    text = str(failure).strip()
    if _LOST_CONNECTION.search(text):
        return "the connection to another rank broke: its process ended, or the network did"
    return f"{type(failure).__name__}: {text}" if text else type(failure).__name__


@contextlib.contextmanager
def agreed(place: Place, kind: type[ValueError]) -> Iterator[None]:
    """End all ranks when the body raises an error of a kind on one, which says what the user gave wrongly. Collective.

    The lowest such rank's reason is printed, once.

    Raises:
        Failed: with exit code 2.
    """
    own = None
    try:
        yield
    except kind as error:
        own = str(error)
    texts: list[str | None] = [None] * place.world_size
    dist.all_gather_object(texts, own)
    wrong = [rank for rank, text in enumerate(texts) if text is not None]
    if not wrong:
        return
    if place.is_first:
        where = "" if len(wrong) == place.world_size else f" (on rank {wrong[0]})"
        print(f"error: {texts[wrong[0]]}{where}", file=sys.stderr, flush=True)
    dist.destroy_process_group()
    raise Failed(USAGE_ERROR)
