"""Copies of models with a hook have none, and say so; a backward that is recorded; compiled and closed models."""

import copy
import io
import pickle
import warnings

import pytest
import torch
from driver import (
    HOOKS,
    NOT_AVERAGING,
    SHAPES,
    TOO_EARLY,
    attached,
    backward,
    distance,
    full_rank_gradients,
    mean_gradients,
    norm,
    same,
)
from pool import OF_COMPILING, ignoring
from test_ddp_modes import mlp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import lightning_commhooks as lc


def saved(thing):
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = {"deepcopy": copy.deepcopy, "pickle": lambda thing: pickle.loads(pickle.dumps(thing)), "torch.save": saved}
COPIED = {
    "int8": ("int8", {}),
    "memory and unused": ("powersgd", {"find_unused_parameters": True}),
    "averages models": (lc.PostLocalSGD(start_localSGD_iter=10, post_local_gradient_allreduce=False), {}),
    "counts micro-batches": (lc.ScaleByGradAccumulation("bf16", "mean"), {}),
    "function": (default_hooks.fp16_compress_hook, {}),
}


def texts(function, *args):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = function(*args)
    return result, [str(warning.message) for warning in caught]


def copies(rank, world, label):
    """Of each copy: what is said in evaluation, in two training steps and with a new hook, and its gradients."""
    hook, options = COPIED[label]
    gradients = [full_rank_gradients(rank, step, SHAPES) for step in range(2)]
    results = {}
    with attached(hook, **options) as (ddp, attachment):
        backward(ddp, gradients[0])
        for way, make in WAYS.items():
            twin = make(ddp)
            with torch.no_grad():
                _, quiet = texts(twin, gradients[1])
            means, said = texts(backward, twin, gradients[1])
            _, again = texts(backward, twin, gradients[1])
            again_copied = make(twin)
            other = lc.attach(again_copied, "allreduce")
            _, hooked = texts(backward, again_copied, gradients[1])
            other.close()
            results[way] = quiet, said, again + hooked, means
        assert attachment.metrics()["steps"] == 1, "copies do not count"
        backward(ddp, gradients[1])
        assert attachment.metrics()["steps"] == 2, "the original goes on"
    return results


@pytest.mark.parametrize("label", COPIED)
def test_a_copied_model_has_no_hook_and_says_so(run, label):
    expected = mean_gradients(full_rank_gradients, 2, 1, SHAPES)
    for rank, result in enumerate(run(copies, label)):
        for before, said, after, means in result.values():
            assert before == after == []
            assert len(said) == (rank == 0)
            assert all("which is not copied" in text and "attach(model, hook)" in text for text in said)
            assert distance(means, expected) <= 1e-6 * norm(expected)


def copied_attachments(rank, world):
    with attached("int8") as (ddp, attachment):
        backward(ddp, full_rank_gradients(rank, 0, SHAPES))
        holder = {"attachment": attachment, "monitor": lc.Monitor(attachment, measure_link=False)}
        copies = [make(holder) for make in WAYS.values()]
        assert not attachment.is_closed
    return copies


def test_an_attachment_is_not_copied(run):
    assert run(copied_attachments) == [[{"attachment": None, "monitor": None}] * len(WAYS)] * 2


def own_hook(state, bucket):
    return default_hooks.allreduce_hook(None, bucket)


def names(rank, world):
    with attached("powersgd") as (ddp, attachment), attached(own_hook) as (_, own):
        backward(ddp, full_rank_gradients(rank, 0, SHAPES))
        return repr(attachment), repr(own)


def test_repr(run):
    assert run(names)[0] == (
        f"Attachment(hook={lc.get_hook('powersgd')!r}, steps=1)",
        "Attachment(hook='test_copies.own_hook', steps=0)",
    )


RECORDED = {label: HOOKS[label] for label in ("allreduce", "int8", "powersgd", "cast", "schedule", "chunked_topk")} | {
    "post_localsgd": lc.PostLocalSGD(start_localSGD_iter=0, post_local_gradient_allreduce=False),
    "scaled": lc.ScaleByGradAccumulation(lc.Int8(min_bytes=0), 3),
    "function": default_hooks.bf16_compress_hook,
}


class TwoBuckets(nn.Module):
    """Of one parameter each: DDP itself cannot record more of them."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(24, 24, bias=False)
        self.second = nn.Linear(24, 24, bias=False, dtype=torch.float64)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)).double())


def gradients_of(rank, hook, create_graph):
    torch.manual_seed(0)
    ddp = DistributedDataParallel(TwoBuckets())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    attachment = lc.attach(ddp, hook, optimizers=[optimizer])
    results = []
    for step in range(4):
        x = torch.randn(4, 24, generator=torch.Generator().manual_seed(10 * step + rank))
        ddp(x).square().mean().backward(create_graph=create_graph)
        results += [p.grad.detach().clone() for p in ddp.parameters()]
        optimizer.step()
        optimizer.zero_grad()  # also breaks the cycle of a recorded gradient and its parameter
    owed = [] if attachment.bound is None else list(attachment.bound.residuals())
    assert not any(tensor.requires_grad for tensor in owed)
    attachment.average_weights()
    attachment.close()
    return results


def recorded(rank, world):
    different = []
    with ignoring(NOT_AVERAGING, TOO_EARLY, "Using backward", "PerParameter: the pattern"):
        for label, hook in RECORDED.items():
            plain, graph = (gradients_of(rank, hook, create_graph) for create_graph in (False, True))
            if not all(torch.equal(a, b) for a, b in zip(plain, graph, strict=True)):
                different.append(label)
    return different


def test_a_backward_that_is_recorded_has_the_same_gradients(run):
    assert run(recorded, timeout=180) == [[], []]


@ignoring(OF_COMPILING)
def of_compiled(rank, world):
    results = []
    for is_compiled in (False, True):
        torch.manual_seed(0)
        ddp = DistributedDataParallel(mlp())
        model = torch.compile(ddp, backend="eager") if is_compiled else ddp
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        local = lc.PostLocalSGD(period=2, start_localSGD_iter=2, post_local_gradient_allreduce=False)
        hook = lc.Schedule({0: lc.Int8(min_bytes=0, block_size=64), 2: local})
        attachment = lc.attach(model, hook, optimizers=[optimizer])
        assert attachment.is_attached_to(model)
        assert attachment.is_attached_to(ddp)
        for step in range(7):
            x = torch.randn(4, 24, generator=torch.Generator().manual_seed(10 * step + rank))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad(), attachment.averaged_weights():
            value = model(torch.ones(1, 24))
        model.train()
        attachment.average_weights()
        results.append([value, *(p.detach().clone() for p in ddp.parameters())])
        assert attachment.metrics()["steps"] == 7
        assert attachment.metrics()["numel_compressed"] > 0
        with pytest.raises(ValueError, match="has the communication hook 'lightning_commhooks:schedule' already"):
            lc.attach(model, "bf16")
        with ignoring(TOO_EARLY):
            attachment.close()
    torch._dynamo.reset()
    return [torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(*results, strict=True)], results[1]


def test_attaches_to_a_model_that_was_compiled_after_it_was_wrapped(run):
    (close, first), (_, second) = run(of_compiled, timeout=120)
    assert all(close)
    assert same(dict(enumerate(first)), dict(enumerate(second)))


def after_close(rank, world):
    for hook in (own_hook, "bf16"):
        with attached(hook) as (ddp, attachment):
            backward(ddp, full_rank_gradients(rank, 0, SHAPES))
            attachment.close()
            wrapped_again = DistributedDataParallel(ddp.module)
            lc.attach(wrapped_again, "allreduce")
            backward(wrapped_again, full_rank_gradients(rank, 0, SHAPES))
            with pytest.raises(lc.HookError, match="was closed; attach another one, to a new wrapper"):
                backward(ddp, full_rank_gradients(rank, 0, SHAPES))
            for other in ("bf16", own_hook):
                with pytest.raises(ValueError, match=r"hook 'lightning_commhooks:.*' of this model was closed.*wrap"):
                    lc.attach(ddp, other)


def test_a_closed_hook_says_that_it_was_closed(run):
    run(after_close)


def uneven(rank, world, divide):
    said = []
    for hook in ("bf16", own_hook):
        with attached(hook) as (ddp, _):

            def train(ddp=ddp):
                with ddp.join(divide_by_initial_world_size=divide):
                    for step in range(2 + rank):
                        backward(ddp, full_rank_gradients(rank, step, SHAPES))

            said.append(texts(train)[1])
    return said


def test_join_that_is_to_divide_by_fewer_ranks_warns(run):
    for first in run(uneven, False)[0]:
        assert len(first) == 1, "once"
        assert "join(divide_by_initial_world_size=False) does nothing with a communication hook" in first[0]
        assert "divided by 2" in first[0]
    assert run(uneven, True) == [[[], []], [[], []]]
