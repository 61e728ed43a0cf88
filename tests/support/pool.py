"""A pool of gloo worker processes that lives as long as the test session.

Starting a process costs seconds, a call on a running one a tenth of one. Every call gets a fresh default
process group over the ranks it asked for, and is checked for what it leaves behind.
"""

import contextlib
import gc
import os
import re
import sys
import threading
import warnings
from datetime import timedelta
from multiprocessing import connection

import torch
import torch.distributed as dist
from forks import FORKS, PATIENCE, alone

from lightning_commhooks.codecs import codec
from lightning_commhooks.collectives import group
from lightning_commhooks.collectives.steps import waiting_threads
from lightning_commhooks.testing.processes import exchange, serve

SIZE = 4
WORKER = "import sys, pool; pool.work(*sys.argv[1:])"
THREAD_NAME = "lightning_commhooks"
# A warning of torch.compile about what it looks at itself, after other things were compiled in this process.
OF_COMPILING = "The .grad attribute of a Tensor that is not a leaf"
# Connecting a new group's ranks, gloo loses a connection once in a hundred thousand, on one side only; such a call is
# repeated once.
LOST_CONNECTION = re.compile(r"connectFullMesh failed.*Connection (closed|reset) by peer")


class WorkerError(AssertionError):
    """A function failed, hung or left something behind on some rank."""


class Pool:
    """Runs module-level functions on 2 or 4 ranks.

    Args:
        call: what a worker does with a call, for other users than pytest's tests; the default is `call_on_new_group`.
        size: number of workers.
    """

    def __init__(self, call=None, size=SIZE):
        self._call = call or call_on_new_group
        self._size = size
        self._workers = []
        self._num_calls = 0

    def run(self, function, *args, world=2, timeout=60):
        """Call `function(rank, world, *args)` on each rank, with a default process group of `world` ranks.

        Args:
            function: of a module that can be imported.
            args: of the function.
            world: number of ranks.
            timeout: seconds that it may take, or `PATIENCE` times as long on a slow machine.

        Returns:
            the results, by rank.

        Raises:
            WorkerError: with the traceback of every rank that failed, or the ranks that took too long. The
                pool starts anew then.
        """
        for _ in range(2):
            replies = self._call_all(function, args, world, timeout)
            failed = [f"rank {rank}:\n{text}" for rank, (ok, text) in replies.items() if not ok]
            if not failed and len(replies) == world:
                return [replies[rank][1] for rank in range(world)]
            self._kill()
            if not failed or not all(LOST_CONNECTION.search(text) for text in failed):
                break
            print(f"{function.__name__} is called again: {failed[0]}", file=sys.stderr)
        missing = [f"rank {rank}: no answer" for rank in range(world) if rank not in replies]
        raise WorkerError("\n".join([f"{function.__name__} failed", *failed, *missing]))

    def _call_all(self, function, args, world, timeout):
        if not self._workers:
            self._start()
        self._num_calls += 1
        pipes = [pipe for _, pipe in self._workers[:world]]
        return exchange(pipes, f"call{self._num_calls}", (self._call, function, args), timeout * PATIENCE, 2 * PATIENCE)

    def close(self):
        """Let the workers end by themselves."""
        for _, pipe in self._workers:
            pipe.close()
        for process, _ in self._workers:
            process.wait(10 * PATIENCE)
        exit_codes = [process.returncode for process, _ in self._workers]
        errors = [process.printed()[1] for process, _ in self._workers]
        self._kill()
        assert not any(exit_codes), f"exit codes of the workers: {exit_codes}\n{errors}"

    def _start(self):
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        path = os.pathsep.join(filter(None, sys.path))
        with connection.Listener(family="AF_UNIX") as listener:
            for _ in range(self._size):
                arguments = (listener.address, self._store.port)
                process = FORKS.start(
                    "-c", WORKER, *arguments, environment=alone(PYTHONPATH=path, TORCH_COMPILE_DISABLE="0")
                )
                self._workers.append((process, listener.accept()))

    def _kill(self):
        for process, pipe in self._workers:
            pipe.close()
            process.kill()
            with process:
                pass
        self._workers = []


def work(address, port):
    """A worker: call what comes from the pool at `address`, until it closes."""
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    # Compiling takes seconds, and the gradients of most tests are too small to be given to what was compiled.
    group.compiled = lambda hook_codec, *_: codec.Kernels(hook_codec)
    serve(
        connection.Client(address), int(port), lambda store, rank, world, call, *what: call(store, rank, world, *what)
    )


def call_on_new_group(store, rank, world, function, args):
    """Call `function(rank, world, *args)` on a new process group; fail if it leaves anything behind."""
    gc.freeze()
    environment = read_environment()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=45 * PATIENCE))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.manual_seed(0)
        result = function(rank, world, *args)
    gc.collect()
    changed = dict(read_environment().items() ^ environment.items())
    assert not changed, f"{function.__name__} changed the environment: {changed}"
    if dist.is_initialized():
        # Else the peers could see a closed connection in the middle of their last collective.
        dist.barrier()
        check_no_leaks(num_groups=1, may_wait=True)
        dist.destroy_process_group()
    check_no_leaks(num_groups=0, may_wait=True)
    return result


def read_environment():
    """Environment variables, without those that PyTorch and pytest set by themselves."""
    theirs = ("TORCHINDUCTOR_", "_TORCHINDUCTOR_", "TRITON_", "PYTEST_", "CUDA_MODULE_LOADING")
    return {key: value for key, value in os.environ.items() if not key.startswith(theirs)}


def check_no_leaks(num_groups, may_wait=False):
    """Fail when a communication thread or process group is left in this process.

    Args:
        num_groups: that there are to be.
        may_wait: whether threads may wait for other ranks: gloo keeps one until its timeout if its peer has closed the
            connection in the middle of a message, which is up to chance where ranks fail at the same time.
    """
    threads = [
        thread.name
        for thread in threading.enumerate()
        if thread.name.startswith(THREAD_NAME) and not (may_wait and thread.ident in waiting_threads)
    ]
    assert not threads, f"leaked threads: {threads}"
    groups = list(dist.distributed_c10d._world.pg_map)
    assert len(groups) == num_groups, f"leaked process groups: {groups[num_groups:]}"


@contextlib.contextmanager
def compiling():
    """Let the codecs of hooks that are attached meanwhile be compiled."""
    eager, group.compiled = group.compiled, codec.compiled
    try:
        yield
    finally:
        group.compiled = eager


@contextlib.contextmanager
def ignoring(*messages):
    """Ignore warnings that begin so (regular expressions); the rest stay errors."""
    with warnings.catch_warnings():
        for message in messages:
            warnings.filterwarnings("ignore", message=message)
        yield
