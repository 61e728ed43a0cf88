"""Processes of the command line, started here or by torchrun; if one fails, all end."""

from __future__ import annotations

import contextlib
import math
import os
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store, TCPStore

# Other ranks wait while rank 0 measures errors.
_TIMEOUT = timedelta(minutes=30)
# Time for the remaining ranks to notice a failure and end.
_GRACE_SECONDS = 3.0
_FAILED = "lightning_commhooks/failed"
_LOST_CONNECTION = re.compile(r"Connection (reset|closed)|Broken pipe|Connection was likely closed")
FAILURE, USAGE_ERROR = 1, 2


@contextlib.contextmanager
def nothing_on_stdout() -> Iterator[None]:
    """Redirect standard output to standard error, also for C++ libraries: some versions of gloo print."""
    sys.stdout.flush()
    with contextlib.redirect_stdout(sys.stderr):
        saved = os.dup(1)
        os.dup2(2, 1)
        try:
            yield
        finally:
            os.dup2(saved, 1)
            os.close(saved)


def spawn(num_processes: int, arguments: Sequence[str]) -> int:
    """Run the command in several processes on this machine, of which rank 0 prints, and return the exit code."""
    num, threads = str(num_processes), str(max(1, (os.cpu_count() or 1) // num_processes))
    shared = {"OMP_NUM_THREADS": threads, **os.environ, "WORLD_SIZE": num, "LOCAL_WORLD_SIZE": num}
    # This process hosts the store, as in torchrun: a free port could be taken before rank 0 listens on it.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared |= {"MASTER_ADDR": store.host, "MASTER_PORT": str(store.port)}
    shared |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    command = [sys.executable, "-m", "lightning_commhooks", *arguments]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(num_processes):
            own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            processes.append(subprocess.Popen(command, env=own, stdout=subprocess.DEVNULL if rank else None))
        return _wait(processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _wait(processes: list[subprocess.Popen[bytes]]) -> int:
    deadline = math.inf
    while None in (codes := [process.poll() for process in processes]) and time.monotonic() < deadline:
        if any(codes):
            deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        time.sleep(0.05)
    failed = [code for code in codes if code]
    if failed and min(failed) < 0:
        print(f"error: a process was ended by signal {-min(failed)}", file=sys.stderr)
        return FAILURE
    return max(failed, default=0)


def choose_device(choice: str) -> torch.device:
    """Return the device of this process; refuse `"cuda"` if there are fewer devices than processes on this node."""
    local_rank, num_local = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    is_enough = available > max(local_rank, num_local - 1)
    if choice == "cuda" and not is_enough:
        raise ValueError(f"--device cuda: {num_local} processes on this machine, but {available} CUDA devices")
    if choice == "cpu" or not is_enough:
        return torch.device("cpu")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


@contextlib.contextmanager
def joined(device: torch.device) -> Iterator[None]:
    """Create a process group for a `with` block. If a rank fails in it, it prints the reason, and all ranks end."""
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    backend = "nccl" if device.type == "cuda" else "gloo"
    alone = HashStore() if size == 1 else None  # several ranks use the store of the environment
    try:
        dist.init_process_group(backend, timeout=_TIMEOUT, world_size=size, rank=rank, store=alone)
        dist.barrier()  # a rank that fails at once could end before its peers have connected to it
    except (RuntimeError, ValueError) as failure:
        if os.environ.get("COMMHOOKS_TRACEBACK"):
            traceback.print_exception(failure)
        print(f"error on rank {rank}: the ranks did not find each other: {failure}", file=sys.stderr)
        sys.exit(FAILURE)
    store: Store = dist.distributed_c10d._get_default_store()
    try:
        yield
        dist.barrier()
    except BaseException as failure:
        _report(failure, store)
        sys.stderr.flush()
        # Without the interpreter's shutdown, in which threads may wait for lost ranks. The peers notice the exit.
        os._exit(USAGE_ERROR if isinstance(failure, ValueError) else FAILURE)
    dist.destroy_process_group()


def _report(failure: BaseException, store: Store) -> None:
    """Print the reason, unless another rank failed first: then this rank has only lost its connection."""
    rank = dist.get_rank()
    try:
        is_first_to_fail = store.add(_FAILED, 1) == 1
    except Exception:
        is_first_to_fail = rank == 0  # rank 0 hosted the store and has ended
    if not is_first_to_fail:
        return
    if os.environ.get("COMMHOOKS_TRACEBACK"):
        traceback.print_exception(failure)
    text = str(failure).strip()
    if not isinstance(failure, ValueError):
        text = f"{type(failure).__name__}: {text}" if text else type(failure).__name__
    if _LOST_CONNECTION.search(text):
        text = "the connection to another rank broke: its process ended, or the network failed"
    where = f" on rank {rank}" if dist.get_world_size() > 1 else ""
    print(f"error{where}: {text}", file=sys.stderr)
