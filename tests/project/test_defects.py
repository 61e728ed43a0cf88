"""Defects that were found in review or by users, and stay fixed."""

import gc
import inspect
import weakref

import pytest
import torch
import torch.distributed as dist
from driver import SHAPES, SMALL_BUCKETS, Params, attached, backward, full_rank_gradients, residuals_of, same
from pool import ignoring
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lightning_commhooks as lc


def attach_again_on_a_subgroup(rank, world):
    # Rank 0 belongs to one group more, so ranks disagree on how many groups there are.
    extra, sub = dist.new_group([0]), dist.new_group([0, 2])
    means = []
    for _ in range(3 if rank in (0, 2) else 0):
        with attached("bf16", process_group=sub) as (ddp, _):
            means = [backward(ddp, full_rank_gradients(rank, step, SHAPES)) for step in range(3)]
    for group in (extra, sub):
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
    return means


def test_attach_several_times_on_part_of_the_world(run):
    results = run(attach_again_on_a_subgroup, world=4)
    assert same(results[0][2], results[2][2])


def near_the_range_of_float16(rank, world, hook):
    shapes = {"weight": (32, 32)}
    with attached(hook, shapes, torch.float16) as (ddp, _):
        gradient = 8000 * torch.eye(32, dtype=torch.float16)
        return [backward(ddp, {"weight": gradient})["weight"].isfinite().all().item() for _ in range(80)]


@pytest.mark.parametrize("hook", [lc.PowerSGD, lc.BatchedPowerSGD])
def test_a_grown_residual_does_not_overflow_float16(run, hook):
    for steps in run(near_the_range_of_float16, hook(start_powerSGD_iter=0)):
        assert all(steps)


def alternating_buckets(rank, world):
    names = [f"p{i}" for i in range(4)]
    options = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True, "bucket_cap_mb": 1e-3}
    with attached("allreduce", dict.fromkeys(names, (20, 20)), **options) as (ddp, attachment):
        for step in range(8):
            backward(ddp, {names[1 + step % 2]: torch.ones(20, 20)})
        return attachment.metrics()["steps"]


def test_each_backward_is_a_step_whatever_buckets_it_has(run):
    if "skip_all_reduce_unused_params" not in inspect.signature(DistributedDataParallel.__init__).parameters:
        pytest.skip("this DDP has no such argument")
    assert run(alternating_buckets) == [8, 8]


class Failing(lc.CommHook):
    name = "failing"

    def bind(self, group):
        return FailingBound(group)


class FailingBound(lc.BoundHook):
    def reduce(self, bucket, ranks):
        raise ZeroDivisionError("on purpose")


def fail_and_forget(rank, world):
    ddp = DistributedDataParallel(Params(SHAPES))
    lc.attach(ddp, Failing())
    module = weakref.ref(ddp.module)
    with pytest.raises(lc.HookError, match="on purpose"):
        backward(ddp, full_rank_gradients(rank, 0, SHAPES))
    del ddp
    gc.collect()
    return module() is None


def test_a_failed_hook_does_not_keep_the_model_alive(run):
    assert run(fail_and_forget) == [True, True]


class NotBinding(lc.CommHook):
    name = "not_binding"

    def bind(self, group):
        raise RuntimeError("cannot bind")


def failing_attach(rank, world):
    ddp = DistributedDataParallel(Params(SHAPES))
    with pytest.raises(RuntimeError, match="cannot bind"):
        lc.attach(ddp, NotBinding())  # the pool looks for leaked groups
    ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    with pytest.raises(ValueError, match=r"has the communication hook 'BuiltinCommHookType.ALLREDUCE' already"):
        lc.attach(ddp, "bf16")


def test_a_failing_attach_leaves_nothing_behind(run):
    run(failing_attach)


def unused_at_the_switch(rank, world):
    hook = lc.Schedule({0: lc.PowerSGD(start_powerSGD_iter=0), 3: "allreduce"})
    total = torch.zeros(24, 40)
    with attached(hook, find_unused_parameters=True) as (ddp, _):
        for step in range(6):
            gradients = full_rank_gradients(rank, step, SHAPES)
            if step in (3, 4):
                gradients.pop("first")
            total += backward(ddp, gradients).get("first", 0)
    return total


def test_schedule_hands_over_what_is_owed_to_a_parameter_unused_at_the_switch(run):
    sent = run(unused_at_the_switch)[0]
    produced = sum(full_rank_gradients(rank, step, SHAPES)["first"] for rank in range(2) for step in (0, 1, 2, 5)) / 2
    torch.testing.assert_close(sent, produced, rtol=1e-4, atol=1e-4)


def memory_after_close(rank, world):
    with attached(lc.PowerSGD(start_powerSGD_iter=0)) as (ddp, attachment):
        backward(ddp, full_rank_gradients(rank, 0, SHAPES))
        residual = weakref.ref(next(iter(attachment.bound._of_buckets.values())))
    gc.collect()
    return residual() is None, attachment.compression_stats()[0] > 1


def test_closing_frees_memory_and_keeps_statistics(run):
    assert run(memory_after_close) == [(True, True), (True, True)]


def test_schedule_warns_when_a_phase_ends_before_its_hook_begins_to_compress():
    schedule = lc.Schedule({0: lc.PowerSGD(), 3: "bf16"})
    (text,) = schedule.check_parameters([])
    assert "phase that begins at step 0 ends at 3, before start_powerSGD_iter=1000: it does not compress" in text
    assert not lc.Schedule({0: "bf16", 3: lc.PowerSGD(start_powerSGD_iter=5)}).check_parameters([])
    assert hash(schedule) == hash(lc.Schedule({3: "bf16", 0: lc.PowerSGD()}))


@pytest.mark.parametrize(("given", "num"), [("topk", 1), ("int4", 0), (lc.PowerSGD(start_powerSGD_iter=0), 1)])
def test_schedule_warns_of_residuals_that_it_loses(given, num):
    outer = lc.DiLoCo(pseudo_gradient=given)
    texts = lc.Schedule({0: outer, 9: "bf16"}).check_parameters([])
    assert [text.partition(", and ")[2][:31] for text in texts] == ["the residuals of 'diloco' are l"] * num
    assert lc.Schedule({0: "bf16", 9: outer}).check_parameters([]) == [], "it is the last phase"


def resumed_statistics(rank, world):
    hook = lc.Schedule({0: "bf16", 2: lc.PowerSGD(start_powerSGD_iter=0)})
    with attached(hook) as (ddp, attachment):
        for step in range(4):
            backward(ddp, full_rank_gradients(rank, step, SHAPES))
        state = attachment.state_dict()
    with attached(hook) as (ddp, resumed):
        resumed.load_state_dict(state)
        backward(ddp, full_rank_gradients(rank, 4, SHAPES))
        return resumed.compression_stats()[0]


def test_schedule_has_the_statistics_of_its_present_phase_after_a_resume(run):
    assert min(run(resumed_statistics)) > 1


class Turns(nn.Module):
    """Two networks that take turns; the gradients of one stay while the other is trained, as in a GAN."""

    def __init__(self):
        super().__init__()
        self.nets = nn.ModuleList(nn.Linear(16, 24) for _ in range(2))

    def forward(self, x, k):
        return self.nets[k](x)


def turns(rank, world, hook, bad_step):
    """Which optimizer steps changed their network, and the metrics."""
    torch.manual_seed(0)
    model = Turns()
    ddp = DistributedDataParallel(model, find_unused_parameters=True, bucket_cap_mb=SMALL_BUCKETS)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in model.nets]
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    attachment = lc.attach(ddp, hook, grad_scaler=scaler, optimizers=optimizers)
    generator = torch.Generator().manual_seed(rank)
    changed = []
    for step in range(10):
        k = step % 2
        optimizers[k].zero_grad()
        before = model.nets[k].weight.detach().clone()
        factor = float("inf") if step == bad_step and rank == 1 else 1.0
        scaler.scale(ddp(torch.randn(4, 16, generator=generator), k).square().mean() * factor).backward()
        scaler.step(optimizers[k])
        scaler.update()
        changed.append(not torch.equal(before, model.nets[k].weight))
    metrics = attachment.metrics()
    attachment.average_weights()
    with ignoring("hook='.*' ", "training ended after"):
        attachment.close()
    return changed, metrics["nonfinite_steps"], scaler.get_scale()


TAKE_TURNS = {
    "powersgd": lc.PowerSGD(start_powerSGD_iter=0, min_compression_rate=1),
    "batched_powersgd": lc.BatchedPowerSGD(start_powerSGD_iter=0),
    "post_localsgd": lc.PostLocalSGD(start_localSGD_iter=0, period=3, post_local_gradient_allreduce=False),
}


@pytest.mark.parametrize("name", TAKE_TURNS)
def test_bad_gradients_left_over_from_another_backward_spoil_no_step(run, name):
    for changed, num_bad, scale in run(turns, TAKE_TURNS[name], 4):
        assert changed == [step != 4 for step in range(10)]
        assert num_bad == 1
        assert scale == 128.0


def left_over(rank, world, hook, clears):
    """Residuals before and after a step of the second network only."""
    torch.manual_seed(0)
    model = Turns()
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    attachment = lc.attach(ddp, hook)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        ddp.zero_grad()
        ddp(torch.randn(4, 16, generator=generator), 0).square().mean().backward()
    before = residuals_of(attachment)
    if clears:
        ddp.zero_grad()
    ddp(torch.randn(4, 16, generator=generator), 1).square().mean().backward()
    after = residuals_of(attachment)
    attachment.close()
    return before, after


@pytest.mark.parametrize("clears", [True, False])
@pytest.mark.parametrize("name", ["powersgd", "batched_powersgd"])
def test_memory_of_an_unused_network_is_left_alone_whatever_its_gradients_are(run, name, clears):
    for before, after in run(left_over, TAKE_TURNS[name], clears):
        assert before["nets.0.weight"].norm() > 0
        assert torch.equal(before["nets.0.weight"], after["nets.0.weight"])
        assert after["nets.1.weight"].norm() > 0
