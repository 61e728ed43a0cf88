"""Names of parameters and buffers in states, patterns and messages: the same with and without wrappers of modules."""

import warnings

import pytest
import torch
from pool import ignoring
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import lightning_commhooks as lc
from lightning_commhooks.interface.layout import Layout


class Inner(nn.Module):
    """Has what it works with in an attribute that wrappers use, too."""

    def __init__(self):
        super().__init__()
        self.module = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x):
        return self.norm(self.module(x))


def make(wrap=lambda module: module):
    torch.manual_seed(0)
    return nn.Sequential(wrap(Inner()), nn.Linear(8, 2))


NAMES = ["0.module.weight", "0.module.bias", "0.norm.weight", "0.norm.bias", "1.weight", "1.bias"]
WRAPPERS = {
    "checkpoint": checkpoint_wrapper,
    "compile": torch.compile,
    "data_parallel": nn.DataParallel,
    "averaged": AveragedModel,
    "both": lambda module: torch.compile(checkpoint_wrapper(module)),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_names_are_those_without_wrappers(wrapper):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PyTorch, when it is to compile for the first time
        models = make(WRAPPERS[wrapper]), WRAPPERS[wrapper](make())
    for model in models:
        layout = Layout(model)
        assert list(layout.trained) == NAMES
        assert {"0.norm.running_mean", "0.norm.running_var"} <= layout.float_buffers().keys()


def test_a_wrappers_own_tensor_has_another_name():
    wrapped = AveragedModel(nn.Linear(2, 2))
    wrapped.module.register_buffer("n_averaged", torch.ones(1))
    wrapped.n_averaged = torch.zeros(1)
    assert sorted(Layout(wrapped).float_buffers()) == ["module.n_averaged", "n_averaged"]


def test_parametrized_weights_are_named_as_in_a_state_dict():
    module = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)))
    assert Layout(module).trained.keys() == module.state_dict().keys()


def trained(model, hook, state=None, steps=3):
    """The state of a hook after some steps."""
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attachment = lc.attach(ddp, hook, optimizers=[optimizer], exact_state=True)
    if state is not None:
        attachment.load_state_dict(state)
    for _ in range(steps):
        optimizer.zero_grad()
        ddp(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
    saved = attachment.state_dict()
    with ignoring("ended while", "training ended after", "NaN", "has never averaged"):
        attachment.close()
    return saved


HOOKS = {
    "powersgd": lc.PowerSGD(start_powerSGD_iter=1, min_compression_rate=1),
    "post": lc.PostLocalSGD(period=9, start_localSGD_iter=0, post_local_gradient_allreduce=False),
    "diloco": lc.DiLoCo(period=9, post_local_gradient_allreduce=False),
}


def loads(rank, world, hook):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = trained(make(), hook)
        wrapped = trained(make(checkpoint_wrapper), hook)
        assert plain["parameters"].keys() == wrapped["parameters"].keys()
        trained(make(checkpoint_wrapper), hook, plain)
        trained(make(), hook, wrapped)


@pytest.mark.parametrize("name", HOOKS)
def test_states_load_with_and_without_wrappers(run, name):
    run(loads, HOOKS[name])


def patterns(rank, world):
    hook = lc.PerParameter({"0.module.*": "int8", "*": "allreduce"})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trained(make(checkpoint_wrapper), hook, steps=1)
    assert not [warning for warning in caught if "matches no parameter" in str(warning.message)]


def test_patterns_do_not_name_wrappers(run):
    run(patterns)


def test_only_ddp_averages_ignored_parameters_of_the_root():
    module = nn.Linear(2, 3)
    assert [*Layout(module, {"weight"}).shapes] == ["weight", "bias"]
    assert [*Layout(module, {"weight"}, ignores_root=True).shapes] == ["bias"]
