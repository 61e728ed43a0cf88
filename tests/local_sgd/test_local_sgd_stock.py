"""Post-local SGD and hierarchical local SGD against PyTorch's `post_localSGD_hook` and model averagers, step by step.

PyTorch's averagers count calls from the beginning of training and from 0, so that they average after the first local
step already; ours count each optimizer's local steps from 1. The counters of PyTorch's are set so that they agree:
`PeriodicModelAverager` subtracts the warm-up, and begins with `step = 1`; `HierarchicalModelAverager` does not, and
begins with `step = 1 - warm-up`. (The first then averages once more, after the last step of the warm-up, when
ranks are equal.) PyTorch's takes sizes and periods in rising order only.
"""

from collections import OrderedDict

import pytest
import torch
import torch.distributed as dist
from local_sgd_driver import copied, local
from test_local_sgd import batch, loss, make_model
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
from torch.nn.parallel import DistributedDataParallel

import lightning_commhooks as lc

STEPS = 16


def train(rank, model, ddp, after_step):
    """Parameters after each step of SGD with momentum."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    trajectory = []
    for step in range(STEPS):
        ddp.zero_grad()
        loss(ddp, batch(rank, step, "both"), "both").backward()
        optimizer.step()
        after_step(optimizer)
        trajectory.append(copied(model.named_parameters()))
    return trajectory


def stock(rank, world, averager, warmup, subgroup_size):
    model = make_model()
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.0005)
    subgroup, groups = dist.new_subgroups(subgroup_size) if subgroup_size else (None, [])
    ddp.register_comm_hook(PostLocalSGDState(None, subgroup, warmup, subgroup is not None), post_localSGD_hook)
    trajectory = train(rank, model, ddp, lambda optimizer: averager.average_parameters(optimizer.param_groups))
    return trajectory, groups


def both(rank, world, hook, levels):
    """Our trajectory and PyTorch's. `levels` makes its averager hierarchical."""
    warmup, size = hook.start_localSGD_iter, hook.subgroup_size
    if levels is None:
        averager = PeriodicModelAverager(hook.period, warmup)
        averager.step = 1
    else:
        averager = HierarchicalModelAverager(OrderedDict(levels), warmup_steps=1)
        averager.step = 1 - warmup
    theirs, groups = stock(rank, world, averager, warmup, size)
    levels = getattr(averager, "period_process_group_dict", {}).values()
    for group in {*groups, *levels} - {dist.GroupMember.NON_GROUP_MEMBER, dist.group.WORLD}:
        dist.destroy_process_group(group)
    model = make_model()
    with local(model, hook, optimizers=[]) as (ddp, attachment):
        ours = train(rank, model, ddp, attachment.after_optimizer_step)
    return ours, theirs


def assert_same(results, warmup, periods):
    """Equal at every step; and ranks are apart at all of them but those that are due."""
    for ours, theirs in results:
        for step, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            for name in mine:
                torch.testing.assert_close(mine[name], other[name], rtol=0, atol=1e-12, msg=f"{name}, step {step}")
    first, *_, last = [ours for ours, _ in results]
    for step in range(STEPS):
        local_steps = step + 1 - warmup
        together = local_steps <= 0 or any(local_steps % period == 0 for period in periods)
        equal = all(torch.equal(first[step][name], last[step][name]) for name in first[step])
        assert equal == together, f"step {step}"


@pytest.mark.parametrize(("world", "subgroup", "warmup"), [(2, None, 0), (4, None, 5), (4, 2, 0)])
def test_post_localsgd_is_pytorchs(run, world, subgroup, warmup):
    hook = lc.PostLocalSGD(
        period=3,
        start_localSGD_iter=warmup,
        post_local_gradient_allreduce=subgroup is not None,
        subgroup_size=subgroup,
    )
    assert_same(run(both, hook, None, world=world), warmup, [3])


@pytest.mark.parametrize(
    ("levels", "subgroup", "warmup"),
    [({3: 2}, None, 0), ({2: 2, 6: 4}, None, 5), ({3: 2, 5: 4}, None, 0), ({1: 2, 4: 4}, 2, 5)],
    ids=str,
)
def test_hierarchical_localsgd_is_pytorchs(run, levels, subgroup, warmup):
    *_, world = levels.values()
    hook = lc.HierarchicalLocalSGD(
        period_group_size_dict=dict(reversed(levels.items())),
        start_localSGD_iter=warmup,
        post_local_gradient_allreduce=subgroup is not None,
        subgroup_size=subgroup,
    )
    all_ranks = [period for period, size in levels.items() if size == world]
    assert_same(run(both, hook, levels, world=world), warmup, all_ranks)
