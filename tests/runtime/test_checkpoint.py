"""States that do not fit, hand-over in a bad step, models wrapped again."""

import copy
import gc
import warnings
from pathlib import Path

import pytest
import torch
from driver import (
    POWERSGD,
    SHAPES,
    attached,
    backward,
    distance,
    full_rank_gradients,
    mean_gradients,
    mean_residuals,
    norm,
    residuals_of,
    same,
)
from pool import OF_COMPILING, ignoring
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lightning_commhooks as lc
from lightning_commhooks.interface.precision import add_unscaled_
from lightning_commhooks.runtime import checkpoint

BATCHED = lc.BatchedPowerSGD(start_powerSGD_iter=0, matrix_approximation_rank=2)
SCHEDULE = lc.Schedule({0: POWERSGD, 2: "bf16"})


def saved_state(rank, hook, shapes=SHAPES):
    with attached(hook, shapes) as (ddp, attachment):
        for step in range(2):
            backward(ddp, full_rank_gradients(rank, step, shapes))
        return attachment.state_dict()


def change(path, value=None):
    """A function that sets or deletes one entry of a state."""

    def apply(state):
        *parents, last = path
        for key in parents:
            state = state[key]
        if value is None:
            del state[last]
        else:
            state[last] = value

    return apply


# By exact_state=True on two ranks after 3 steps of these parameters, with what rank 0 got in the 2 steps after it.
STATES_OF_0_1_0 = Path(__file__).parent / "states" / "0.1.0.pt"
OLD_SHAPES = {"first": (24, 40), "bias": (40,)}
ENTRY = ("hook", "state", "entries")
RENAMED = {("other" if name == "first" else name): shape for name, shape in SHAPES.items()}
RESHAPED = {**SHAPES, "first": (40, 24)}
RANK_1 = lc.PowerSGD(start_powerSGD_iter=0, matrix_approximation_rank=1)
NO_FEEDBACK = lc.PowerSGD(start_powerSGD_iter=0, matrix_approximation_rank=2, use_error_feedback=False)
NEVER = lc.PowerSGD(start_powerSGD_iter=0, matrix_approximation_rank=2, min_compression_rate=1e9)

# Saved with, changed how, loaded with, into a model of these shapes; and what the error says.
MISMATCHES = {
    "another hook": (POWERSGD, None, lc.BF16(), SHAPES, "it is of hook 'powersgd', not of 'bf16'"),
    "stateless": (lc.BF16(), None, POWERSGD, SHAPES, "it is of hook 'bf16', not of 'powersgd'"),
    "another rank": (
        POWERSGD,
        None,
        RANK_1,
        SHAPES,
        r"the factor of 'conv' has shape \[2, 72\] in the state and \[1, 72\] now "
        r"\(matrix_approximation_rank was 2, is 1\)",
    ),
    "another rank, batched": (BATCHED, None, lc.BatchedPowerSGD(start_powerSGD_iter=0), SHAPES, "rank was 2, is 1"),
    "renamed": (POWERSGD, None, POWERSGD, RENAMED, "parameter 'first' of the state is not in the model"),
    "missing": (
        POWERSGD,
        None,
        POWERSGD,
        {**SHAPES, "new": (30, 30)},
        "parameter 'new' of the model is not in the state",
    ),
    "reshaped": (
        POWERSGD,
        None,
        POWERSGD,
        RESHAPED,
        r"parameter 'first' has shape \[24, 40\] in the state and \[40, 24\] now",
    ),
    "no feedback": (POWERSGD, None, NO_FEEDBACK, SHAPES, r"error feedback of 'conv' .*use_error_feedback was True"),
    "feedback": (NO_FEEDBACK, None, POWERSGD, SHAPES, "it has no error feedback of 'conv'"),
    "not compressed": (POWERSGD, None, NEVER, SHAPES, "'conv' is compressed in the state and not any more"),
    "truncated": (POWERSGD, change((*ENTRY, "first", "residual")), POWERSGD, SHAPES, "7 tensors of 8: it is"),
    "no steps": (POWERSGD, change(("steps",)), POWERSGD, SHAPES, "it has no 'steps'"),
    "format": (POWERSGD, change(("format",), 99), POWERSGD, SHAPES, "its format is 99, not 1"),
    "no hook": (POWERSGD, change(("hook",), "powersgd"), POWERSGD, SHAPES, "no dictionary"),
    "no entries": (POWERSGD, change(("hook", "state"), {}), POWERSGD, SHAPES, "0 tensors of 8: it is"),
    "phases": (
        SCHEDULE,
        None,
        lc.Schedule({0: POWERSGD, 3: "bf16"}),
        SHAPES,
        "a phase of the schedule begins at step 2 then only",
    ),
    "wrapper": (lc.Cast(POWERSGD, "bf16"), None, POWERSGD, SHAPES, "it is of hook 'cast', not of 'powersgd'"),
    "inside": (lc.Cast(POWERSGD), None, lc.Cast("fp16"), SHAPES, "it is of hook 'powersgd', not of 'fp16'"),
}


def load_wrong(rank, world, case):
    saved_with, edit, loaded_with, shapes, message = MISMATCHES[case]
    state = saved_state(rank, saved_with)
    if edit is not None:
        state = copy.deepcopy(state)
        edit(state)
    with attached(loaded_with, shapes) as (ddp, attachment):
        with pytest.raises(ValueError, match=message) as error:
            attachment.load_state_dict(state)
        assert "strict_state=False" in str(error.value)
        if rank == 0:
            with pytest.warns(UserWarning, match="strict_state=False: not taken over .*is reset"):
                attachment.load_state_dict(state, strict_state=False)
        else:
            attachment.load_state_dict(state, strict_state=False)
        loaded = attachment.state_dict()
        means = [backward(ddp, full_rank_gradients(rank, step, shapes)) for step in range(2)]
    return state, loaded, means


def load_steps_of_another_hook(rank, world):
    with attached(POWERSGD) as (ddp, attachment):
        backward(ddp, full_rank_gradients(rank, 0, SHAPES))
        state = checkpoint.save_steps(attachment.runtime)
    with attached(lc.Int8(min_bytes=0)) as (_, attachment):
        with pytest.raises(lc.StateError, match="it is of hook 'powersgd', not of 'int8'"):
            attachment.load_state_dict(state)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            attachment.load_state_dict(state, strict_state=False)
        return attachment.state_dict()["steps"], [str(warning.message) for warning in caught]


def test_a_step_count_is_of_a_hook_too(run):
    (steps, texts), (_, others) = run(load_steps_of_another_hook)
    assert steps == 1
    assert any("the state of hook 'powersgd' was saved without averaging" in text for text in texts)
    assert others == []


@pytest.mark.parametrize("case", MISMATCHES)
def test_mismatch_names_the_first_difference_and_the_way_out(run, case):
    results = run(load_wrong, case)
    state, loaded, means = results[0]
    assert all(same(a, b) for a, b in zip(means, results[1][2], strict=True))
    assert all(mean.isfinite().all() for mean in means[-1].values())
    if case in ("renamed", "missing", "reshaped"):
        kept = {"second", "third", "conv"} | ({"first"} if case == "missing" else set())
        assert loaded["hook"]["state"]["entries"].keys() == kept
    if case == "another rank":  # what is owed does not depend on it
        assert distance(mean_residuals(state, SHAPES), mean_residuals(loaded, SHAPES)) <= 1e-6
    unreadable = case in ("truncated", "no steps", "format", "no hook", "no entries")
    assert loaded["steps"] == (0 if unreadable else 2)


def other_dtype(rank, world, saved, loaded):
    with attached(POWERSGD, dtype=saved) as (ddp, attachment):
        backward(ddp, full_rank_gradients(rank, 0, SHAPES, saved))
        state = attachment.state_dict()
    with attached(POWERSGD, dtype=loaded) as (ddp, attachment):
        attachment.load_state_dict(state)
        means = [backward(ddp, full_rank_gradients(rank, step, SHAPES, loaded)) for step in (1, 2)]
        return state, attachment.state_dict(), means


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        *((torch.float32, torch.float32), (torch.float64, torch.bfloat16)),
        *((torch.float32, torch.float16), (torch.float16, torch.float32)),
    ],
    ids=str,
)
def test_resumes_in_another_precision(run, saved, loaded):
    before, after, means = run(other_dtype, saved, loaded)[0]
    assert means[0]["first"].dtype == loaded
    expected = [mean_gradients(full_rank_gradients, 2, step, SHAPES, loaded) for step in (1, 2)]
    came, went = mean_residuals(before, SHAPES), mean_residuals(after, SHAPES)
    for name in SHAPES:
        came[name] = came[name] + sum(mean[name] for mean in expected)
        went[name] = went[name] + sum(mean[name].double() for mean in means)
    assert distance(came, went) <= 4 * torch.finfo(loaded).eps * sum(map(norm, expected))


def load_foreign(rank, world):
    texts = []
    with attached(POWERSGD) as (ddp, attachment):
        backward(ddp, full_rank_gradients(rank, 0, SHAPES))
        good = attachment.state_dict()
        for foreign in (None, 3, {}, {"state_dict": {}}, {"format": 1}, object(), {**good, "steps": -3}):
            with pytest.raises(ValueError, match="not the state of a communication hook") as error:
                attachment.load_state_dict(foreign)
            texts.append(str(error.value))
        assert norm(residuals_of(attachment)) > 0, "after an error the hook is as it was"
        with ignoring("strict_state=False: not taken over"):
            attachment.load_state_dict(object(), strict_state=False)
        assert not residuals_of(attachment)
        backward(ddp, full_rank_gradients(rank, 0, SHAPES))
    return texts


def test_foreign_state(run):
    assert all("strict_state=False" in text for text in run(load_foreign)[0])


def load_differently(rank, world):
    good = saved_state(rank, POWERSGD)
    later, malformed = copy.deepcopy(good), copy.deepcopy(good)
    if rank:
        later["steps"] += 1
        malformed["hook"]["options"] = 3
    texts = []
    with attached(POWERSGD) as (_, attachment):
        for state in (None if rank else good, later, malformed):
            with pytest.raises(ValueError, match="state") as error:
                attachment.load_state_dict(state)
            texts.append(str(error.value))
    return texts


def test_bad_state_on_one_rank_is_an_error_on_all(run):
    (none, later, malformed), (own, _, own_malformed) = run(load_differently)
    assert "does not fit on rank 1" in none
    assert "it is a NoneType" in own
    assert "ranks were given different states" in later
    assert "does not fit on rank 1" in malformed
    assert "the state cannot be read: AttributeError" in own_malformed


def load_in_another_order(rank, world):
    state = saved_state(rank, POWERSGD)
    entries = state["hook"]["state"]["entries"]
    if rank:
        state["hook"]["state"]["entries"] = dict(reversed(entries.items()))
    with attached(POWERSGD) as (_, attachment):
        attachment.load_state_dict(state)
        return list(entries), list(attachment.state_dict()["hook"]["state"]["entries"])


def test_order_of_a_state_does_not_matter(run):
    """Ranks may meet parameters in different orders, as buckets are reduced beside each other."""
    assert all(saved == sorted(loaded) and len(saved) > 1 for saved, loaded in run(load_in_another_order))


def nonfinite_hand_over(rank, world, value):
    """What came in and out, around a step with a bad gradient in which another hook takes over."""
    with attached(SCHEDULE, dtype=torch.float64, find_unused_parameters=True) as (ddp, attachment):
        means = []
        for step in range(5):
            gradients = full_rank_gradients(rank, step, SHAPES, torch.float64)
            if step == 2 and rank == 1:
                gradients["second"][0, 0] = value
            means.append(backward(ddp, gradients))
        return means, attachment.state_dict()


@pytest.mark.parametrize(("value", "world"), [(float("inf"), 2), (float("nan"), 4)])
def test_hand_over_in_a_bad_step_forgets_what_was_owed(run, world, value):
    for means, state in run(nonfinite_hand_over, value, world=world):
        assert not any(mean.isfinite().all() for mean in means[2].values() if mean.numel())
        for step in (3, 4):
            expected = mean_gradients(full_rank_gradients, world, step, SHAPES, torch.float64)
            assert distance(means[step], expected) <= 2.0**-7 * norm(expected)
        assert norm(mean_residuals(state, SHAPES)) == 0
        phases = state["hook"]["state"]["hooks"]
        assert not phases["0"]["state"]["entries"], "what is paid takes no memory"


def overflows(rank, world, hook):
    with attached(hook) as (ddp, attachment):
        gradients = full_rank_gradients(rank, 0, SHAPES)
        gradients["first"][0, :3] = 1e6 if rank else 1.0
        mean = backward(ddp, gradients)
        return attachment.metrics()["numel_overflowed"], mean


@pytest.mark.parametrize(
    "hook", [lc.FP16(), lc.FP16(accumulate_dtype="float32"), lc.Cast(POWERSGD, "fp16"), lc.BF16()], ids=repr
)
def test_overflow_of_the_cast_alone_is_in_the_metrics(run, hook):
    (none, _), (some, mean) = run(overflows, hook)
    assert (none, some) == (0, 0 if hook == lc.BF16() else 3)
    assert bool(mean["first"].isfinite().all()) == (hook == lc.BF16())


def unfreeze(rank, world, hook, again):
    """Gradients and residuals before and after two parameters are unfrozen, on a new wrapper or the old one."""
    with attached(hook, dtype=torch.float64) as (ddp, attachment):
        module = ddp.module
        for name in ("first", "bias"):
            module.get_parameter(name).requires_grad_(False)
        ddp = None
        gc.collect()
    ddp = DistributedDataParallel(module, bucket_cap_mb=4e-3)
    attachment = lc.attach(ddp, hook)
    means = []
    for step in range(2):
        gradients = full_rank_gradients(rank, step, SHAPES, torch.float64)
        means.append(backward(ddp, {name: g for name, g in gradients.items() if name not in ("first", "bias")}))
    assert attachment.unfrozen() == []
    module.requires_grad_(True)
    assert attachment.unfrozen() == ["first", "bias"]
    if again:
        before = attachment.state_dict()
        new = DistributedDataParallel(module, bucket_cap_mb=4e-3)
        attachment.move_to(new)
        ddp = new
        assert attachment.unfrozen() == []
        after = attachment.state_dict()
        assert distance(mean_residuals(before, SHAPES), mean_residuals(after, SHAPES)) == 0
        means += [backward(ddp, full_rank_gradients(rank, step, SHAPES, torch.float64)) for step in (2, 3)]
    else:
        with pytest.warns(UserWarning, match="2 parameters are trained now .*'first' first.*move_to"):
            backward(ddp, full_rank_gradients(rank, 2, SHAPES, torch.float64))
    steps = attachment.metrics()["steps"]
    state = attachment.state_dict()
    attachment.close()
    return means, steps, state


def test_moves_to_a_new_wrapper_of_a_model_with_unfrozen_parameters(run):
    results = run(unfreeze, POWERSGD, True)
    means, steps, state = results[0]
    assert steps == state["steps"] == 4
    assert all(same(a, b) for a, b in zip(means, results[1][0], strict=True))
    owed = mean_residuals(state, SHAPES)
    for name in SHAPES:
        seen = range(2, 4) if name in ("first", "bias") else range(4)
        produced = sum(mean_gradients(full_rank_gradients, 2, step, SHAPES, torch.float64)[name] for step in seen)
        received = sum(means[step][name] for step in seen)
        torch.testing.assert_close(received + owed[name], produced, rtol=1e-10, atol=1e-10)


def test_warns_of_unfrozen_parameters_that_are_not_averaged(run):
    assert run(unfreeze, POWERSGD, False)[0][1] == 3


@ignoring(OF_COMPILING)
def train_compiled(rank, world, where):
    torch._dynamo.reset()
    # Larger than DDP's first bucket: its optimizer for torch.compile insists on one of a megabyte.
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(400, 400), nn.Tanh())))
    if where == "inside":
        model = torch.compile(model, backend="aot_eager")
    ddp = DistributedDataParallel(model, bucket_cap_mb=1)
    attachment = lc.attach(ddp, POWERSGD)
    run = torch.compile(ddp, backend="aot_eager") if where == "outside" else ddp
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(4):
        x = torch.randn(4, 400, generator=torch.Generator().manual_seed(10 * step + rank))
        run(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    state = attachment.state_dict()
    attachment.close()
    return torch.cat([p.detach().view(-1) for p in ddp.parameters()]), state


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_compiled_model_trains_alike_and_exchanges_state_with_the_plain_one(run, where):
    (plain, state), _ = run(train_compiled, "nowhere")
    (compiled, other), (mirror, _) = run(train_compiled, where, timeout=120)
    torch.testing.assert_close(compiled, plain, rtol=1e-4, atol=1e-5)
    assert torch.equal(compiled, mirror)
    assert state["hook"]["state"]["entries"].keys() == other["hook"]["state"]["entries"].keys()
    assert state["parameters"] == other["parameters"]


def bad_scaler(rank, world):
    with (
        pytest.raises(ValueError, match=r"grad_scaler must be a torch.amp.GradScaler, got 3"),
        attached(POWERSGD, grad_scaler=3),
    ):
        pass
    with attached(POWERSGD, grad_scaler=torch.amp.GradScaler("cpu", enabled=False)) as (ddp, _):
        return backward(ddp, full_rank_gradients(rank, 0, SHAPES))


def test_scaler_that_is_none_or_off(run):
    mean, _ = run(bad_scaler)
    assert all(g.isfinite().all() for g in mean.values())


def on_a_subgroup(rank, world):
    groups = [torch.distributed.new_group([0, 1]), torch.distributed.new_group([2, 3])]
    with warnings.catch_warnings(record=True) as caught, attached(POWERSGD, process_group=groups[rank // 2]) as (_, a):
        warnings.simplefilter("always")
        a.load_state_dict({}, strict_state=False)
    for group in groups:
        if group is not torch.distributed.GroupMember.NON_GROUP_MEMBER:
            torch.distributed.destroy_process_group(group)
    return sum("strict_state=False" in str(warning.message) for warning in caught)


def test_warns_once_in_each_group(run):
    assert run(on_a_subgroup, world=4) == [1, 0, 1, 0]


class Checkpointed(nn.Module):
    """Recomputes each layer in a backward inside the backward."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(5))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=True))
        return x


def reentrant(rank, world, bad):
    ddp = DistributedDataParallel(Checkpointed(), bucket_cap_mb=2e-3)
    attachment = lc.attach(ddp, POWERSGD)
    steps = []
    for step in range(4):
        x = torch.randn(4, 24, generator=torch.Generator().manual_seed(10 * step + rank)).requires_grad_()
        ddp.zero_grad()
        loss = ddp(x).square().mean()
        if bad and step == 2 and rank == 1:
            ddp.module.layers[3].weight.register_hook(lambda gradient: gradient * float("inf"))
        loss.backward()
        steps.append([bool(p.grad.isfinite().all()) for p in ddp.parameters()])
        if step == 1:
            before = attachment.state_dict()
    after = attachment.state_dict()
    metrics = attachment.metrics()
    attachment.close()
    return steps, metrics["steps"], metrics["nonfinite_steps"], before, after


def test_reentrant_checkpointing_is_one_step(run):
    for steps, count, bad, _, _ in run(reentrant, False):
        assert (count, bad) == (4, 0)
        assert all(map(all, steps))
    for steps, count, bad, before, after in run(reentrant, True):
        assert (count, bad) == (4, 2), "the hook of that parameter stays"
        assert [any(step) for step in steps] == [True, True, False, False]
        entries = before["hook"]["state"]["entries"], after["hook"]["state"]["entries"]
        assert all(torch.equal(entries[0][name]["factor"], entries[1][name]["factor"]) for name in entries[0])
        assert not any(entry["residual"].any() for entry in entries[1].values())


class Explodes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ArithmeticError("out of numbers")


def broken_off(rank, world):
    ddp = DistributedDataParallel(nn.Sequential(*(nn.Linear(24, 24) for _ in range(4))), bucket_cap_mb=2e-3)
    attachment = lc.attach(ddp, POWERSGD)
    for _ in range(2):
        ddp.zero_grad()
        ddp(torch.randn(4, 24)).square().mean().backward()
    torch.distributed.barrier()
    ddp.module[1].register_forward_hook(lambda module, inputs, output: Explodes.apply(output))
    # Whoever comes later may find that the other one has failed.
    with pytest.raises((ArithmeticError, lc.HookError)):
        ddp(torch.randn(4, 24)).square().mean().backward()
    with pytest.raises(lc.HookError, match="the backward of step 2 broke off on rank"):
        attachment.state_dict()
    steps = attachment.shared_state_dict()["steps"]
    attachment.close()
    return steps


def test_after_a_backward_that_breaks_off_only_the_step_count_can_be_saved(run):
    assert run(broken_off) == [3, 3]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_scale_on_the_device_divides_in_float32(dtype):
    memory, gradient = torch.randn(8, 8), (1e-2 * torch.randn(8, 8)).to(dtype)
    expected = memory + gradient.float() / 2.0**16
    for scale in (2.0**16, torch.tensor(2.0**16)):
        torch.testing.assert_close(add_unscaled_(memory.clone(), gradient, scale), expected, rtol=1e-7, atol=0)


def goes_on(rank, world, hook, state):
    with attached(hook, OLD_SHAPES, exact_state=True, find_unused_parameters=True) as (ddp, attachment):
        attachment.load_state_dict(state)
        return [backward(ddp, full_rank_gradients(rank, step, OLD_SHAPES)) for step in (3, 4)]


@pytest.mark.parametrize(
    "hook",
    [
        lc.PowerSGD(start_powerSGD_iter=0, matrix_approximation_rank=2),
        lc.BatchedPowerSGD(start_powerSGD_iter=0),
        lc.Int8(min_bytes=0, block_size=128),
        lc.ChunkedTopK(),
        lc.Schedule({0: lc.Int8(min_bytes=0), 2: lc.PowerSGD(start_powerSGD_iter=0)}),
    ],
    ids=lambda hook: hook.name,
)
def test_states_of_the_first_release_load(run, hook):
    saved = torch.load(STATES_OF_0_1_0, weights_only=True)[hook.name]
    for means in run(goes_on, hook, saved["state"]):
        for mean, expected in zip(means, saved["after"], strict=True):
            # Another version of PyTorch may add up in another order.
            assert distance(mean, expected) <= 1e-5 * norm(expected)


class Counting(lc.CommHook):
    """Names what it keeps, and does not save or load it."""

    name = "counting"

    def bind(self, group):
        return _BoundCounting(group)


class _BoundCounting(lc.BoundHook):
    def reduce(self, bucket, ranks):
        for slot in bucket.slots:
            entry = self.memory.setdefault(slot.name, {"count": torch.zeros(1), "residual": torch.zeros(slot.shape)})
            entry["count"] = entry["count"] + 1
            entry["residual"] += ranks.rank
        yield from ranks.all_reduce_mean_(bucket.flat)

    def kept(self, shapes):
        return {"count": (1,), "residual": shapes[0]}


def counts(rank, world):
    with attached(Counting()) as (ddp, attachment):
        for step in range(3):
            backward(ddp, full_rank_gradients(rank, step, SHAPES))
        state = attachment.state_dict()
    wrong = copy.deepcopy(state)
    wrong["hook"]["state"]["entries"]["first"]["count"] = torch.zeros(2)
    with attached(Counting()) as (ddp, attachment):
        with pytest.raises(lc.StateError, match=r"the count of 'first' has shape \[2\] in the state and \[1\] now"):
            attachment.load_state_dict(wrong)
        attachment.load_state_dict(state)
        backward(ddp, full_rank_gradients(rank, 3, SHAPES))
        return {name: {kind: own.clone() for kind, own in e.items()} for name, e in attachment.bound.memory.items()}


def test_a_hook_names_what_it_keeps(run):
    """It is saved, loaded and checked; the residual as the mean over ranks."""
    for rank, memory in enumerate(run(counts)):
        assert memory.keys() == SHAPES.keys()
        for entry in memory.values():
            assert entry["count"] == 4
            assert (entry["residual"] == 3 * 0.5 + rank).all()
