"""The side stream on which hooks run on NCCL: nothing overtakes what it needs, in a run with a stand-in for DDP."""

import contextlib

import pytest
import torch
from cuda_dry_replicas import TrainingOfReplicas
from cuda_dry_training import Training, Way, without_cuda
from hooks_under_test import INT8, RANK_2
from pool import ignoring
from stream_order import Order, recorded

import lightning_commhooks as lc
from lightning_commhooks.collectives import process_groups
from lightning_commhooks.collectives import steps as steps_module
from lightning_commhooks.collectives.counters import Timing
from lightning_commhooks.collectives.gloo_abort import Connections
from lightning_commhooks.runtime import engine, finite_steps

HOOKS = {
    "allreduce": lc.AllReduce(),
    "fp16": lc.FP16(),
    "int8": lc.Int8(**INT8),
    "powersgd": lc.PowerSGD(**RANK_2),
    "powersgd+half": lc.PowerSGD(**RANK_2, num_iters_per_step=1),
    "batched_powersgd": lc.BatchedPowerSGD(**RANK_2),
    "schedule": lc.Schedule({0: lc.PowerSGD(**RANK_2), 2: lc.Int8(**INT8)}),
    "post_localsgd": lc.PostLocalSGD(start_localSGD_iter=2, period=2, post_local_gradient_allreduce=False),
    "diloco": lc.DiLoCo(start_localSGD_iter=2, period=2, fragments=2, post_local_gradient_allreduce=False),
    "diloco+delay": lc.DiLoCo(start_localSGD_iter=2, period=2, delay=1, post_local_gradient_allreduce=False),
    "diloco+eager": lc.DiLoCo(
        start_localSGD_iter=2, period=2, delay=2, eager=True, outer_momentum=0, post_local_gradient_allreduce=False
    ),
}
# One of each kind, for what does not differ between others.
KINDS = ("int8", "powersgd+half", "schedule", "diloco")
PLAIN = Way(2, torch.float32)


@pytest.fixture
def device(monkeypatch):
    """`device(world)`: the [`Order`][] of what is noted within, and the waits."""

    @contextlib.contextmanager
    def device(world=2):
        order = Order()
        pointers = ignoring("Accessing the data pointer of FakeTensor")
        with without_cuda(monkeypatch, world, order) as (waits, edges), recorded(monkeypatch, order), pointers:
            order.waits, order.edges = waits, edges
            yield order

    return device


def steps(order, training, numbers):
    for step in numbers:
        order.during = f"step {step}"
        training.step(step, order.waits)


@pytest.mark.parametrize(("label", "scales"), [(label, i % 2 == 0) for i, label in enumerate(HOOKS)])
def test_ordinary_steps_and_what_users_ask_for(device, label, scales):
    with device() as order:
        training = Training(HOOKS[label], Way(2, torch.float32, True, scales), order.edges)
        steps(order, training, range(5))
        order.during = "state"
        training.attachment.shared_state_dict()
        training.attachment.state_dict()
        training.attachment.metrics()
        training.attachment.average_weights()
        steps(order, training, range(5, 7))
        order.during = "close"
        training.runtime.close()
        side = [stream for stream in order.kernels if stream not in ("host", "nccl", "stream 0")]
        assert len(side) == (2 if "+delay" in label or "+eager" in label else 1)
        assert order.kernels[side[0]] > 10
    assert not order.found, "\n".join(order.found)


# Without memory, nothing reads the gradients before the last backward.
OF_REPLICAS = [*((label, True) for label in KINDS), ("int8", False)]


@pytest.mark.parametrize(("label", "is_last"), OF_REPLICAS)
def test_between_replicas_on_the_stream_of_fsdp2(device, label, is_last):
    with device() as order:
        training = TrainingOfReplicas(HOOKS[label], PLAIN, order.edges)
        training.runtime.source.is_last = is_last
        steps(order, training, range(5))
        order.during = "state"
        training.attachment.state_dict()
        training.attachment.average_weights()
        steps(order, training, range(5, 7))
        training.runtime.close()
        theirs = [stream for stream in order.kernels if stream not in ("host", "nccl", "stream 0")]
        assert theirs
        assert order.kernels[theirs[0]] > 10
    assert not order.found, "\n".join(order.found)


@pytest.mark.parametrize("label", ["allreduce", *KINDS])
def test_bad_step(device, label, monkeypatch):
    """The host hears of it when the next step begins."""
    wait, bad = finite_steps.OnHost.wait, []

    def is_bad(self):
        bad.append(bool(wait(self)))
        return torch.tensor(len(bad) % 2 == 0)

    monkeypatch.setattr(finite_steps.OnHost, "wait", is_bad)
    with device() as order:
        training = Training(HOOKS[label], PLAIN, order.edges)
        steps(order, training, range(6))
        has_memory = training.runtime.bound.has_memory
        assert (training.runtime._steps.pending is not None) == has_memory
        training.runtime.close()
    assert bool(bad) == has_memory
    assert not order.found, "\n".join(order.found)


def test_two_models(device):
    with device() as order:
        first, second = (Training(HOOKS["int8"], PLAIN, order.edges) for _ in range(2))
        for step in range(4):
            steps(order, first, [step])
            steps(order, second, [step])
        first.runtime.close()
        steps(order, second, [4])
        second.runtime.close()
    assert not order.found, "\n".join(order.found)


def test_failure(device, monkeypatch):
    """It aborts the group; later steps are refused, and nothing is launched for them."""
    aborted = []
    monkeypatch.setattr(process_groups.BackendConnections, "abort", lambda self: aborted.append(self))
    with device() as order:
        training = Training(HOOKS["int8"], PLAIN, order.edges)
        steps(order, training, range(2))
        with monkeypatch.context() as patch:
            patch.setattr(type(training.runtime.bound), "reduce", lambda *_: 1 / 0)
            with pytest.raises(lc.HookError, match=r"hook 'int8' failed on rank 0 at step 2, bucket 0 .*division"):
                steps(order, training, [2])
        assert aborted
        before = dict(order.kernels)
        for function in (training.attachment.state_dict, training.attachment.average_weights):
            with pytest.raises(lc.HookError, match="at step 2, bucket 0"):
                function()
        with pytest.raises(lc.HookError, match="at step 2, bucket 0"):
            steps(order, training, [3])
        side = next(stream for stream in before if stream not in ("host", "nccl", "stream 0"))
        assert order.kernels[side] == before[side]
        training.runtime.close()
    assert not order.found, "\n".join(order.found)


def test_options_that_do_not_fit_leave_the_group_alone(device, monkeypatch):
    aborted = []
    monkeypatch.setattr(process_groups.BackendConnections, "abort", lambda self: aborted.append(self))

    def unfit(self, group):
        raise ValueError("subgroup_size=3 on 2 ranks")

    with device() as order:
        monkeypatch.setattr(lc.Int8, "bind", unfit)
        with pytest.raises(ValueError, match="subgroup_size=3"):
            Training(HOOKS["int8"], PLAIN, order.edges)
    assert not aborted


def test_capturing(device, monkeypatch):
    with device() as order:
        training = Training(HOOKS["int8"], PLAIN, order.edges)
        steps(order, training, range(2))
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(lc.HookError, match=r"CUDA graph is being captured.*make_graphed_callables"):
            steps(order, training, [2])
        with pytest.raises(lc.HookError, match="CUDA graph is being captured"):
            training.attachment.state_dict()


@pytest.mark.parametrize("name", ["nccl2", "nccl-lazy"])
def test_every_engine_of_nccl_has_the_side_stream(device, monkeypatch, name):
    with device() as order:
        monkeypatch.setattr(process_groups, "backend_for", lambda *_: name)
        training = Training(HOOKS["int8"], PLAIN, order.edges)
        assert training.runtime._engine._stream is not None


def test_a_backend_that_is_not_known_is_refused(device, monkeypatch):
    with device() as order:
        monkeypatch.setattr(process_groups, "backend_for", lambda *_: "ucc")
        with pytest.raises(ValueError, match=r"for cuda is 'fake', which calls itself 'ucc'.*use 'nccl'.*or 'gloo'"):
            Training(HOOKS["int8"], PLAIN, order.edges)


def test_side_stream_comes_first(device):
    """Between kernels that wait, a device takes those of the stream with the higher priority, the lower number."""
    with device():
        on_stream = engine.InlineEngine(torch.device("cuda", 0), Connections(), Timing(), "hook", has_side_stream=True)
        assert on_stream._stream.priority < 0


def test_sees_what_does_not_wait(device, monkeypatch):
    with device() as order:
        monkeypatch.setattr(torch.cuda.Stream, "wait_stream", lambda self, other: None)
        training = Training(HOOKS["int8"], PLAIN, order.edges)
        steps(order, training, range(2))
    assert order.found


def test_sees_a_collective_that_is_not_waited_for(device, monkeypatch):
    with device() as order:
        monkeypatch.setattr(steps_module.Wait, "wait", lambda self: None)
        training = Training(HOOKS["allreduce"], PLAIN, order.edges)
        steps(order, training, range(2))
    assert any("what nccl may be at work on" in text for text in order.found)


def test_sees_memory_that_is_free_too_soon(device):
    with device() as order:
        numbers, side = torch.zeros(4, device="cuda"), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            numbers.add_(1)
        del numbers
        torch.zeros(4, device="cuda")
    assert ["may use memory again" in text for text in order.found] == [True]
