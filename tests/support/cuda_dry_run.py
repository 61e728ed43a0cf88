"""Code for CUDA where there is no CUDA: what it does to devices, dtypes and shapes, and where it waits for the device.

Tensors are those of PyTorch's `FakeTensorMode`, which have no numbers and refuse to mix devices. What is wanted of
numbers here: `True` and 1 of what is read, which is noted as a wait unless it is on the CPU already; and a running
number of what has come to pinned memory, so that code goes both ways that is about odd and even ones.
"""

import ast
import contextlib
import ctypes
import functools
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed._tools.fake_collectives  # in PyTorch 2.10, fake tensors have collectives only with it
from cuda_dry_streams import Clocks, Streams
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import lightning_commhooks

ROOT = Path(lightning_commhooks.__file__).parent
aten = torch.ops.aten
# What comes from the host is copied to the device before.
_COPIED_FIRST = (aten.where, aten.index, aten.index_put, aten.index_put_)


@dataclass(frozen=True)
class Wait:
    """One synchronization of the host with the device.

    Attributes:
        file: of the library, relative to it.
        function: the innermost of the library's that led there.
        line: its line.
        during: what the test was about.
        what: it did.
    """

    file: str
    function: str
    line: int
    during: str
    what: str

    def __str__(self):
        return f"lightning_commhooks/{self.file}:{self.line}, {self.function}(), {self.during}: {self.what}"


@functools.cache
def _functions(path):
    """Name, first and last line of each function in a file, those inside of others last."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
    return [(node.name, node.lineno, node.end_lineno) for node in sorted(nodes, key=lambda node: node.lineno)]


def _place():
    """File, function and line of this library that is at work: innermost; a lambda is part of a function."""
    frame = sys._getframe(1)
    while frame is not None:
        path, line = Path(frame.f_code.co_filename), frame.f_lineno
        if ROOT in path.parents:
            names = [name for name, first, last in _functions(path) if first <= line <= last]
            return path.relative_to(ROOT).as_posix(), names[-1], line
        frame = frame.f_back
    return "", "", 0


class Waits(TorchDispatchMode):
    """Notes waits. Goes around a `FakeTensorMode`.

    Attributes:
        found: the waits.
        during: what the test is about now.
    """

    def __init__(self):
        super().__init__()
        self.found = []
        self.during = ""
        self._num_arrived = 0

    def note(self, what):
        """Note that something waits for the device."""
        self.found.append(Wait(*_place(), self.during, what))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is aten._local_scalar_dense.default:
            return self._read(func, args[0])
        if func is aten.is_pinned.default:
            return _is_pinned(args[0])
        if func is aten._pin_memory.default:
            return _pinned(args[0].clone())
        if (what := _copies(func, args, kwargs)) or (func.namespace == "c10d" and "barrier" in func.name()):
            self.note(what or "a barrier")
        wants_pinned = kwargs.pop("pin_memory", None)
        try:
            result = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            self.note(f"{func} depends on numbers")
            raise
        return _pinned(result) if wants_pinned else result

    def _read(self, func, tensor):
        number = 1
        if tensor.is_cuda:
            self.note(f"a number is read, {tensor.dtype}")
        elif _is_pinned(tensor):
            self._num_arrived += 1
            number = self._num_arrived
        else:
            with contextlib.suppress(DataDependentOutputException):
                return func(tensor)  # of torch.tensor(5) it is known
        return bool(number) if tensor.dtype == torch.bool else float(number) if tensor.is_floating_point() else number


def _tolist(tensor):
    """As `FakeTensor.tolist`, but it reads one number for all."""
    number = tensor.reshape(-1)[0].item() if tensor.numel() else None
    return functools.reduce(lambda part, size: [part] * size, reversed(tensor.shape), number)


def _data_ptr(tensor):
    return tensor.untyped_storage()._cdata + tensor.storage_offset() * tensor.element_size()


def _pinned(tensor):
    tensor.is_in_pinned_memory = True
    return tensor


def _is_pinned(tensor):
    return getattr(tensor, "is_in_pinned_memory", False)


def _copies(func, args, kwargs):
    """What is copied between host and device so that the host waits; empty for nothing."""
    packet = func.overloadpacket
    if packet is aten._to_copy:
        source, target = args[0].device, torch.device(kwargs.get("device") or args[0].device)
        # PyTorch itself pins what a copy to the host that does not block is written to.
        has_to_wait = not (kwargs.get("non_blocking") and (source.type == "cuda" or _is_pinned(args[0])))
    elif packet is aten.copy_:
        source, target = args[1].device, args[0].device
        non_blocking = kwargs.get("non_blocking") or (len(args) > 2 and args[2])
        has_to_wait = not (non_blocking and any(map(_is_pinned, args[:2])))
    else:
        return _mixes(func, args, kwargs)
    return f"a copy from {source.type} to {target.type}" if source.type != target.type and has_to_wait else ""


def _mixes(func, args, kwargs):
    """Whether a tensor on the CPU is beside one on the device, which only arithmetic takes, of one element, as it is.

    `FakeTensorMode` raises for larger ones, and takes those of one element everywhere.
    """
    if torch.Tag.pointwise in func.tags and func.overloadpacket not in _COPIED_FIRST:
        return ""
    devices = {leaf.device.type for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
    return f"{func} gets an argument on the CPU" if len(devices) > 1 else ""


@contextlib.contextmanager
def _no_driver():
    """Have functions in C++ that ask the driver for the present device, as `tensor[0]` does, ask nobody.

    PyTorch does so itself in a build with CUDA, where there is no device, and has nothing to put there in one without.
    What it has for the meta device, which has neither devices nor streams, does nothing for CUDA, too.
    """
    (library,) = Path(torch.__file__).parent.glob("lib/libc10.*")
    # An array by `c10::DeviceType`.
    guards = (ctypes.c_void_p * 16).in_dll(ctypes.CDLL(library), "_ZN3c104impl26device_guard_impl_registryE")
    cuda, meta = 1, 14
    before = guards[cuda]
    guards[cuda] = guards[meta]
    try:
        yield
    finally:
        guards[cuda] = before


@contextlib.contextmanager
def dry_run(monkeypatch, clocks=None):
    """Within, tensors are fake and may be on `"cuda"`; the [`Waits`][] that are noted."""
    waits = Waits()
    streams = Streams(clocks or Clocks(), waits.note)
    make_future = torch.futures.Future.__init__
    with monkeypatch.context() as patch:
        for name in ("Stream", "Event", "current_stream", "stream"):
            patch.setattr(torch.cuda, name, getattr(streams, name))
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        patch.setattr(torch.cuda, "synchronize", lambda device=None: waits.note("the device is waited for"))
        # For speed: states are compared by 64 numbers of each tensor.
        patch.setattr(FakeTensor, "tolist", _tolist)
        # Whether two are the same memory is all that we ask of it.
        patch.setattr(FakeTensor, "data_ptr", _data_ptr, raising=False)
        patch.setattr(FakeTensor, "record_stream", lambda tensor, stream: None, raising=False)
        # A future that is to make other streams wait asks for the driver.
        patch.setattr(torch.futures.Future, "__init__", lambda self, *, devices=None: make_future(self))
        with _no_driver(), FakeTensorMode(), waits:
            yield waits
