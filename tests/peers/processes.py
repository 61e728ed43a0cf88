"""Two processes that live on, from `tests/support/pool.py`, and run one peer's test after another."""

import contextlib
import gc
import io
import os
import threading
import traceback
from datetime import timedelta

import torch.distributed as dist
from pool import THREAD_NAME, Pool, WorkerError

# For one test, s. The longest takes 20 on two cores that have nothing else to do.
TIMEOUT = 120


class Pair:
    """Two ranks, each in a process that imports PyTorch once."""

    def __init__(self):
        self._pool = Pool(_call, size=2)

    def run(self, function, *args):
        """Call `function(rank, world, *args) -> (outcome, count)` on both ranks, on a new process group.

        Returns:
            outcome and count of rank 0; or ("failed: " and why, 0), where a rank failed or gave no answer.
        """
        try:
            ranks = self._pool.run(function, *args, timeout=TIMEOUT)
        except WorkerError as error:  # both processes are new ones
            return f"failed: {error}", 0
        failed = [f"rank {rank}: {outcome}" for rank, (outcome, _) in enumerate(ranks) if outcome.startswith("failed")]
        if failed:
            return "failed: " + "\n".join(failed), 0
        if ranks[0] != ranks[1]:
            return f"failed: ranks do not agree, {ranks}", 0
        return ranks[0]

    def close(self):
        """End the processes."""
        self._pool.close()


def _call(store, rank, world, function, args):
    """Call `function` on a new process group, and restore what it changed.

    A failure is an outcome. Its process group is destroyed at once, so that the other rank, which may wait in a
    collective, fails too.
    """
    gc.freeze()
    environment = dict(os.environ)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    unread = io.StringIO()
    try:
        with contextlib.redirect_stdout(unread), contextlib.redirect_stderr(unread):
            result = function(rank, world, *args)
    except Exception:
        result = f"failed: {traceback.format_exc()}", 0
    os.environ.clear()
    os.environ.update(environment)
    dist.set_debug_level_from_env()
    gc.collect()
    if dist.is_initialized():
        if not result[0].startswith("failed"):
            dist.barrier()
        dist.destroy_process_group()
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith(THREAD_NAME)]
    assert not threads, f"leaked threads: {threads}; {result[0]}"
    return result
