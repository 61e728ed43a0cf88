"""Forks of a rank, such as workers of a `DataLoader`, destroy nothing of their parent's and cannot use its hook."""

import gc
import os
import signal
import time
import traceback

import pytest
import torch
from driver import POWERSGD, SHAPES, Params, attached, backward, full_rank_gradients, same
from pool import ignoring
from torch.nn.parallel import DistributedDataParallel

import lightning_commhooks as lc

SECONDS = 60
BESIDE = lc.DiLoCo(period=4, delay=2, start_localSGD_iter=1, post_local_gradient_allreduce=False)


def in_fork(act):
    """Exit code of a fork that calls `act`; of one that hangs, the signal that ended it."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            act()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    deadline = time.monotonic() + SECONDS
    while not (ended := os.waitpid(pid, os.WNOHANG))[0] and time.monotonic() < deadline:
        time.sleep(0.01)
    if not ended[0]:
        os.kill(pid, signal.SIGKILL)
        ended = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(ended[1])


def fork_and_train(rank, world, hook, forks):
    """Train; with `forks`, forks free the model that the hook is attached to, or close it."""
    model = Params(SHAPES)
    ddp = DistributedDataParallel(model, bucket_cap_mb=4e-3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    held = [model, ddp, optimizer, lc.attach(ddp, hook, optimizers=[optimizer])]
    model.held = held  # a reference cycle, which the garbage collector alone frees

    def free():
        nonlocal model, ddp, optimizer
        held.clear()
        del model, ddp, optimizer
        gc.collect()

    def close():
        held[-1].close()
        free()

    def fork_again():
        assert in_fork(close) == 0
        free()

    codes = []
    for step in range(6):
        ddp(full_rank_gradients(rank, step, SHAPES)).backward()
        optimizer.step()
        if forks and step in (2, 3, 4):
            codes.append(in_fork((free, close, fork_again)[step - 2]))
    parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    with ignoring("hook='.*' ended while"):
        held[-1].close()
    model.held = None
    return codes, parameters


@pytest.mark.parametrize("hook", ["allreduce", POWERSGD, BESIDE], ids=["allreduce", "powersgd", "diloco"])
def test_forks_that_free_or_close_a_hook_end_well_and_leave_training_alone(run, hook):
    with_forks, without = run(fork_and_train, hook, True), run(fork_and_train, hook, False)
    for (codes, parameters), (_, expected) in zip(with_forks, without, strict=True):
        assert codes == [0, 0, 0]
        assert same(parameters, expected)


def use_in_fork(rank, world):
    with attached(POWERSGD) as (ddp, attachment):
        for step in range(2):  # then DDP has built its buckets again, for which it talks in a forward
            backward(ddp, full_rank_gradients(rank, step, SHAPES))

        def use():
            assert attachment.metrics()["steps"] == 2
            calls = {
                "state_dict": attachment.state_dict,
                "load": lambda: attachment.load_state_dict({}),
                "average": attachment.average_weights,
                "backward": lambda: backward(ddp, full_rank_gradients(rank, 2, SHAPES)),
            }
            for call in calls.values():
                with pytest.raises(lc.HookError, match=r"is a fork of it, such as a worker of a DataLoader"):
                    call()
            attachment.close()
            assert attachment.metrics()["steps"] == 2

        code = in_fork(use)
        backward(ddp, full_rank_gradients(rank, 2, SHAPES))
        return code


def test_forks_cannot_use_the_hook_and_say_so(run):
    assert run(use_in_fork) == [0, 0]
