"""`PerParameter`: which hook a parameter gets, and that each does what it does alone."""

import copy
import functools
import io
import pickle
import warnings

import pytest
import torch
import torch.distributed as dist
from driver import (
    SHAPES,
    Params,
    attached,
    backward,
    distance,
    full_rank_gradients,
    mean_gradients,
    mean_residuals,
    norm,
    outputs,
    same,
)
from local_sgd_driver import ALONE, copied, local, one_step, params, whole_numbers
from pool import ignoring
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lightning_commhooks as lc
from lightning_commhooks.collectives.in_memory import groups_in_memory, run_together
from lightning_commhooks.interface.bucket import Bucket, Slot
from lightning_commhooks.interface.precision import all_finite

INT8 = lc.Int8(min_bytes=0, block_size=128)
POWERSGD = lc.PowerSGD(start_powerSGD_iter=1, matrix_approximation_rank=2)
MIXED = {"*ir*": POWERSGD, "second": INT8, "b*": "bf16", "*": "allreduce"}
ONE_BUCKET = {"bucket_cap_mb": 25}


def test_first_pattern_counts():
    hook = lc.PerParameter({"net.*.weight": "bf16", "net.[01].*": INT8, "*bia?": "fp16", "*": "allreduce"})
    for name, pattern in {
        "net.0.weight": "net.*.weight",
        "net.0.inner.weight": "net.*.weight",
        "net.1.bias": "net.[01].*",
        "net.2.bias": "*bia?",
        "Net.0.weight": "*",
    }.items():
        assert hook.pattern_of(name) == pattern
    assert hook.inner_hooks == (lc.BF16(), INT8, lc.FP16(), lc.AllReduce())
    assert lc.PerParameter({"a": "bf16", "b": lc.BF16(), "*": "allreduce"}).inner_hooks == (lc.BF16(), lc.AllReduce())
    reordered = lc.PerParameter(dict(reversed(hook.hooks.items())))
    assert hook != reordered
    assert pickle.loads(pickle.dumps(hook)) == hook
    assert len({hook, pickle.loads(pickle.dumps(hook)), reordered}) == 2
    for hooks, message in (
        ({}, "a dict of hooks by pattern"),
        ({1: "bf16"}, "a dict of hooks by pattern"),
        ({"*": "x"}, "'x'"),
    ):
        with pytest.raises(ValueError, match=message):
            lc.PerParameter(hooks)


def attach_badly(rank, world):
    """The error of a parameter without a hook; warnings of a pattern too many."""
    texts = []
    unmatched = lc.PerParameter({"*ir*": "bf16", "b*": "fp16"})
    for hook in (unmatched, lc.Schedule({0: "bf16", 2: lc.Cast(unmatched)})):
        with pytest.raises(ValueError, match="no hook") as error, attached(hook):
            pass
        texts.append(str(error.value))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with attached(lc.PerParameter({"frist": "bf16", "*": lc.PerParameter({"fir*": "fp16", "*": "fp16"})})) as (
            ddp,
            _,
        ):
            mean = backward(ddp, full_rank_gradients(rank, 0, SHAPES))
    return texts, [str(warning.message) for warning in caught], mean


def test_patterns_are_checked_when_attached(run):
    for rank, (errors, caught, mean) in enumerate(run(attach_badly)):
        for text in errors:
            assert "PerParameter has no hook for parameter 'scalar', only for '*ir*', 'b*'" in text
            assert "'*': 'allreduce'" in text
        assert len(caught) == (rank == 0)
        assert all("the pattern 'frist' matches no parameter; there are '" in text for text in caught)
        expected = mean_gradients(full_rank_gradients, 2, 0, SHAPES)
        assert 0 < distance(mean, expected) <= 1e-2 * norm(expected)


def alone_and_together(rank, world):
    """Means by all hooks together, also nested and with other buckets, and of each hook alone on its parameters."""
    together = lc.PerParameter(MIXED)
    inside = lc.PerParameter({"s*": lc.Schedule({0: together, 9: "noop"}), "*": together})
    results = {}
    with ignoring("PerParameter: the pattern .* (matches no|comes after)"):
        for label, hook, options in [
            ("one", together, ONE_BUCKET),
            ("many", together, {}),
            ("nested", inside, ONE_BUCKET),
        ]:
            means, _, metrics = outputs(rank, world, hook, full_rank_gradients, 4, options=options)
            results[label] = means, metrics["collectives"]
    alone, counts = [{} for _ in range(4)], 0
    for pattern, hook in MIXED.items():
        shapes = {name: shape for name, shape in SHAPES.items() if together.pattern_of(name) == pattern}
        with attached(hook, shapes, **ONE_BUCKET) as (ddp, attachment):
            for step, means in enumerate(alone):
                own = full_rank_gradients(rank, step, SHAPES)
                means.update(backward(ddp, {name: own[name] for name in shapes}))
            counts += attachment.metrics()["collectives"]
    return results, alone, counts


def test_each_hook_does_what_it_does_alone(run):
    results, alone, counts = run(alone_and_together)[-1]
    for label, (means, _) in results.items():
        for step, mean in enumerate(means):
            for name, gradient in mean.items():
                assert torch.equal(gradient, alone[step][name]), (label, step, name)
    # One pass for each hook.
    assert results["one"][1] == counts


def collectives(rank, world):
    hooks = {
        "bf16": "bf16",
        "equal": lc.PerParameter({"first": "bf16", "s*": lc.BF16(), "*": "bf16"}),
        "two": lc.PerParameter({"second": "fp16", "*": "bf16"}),
        "cast": lc.Cast("allreduce", "fp16"),
        "cast inside": lc.Cast(lc.PerParameter({"first": "allreduce", "*": lc.AllReduce()}), "fp16"),
    }
    counts = {}
    for label, hook in hooks.items():
        means, _, metrics = outputs(rank, world, hook, full_rank_gradients, 3, options=ONE_BUCKET)
        counts[label] = means, metrics["collectives"]
    return counts


def test_equal_hooks_share_a_pass(run):
    for counts in run(collectives):
        assert all(same(a, b) for a, b in zip(counts["bf16"][0], counts["equal"][0], strict=True))
        assert all(same(a, b) for a, b in zip(counts["cast"][0], counts["cast inside"][0], strict=True))
        assert [counts[label][1] for label in ("bf16", "equal", "two")] == [3, 3, 6]


def saved_and_loaded(rank, world, exact):
    """Whether a run that is saved, and loaded with other buckets, goes on as it would have; what came and went."""
    hook, options = lc.PerParameter(MIXED), {"dtype": torch.float64, "exact_state": exact}
    means, state, received = [], None, dict.fromkeys(SHAPES, 0)
    with attached(hook, **options) as (ddp, attachment):
        for step in range(6):
            if step == 3:
                file = io.BytesIO()
                torch.save(attachment.state_dict(), file)
            means.append(backward(ddp, full_rank_gradients(rank, step, SHAPES, torch.float64)))
            received = {name: received[name] + means[-1][name] for name in SHAPES}
        state = attachment.state_dict()
    file.seek(0)
    with attached(hook, **options, **ONE_BUCKET) as (ddp, attachment):
        attachment.load_state_dict(torch.load(file, weights_only=True))
        again = [backward(ddp, full_rank_gradients(rank, step, SHAPES, torch.float64)) for step in range(3, 6)]
    owed = mean_residuals(state, SHAPES)
    differences = [distance(a, b) / norm(a) for a, b in zip(means[3:], again, strict=True)]
    return differences, {name: received[name] + owed[name] for name in SHAPES}


def test_state_of_powersgd_and_int8(run):
    expected = [mean_gradients(full_rank_gradients, 2, t, SHAPES, torch.float64) for t in range(6)]
    expected = {name: sum(mean[name] for mean in expected) for name in SHAPES}
    for exact in (True, False):
        for differences, received in run(saved_and_loaded, exact):
            assert max(differences) <= (1e-10 if exact else 0.05)
            exact_names = [name for name in SHAPES if name != "bias"]  # that one is sent in 16 bit
            pair = [{name: total[name] for name in exact_names} for total in (received, expected)]
            assert distance(*pair) <= 1e-10 * norm(expected)


class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 24, sparse=True)
        self.head = nn.Linear(24, 24)

    def forward(self, x):
        return self.head(self.embedding(x).mean(1)).square().sum()


def sparse(rank, world, hook):
    torch.manual_seed(0)
    model = Embedding()
    ddp = DistributedDataParallel(model)
    attachment = lc.attach(ddp, hook)
    ddp(torch.arange(6).view(2, 3) + 4 * rank).backward()
    attachment.close()
    return {name: p.grad.to_dense() for name, p in model.named_parameters()}


def test_sparse_gradients(run):
    hook = lc.PerParameter({"embed*": "bf16", "head.weight": INT8, "*": "allreduce"})
    mine, plain = (run(sparse, h) for h in (hook, "allreduce"))
    assert all(same(mine[0], other) for other in mine)
    for name, gradient in plain[0].items():
        bound = {"embedding.weight": 2**-7, "head.weight": 1 / 60}.get(name, 1e-6)
        assert (mine[0][name] - gradient).abs().max() <= bound * gradient.abs().max()


def average_some(rank, world):
    """Parameters after each step, with those whose name begins with "l" averaged every third step only."""
    shapes = {"linear": (6, 5), "other": (7,), "last": (4,)}
    hook = lc.PerParameter({"l*": lc.PostLocalSGD(period=3, **ALONE), "*": "allreduce"})
    model, _ = params(shapes)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    trajectory = []
    with local(model, hook, optimizers=[optimizer]) as (ddp, _):
        for step in range(7):
            one_step(ddp, optimizer, whole_numbers(rank, shapes, seed=step))
            trajectory.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return trajectory


def test_local_sgd_for_some_parameters(run):
    results = run(average_some, world=4)
    shapes = {"linear": (6, 5), "other": (7,), "last": (4,)}
    own = [{name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()} for _ in range(4)]
    for step in range(7):
        for rank in range(4):
            gradient = whole_numbers(rank, shapes, seed=step)
            own[rank] = {name: own[rank][name] - gradient[name] for name in shapes}
        for name in shapes:
            if name == "other" or step % 3 == 2:
                mean = sum(values[name] for values in own) / 4
                for values in own:
                    values[name] = mean
        for rank, trajectory in enumerate(results):
            for name, value in trajectory[step].items():
                torch.testing.assert_close(value, own[rank][name], rtol=0, atol=1e-12, msg=f"{name} {step} {rank}")


def clipped(rank, world):
    """Parameters after each step with clipped gradients, and after the last ones of a run that resumes."""
    hook = lc.PerParameter({"l*": lc.PostLocalSGD(period=3, **ALONE), "*": "allreduce"})
    shapes = {"linear": (6, 5), "other": (7,), "last": (4,)}

    def train(ddp, optimizer, steps):
        for step in steps:
            ddp.zero_grad()
            ddp(full_rank_gradients(rank, step, shapes)).backward()
            torch.nn.utils.clip_grad_norm_(ddp.parameters(), 0.1)
            optimizer.step()
            yield copied(ddp.module.named_parameters())

    def make():
        model, _ = params(shapes)
        return model, torch.optim.Adam(model.parameters(), lr=0.1)

    model, optimizer = make()
    with local(model, hook, [optimizer], exact_state=True) as (ddp, attachment):
        whole = [*train(ddp, optimizer, range(5))]
        saved = copy.deepcopy([model.state_dict(), optimizer.state_dict(), attachment.state_dict()])
        whole += [*train(ddp, optimizer, range(5, 9))]
    model, optimizer = make()
    with local(model, hook, [optimizer], exact_state=True) as (ddp, attachment):
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        attachment.load_state_dict(saved[2])
        return whole, [*train(ddp, optimizer, range(5, 9))]


def test_averages_include_what_clipping_has_moved_apart(run):
    (first, resumed), *others = run(clipped)
    for step, own in enumerate(first):
        (other,) = [whole[step] for whole, _ in others]
        assert same(own, other) == (step % 3 == 2)
        # The norms differ from the first step on.
        assert torch.equal(own["other"], other["other"]) == (step % 3 == 2)
    assert all(map(same, first[5:], resumed))


def clipped_of_optimizers(rank, world):
    """Parameters after each step of two optimizers, whose parameters are in another order on each rank."""
    hook = lc.PerParameter({"l*": lc.PostLocalSGD(period=3, **ALONE), "*": "allreduce"})
    shapes = {"linear": (6, 5), "other": (4,), "last": (4,), "more": (4,)}
    model, _ = params(shapes)
    parts = [[model.other, model.more], [model.linear, model.last]]
    optimizers = [torch.optim.SGD(part[:: 1 - 2 * rank], lr=0.1) for part in parts]
    trajectory = []
    with local(model, hook, optimizers) as (ddp, _):
        for step in range(6):
            ddp.zero_grad()
            ddp(full_rank_gradients(rank, step, shapes)).backward()
            torch.nn.utils.clip_grad_norm_(ddp.parameters(), 0.1)
            for optimizer in optimizers:
                optimizer.step()
            trajectory.append(copied(model.named_parameters()))
    return trajectory


def test_averages_include_parameters_of_other_optimizers(run):
    first, second = run(clipped_of_optimizers)
    for step, (own, other) in enumerate(zip(first, second, strict=True)):
        assert same(own, other) == (step % 3 == 2)
    moved = max((first[2][name] - first[1][name]).abs().max().item() for name in ("other", "more"))
    assert moved < 0.02


def into_a_mixture(rank, world):
    """Largest difference between ranks after each step, where some parameters leave local SGD at step 3."""
    alone = lc.PostLocalSGD(period=10, **ALONE)
    hook = lc.Schedule({0: alone, 3: lc.PerParameter({"first": alone, "*": "allreduce"})})
    shapes = {"first": (6, 5), "other": (7,)}
    model, _ = params(shapes)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    apart = []
    with local(model, hook, optimizers=[optimizer]) as (ddp, _), ignoring("hook='post_localsgd' never averaged"):
        for step in range(6):
            one_step(ddp, optimizer, full_rank_gradients(rank, step, shapes))
            everywhere = [None] * world
            dist.all_gather_object(everywhere, copied(model.named_parameters()))
            apart.append((everywhere[0]["other"] - everywhere[1]["other"]).abs().max().item())
    return apart


def test_what_leaves_local_sgd_beside_it_is_equal_from_then_on(run):
    apart = run(into_a_mixture)[0]
    assert all(apart[:3])
    assert not any(apart[3:])


def early_step(rank, world):
    hook = lc.PerParameter({"first": lc.Schedule({0: "allreduce", 2: lc.PostLocalSGD(**ALONE)}), "*": "allreduce"})
    model, _ = params({"first": (6, 5), "other": (7,)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with local(model, hook, optimizers=[optimizer]) as (_, attachment):
        optimizer.step()
        return attachment.models_differ


def test_an_optimizer_may_step_before_the_first_backward(run):
    assert run(early_step) == [False, False]


def leave_local(rank, world):
    """Largest difference between ranks after each step, of parameters that leave local SGD at step 3, and of others."""
    shapes = {"first": (6, 5), "other": (7,)}
    alone = lc.PostLocalSGD(period=50, **ALONE)
    hook = lc.PerParameter({"first": lc.Schedule({0: alone, 3: "allreduce"}), "*": alone})
    model, _ = params(shapes)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    apart = []
    with local(model, hook, optimizers=[optimizer]) as (ddp, _), ignoring("hook='post_localsgd' never averaged"):
        for step in range(7):
            ddp.zero_grad()
            ddp(full_rank_gradients(rank, step, shapes)).backward()
            optimizer.step()
            everywhere = [None] * world
            dist.all_gather_object(everywhere, copied(model.named_parameters()))
            apart.append([max((one[n] - everywhere[0][n]).abs().max().item() for one in everywhere) for n in shapes])
    return apart


def test_what_leaves_local_sgd_is_equal_from_then_on(run):
    """Optimizer state too: or Adam would move ranks apart again."""
    apart = run(leave_local)[0]
    assert all(first > 1e-3 for first, _ in apart[:3])
    assert all(first == 0 for first, _ in apart[3:])
    assert all(other > 1e-3 for _, other in apart)


def other_patterns(rank, world):
    def mixed(pattern):
        return lc.PerParameter({pattern: INT8, "*": lc.Int4(min_bytes=0, block_size=8)})

    with attached(mixed("first"), **ONE_BUCKET) as (ddp, attachment):
        backward(ddp, full_rank_gradients(rank, 0, SHAPES))
        state = attachment.state_dict()
    refused = pytest.raises(lc.StateError, match=r"memory of 'first', but another hook has that parameter now")
    with attached(mixed("second"), **ONE_BUCKET) as (_, attachment), refused:
        attachment.load_state_dict(state)


def test_state_of_other_patterns_is_refused(run):
    run(other_patterns)


def unfreeze(rank, world):
    model = Params({"a": (6, 5), "b": (6, 5)})
    model.b.requires_grad_(False)
    ddp = DistributedDataParallel(model)
    attachment = lc.attach(ddp, lc.PerParameter({"a": "bf16"}))
    model.b.requires_grad_(True)
    with pytest.raises(ValueError, match="no hook for parameter 'b'"):
        attachment.move_to(DistributedDataParallel(model))
    attachment.close()


def test_patterns_are_checked_when_parameters_are_unfrozen(run):
    run(unfreeze)


@pytest.mark.parametrize("bad_step", [0, 1])
def test_infinite_factor_of_clipped_gradients_is_not_finite(bad_step):
    """Float16 is clipped, so that gradients alone do not tell; "allreduce" has no verdict."""
    low_rank = lc.PowerSGD(
        start_powerSGD_iter=0, matrix_approximation_rank=1, num_iters_per_step=1, min_compression_rate=0.1
    )
    hook = lc.PerParameter({"a": low_rank, "*": "allreduce"})
    slots = (Slot("a", (8, 8), 0), Slot("b", (4,), 64))
    groups = groups_in_memory(2)
    bound = [hook.bind(group) for group in groups]
    for step in range(bad_step + 1):
        flats = [torch.randn(68, generator=torch.Generator().manual_seed(rank)).half() for rank in range(2)]
        if step == bad_step:
            flats[0][3] = torch.inf
        works = [
            functools.partial(own.reduce, Bucket(flat, 0, True, step, slots), group)
            for own, flat, group in zip(bound, flats, groups, strict=True)
        ]
        # As the runtime does where a hook has no verdict.
        verdicts = [
            all_finite(flat) if finite is None else finite
            for finite, flat in zip(run_together(works), flats, strict=True)
        ]
        for own, finite in zip(bound, verdicts, strict=True):
            own.end_step(finite)
    assert [bool(finite) for finite in verdicts] == [False, False]
