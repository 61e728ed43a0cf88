"""A run of training between replicas on fake tensors, with a stand-in for FSDP2's units."""

import types
from itertools import pairwise

import torch
import torch.distributed as dist
from cuda_dry_training import DEVICE, Training

from lightning_commhooks.interface.layout import Layout
from lightning_commhooks.runtime.source import Source
from lightning_commhooks.sources.replicas import Replicas, _Unit


class ParamGroup:
    """In place of FSDP2's `FSDPParamGroup`: parameters that are reduced together, on FSDP2's stream."""

    def __init__(self, parameters, stream):
        self._stream = stream
        self.mesh_info = types.SimpleNamespace(replicate_process_group=None)
        self.post_forward_mesh_info = None
        self.fsdp_params = [
            types.SimpleNamespace(
                sharded_param=p,
                sharded_size=p.shape,
                padded_sharded_param_size=p.shape,
                _unsharded_param=p,
                unsharded_param=types.SimpleNamespace(grad=p),
                unsharded_accumulated_grad=None,
            )
            for p in parameters
        ]

    def reshard(self):
        """Nothing is gathered."""

    def post_backward(self):
        """As FSDP2's, of gradients that lie in `grad` of the parameters."""
        parameters = [p.sharded_param for p in self.fsdp_params]
        share = self._share = torch.cat([p.grad.reshape(-1) for p in parameters])
        options = types.SimpleNamespace(reduceOp=dist.ReduceOp.AVG)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self.mesh_info.replicate_process_group.allreduce([share], options).wait()
            for p, own in zip(parameters, share.split([p.numel() for p in parameters]), strict=True):
                p.grad = own.view(p.shape).clone()
            self.end = self._stream.record_event()


class Shares(Replicas):
    """Of a model that FSDP2 has not sharded."""

    def __init__(self, ddp):
        Source.__init__(self, dist.group.WORLD)
        self.device, self.layout = DEVICE, Layout(ddp.module)
        # FSDP2 takes no parameters without dimensions.
        parameters = [p for p in ddp.module.parameters() if p.dim()][::-1]
        stream = torch.cuda.Stream()
        self.groups = [ParamGroup(parameters[first:last], stream) for first, last in pairwise([0, 2, len(parameters)])]
        self._units, self._states, self._reduced = [], [], []
        self._within = self._gather = self._handle = self._stream = None
        # Whether FSDP2 waits at the end of the backward, as it does unless `set_is_last_backward(False)`.
        self.is_last = True

    def connect(self, model, runtime):
        for group in self.groups:
            names = {id(p): self.layout.name_of(p.sharded_param) for p in group.fsdp_params}
            self._units.append(_Unit(group, self, names))
            self._units[-1].connect(runtime)

        model.synchronize = lambda function: function()

    def function(self):
        """Reduce the gradients."""
        for group in self.groups:
            group.post_backward()
        for group in self.groups if self.is_last else ():
            torch.cuda.current_stream().wait_event(group.end)


class TrainingOfReplicas(Training):
    """A model with a hook between its replicas."""

    source = Shares
