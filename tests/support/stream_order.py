"""Finds what streams of a CUDA device could do in the wrong order, without one: kernels are noted, not run.

Two kernels of which one writes what the other reads or writes have to be ordered by the clocks of their streams, and
memory that a stream allocated is not to go back to it while another one may be at work on it, as PyTorch's allocator
has it.
"""

import contextlib
import types
import weakref
from collections import defaultdict
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from cuda_dry_streams import HOST, Clocks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

NCCL = "nccl"
COLLECTIVES = ("all_reduce", "all_gather_into_tensor", "all_gather_single", "all_to_all_single", "all_gather")


@dataclass
class Storage:
    """What is known of one piece of memory.

    Attributes:
        owner: name of the stream that it was allocated on.
        written: stream and time of the last write.
        read: time of the last read since then, by stream.
        num_tensors: tensors that are left of it.
        used: time of the last use of all, by stream.
    """

    owner: str
    written: tuple[str, int]
    read: dict[str, int] = field(default_factory=dict)
    used: dict[str, int] = field(default_factory=dict)
    num_tensors: int = 0


class Order(Clocks, TorchDispatchMode):
    """Notes kernels and the events between streams. Goes around a `FakeTensorMode`.

    Attributes:
        found: what is not ordered, one text each.
        during: what the test is about now.
        last_collective: clock of the one that was issued last.
    """

    def __init__(self):
        TorchDispatchMode.__init__(self)
        Clocks.__init__(self)
        self.found, self.during = [], ""
        self.last_collective = {}
        self._storages = {}
        # Of memory that went back to a stream: who used it last, and when.
        self._free = defaultdict(list)

    def launch(self, stream):
        self.join(stream, self.clocks[HOST])
        for used in self._free.pop(stream, []):
            for other, at in used.items():
                if self.clocks[stream][other] < at:
                    self.found.append(f"{self.during}: {stream} may use memory again that {other} may be at work on")
        return super().launch(stream)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.namespace == "prim":  # what the host asks of a tensor, as its device
            return result
        given = _tensors((args, kwargs))
        made = [tensor for tensor in _tensors(result) if tensor.untyped_storage()._cdata not in self._storages]
        if func.is_view:
            self._keep(result)
            return result
        on_device = any(tensor.is_cuda for tensor in (*given, *_tensors(result)))
        stream = self.current if on_device else HOST
        if func.namespace == "c10d":
            # On a stream of its own, after what the present one has to do.
            self.join(NCCL, self.clocks[stream])
            stream = NCCL
        time = self.launch(stream)
        written = _written(func, args, kwargs)
        for tensor in given:
            self._use(func, tensor, stream, time, any(tensor is other for other in written))
        for tensor in made:
            self._storages[tensor.untyped_storage()._cdata] = Storage(stream, (stream, time))
        if stream is NCCL:
            self.last_collective = dict(self.clocks[NCCL])
        if on_device and not _goes_on(func, args, kwargs) and any(not t.is_cuda for t in (*written, *made)):
            self.join(HOST, self.clocks[stream])
        self._keep(result)
        return result

    def _use(self, func, tensor, stream, time, is_write):
        storage = self._storages.get(tensor.untyped_storage()._cdata)
        if storage is None:  # from before
            return
        clock = self.clocks[stream]
        before = dict([storage.written])
        if is_write:
            before |= {other: max(at, before.get(other, 0)) for other, at in storage.read.items()}
        for other, at in before.items():
            if clock[other] < at:
                what = "writes" if is_write else "reads"
                self.found.append(f"{self.during}: {func} on {stream} {what} what {other} may be at work on")
        if is_write:
            storage.written, storage.read = (stream, time), {}
        else:
            storage.read[stream] = time
        storage.used[stream] = time

    def _keep(self, result):
        for tensor in _tensors(result):
            key = tensor.untyped_storage()._cdata
            if (storage := self._storages.get(key)) is not None:
                storage.num_tensors += 1
                weakref.finalize(tensor, self._gone, key, storage).atexit = False

    def _gone(self, key, storage):
        storage.num_tensors -= 1
        if storage.num_tensors or self._storages.get(key) is not storage:
            return
        del self._storages[key]
        if HOST not in (storage.owner, *storage.used):
            self._free[storage.owner].append(storage.used)


def _tensors(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _goes_on(func, args, kwargs):
    """Whether the host does while a copy is made."""
    return kwargs.get("non_blocking") or (func.overloadpacket is torch.ops.aten.copy_ and args[2:3] == (True,))


def _written(func, args, kwargs):
    """Arguments that a function writes to; those of collectives do not say so."""
    if func.namespace == "c10d":
        return _tensors((args, kwargs))
    by_name = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    return [
        tensor
        for argument in func._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
        for tensor in _tensors(by_name.get(argument.name))
    ]


@contextlib.contextmanager
def recorded(monkeypatch, order):
    """Within, which is to be within [`dry_run`][] of the same [`Order`][], kernels are noted."""
    set_result, wait = torch.futures.Future.set_result, torch.futures.Future.wait

    # As of CUDA futures: who waits for one has its stream wait, if the result is on a device.
    def set_result_recorded(self, result):
        if any(tensor.is_cuda for tensor in _tensors(result)):
            self._event = torch.cuda.current_stream().record_event()
        set_result(self, result)

    def wait_recorded(self):
        if hasattr(self, "_event"):
            torch.cuda.current_stream().wait_event(self._event)
        return wait(self)

    def waiting(collective):
        """Have it hand out what has the present stream wait for it, and only for it."""

        def begin(*args, async_op=False, **kwargs):
            assert all(tensor.is_cuda for tensor in _tensors(args)), f"NCCL knows no CPU tensors: {collective.__name__}"
            work = collective(*args, async_op=True, **kwargs)
            # NCCL's work holds its tensors until it is waited for.
            clock, held = order.last_collective, [args]

            def wait():
                order.join(order.current, clock)
                held.clear()
                work.wait()

            if async_op:
                return types.SimpleNamespace(wait=wait)
            return wait()

        return begin

    with monkeypatch.context() as patch:
        for name in COLLECTIVES:
            if hasattr(dist, name):
                patch.setattr(dist, name, waiting(getattr(dist, name)))
        patch.setattr(torch.futures.Future, "set_result", set_result_recorded)
        patch.setattr(torch.futures.Future, "wait", wait_recorded)
        with order:
            yield
