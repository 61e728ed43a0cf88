"""PyTorch's own tests of DDP, on two CPU processes over gloo. The only file with PyTorch's private testing modules.

Most of these tests ask for two GPUs, though what they are about is the same on CPU: they get the CPU instead.
"""

import contextlib
import importlib.util
import inspect
import os
import sys
import tempfile
import unittest
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from attaching import SETUPS, attaching
from torch.overrides import TorchFunctionMode

WORLD = 2
# Tests that register hooks themselves, while a rank that gets no batch never calls the model's forward.
ATTACHED_AT_ONCE = {"test_ddp_uneven_inputs"}


def _needs_gpus(number, **_):
    """Instead of `skip_if_lt_x_gpu`: there is one for each rank."""
    return (lambda test: test) if number <= WORLD else unittest.skip(f"needs {number} ranks")


def _import_tests():
    # Read when the tests are imported.
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(WORLD), PYTORCH_PRINT_REPRO_ON_FAILURE="0")
    if not importlib.util.find_spec("expecttest"):
        # What its TestCase, the base of PyTorch's, can do more than unittest's is not used by tests of DDP.
        sys.modules["expecttest"] = SimpleNamespace(TestCase=unittest.TestCase, ACCEPT=False)
    from torch.testing._internal import common_distributed

    common_distributed.skip_if_lt_x_gpu = _needs_gpus
    common_distributed.skip_if_no_gpu = lambda test: test
    from torch.testing._internal.distributed import distributed_test

    distributed_test.init_multigpu_helper = lambda world_size, backend: {rank: [rank] for rank in range(world_size)}
    return distributed_test


distributed_test = _import_tests()
_BASE = distributed_test.DistributedTest._DistTestBase


class _Case(distributed_test.TestDistBackend, _BASE):
    """As PyTorch's `TestDistBackendWithSpawn`, in a process that is there already."""

    def _run_uneven_inputs_test(self, test_case, *args, **options):
        # For GPUs: 1000 by 1000 pixels and features, 126 times.
        if isinstance(test_case.model, torch.nn.Linear):
            model = torch.nn.Linear(50, 50, bias=False)
            test_case = test_case._replace(model=model, inp=test_case.inp[:, :50])
        elif isinstance(test_case.model, torch.nn.Sequential):
            test_case = test_case._replace(inp=test_case.inp[..., :20, :20])
        super()._run_uneven_inputs_test(test_case, *args, **options)


def names():
    """Names of the tests that make DDP models, by themselves or by a helper."""
    return [name for name in dir(_BASE) if name.startswith("test_") and _mentions(name, "DistributedDataParallel")]


def run_test(rank, world, name, setup):
    """Run one test in a set-up, on one rank.

    Returns:
        `(outcome, number of hooks attached)`: outcome is "passed", or "skipped: " and why.

    Raises:
        Exception: the test failed.
    """
    case = _Case(name)
    case.rank = rank
    late = name not in ATTACHED_AT_ONCE and _mentions(name, "register_comm_hook")
    distributed_test.Barrier.barrier_id = 0
    torch.manual_seed(0)
    with _shared_folder(rank) as folder, attaching(SETUPS[setup], late) as attachments:
        os.environ.update(BACKEND="gloo", WORLD_SIZE=str(world), TEMP_DIR=folder)
        try:
            with _on_cpu():
                getattr(case, name)()
        except unittest.SkipTest as skipped:
            return f"skipped: {skipped}", 0
        return "passed", len(attachments)


def _mentions(name, what):
    """Whether a method, or another that it calls, names `what`."""
    codes, seen = [_code(name)], {name}
    while codes:
        code = codes.pop()
        if what in code.co_names:
            return True
        codes += filter(inspect.iscode, code.co_consts)
        called = {each for each in code.co_names if inspect.isfunction(getattr(_BASE, each, None))} - seen
        seen |= called
        codes += map(_code, called)
    return False


def _code(name):
    return inspect.unwrap(getattr(_BASE, name)).__code__


@contextlib.contextmanager
def _shared_folder(rank):
    """A new folder, the same for both ranks, with what `Barrier` and other tests expect in it."""
    with tempfile.TemporaryDirectory() if rank == 0 else contextlib.nullcontext() as own:
        if rank == 0:
            for part in ("barrier", "test_dir"):
                Path(own, part).mkdir()
        folder = [own]
        dist.broadcast_object_list(folder)
        yield folder[0]
        dist.barrier()


class _OnCPU(TorchFunctionMode):
    """The CPU instead of any GPU that a function is asked for."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to:
            args = (args[0], *map(_cpu_instead, args[1:]))
        if kwargs.get("device") is not None:
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def _cpu_instead(argument):
    return "cpu" if isinstance(argument, (str, torch.device)) or type(argument) is int else argument


@contextlib.contextmanager
def _on_cpu():
    to = torch.nn.Module.to

    def to_cpu(module, *args, **options):
        return to(module, *map(_cpu_instead, args), **options)

    calls = {"set_device": lambda device: None, "synchronize": lambda device=None: None, "current_device": lambda: 0}
    with mock.patch.object(torch.nn.Module, "to", to_cpu), mock.patch.multiple(torch.cuda, **calls), _OnCPU():
        yield
