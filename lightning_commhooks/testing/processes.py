"""Ranks as processes, each call with a new process group."""

from __future__ import annotations

import itertools
import os
import pickle
import re
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import connection, get_context
from typing import Any

import torch
import torch.distributed as dist

from lightning_commhooks.collectives.errors import HookError
from lightning_commhooks.testing.model import use_device

# Compiling takes seconds and does not pay for gradients as small as these. DDP's warnings on stderr that no parameter
# is unused are hidden.
_ENVIRONMENT = {"TORCH_COMPILE_DISABLE": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}

_SECONDS_TO_START = 120.0
# Time for the remaining ranks to report their errors after one has failed.
_SECONDS_AFTER_FAILURE = 10.0
# Of errors that are the consequence of another rank's.
_OF_ANOTHER_RANK = re.compile(r"gloo/|NCCL|Timed out|Connection (?:closed|reset)|the process died")
# The first version of NCCL in which ranks may share a GPU.
_SHARES_GPUS = (2, 30)


def variables_for_shared_gpus(rank: int, num_ranks: int, num_gpus: int, nccl: tuple[int, ...]) -> dict[str, str]:
    """Return the environment variables with which ranks on one machine share its GPUs over NCCL.

    Before version 2.30, NCCL rejects a GPU that it finds twice on one host. Each rank then gets its own host name and
    sends over sockets. Results are correct; times are meaningless, since processes take turns on a GPU. None are needed
    if each rank has its own GPU.
    """
    if num_ranks <= num_gpus:
        return {}
    # Disable the transports that need several GPUs or network cards.
    common = {"NCCL_NVLS_ENABLE": "0", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    if nccl[:2] >= _SHARES_GPUS:
        return {**common, "NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "2", "NCCL_NET_GDR_LEVEL": "LOC"}
    return {**common, "NCCL_HOSTID": f"rank-{rank}"}


def take_gpu(rank: int, num_ranks: int) -> torch.device:
    """Make one of the GPUs the device of this process, shared over NCCL if there are more ranks than GPUs.

    Call it before the process group is created: NCCL reads its variables once. Existing variables are kept.

    Args:
        rank: this process's rank on this machine.
        num_ranks: number of ranks on this machine.

    Returns:
        the device.
    """
    num_gpus = torch.cuda.device_count()
    if dist.is_nccl_available():
        for name, value in variables_for_shared_gpus(rank, num_ranks, num_gpus, torch.cuda.nccl.version()).items():
            os.environ.setdefault(name, value)
    device = torch.device("cuda", rank % num_gpus)
    torch.cuda.set_device(device)
    # A device mesh would otherwise choose device number LOCAL_RANK, which may not exist.
    torch.cuda.init()
    return device


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the processes that are started meanwhile; existing variables are kept."""
    ours = {key: value for key, value in variables.items() if key not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for key in ours:
            del os.environ[key]


class Processes:
    """A context manager that calls functions on up to `size` ranks, each in its own process.

    Args:
        size: number of processes.
        seconds: time limit of a collective; a call may take twice as long.
        device: `"cpu"` or `"cuda"`, the device of `Params` models. Ranks are distributed over the GPUs.
        backend: backend of the process groups: `"gloo"`, `"nccl"` or another registered name of NCCL's.

    Raises:
        ValueError: the device or backend is not available.
    """

    def __init__(self, size: int, seconds: float, device: str = "cpu", backend: str = "gloo") -> None:
        if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
            raise ValueError(f"device={device!r} is not available; use 'cpu', or 'cuda' where PyTorch finds a GPU")
        is_known = backend == "gloo" or (backend.startswith("nccl") and backend in dist.Backend.backend_list)
        if not is_known or (backend != "gloo" and device != "cuda"):
            raise ValueError(f"backend={backend!r}: use 'gloo', or 'nccl' with device='cuda'")
        self._place = device, backend
        self._size = size
        self._seconds = seconds
        self._numbers = itertools.count()
        self._ranks: list[tuple[Any, connection.Connection]] = []

    def __enter__(self) -> Processes:
        self._store = _store(0, is_master=True)
        # Forking is unsafe here: a process that has trained has threads.
        context = get_context("spawn")
        with _environment(_ENVIRONMENT):
            for rank in range(self._size):
                ours, theirs = context.Pipe()
                args = (theirs, self._store.port, self._seconds, *self._place, rank, self._size)
                process = context.Process(target=_work, args=args, daemon=True)
                process.start()
                theirs.close()
                self._ranks.append((process, ours))
        self._wait_until_started()
        return self

    def _wait_until_started(self) -> None:
        # On a busy machine, starting may take longer than a call.
        deadline = time.monotonic() + max(_SECONDS_TO_START, self._seconds)
        try:
            for _, pipe in self._ranks:
                if not pipe.poll(max(0.0, deadline - time.monotonic())):
                    raise EOFError
                pipe.recv_bytes()
        except EOFError:
            self.__exit__()
            raise RuntimeError(
                'a process failed to start in time. In a script, call check_hook under `if __name__ == "__main__":`'
            ) from None

    def __exit__(self, *error: object) -> None:
        for process, pipe in self._ranks:
            pipe.close()
            process.join(1)
            process.kill()
        self._ranks = []

    def __call__(self, function: Callable[..., Any], *args: Any, world: int) -> list[Any]:
        """Call `function(rank, world, *args)` on `world` ranks and return the results by rank.

        Raises:
            RuntimeError: the function failed on some ranks, or did not end in time on all of them. The text begins with
                the ranks that did not just lose or wait for another rank.
        """
        prefix = f"call{next(self._numbers)}"
        pipes = [pipe for _, pipe in self._ranks[:world]]
        start = time.monotonic()
        replies = exchange(pipes, prefix, (function, args), 2 * self._seconds, _SECONDS_AFTER_FAILURE)
        took = time.monotonic() - start
        failed = {rank: text for rank, (is_fine, text) in sorted(replies.items()) if not is_fine}
        failed |= {rank: f"no reply after {took:.0f} s" for rank in range(world) if rank not in replies}
        if failed:
            causes = [rank for rank, text in failed.items() if rank in replies and not _OF_ANOTHER_RANK.search(text)]
            advice = "" if causes else "All ranks have to issue the same collectives in the same order, and finish\n"
            texts = (f"rank {rank}: {failed[rank]}" for rank in dict.fromkeys([*causes, *failed]))
            raise RuntimeError(advice + "\n".join(texts))
        return [replies[rank][1] for rank in range(world)]


def exchange(
    pipes: list[connection.Connection], prefix: str, what: tuple[Any, ...], seconds: float, after_failure: float
) -> dict[int, tuple[bool, Any]]:
    """Let processes that `serve` call `what`, each as one rank, and return their replies by rank.

    A reply says whether the call went well, with its result or the traceback. Ranks that take longer than `seconds`, or
    `after_failure` seconds longer than one that failed, are missing. Each call needs another `prefix`.
    """
    for rank, pipe in enumerate(pipes):
        pipe.send_bytes(pickle.dumps((prefix, rank, len(pipes), *what)))
    deadline = time.monotonic() + seconds
    replies: dict[int, tuple[bool, Any]] = {}
    while len(replies) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in replies]
        ready = connection.wait(waiting, max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for rank, pipe in enumerate(pipes):
            if pipe in ready:
                try:
                    replies[rank] = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    replies[rank] = False, "the process died"
                if not replies[rank][0]:
                    deadline = min(deadline, time.monotonic() + after_failure)
    return replies


def serve(
    pipe: connection.Connection, port: int, call: Callable[..., Any], after_failure: Callable[[], object] = bool
) -> None:
    """Answer what comes through `exchange` until the pipe is closed, with the store at `port`.

    Each time, `call(store, rank, num_ranks, *what)` is called, and `after_failure()` once an error has been sent.
    """
    store = _store(port, is_master=False)
    while True:
        try:
            message = pipe.recv_bytes()
        except EOFError:
            return
        try:
            prefix, *arguments = pickle.loads(message)
            own = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]  # documented
            reply = True, call(own, *arguments)
        except BaseException as error:
            reply = False, "".join(traceback.format_exception(error))
        pipe.send_bytes(pickle.dumps(reply))
        if not reply[0]:
            after_failure()


def _store(port: int, is_master: bool) -> Any:
    return dist.TCPStore(  # type: ignore[attr-defined]  # documented
        "127.0.0.1", port, is_master=is_master, wait_for_workers=False
    )


def _work(
    pipe: connection.Connection, port: int, seconds: float, device: str, backend: str, number: int, size: int
) -> None:
    """Run one rank: answer calls until the pipe is closed."""
    torch.set_num_threads(1)
    if device == "cuda":
        # PyTorch 2.15's backend for NCCL chooses its device by this variable.
        os.environ.setdefault("LOCAL_RANK", str(number))
        use_device(take_gpu(number, size))
    timeout = timedelta(seconds=seconds)

    def call(store: Any, rank: int, world: int, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                result = function(rank, world, *args)
            except HookError as error:
                # Without the frames of the thread that trains.
                cause = "".join(traceback.format_exception(error.__cause__ or error, chain=False))
                raise RuntimeError(f"{error}\n{cause}") from None
        if dist.is_initialized():
            dist.barrier(device_ids=None if backend == "gloo" else [torch.cuda.current_device()])
            dist.destroy_process_group()
        return result

    def after_failure() -> None:
        if backend != "gloo":
            # A failed device cannot be used again, and NCCL could wait for ranks that wait for this one.
            os._exit(1)
        if dist.is_initialized():
            dist.destroy_process_group()

    pipe.send_bytes(b"")
    serve(pipe, port, call, after_failure)
