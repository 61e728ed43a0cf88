"""A run of training on fake tensors, with a stand-in for DDP, whose C++ reads and writes the numbers of tensors."""

import contextlib
import types
from collections import OrderedDict
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from cuda_dry_run import dry_run
from pool import ignoring
from torch import nn
from torch.autograd import Variable
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.hooks import RemovableHandle

import lightning_commhooks as lc
from lightning_commhooks.codecs.codec import Kernels
from lightning_commhooks.collectives import group
from lightning_commhooks.interface.error_sample import ErrorSampler
from lightning_commhooks.interface.layout import Layout
from lightning_commhooks.runtime.attachment import Attachment
from lightning_commhooks.runtime.runtime import Runtime
from lightning_commhooks.sources.ddp import DDPSource
from lightning_commhooks.testing.model import Params, use_device

DEVICE = torch.device("cuda", 0)
# Some of those in `lightning_commhooks.testing.model`: a fake tensor costs time by the operation.
SHAPES = {"first": (24, 40), "bias": (40,), "scalar": (), "second": (40, 24), "third": (24, 40), "empty": (0, 3)}
# Of the last steps, in which no bucket is new, no hook begins or takes over from another one.
LAST_STEPS = 2


class GradBucket:
    """In place of DDP's own."""

    def __init__(self, index, is_last, flat, parameters):
        self._index, self._is_last, self._flat, self._parameters = index, is_last, flat, parameters

    def index(self):
        return self._index

    def is_last(self):
        return self._is_last

    def buffer(self):
        return self._flat

    def parameters(self):
        return self._parameters


@contextlib.contextmanager
def without_cuda(monkeypatch, world, order=None):
    """A [`dry_run`][] with a process group of this many ranks: the waits, and the [`GradientEdges`][]."""
    edges = GradientEdges()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    monkeypatch.setattr(group, "compiled", lambda hook_codec, *_: Kernels(hook_codec))
    monkeypatch.setattr(torch.autograd.graph, "get_gradient_edge", edges)
    try:
        # What a hook may say that is used for a few steps.
        with dry_run(monkeypatch, order) as waits, ignoring("hook=", "training ended after"):
            yield waits, edges
    finally:
        dist.destroy_process_group()


class Node:
    """What accumulates the gradient of a parameter; autograd's own asks the driver for a stream."""

    def __init__(self):
        self.prehooks = OrderedDict()

    def register_prehook(self, hook):
        handle = RemovableHandle(self.prehooks)
        self.prehooks[handle.id] = hook
        return handle


class GradientEdges:
    """In place of `torch.autograd.graph.get_gradient_edge`."""

    def __init__(self):
        self._nodes = {}

    def __call__(self, parameter):
        return types.SimpleNamespace(node=self.node(parameter))

    def node(self, parameter):
        return self._nodes.setdefault(id(parameter), Node())


class DDP(nn.Module):
    """Hands buckets of gradients that are given to the function of a `Runtime`, in the order of DDP.

    Args:
        module: whose parameters are trained.
        edges: through which hooks for gradients that arrive are registered.
        find_unused_parameters: see DDP.
    """

    static_graph = skip_all_reduce_unused_params = False
    broadcast_buffers = True

    def __init__(self, module, edges, find_unused_parameters=False):
        super().__init__()
        self.module = module
        self.find_unused_parameters = find_unused_parameters
        self._join_config = types.SimpleNamespace(enable=False)
        self._edges = edges
        self._num_backwards = 0

    def forward(self):
        """Its hooks."""

    def backward(self, gradients, trampoline=None):
        """One forward and backward, synchronized if there is a function to hand buckets to.

        In a real backward, of a number on the CPU, so that functions can be queued for its end.
        """

        def run(_):
            for name, parameter in reversed(list(self.module.named_parameters())):
                if name in gradients:
                    self._arrive(parameter, gradients[name])
            if trampoline is not None:
                self.synchronize(trampoline)

        self()
        leaf = torch.zeros((), requires_grad=True)
        leaf.register_hook(run)
        leaf.clone().backward()

    def _arrive(self, parameter, gradient):
        for hook in tuple(self._edges.node(parameter).prehooks.values()):
            hook((gradient,))
        parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        for hook in tuple((parameter._post_accumulate_grad_hooks or {}).values()):
            hook(parameter)

    def synchronize(self, trampoline):
        """Hand over buckets."""
        buckets = self._buckets()
        self._num_backwards += 1
        reduced = []
        for index, parameters in enumerate(buckets):
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
            bucket = GradBucket(index, index == len(buckets) - 1, torch.cat([g.reshape(-1) for g in grads]), parameters)
            reduced.append((parameters, trampoline(None, bucket)))
        Variable._execution_engine.queue_callback(lambda: self._write(reduced))

    def _buckets(self):
        """Others from the second backward on, as DDP has them."""
        parameters = list(self.module.parameters())[::-1]
        ends = [0, 3, len(parameters)] if self._num_backwards == 0 else [0, 2, len(parameters)]
        return [parameters[first:last] for first, last in pairwise(ends)]

    def _write(self, reduced):
        for parameters, future in reduced:
            means = future.wait().split([p.numel() for p in parameters])
            for parameter, mean in zip(parameters, means, strict=True):
                if parameter.grad is not None:
                    parameter.grad.copy_(mean.view(parameter.shape))


class Buckets(DDPSource):
    """Of a stand-in for DDP, which is not registered anything with."""

    def __init__(self, ddp):
        super().__init__(dist.group.WORLD)
        self.device, self.layout = DEVICE, Layout(ddp.module)

    def connect(self, model, runtime):
        self.function = self.trampoline(runtime, model)


@dataclass(frozen=True)
class Way:
    """What differs between runs of one hook.

    Attributes:
        world: number of ranks.
        dtype: of parameters and gradients.
        find_unused_parameters: whether DDP looks for parameters without gradients, and there are some.
        scales: whether there is a scaler.
        exact_state: see `attach`.
        accumulation: see `attach`; if it divides by something, there are two micro-batches in a step.
        clears: whether gradients are cleared after each step, or after every other.
        is_short: whether there are a few steps only, and no other run goes on from their state.
    """

    world: int
    dtype: torch.dtype
    find_unused_parameters: bool = False
    scales: bool = False
    exact_state: bool = False
    accumulation: str | int = "framework"
    clears: bool = True
    is_short: bool = False


class Training:
    """A model with a hook, and what trains it."""

    source = Buckets

    def __init__(self, hook, way, edges):
        self.way = way
        self.scaler = None
        if way.scales:
            self.scaler = torch.amp.GradScaler("cpu")  # "cuda" asks for a device
            self.scaler._lazy_init_scale_growth_tracker(DEVICE)
        config = hook
        if way.accumulation != "framework":
            config = lc.ScaleByGradAccumulation(hook, way.accumulation)
        use_device(DEVICE)
        module = Params(SHAPES, way.dtype)
        use_device("cpu")
        module.register_buffer("mean", torch.zeros(3, device=DEVICE))
        self.ddp = DDP(module, edges, way.find_unused_parameters)
        self.optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        source = self.source(self.ddp)
        self.runtime = Runtime(config, source, self.scaler, lambda: 1.0)
        self.attachment = Attachment(self.runtime, way.exact_state)
        self.runtime.connect(self.ddp)
        self._trampoline = torch.no_grad()(source.function)
        self.runtime.local.set_optimizers([self.optimizer])
        # By `Attachment.sample_error` ranks would agree on the numbers.
        self.runtime.sampler = ErrorSampler(3, 500, 5000)

    def step(self, step, waits):
        """Two micro-batches if gradients are scaled by their number, and the optimizer's step."""
        if self.way.accumulation != "framework":
            self._backward(step, is_synchronized=False)
        self._backward(step)
        during, waits.during = waits.during, f"optimizer in {waits.during}"
        self.optimizer.step()
        waits.during = during
        if self.way.clears or step % 2:
            self.optimizer.zero_grad()

    def _backward(self, step, is_synchronized=True):
        unused = ("second", "third", "bias", "")[step % 4] if self.way.find_unused_parameters else ""
        gradients = {
            name: torch.zeros(shape, dtype=self.way.dtype, device=DEVICE)
            for name, shape in SHAPES.items()
            if name != unused
        }
        if self.way.accumulation == "weighted":
            self.attachment.add_weight(torch.ones((), device=DEVICE))
        self.ddp.backward(gradients, self._trampoline if is_synchronized else None)


def train(hook, way, num_steps, waits, edges, kind=Training):
    """A run with what users do in it, which is left, and taken up again; `waits.during` says what."""
    waits.during = "attach"
    training = kind(hook, way, edges)
    num_steps, num_last = (3, 0) if way.is_short else (num_steps, LAST_STEPS)
    for step in range(num_steps):
        waits.during = "first steps" if step < num_steps - num_last else "last steps"
        training.step(step, waits)
    waits.during = "state"
    training.attachment.shared_state_dict()
    saved = training.attachment.state_dict()
    waits.during = "metrics"
    training.attachment.metrics()
    training.attachment.residual_norm()
    waits.during = "average"
    averaged_state = training.attachment.averaged_optimizer_state(training.optimizer)
    with training.attachment.averaged_weights(), averaged_state:
        pass
    training.attachment.average_weights()
    waits.during = "close"
    training.runtime.close()
    if way.is_short:
        return
    waits.during = "attach"
    resumed = kind(hook, way, edges)
    waits.during = "state"
    resumed.optimizer.load_state_dict(training.optimizer.state_dict())
    resumed.attachment.load_state_dict(saved)
    waits.during = "first steps"
    resumed.step(num_steps, waits)
    waits.during = "state"
    resumed.attachment.reset_state()
    waits.during = "close"
    resumed.runtime.close()
