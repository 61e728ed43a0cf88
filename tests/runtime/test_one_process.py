"""Training in one process: hooks say once that they do nothing, and leave gradients as they are."""

import threading
import warnings

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import lightning_commhooks as lc
from lightning_commhooks.codecs import codec as codecs
from lightning_commhooks.monitoring import closing_line

LOCAL = lc.PostLocalSGD(post_local_gradient_allreduce=False)
EVERY = {
    **{name: name for name in ("allgather", "auto", "bf16", "chunked_topk", "fp8", "int2", "int4", "int8", "noop")},
    "powersgd": lc.PowerSGD(start_powerSGD_iter=1),
    "cast": lc.Cast(lc.PowerSGD(start_powerSGD_iter=0), "int8"),
    "schedule": lc.Schedule({0: "bf16", 2: "int8"}),
    "per_parameter": lc.PerParameter({"weight": lc.Int8(min_bytes=0), "*": "bf16"}),
    "post_localsgd": "post_localsgd",
    "local later": lc.Schedule({0: lc.PowerSGD(start_powerSGD_iter=0), 100: "post_localsgd"}),
    "cast, local later": lc.Cast(lc.Schedule({0: lc.PowerSGD(start_powerSGD_iter=0), 100: "post_localsgd"}), "bf16"),
    "local in part": lc.PerParameter({"bias": lc.PostLocalSGD(), "*": lc.PowerSGD(start_powerSGD_iter=0)}),
}


KNOWN = {"local later": "schedule", "cast, local later": "cast", "local in part": "per_parameter"}


def trained(hook, accumulation="framework", state=None):
    """Weights after four steps, what was warned of, threads that were started, and the hook's state."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(torch.nn.Linear(512, 256))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    num_threads, attachment = threading.active_count(), None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if hook is not None:
            attachment = lc.attach(ddp, hook, accumulation=accumulation, optimizers=[optimizer])
            if state is not None:
                attachment.load_state_dict(state)
        num_threads = threading.active_count() - num_threads
        for step in range(4):
            optimizer.zero_grad()
            # Of accumulated gradients there are two micro-batches.
            for ends in (False, True) if accumulation != "framework" else (True,):
                ddp.require_backward_grad_sync = ends
                ddp(torch.full((2, 512), 0.01 * (1 + step))).square().mean().backward()
            optimizer.step()
        saved = None
        if attachment is not None:
            assert attachment.forecast(4) is None
            assert closing_line(attachment) is None
            saved = attachment.state_dict()
            attachment.close()
    return ddp.module.weight.detach().clone(), [str(one.message) for one in caught], num_threads, saved


def alone(rank, world):
    compiled, codecs.compiled = codecs.compiled, None  # calling it would fail
    try:
        return trained(None)[0], {name: trained(hook) for name, hook in EVERY.items()}
    finally:
        codecs.compiled = compiled


def test_hooks_do_nothing_and_say_so_once(run):
    ((expected, results),) = run(alone, world=1)
    for name, (weights, texts, num_threads, _) in results.items():
        what = "averages" if "local" in name else "does"
        assert texts == [f"hook={KNOWN.get(name, name)!r} {what} nothing: training runs in one process"]
        assert torch.equal(weights, expected), name
        assert num_threads == 0, name


def accumulated(rank, world):
    return [trained(hook, "mean")[0] for hook in ("allreduce", "int8")]


def test_accumulation_is_still_divided(run):
    ((plain, encoded),) = run(accumulated, world=1)
    assert torch.equal(plain, encoded)


def saved_by_two(rank, world, hook):
    ddp = DistributedDataParallel(torch.nn.Linear(512, 256))
    attachment = lc.attach(ddp, hook, optimizers=[])
    ddp(torch.randn(2, 512)).square().mean().backward()
    state = attachment.state_dict()
    attachment.close()
    return state


def goes_on_from(rank, world, hook, state):
    weights, _, _, saved = trained(hook, state=state)
    return weights, trained(None)[0], saved


@pytest.mark.parametrize(
    "hook",
    [lc.Int8(min_bytes=0), lc.PerParameter({"bias": LOCAL, "*": lc.Int8(min_bytes=0)})],
    ids=lambda hook: hook.name,
)
def test_state_of_several_ranks_goes_on(run, hook):
    """Their residuals are in the first step's gradients."""
    state, _ = run(saved_by_two, hook)
    ((weights, plain, saved),) = run(goes_on_from, hook, state, world=1)
    assert saved["steps"] == state["steps"] + 4
    assert 0 < (weights - plain).abs().max() < 0.01


def monitored(rank, world):
    ddp = DistributedDataParallel(torch.nn.Linear(512, 256))
    attachments = [lc.attach(ddp, "bf16")]
    lines = [closing_line(attachments[0])]
    ddp(torch.randn(2, 512)).square().mean().backward()
    lines += [closing_line(attachments[0]) for _ in range(2)]
    ddp(torch.randn(2, 512)).square().mean().backward()
    lines += [closing_line(attachments[0])]
    attachments[0].close()
    return lines


def test_closing_line_comes_once_where_there_are_steps(run):
    for before, line, again, later in run(monitored):
        assert before is again is None
        assert line == "Communication hook 'bf16': 263 kB sent in 1 step instead of 525 kB (2 times fewer)"
        assert later == "Communication hook 'bf16': 525 kB sent in 2 steps instead of 1.05 MB (2 times fewer)"
