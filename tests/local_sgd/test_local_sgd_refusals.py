"""What local SGD refuses, warns of and how it fails; which ranks are on one node."""

import pickle
import warnings

import pytest
import torch
from local_sgd_driver import ALONE, local, one_step, params, zero_lr
from pool import ignoring

import lightning_commhooks as lc

SHAPES = {"a": (6,), "b": (2, 2)}
POST = lc.PostLocalSGD(period=2, **ALONE)
HIERARCHICAL, PERIODS = lc.HierarchicalLocalSGD, "period_group_size_dict"

# Options ---------------------------------------------------------------------------------------------------------

LOCAL_SGD = [lc.PostLocalSGD, lc.HierarchicalLocalSGD, lc.DiLoCo]
BAD_IN_ALL = [
    ({"start_localSGD_iter": -1}, "start_localSGD_iter must be an integer of at least 0, got -1"),
    (
        {"start_localSGD_iter": 1.5},
        "start_localSGD_iter must be a step, an integer, a fraction of the run, as 0.1, or 'auto'",
    ),
    ({"start_localSGD_iter": True}, "start_localSGD_iter must be an integer of at least 0, got True"),
    ({"subgroup_size": 0}, "subgroup_size must be an integer of at least 1, got 0"),
    ({"subgroup_size": "2"}, "subgroup_size must be an integer of at least 1, got '2'"),
    ({"post_local_gradient_allreduce": 1}, "post_local_gradient_allreduce must be True or False, got 1"),
    ({"average_buffers": None}, "average_buffers must be True or False, got None"),
    ({"subgroup_size": 2, "post_local_gradient_allreduce": False}, "subgroup_size=2 has no effect with"),
    ({"optimizer_state": "drop"}, "optimizer_state must be 'keep', 'average' or 'reset', got 'drop'"),
]
BAD = [(make, *case) for case in BAD_IN_ALL for make in LOCAL_SGD] + [
    (lc.PostLocalSGD, {"period": 0}, "period must be an integer of at least 1, got 0"),
    (lc.PostLocalSGD, {"period": None}, "period must be an integer of at least 1, got None"),
    (HIERARCHICAL, {PERIODS: {}}, r"period_group_size_dict must be a dict .* \{4: 8, 16: None\}, got \{\}"),
    (HIERARCHICAL, {PERIODS: 8}, "period_group_size_dict must be a dict .*, got 8"),
    (HIERARCHICAL, {PERIODS: {0: 2}}, "a period in period_group_size_dict must be an integer of at least 1, got 0"),
    (HIERARCHICAL, {PERIODS: {"x": 2, 4: 4}}, "a period in period_group_size_dict must be an integer .* got 'x'"),
    (HIERARCHICAL, {PERIODS: {4: 1}}, "a group size in period_group_size_dict must be .* at least 2, got 1"),
    (HIERARCHICAL, {PERIODS: {4: 4, 8: 2}}, r"must grow with periods, are \{4: 4, 8: 2\}"),
    (HIERARCHICAL, {PERIODS: {8: 2, 4: 2}}, "must grow with periods"),
    (HIERARCHICAL, {PERIODS: {4: None, 8: None}}, "must grow with periods"),
    (HIERARCHICAL, {PERIODS: {4: None, 8: 2}}, "must grow with periods"),
    (lc.DiLoCo, {"period": -3}, "period must be an integer of at least 1, got -3"),
    (lc.DiLoCo, {"fragments": 0}, "fragments must be an integer of at least 1, got 0"),
    (lc.DiLoCo, {"fragments": 5, "period": 4}, "fragments must be at most period=4, got 5"),
    (lc.DiLoCo, {"outer_lr": 0}, "outer_lr must be above 0, got 0"),
    (lc.DiLoCo, {"outer_lr": float("nan")}, "outer_lr must be above 0, got nan"),
    (lc.DiLoCo, {"outer_lr": "0.7"}, "outer_lr must be above 0, got '0.7'"),
    (lc.DiLoCo, {"outer_momentum": 1.0}, r"outer_momentum must be in \[0, 1\), got 1.0"),
    (lc.DiLoCo, {"outer_momentum": -0.1}, r"outer_momentum must be in \[0, 1\), got -0.1"),
    (lc.DiLoCo, {"outer_momentum": None}, r"outer_momentum must be in \[0, 1\), got None"),
    (lc.DiLoCo, {"nesterov": 1}, "nesterov must be True or False, got 1"),
    (lc.DiLoCo, {"pseudo_gradient": "int3"}, "pseudo_gradient must be one of .*, got 'int3'"),
    (lc.DiLoCo, {"pseudo_gradient": {"name": "int4"}}, "pseudo_gradient must be one of .*, got {'name': 'int4'}"),
    (lc.DiLoCo, {"pseudo_gradient": lc.PowerSGD()}, "would begin after so many outer steps: set start_powerSGD_iter=0"),
    (
        lc.DiLoCo,
        {"pseudo_gradient": lc.Cast(lc.PowerSGD(), "bf16")},
        r"PowerSGD\(start_powerSGD_iter=1000\) would begin",
    ),
    (lc.DiLoCo, {"pseudo_gradient": lc.PostLocalSGD()}, "PostLocalSGD.* does not average gradients in each step"),
    (lc.DiLoCo, {"pseudo_gradient": lc.Int8(), "error_feedback": True}, "Int8.*, which has its own option"),
    (lc.DiLoCo, {"error_feedback": True}, "error_feedback=True has no effect with pseudo_gradient='fp32'"),
    (lc.DiLoCo, {"delay": 5, "period": 4}, "delay must be at most period=4, got 5"),
    (lc.DiLoCo, {"mixing": 1.5}, r"mixing must be None or in \[0, 1\], got 1.5"),
    (
        lc.DiLoCo,
        {"eager": True, "delay": 3},
        "eager=True means delay=100, the period, and mixing=0: leave out delay=3$",
    ),
]


@pytest.mark.parametrize(("make", "options", "message"), BAD, ids=lambda value: getattr(value, "name", None))
def test_bad_option_is_refused(make, options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)
    with pytest.raises(ValueError, match=message):
        lc.get_hook(make.name, **options)


def test_names_and_defaults():
    for name in ("post_localsgd", "post_local_sgd", "post_localSGD"):
        assert lc.get_hook(name, period=3) == lc.PostLocalSGD(start_localSGD_iter="auto", period=3)
    for name in ("hierarchical_localsgd", "hierarchical_local_sgd"):
        named = lc.HierarchicalLocalSGD(start_localSGD_iter="auto", period_group_size_dict={8: None})
        assert lc.get_hook(name) == named
    assert lc.get_hook("diloco") == lc.DiLoCo(start_localSGD_iter=0, period=100, outer_lr=0.7, outer_momentum=0.9)
    unsorted = lc.HierarchicalLocalSGD(period_group_size_dict={8: None, 2: 2})
    assert list(unsorted.period_group_size_dict) == [2, 8]
    for hook in (POST, unsorted, lc.DiLoCo()):
        assert pickle.loads(pickle.dumps(hook)) == hook
        assert len({hook, pickle.loads(pickle.dumps(hook))}) == 1


# Optimizers --------------------------------------------------------------------------------------------------


def sharded(kind, parameters):
    with ignoring(".*"):
        from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
        from torch.distributed.optim import DistributedOptimizer, PostLocalSGDOptimizer, ZeroRedundancyOptimizer

        if kind == "zero":
            return ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.1)
        if kind == "post_local":
            return PostLocalSGDOptimizer(torch.optim.SGD(parameters, lr=0.1), PeriodicModelAverager(period=4))
        # To make a real one takes torch.distributed.rpc.
        return DistributedOptimizer.__new__(type("Own", (DistributedOptimizer,), {}))


class Wrapper:
    """No `torch.optim.Optimizer`, but it has what one has."""

    def __init__(self, optimizer):
        self.param_groups, self.state = optimizer.param_groups, optimizer.state


REFUSED = {
    "zero": "do not work with ZeroRedundancyOptimizer: it keeps its state in shards .* use the optimizer that it wraps",
    "post_local": "do not work with PostLocalSGDOptimizer: it averages models itself; use the optimizer that it wraps",
    "distributed": "do not work with Own: it keeps its state in shards .* use an optimizer of torch.optim",
    "none": "not an optimizer: 3",
}


def refuse(rank, world, kind):
    model, gradients = params(SHAPES)
    bad = 3 if kind == "none" else sharded(kind, model.parameters())
    message = REFUSED[kind]
    with pytest.raises(ValueError, match=message), local(model, POST, [bad]):
        pass
    with pytest.raises(ValueError, match=message), local(model, POST, lambda: [bad]) as (ddp, _):
        one_step(ddp, bad, gradients)
    with local(model, POST) as (ddp, attachment):
        with pytest.raises(ValueError, match=message):
            attachment.add_optimizer(bad)
        with pytest.raises(ValueError, match=message):
            attachment.after_optimizer_step(bad)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        attachment.add_optimizer(optimizer)
        attachment.add_optimizer(optimizer)
        with pytest.raises(ValueError, match=message):
            attachment.after_optimizer_step(bad)
        with pytest.raises(ValueError, match="SGD reports its steps by itself"):
            attachment.after_optimizer_step(optimizer)
        for _ in range(2):
            one_step(ddp, optimizer, {name: rank * g for name, g in gradients.items()})
        return model.a.tolist(), attachment.metrics()["averagings"]


@pytest.mark.parametrize("kind", REFUSED)
def test_optimizer_that_cannot_step_alone_is_refused_and_the_hook_goes_on(run, kind):
    assert run(refuse, kind) == [([-1.0] * 6, 1)] * 2


def foreign(rank, world):
    model, gradients = params(SHAPES)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    wrapper = Wrapper(inner)
    refused = pytest.raises(ValueError, match=r"Wrapper has no register_step_post_hook.*after_optimizer_step")
    with refused, local(model, POST, [wrapper]):
        pass
    refused = pytest.raises(ValueError, match=r"optimizers must be a list, \[optimizer\], got SGD\(\.\.\.\)")
    with refused, local(model, POST, inner):
        pass
    with local(model, POST, []) as (ddp, attachment):
        for _ in range(2):
            one_step(ddp, inner, {name: rank * g for name, g in gradients.items()})
            attachment.after_optimizer_step(wrapper)
        attachment.after_optimizer_step(zero_lr(params(SHAPES)[0]))  # of another model
        return model.a.tolist(), attachment.metrics()["averagings"]


def test_optimizer_without_step_hooks_is_reported(run):
    assert run(foreign) == [([-1.0] * 6, 1)] * 2


def forget(rank, world):
    model, gradients = params(SHAPES)
    hook = lc.PostLocalSGD(start_localSGD_iter=1, post_local_gradient_allreduce=False)
    for optimizers in (None, list, [torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])]):
        with local(model, hook, optimizers) as (ddp, _):
            ddp(gradients).backward()
            with pytest.raises(lc.HookError, match=r"knows no optimizer: write attach\(model, 'post_localsgd', optim"):
                ddp(gradients).backward()
    optimizer = torch.optim.SGD([model.a], lr=0.1)
    with local(model, hook, [optimizer]) as (ddp, _):
        ddp(gradients).backward()
        optimizer.step()
        with pytest.warns(UserWarning, match="1 trained parameters, 'b' first, are in no optimizer .* never averaged"):
            ddp(gradients).backward()
        ddp(gradients).backward()  # once


def test_optimizers_that_were_forgotten(run):
    run(forget)


class Grows(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))

    def forward(self, x):
        return self.layers(x).square().sum()


def changing(rank, world):
    """Warnings after a layer was added to the model and its optimizer, and after one was taken from the optimizer."""
    found = []
    for adds in (True, False):
        model = Grows()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with (
            warnings.catch_warnings(record=True) as seen,
            local(model, lc.PostLocalSGD(period=2, **ALONE), [optimizer]) as (ddp, attachment),
        ):
            warnings.simplefilter("always")
            for step in range(4):
                if step == 2 and adds:
                    model.layers.append(torch.nn.Linear(2, 2))
                    optimizer.add_param_group({"params": list(model.layers[2].parameters())})
                elif step == 2:
                    del optimizer.param_groups[0]["params"][:2]
                ddp(torch.ones(2)).backward()
                optimizer.step()
            attachment.average_weights()
            found.append([str(one.message) for one in seen])
    return found


def test_parameters_that_come_and_go_are_named(run):
    for added, left in run(changing):
        assert len(added) == len(left) == 1
        assert added[0].startswith("2 parameters, 'layers.2.weight' first, are new in the model since hook 'post_local")
        assert left[0].startswith("2 trained parameters, 'layers.0.weight' first, are in no optimizer that hook")
        assert "if it has stepped before, also Attachment.average_weights()" in left[0]
