"""Failing, interrupting and ending: on one rank, and what the others see of it. Every rank is a process of its own.

    python test_failure.py SCENARIO RANK WORLD STORE

The process groups have a timeout of half an hour, as PyTorch's: whoever waits for it counts as hanging.
"""

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from driver import POWERSGD, SHAPES, Params, attached, backward, full_rank_gradients
from failures import PLACES, fail_somewhere
from forks import FORKS, PATIENCE, alone
from fsdp_driver import NAMES, shard2
from pool import check_no_leaks
from torch.nn.parallel import DistributedDataParallel

import lightning_commhooks as lc
from lightning_commhooks.collectives.steps import Wait

SOON = 10 * PATIENCE  # seconds, far more than it takes, on a machine that has other things to do
TIMEOUT_SECONDS = {"time_out": 3}
SECONDS_TO_FAIL = 5
ERROR_OF_PEERS = {"load_state_dict": "StateError"}
OWN_MESSAGE = {
    "attach": "unknown hook 'powersdg'",
    "loss_divided_by": "loss_divided_by must return a positive number, returned 0",
    "sample_error": "every must be an integer of at least 0, got -1",
    "measure_link": "not supported between instances of 'float' and 'str'",
    "averaged_weights": "averaged_weights() must be called on all ranks",
}
# Near, and far from each other: with direct messages, of several buckets at once.
LATENCIES = [{"COMMHOOKS_LATENCY_MS": "0"}, {"COMMHOOKS_LATENCY_MS": "40"}]


class Broken(lc.CommHook):
    """Fails on the last rank, in step 2."""

    name = "broken"

    def bind(self, group):
        return _BoundBroken(group)


class _BoundBroken(lc.BoundHook):
    def fails(self, bucket, ranks):
        return "second" in bucket.names and ranks.global_rank == ranks.size - 1

    def reduce(self, bucket, ranks):
        if bucket.step == 2 and self.fails(bucket, ranks):
            raise ArithmeticError("out of numbers")
        yield from ranks.all_reduce_mean_(bucket.flat)


class BrokenOnOneShard(Broken):
    """Fails on the last rank of the world alone."""

    name = "broken on one shard"

    def bind(self, group):
        return _BoundBrokenOnOneShard(group)


class _BoundBrokenOnOneShard(_BoundBroken):
    def fails(self, bucket, ranks):
        return dist.get_rank() == dist.get_world_size() - 1


class Stopped(Broken):
    """In step 2, rank 0 sends rank 1 what does not fit into buffers of the system, and rank 1 stops as a process."""

    name = "stopped"

    def bind(self, group):
        return _BoundStopped(group)


class _BoundStopped(lc.BoundHook):
    def reduce(self, bucket, ranks):
        if bucket.step == 2:
            messages, much = ranks.transport, torch.zeros(2**26)
            if ranks.rank == 1:
                works = messages.receive([much], messages.number())
                os.kill(os.getpid(), signal.SIGSTOP)
            else:
                works = messages.send([much], messages.number())
            yield Wait(works)
        yield from ranks.all_reduce_mean_(bucket.flat)


# What the ranks do -------------------------------------------------------------------------------------------


def say(text):
    print(text, flush=True)


def train(rank, hook="allreduce", absent=None, **options):
    """Train for five steps. In step 2 the rank `absent` stays away, until it is told to go on."""
    ddp = DistributedDataParallel(Params(SHAPES), bucket_cap_mb=4e-3, **options)
    train.attachment = lc.attach(ddp, hook)
    for step in range(5):
        if step == 2:
            say("step 2")
            if rank == absent:
                sys.stdin.readline()
        backward(ddp, full_rank_gradients(rank, step, SHAPES))
    say("trained")


def average_beside(rank, world):
    """Rank 1 never gets to the average that rank 0 has under way, and waits for two steps later."""
    ddp = DistributedDataParallel(Params(SHAPES))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    hook = lc.DiLoCo(period=5, delay=2, post_local_gradient_allreduce=False)
    lc.attach(ddp, hook, optimizers=[optimizer])
    for step in range(5):
        if step == 2:
            say("step 2")
            if rank == 1:
                sys.stdin.readline()
        backward(ddp, full_rank_gradients(rank, step, SHAPES))
        optimizer.step()
    say("trained")


def fail_and_die(rank, world):
    train(rank, Broken())


def fail_between_replicas(rank, world):
    """As `fail_and_die`, in a model of which each replica is sharded over two ranks."""
    model = shard2("hybrid")
    lc.attach(model, BrokenOnOneShard())
    for step in range(5):
        if step == 2:
            say("step 2")
        model({name: torch.randn(shape) for name, shape in NAMES.items()}).backward()
    say("trained")


def stop_while_receiving(rank, world):
    train(rank, Stopped())


def fail_and_stay(rank, failing, num_groups=1, **options):
    try:
        train(rank, Broken(), **options)
    except lc.HookError:
        if rank != failing:
            raise
        say("failed")
        sys.stdin.readline()
    train.attachment.close()
    check_no_leaks(num_groups)


def rank_2_fails_and_stays(rank, world):
    fail_and_stay(rank, failing=2)


def rank_1_of_a_subgroup_fails_and_stays(rank, world):
    subgroup = dist.new_group([0, 1])
    if rank < 2:
        fail_and_stay(rank, failing=1, num_groups=2, process_group=subgroup)
    else:
        say("step 2")
        sys.stdin.readline()


def wait_for_rank_1(rank, world):
    train(rank, absent=1)


def time_out(rank, world):
    train(rank, absent=1)


def wait_for_rank_1_and_survive(rank, world):
    try:
        train(rank, absent=1)
    except KeyboardInterrupt:
        say("interrupted")
    with pytest.raises(lc.HookError, match="interrupted by KeyboardInterrupt"):
        train.attachment.state_dict()
    train.attachment.close()
    check_no_leaks(num_groups=1)


def wait_with_handler(rank, world):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    train(rank, absent=1)


def wait_in_state_dict(rank, world):
    with attached(POWERSGD) as (ddp, attachment):
        for step in range(2):
            backward(ddp, full_rank_gradients(rank, step, SHAPES))
        say("step 2")
        if rank == 1:
            sys.stdin.readline()
        attachment.state_dict()


class _Raise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ArithmeticError("in the user's backward")


def break_off(rank, world, close=False, idle=False, away=1):
    """Rank 0's backward fails after its first buckets were handed over; rank 1 is away."""
    ddp = DistributedDataParallel(Params({"first": (2000,), "last": (2000,)}), bucket_cap_mb=4e-3)
    attachment = lc.attach(ddp, "allreduce")
    for step in range(3):
        if step == 2:
            say("step 2")
            if rank == away:
                sys.stdin.readline()
        first, last = ddp.module.first, ddp.module.last
        ddp({})
        try:
            ((_Raise.apply(first) if (step, rank) == (2, 0) else first).sum() + last.sum()).backward()
        except ArithmeticError:
            if idle:
                say("caught")
                sys.stdin.readline()
                return
            if not close:
                raise
            attachment.close()
            check_no_leaks(num_groups=1)
            say("closed")


def break_off_and_close(rank, world):
    break_off(rank, world, close=True)


def break_off_and_close_late(rank, world):
    break_off(rank, world, close=True, away=0)


def break_off_and_idle(rank, world):
    break_off(rank, world, idle=True)


def main(scenario, rank, world, store):
    rank, world, timeout = int(rank), int(world), timedelta(seconds=TIMEOUT_SECONDS.get(scenario, 1800))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timeout)
    globals()[scenario](rank, world)


# The tests ---------------------------------------------------------------------------------------------------


class Ranks:
    """The processes of a scenario."""

    def __init__(self, scenario, store, world, environment):
        self.processes = [
            FORKS.start(__file__, scenario, rank, world, store, environment=alone(**environment), pipes=True)
            for rank in range(world)
        ]
        for rank in range(world):
            self.until(rank, "step 2")

    def until(self, rank, line):
        """Read what the rank prints up to this line."""
        while (read := self.processes[rank].stdout.readline()) != line + "\n":
            assert read, self.processes[rank].stderr.read()

    def go_on(self, rank):
        self.processes[rank].stdin.write("\n")
        self.processes[rank].stdin.flush()

    def send(self, rank, number):
        self.processes[rank].send_signal(number)

    def end(self, rank):
        """Exit code and outputs of a rank that ends soon, cleanly."""
        try:
            self.processes[rank].wait(SOON)
        except subprocess.TimeoutExpired:
            pytest.fail(f"rank {rank} hangs")
        out, err = self.processes[rank].stdout.read(), self.processes[rank].stderr.read()
        assert "terminate called" not in err
        assert "Exception ignored" not in err
        return self.processes[rank].returncode, out, err

    def end_by_hook_error(self, rank):
        """Standard error of a rank that ends soon with an error of its hook in step 2."""
        code, out, err = self.end(rank)
        assert code == 1, err
        assert "trained" not in out
        last = [line for line in err.splitlines() if "HookError: communication hook" in line][-1]
        assert f"failed on rank {rank} at step 2, bucket" in last
        return err


@pytest.fixture
def start(tmp_path):
    """`start(scenario, world=2, **environment)`: its processes, killed at the end of the test."""
    started = []

    def start(scenario, world=2, **environment):
        started.append(Ranks(scenario.__name__, tmp_path / "store", world, environment))
        return started[-1]

    yield start
    for process in (process for ranks in started for process in ranks.processes):
        process.kill()
        with process:
            pass


@pytest.mark.parametrize("latency", LATENCIES)
def test_failure_ends_all_ranks_with_the_hook_own_traceback(start, latency):
    ranks = start(fail_and_die, **latency)
    ranks.end_by_hook_error(0)
    err = ranks.end_by_hook_error(1)
    assert 'raise ArithmeticError("out of numbers")' in err
    assert "in reduce" in err
    assert "direct cause" in err


def test_failure_between_replicas_ends_all_ranks(start):
    ranks = start(fail_between_replicas, world=4)
    errors = [ranks.end(rank) for rank in range(4)]
    assert [code for code, *_ in errors] == [1] * 4
    assert not any("trained" in out for _, out, _ in errors)
    # Of the replica next to it, the rank that waited for this share; the others wait in collectives of FSDP2.
    for rank in (1, 3):
        assert "HookError: communication hook 'broken on one shard' failed on rank" in errors[rank][2]
    assert 'raise ArithmeticError("out of numbers")' in errors[3][2]


@pytest.mark.parametrize(
    ("scenario", "failing", "latency"),
    [(rank_2_fails_and_stays, 2, LATENCIES[0]), (rank_1_of_a_subgroup_fails_and_stays, 1, LATENCIES[1])],
)
def test_peers_fail_soon_though_the_failing_rank_stays(start, scenario, failing, latency):
    ranks = start(scenario, world=3, **latency)
    for rank in range(failing):
        ranks.end_by_hook_error(rank)
    ranks.until(failing, "failed")
    assert ranks.processes[failing].poll() is None
    ranks.go_on(failing)
    code, _, err = ranks.end(failing)
    assert code == 0, err


def test_timeout_of_the_process_group(start):
    ranks = start(time_out)
    ranks.end_by_hook_error(0)
    assert ranks.processes[1].poll() is None


def test_interrupt_of_one_rank(start):
    ranks = start(wait_for_rank_1)
    time.sleep(0.5)  # then rank 0 waits in step 2 for rank 1, who is not there
    ranks.send(0, signal.SIGINT)
    code, out, err = ranks.end(0)
    assert code == -signal.SIGINT
    assert "trained" not in out
    assert "KeyboardInterrupt" in err
    ranks.go_on(1)
    ranks.end_by_hook_error(1)


def test_interrupt_of_all_ranks(start):
    ranks = start(wait_for_rank_1)
    time.sleep(0.5)  # then rank 0 waits in step 2 for rank 1, who is not there
    for rank in (0, 1):
        ranks.send(rank, signal.SIGINT)
    assert [ranks.end(rank)[0] for rank in (0, 1)] == [-signal.SIGINT] * 2


def test_caught_interrupt_leaves_nothing_behind(start):
    ranks = start(wait_for_rank_1_and_survive)
    time.sleep(0.5)  # then rank 0 waits in step 2 for rank 1, who is not there
    ranks.send(0, signal.SIGINT)
    code, out, err = ranks.end(0)
    assert code == 0, err
    assert "interrupted" in out


def test_interrupt_of_a_call(start):
    ranks = start(wait_in_state_dict)
    time.sleep(0.5)  # then rank 0 waits in step 2 for rank 1, who is not there
    ranks.send(0, signal.SIGINT)
    assert ranks.end(0)[0] == -signal.SIGINT


@pytest.mark.parametrize("latency", LATENCIES)
def test_kill_of_a_rank_that_others_wait_for_between_steps(start, latency):
    ranks = start(wait_in_state_dict, **latency)
    ranks.send(1, signal.SIGKILL)
    code, _, err = ranks.end(0)
    assert code == 1, err
    assert "HookError: state_dict() must be called on all ranks, and rank 1 has not called it, and a conn" in err


@pytest.mark.parametrize(("killed", "latency"), list(enumerate(LATENCIES)))
def test_sigterm_kills_one_rank(start, killed, latency):
    ranks = start(wait_for_rank_1, **latency)
    time.sleep(0.5)  # then rank 0 waits in step 2 for rank 1, who is not there
    ranks.send(killed, signal.SIGTERM)
    assert ranks.end(killed)[0] == -signal.SIGTERM
    if killed == 0:
        ranks.go_on(1)
    ranks.end_by_hook_error(1 - killed)


def test_kill_of_a_rank_while_others_average_beside_training(start):
    ranks = start(average_beside, **LATENCIES[1])
    time.sleep(0.5)  # then rank 0 waits for what is under way
    ranks.send(1, signal.SIGKILL)
    code, out, err = ranks.end(0)
    assert code == 1, err
    assert "trained" not in out
    assert "HookError: communication hook 'diloco' failed on rank 0" in err


def test_kill_of_a_rank_to_which_a_message_is_on_its_way(start):
    """Gloo tells nobody who waits for that message."""
    ranks = start(stop_while_receiving, COMMHOOKS_LATENCY_MS="40")
    time.sleep(0.5)  # then rank 0 waits for a message to be sent
    ranks.send(1, signal.SIGKILL)
    ranks.end_by_hook_error(0)


def test_sigterm_with_a_handler_that_exits(start):
    ranks = start(wait_with_handler)
    time.sleep(0.5)  # then rank 0 waits in step 2 for rank 1, who is not there
    ranks.send(0, signal.SIGTERM)
    assert ranks.end(0)[0] == 143
    ranks.go_on(1)
    ranks.end_by_hook_error(1)


def test_exception_in_the_backward_of_one_rank(start):
    ranks = start(break_off)
    time.sleep(0.5)  # then rank 0 waits in step 2 for rank 1, who is not there
    code, _, err = ranks.end(0)
    assert code == 1
    assert "ArithmeticError: in the user's backward" in err
    ranks.go_on(1)
    ranks.end_by_hook_error(1)


def test_close_after_a_backward_that_was_broken_off(start):
    ranks = start(break_off_and_close)
    code, out, err = ranks.end(0)
    assert code == 0, err
    assert "closed" in out
    ranks.go_on(1)
    ranks.end_by_hook_error(1)


def test_close_after_a_backward_that_was_broken_off_while_another_rank_has_handed_over_more(start):
    ranks = start(break_off_and_close_late, **LATENCIES[1])
    time.sleep(0.5)  # then rank 1 has handed over all buckets, of another number and size than those of rank 0
    ranks.go_on(0)
    code, out, err = ranks.end(0)
    assert code == 0, err
    assert "closed" in out
    assert "broke off on rank 0" in ranks.end_by_hook_error(1)


def test_peers_fail_though_the_rank_whose_backward_broke_off_and_idles_stays(start):
    ranks = start(break_off_and_idle)
    ranks.until(0, "caught")
    ranks.go_on(1)
    ranks.end_by_hook_error(1)
    assert ranks.processes[0].poll() is None
    ranks.go_on(0)
    code, _, err = ranks.end(0)
    assert code == 0, err


def fail(rank, world):
    with attached(Broken()) as (ddp, attachment):
        for step in range(2):
            backward(ddp, full_rank_gradients(rank, step, SHAPES))
        with pytest.raises(lc.HookError) as first:
            backward(ddp, full_rank_gradients(rank, 2, SHAPES))
        with pytest.raises(lc.HookError) as later:
            attachment.state_dict()
    return str(first.value), repr(first.value.__cause__), str(later.value)


def test_failure_names_hook_step_and_bucket(run):
    results = run(fail)
    # The other rank may have lost its connection first.
    message, cause, later = next(one for one in results if "out of numbers" in one[0])
    for part in ("'broken'", "on rank ", "step 2", "bucket"):
        assert part in message
    assert "ArithmeticError('out of numbers')" in cause
    assert "step 2" in later


@pytest.mark.parametrize(("place", "world"), [*((place, 2) for place in PLACES), ("bind", 4), ("end_step", 4)])
def test_all_ranks_fail_soon_wherever_one_fails_and_stays(run, place, world):
    *peers, (_, message, _) = run(fail_somewhere, place, world=world, timeout=30)
    assert OWN_MESSAGE.get(place, f"out of numbers in {place.split()[0]}") in message
    for kind, text, seconds in peers:
        assert kind == ERROR_OF_PEERS.get(place, "HookError"), text
        assert seconds < SECONDS_TO_FAIL


if __name__ == "__main__":
    main(*sys.argv[1:])
