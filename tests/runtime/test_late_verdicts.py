"""Whether a step was bad is known with the next one, as on CUDA: else nothing is different for hooks and users."""

import types

import pytest
import torch
from driver import SHAPES, attached, backward, full_rank_gradients, same
from hooks_under_test import INT8, RANK_2
from torch import nn

import lightning_commhooks as lc
from lightning_commhooks.runtime import finite_steps

LOCAL = {"start_localSGD_iter": 2, "period": 2, "post_local_gradient_allreduce": False}
HOOKS = {
    "int8": lc.Int8(**INT8),
    "powersgd": lc.PowerSGD(**RANK_2),
    "powersgd+half": lc.PowerSGD(**RANK_2, num_iters_per_step=1),
    "schedule": lc.Schedule({0: lc.PowerSGD(**RANK_2), 3: lc.Int8(**INT8), 6: "bf16"}),
    "int8, then local": lc.Schedule({0: lc.Int8(**INT8), 3: lc.PostLocalSGD(**LOCAL)}),
}
BAD = (3, 4, 6)


def late(patch, verdicts):
    """Have verdicts come when they are asked for; they are noted."""

    def on_its_way(finite):
        verdicts.append(finite)
        return types.SimpleNamespace(wait=lambda: finite)

    patch.setattr(finite_steps, "_on_its_way", on_its_way)


def leaves(state):
    if isinstance(state, dict):
        return [leaf for key in sorted(state, key=repr) for leaf in (key, *leaves(state[key]))]
    return [state.tolist()] if isinstance(state, torch.Tensor) else [state]


def steps_and_states(rank, hook, is_late):
    """Gradients, what users read between steps, and states, of steps of which some are bad on rank 1."""
    patch, verdicts = pytest.MonkeyPatch(), []
    if is_late:
        late(patch, verdicts)
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
            if step % 3 == 0:
                seen.append(attachment.metrics()["nonfinite_steps"])
        seen += [attachment.metrics()["nonfinite_steps"], leaves(attachment.state_dict())]
    patch.undo()
    assert len(verdicts) == (9 if is_late else 0)
    return seen


def compared(rank, world, name):
    early, late = (steps_and_states(rank, HOOKS[name], is_late) for is_late in (False, True))
    return [same(a, b) if isinstance(a, dict) else a == b for a, b in zip(early, late, strict=True)], early[-2]


@pytest.mark.parametrize("name", HOOKS)
def test_late_verdicts_change_nothing(run, name):
    for are_same, num_bad in run(compared, name):
        assert all(are_same)
        assert num_bad == len(BAD)


def uneven_data(rank, world, is_late):
    """Gradients of a rank with data for six steps and one for three, which `join()` has take part in the others."""
    patch = pytest.MonkeyPatch()
    if is_late:
        late(patch, [])
    means = []
    with attached(HOOKS["powersgd+half"], bucket_cap_mb=25) as (ddp, attachment):
        with ddp.join():
            for step in range(6 if rank else 3):
                means.append(backward(ddp, full_rank_gradients(rank, step, SHAPES)))
        means.append(leaves(attachment.state_dict()))
    patch.undo()
    return means


def test_steps_that_end_when_the_next_one_has_begun(run):
    """The hook hears of them before a bucket of the next one, here the only one."""
    early, late = run(uneven_data, False), run(uneven_data, True)
    for own, own_late in zip(early, late, strict=True):
        assert all(same(a, b) if isinstance(a, dict) else a == b for a, b in zip(own, own_late, strict=True))


def has_p(bound):
    return any("factor_p" in entry for entry in bound.memory.values())


def pending(rank, world):
    """Whether the hook has taken over its first step, before and after what does away with a pending verdict."""
    patch, verdicts, taken = pytest.MonkeyPatch(), [], []
    late(patch, verdicts)
    with attached(HOOKS["powersgd+half"]) as (ddp, attachment):
        runtime = attachment.runtime
        for step in range(2):
            backward(ddp, full_rank_gradients(rank, step, SHAPES))
        taken += [has_p(runtime.bound), runtime._steps.pending is not None]
        attachment.reset_state()
        attachment.metrics()
        taken += [has_p(runtime.bound), runtime._steps.pending is not None]
        backward(ddp, full_rank_gradients(rank, 3, SHAPES))
        bound = runtime.bound
    metrics = attachment.metrics()
    taken += [has_p(bound), runtime._steps.pending is not None, metrics["nonfinite_steps"]]
    patch.undo()
    return taken


def test_who_is_gone_hears_no_verdict(run):
    """A hook that began anew does not take over the steps of the one before; a closed one none at all."""
    assert run(pending) == [[True, True, False, False, False, False, 0]] * 2


class Fails(lc.BoundHook):
    """Its `end_step` raises."""

    has_memory = True

    def reduce(self, bucket, ranks):
        yield from ranks.all_reduce_mean_(bucket.flat)

    def end_step(self, finite):
        raise ArithmeticError("out of numbers")


def fail_late(rank, world):
    patch = pytest.MonkeyPatch()
    late(patch, [])
    texts = []
    with attached(HOOKS["int8"]) as (ddp, attachment):
        backward(ddp, full_rank_gradients(rank, 0, SHAPES))
        patch.setattr(type(attachment.runtime.bound), "end_step", Fails.end_step)
        for function in (attachment.metrics, attachment.state_dict):
            with pytest.raises(lc.HookError) as error:
                function()
            texts.append(str(error.value))
    patch.undo()
    return texts


def test_failure_names_the_hook_and_ends_it(run):
    for rank, texts in enumerate(run(fail_late)):
        for text in texts:
            assert f"'int8' failed on rank {rank} after 1 step: out of numbers" in text
