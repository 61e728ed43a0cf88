"""Whether a step was bad is known with the next one, as on CUDA: else nothing is different for hooks and users."""

import types

import pytest
import torch
from driver import SHAPES, attached, backward, full_rank_gradients, same
from hooks_under_test import INT8, RANK_2
from torch import nn

import lightning_commhooks as lc
from lightning_commhooks.ddp import finite_steps

LOCAL = {"start_localSGD_iter": 2, "period": 2, "post_local_gradient_allreduce": False}
HOOKS = {
    "int8": lc.Int8(**INT8),
    "powersgd": lc.PowerSGD(**RANK_2),
    "powersgd+half": lc.PowerSGD(**RANK_2, num_iters_per_step=1),
    "schedule": lc.Schedule({0: lc.PowerSGD(**RANK_2), 3: lc.Int8(**INT8), 6: "bf16"}),
    "post_localsgd": lc.PostLocalSGD(**LOCAL),
    "diloco": lc.DiLoCo(**LOCAL, fragments=2),
}
BAD = (3, 4, 6)


def leaves(state):
    if isinstance(state, dict):
        return [leaf for key in sorted(state, key=repr) for leaf in (key, *leaves(state[key]))]
    return [state.tolist()] if isinstance(state, torch.Tensor) else [state]


def steps_and_states(rank, hook, is_late):
    """Gradients, what users read between steps, and states, of steps of which some are bad on rank 1."""
    patch = pytest.MonkeyPatch()
    if is_late:
        patch.setattr(finite_steps, "_on_its_way", lambda finite: types.SimpleNamespace(wait=lambda: finite))
    seen = []
    with attached(hook, exact_state=True) as (ddp, attachment):
        optimizer = torch.optim.SGD(ddp.module.parameters(), lr=0.1)
        attachment.add_optimizer(optimizer)
        for step in range(9):
            gradients = full_rank_gradients(rank, step, SHAPES)
            if step in BAD and rank == 1:
                gradients["second"] = torch.full_like(gradients["second"], torch.inf)
            means = backward(ddp, gradients)
            nn.utils.clip_grad_value_(ddp.module.parameters(), 1.0)
            optimizer.step()
            seen.append({name: mean.nan_to_num(7.0) for name, mean in means.items()})
            if step % 2:
                seen.append(leaves(attachment.shared_state_dict()))
            if step % 3 == 0:
                seen.append(attachment.metrics()["nonfinite_steps"])
        seen += [attachment.metrics()["nonfinite_steps"], leaves(attachment.state_dict())]
    patch.undo()
    return seen


def compared(rank, world, name):
    early, late = (steps_and_states(rank, HOOKS[name], is_late) for is_late in (False, True))
    assert len(early) == len(late)
    return [same(a, b) if isinstance(a, dict) else a == b for a, b in zip(early, late, strict=True)], early[-2]


@pytest.mark.parametrize("name", HOOKS)
def test_late_verdicts_change_nothing(run, name):
    for are_same, num_bad in run(compared, name):
        assert all(are_same)
        assert num_bad == (len(BAD) if "local" not in name and name != "diloco" else num_bad)
