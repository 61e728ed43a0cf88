"""What the tests of local SGD share: an attachment that may end anywhere, chosen parameters, a lossless transport."""

import contextlib
import io
import itertools

import torch
import torch.distributed as dist
from driver import Params
from local_sgd_reference import Simulation
from pool import ignoring
from torch.nn.parallel import DistributedDataParallel

import lightning_commhooks as lc

ALONE = {"start_localSGD_iter": 0, "post_local_gradient_allreduce": False}
ENDED = "hook='.*' ended while"
TOO_EARLY = "training ended after"
IN_ONE_PROCESS = "hook=.* nothing: training runs in one process"
SENDS_MORE = "hook=.* sends about .* as many bytes"
OUTER = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
# Methods by a short name: the class, options, and those of the simulation of 4 ranks.
METHODS = {
    "post": (lc.PostLocalSGD, {"period": 4}, {"periods": {4: 4}}),
    "hierarchical": (lc.HierarchicalLocalSGD, {"period_group_size_dict": {2: 2, 6: 4}}, {"periods": {2: 2, 6: 4}}),
    "diloco": (lc.DiLoCo, {"period": 4}, {"periods": {4: 4}, "outer": OUTER}),
}


@contextlib.contextmanager
def local(model, hook, optimizers=None, grad_scaler=None, exact_state=False, **ddp_options):
    """`(ddp, attachment)`, closed at the end, however far training came."""
    ddp = DistributedDataParallel(model, **{"bucket_cap_mb": 0.0005, **ddp_options})
    with ignoring(IN_ONE_PROCESS, SENDS_MORE):
        attachment = lc.attach(ddp, hook, optimizers=optimizers, grad_scaler=grad_scaler, exact_state=exact_state)
    with ignoring(ENDED, TOO_EARLY):
        yield ddp, attachment
        attachment.close()


def copied(tensors):
    """Copies by name of what `named_parameters()` and the like give."""
    return {name: tensor.detach().clone() for name, tensor in tensors}


def snapshot(model, optimizers):
    """Copies of parameters and of optimizers' state, by name."""
    values = copied(model.named_parameters())
    for optimizer, (name, p) in itertools.product(optimizers, model.named_parameters()):
        for key, value in optimizer.state.get(p, {}).items():
            if isinstance(value, torch.Tensor):
                values[f"{name}.{key}"] = value.clone()
    return values


def same(a, b):
    """Whether two sets of tensors are equal bit by bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def mean(values):
    """The mean of the ranks' tensors by name."""
    return {name: sum(rank[name] for rank in values) / len(values) for name in values[0]}


def whole_numbers(rank, shapes, dtype=torch.float64, seed=0):
    """A rank's values by name; sums and means of 2 or 4 of them are exact in any dtype."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return {name: (4.0 * torch.randint(-8, 8, shape, generator=generator)).to(dtype) for name, shape in shapes.items()}


def put(model, values):
    """Give parameters these values, in their place."""
    with torch.no_grad():
        for name, value in values.items():
            model.get_parameter(name).copy_(value)


def zero_lr(model):
    """An optimizer whose steps change nothing."""
    return torch.optim.SGD(model.parameters(), lr=0.0)


def params(shapes, dtype=torch.float64):
    """A model of parameters, all zero, whose loss has gradient one for each."""
    model = Params(shapes, dtype)
    return model, {name: torch.ones(shape, dtype=dtype) for name, shape in shapes.items()}


def one_step(ddp, optimizer, gradients):
    """A backward and a step."""
    ddp.zero_grad()
    ddp(gradients).backward()
    optimizer.step()


def through_a_file(value):
    """What rank 0 saved, loaded on all ranks as Lightning does."""
    file = io.BytesIO()
    torch.save(value, file)
    given = [file.getvalue()]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(given, src=0)
    return torch.load(io.BytesIO(given[0]), weights_only=True)


class SimulationWithState(Simulation):
    """Local SGD that also averages or forgets optimizers' state, of all parameters of an optimizer at once."""

    def __init__(self, *args, optimizer_state, **options):
        super().__init__(*args, **options)
        self.optimizer_state = optimizer_state

    def step(self, k):
        super().step(k)
        due = [period for period in self.periods if self.num_steps[k] % period == 0]
        if not due or not self.is_local:
            return
        if self.optimizer_state == "average":
            states = {id(m): o[k].state for m, o in zip(self.models, self.optimizers, strict=True)}
            self._average(lambda m: _tensors(states[id(m)]), self.periods[max(due)])
        elif self.optimizer_state == "reset":
            for optimizers in self.optimizers:
                optimizers[k].state.clear()


def _tensors(state):
    return [t for own in state.values() for key, t in own.items() if key != "step" and isinstance(t, torch.Tensor)]
