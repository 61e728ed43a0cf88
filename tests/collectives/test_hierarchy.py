"""`hierarchy="node"`: gradients are averaged within nodes and compressed between them; and bytes between nodes."""

import contextlib
import dataclasses
import functools
import os
import warnings

import pytest
import torch
from driver import SHAPES, Params, attached, backward, full_rank_gradients, mean_gradients, norm, outputs, same
from hooks_under_test import CASES
from torch.nn.parallel import DistributedDataParallel

import lightning_commhooks as lc
from lightning_commhooks.codecs.codec import Kernels
from lightning_commhooks.collectives import group as group_module
from lightning_commhooks.collectives.group import counted
from lightning_commhooks.collectives.in_memory import groups_in_memory, run_together
from lightning_commhooks.interface.bucket import Bucket, Slot
from lightning_commhooks.interface.hierarchy import Hierarchy, bind_by_node
from lightning_commhooks.testing.check import RULES, check_rule

LABELS = ["int8", "int4", "fp16", "bf16", "powersgd", "batched_powersgd"]
HOOKS = {label: dataclasses.replace(CASES[label].hook, hierarchy="node") for label in LABELS}
ALL_ENCODED = {"min_bytes": 0, "compress_1d": True, "block_size": 8}
TWO_BY_TWO = [0, 0, 1, 1]
# How ranks are on nodes, by their number.
PLACES = {4: TWO_BY_TWO, 2: [0, 1], 1: [0]}


@contextlib.contextmanager
def on_node(number):
    """As a launcher says it."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("GROUP_RANK", "SLURM_NODEID"):
            patch.delenv(name, raising=False)
        patch.setenv("NODE_RANK", str(number))
        yield


def placed(rank, world, places, function, args):
    """Call a function on nodes."""
    with on_node(places[rank]):
        return function(rank, world, *args)


def on_nodes(run, places=None):
    """`run` with ranks on nodes."""
    return lambda function, *args, world: run(placed, places or PLACES[world], function, args, world=world)


OF_STATE = [rule for rule in RULES if rule.__module__.endswith("rules_of_state")]


@pytest.mark.parametrize(
    ("rule", "label"),
    [(rule, label) for label, rules in (("int8", RULES), ("powersgd", OF_STATE)) for rule in rules],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_rule(run, rule, label):
    case = dataclasses.replace(CASES[label], hook=HOOKS[label], bytes_sent=None)
    check_rule(rule, on_nodes(run), case, 4)


def of_nodes(rank, step, shapes, dtype=torch.float32):
    """What a node has, rounded once: the mean of its two ranks."""
    ranks = [full_rank_gradients(2 * rank + i, step, shapes, dtype) for i in range(2)]
    return {name: ranks[0][name] / 2 + ranks[1][name] / 2 for name in shapes}


@pytest.mark.parametrize("label", LABELS)
def test_it_is_the_hook_among_nodes(run, label):
    results = on_nodes(run)(outputs, HOOKS[label], full_rank_gradients, 4, world=4)
    for other in results[1:]:
        assert all(same(a, b) for a, b in zip(results[0][0], other[0], strict=True))
    expected = run(outputs, CASES[label].hook, of_nodes, 4, world=2)[0][0]
    for mean, wanted in zip(results[0][0], expected, strict=True):
        for name, gradient in wanted.items():
            torch.testing.assert_close(mean[name], gradient, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize(("label", "bound"), [("int8", 0.02), ("powersgd", 1)])
def test_ranks_of_a_node_need_not_be_neighbors(run, label, bound):
    results = on_nodes(run, [0, 1, 0, 1])(outputs, HOOKS[label], full_rank_gradients, 2, world=4)
    for other in results[1:]:
        assert all(same(a, b) for a, b in zip(results[0][0], other[0], strict=True))
    mean = mean_gradients(full_rank_gradients, 4, 0)
    assert norm({name: mean[name] - g for name, g in results[0][0][0].items()}) < bound * norm(mean)


def test_on_nodes_of_one_rank_it_is_the_hook_as_it_is(run):
    plain = run(outputs, CASES["int8"].hook, full_rank_gradients, 3, world=4)[0][0]
    by_node = on_nodes(run, [0, 1, 2, 3])(outputs, HOOKS["int8"], full_rank_gradients, 3, world=4)[0][0]
    assert all(same(a, b) for a, b in zip(plain, by_node, strict=True))


def in_memory(nodes, hook, gradients, dtype=torch.float32, scale_of=lambda rank: 1.0):
    """Means of each step on each rank, `gradients(rank)` of shape `(steps, 96, 80)`; and the hook of rank 1."""
    slots, bound = (Slot("weight", (96, 80), 0),), {}

    def on_rank(group):
        group._nodes = nodes
        own = bound[group.rank] = hook.bind(group)
        means = []
        for step, gradient in enumerate(gradients(group.rank)):
            flat = gradient.to(dtype).reshape(-1).clone()
            yield from own.reduce(Bucket(flat, 0, True, step, slots, scale=scale_of(group.rank)), group)
            own.end_step(torch.tensor(True))
            means.append(flat)
        return torch.stack(means)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group_module, "compiled", lambda codec, *_: Kernels(codec))
        groups = groups_in_memory(sum(map(len, nodes)))
        return run_together([functools.partial(on_rank, group) for group in groups]), bound[1]


@pytest.mark.parametrize(
    ("hook", "as_they_are"),
    [(HOOKS["int8"], 7), (HOOKS["bf16"], 0), (HOOKS["powersgd"], 7), (lc.AllReduce(), 967), (lc.PostLocalSGD(), 967)],
    ids=lambda value: getattr(value, "name", None),
)
def test_numbers_that_leave_a_node_are_those_that_were_sent_as_they_are(hook, as_they_are):
    """Each rank of a node sends a share of them. Within nodes gradients are sent as they are, always."""
    slots = (Slot("weight", (24, 40), 0), Slot("bias", (7,), 960))

    def on_rank(group):
        group._nodes = [[0, 1], [2, 3]]
        bucket = Bucket(torch.ones(967), 0, True, 0, slots)
        bound, ranks = hook.bind(group), group.for_bucket(1)
        with counted(bucket.flat, ranks):
            yield from bound.reduce(bucket, ranks)
        return group.counters.numel_compressed, group.counters.numel_uncompressed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group_module, "compiled", lambda codec, *_: Kernels(codec))
        found = run_together([functools.partial(on_rank, group) for group in groups_in_memory(4)])
    assert found == [(967 - as_they_are, as_they_are)] * 4


@pytest.fixture
def many():
    """Gradients of eight ranks in twenty steps, near each other."""
    generator = torch.Generator().manual_seed(0)
    common = torch.randn(96, 80, generator=generator)
    return common + torch.randn(8, 20, 96, 80, generator=generator) / 4


@pytest.mark.parametrize("label", ["int8", "powersgd", "bf16"])
def test_four_nodes_of_two_ranks(many, label):
    """Two shots between nodes: each owns a share of the mean."""
    of_ranks, _ = in_memory([[0, 1], [2, 3], [4, 5], [6, 7]], HOOKS[label], lambda rank: many[rank, :3])
    means = (many[::2, :3] + many[1::2, :3]) / 2
    of_nodes, _ = in_memory([[0], [1], [2], [3]], CASES[label].hook, lambda rank: means[rank])
    assert all(torch.equal(of_ranks[0], other) for other in of_ranks)
    torch.testing.assert_close(of_ranks[0], of_nodes[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("label", ["int8", "bf16", "powersgd"])
def test_weights_that_differ_within_a_node(many, label):
    weights = torch.tensor([0.25, 1.75, 0.5, 1.5])
    means, _ = in_memory(
        [[0, 1], [2, 3]], HOOKS[label], lambda rank: many[rank, :1], scale_of=lambda rank: weights[rank].item()
    )
    expected = (weights.view(4, 1, 1) * many[:4, 0]).mean(dim=0).view(-1)
    error = (means[0][0] - expected).norm() / expected.norm()
    assert error < (0.01 if label != "powersgd" else 1)


NODES = {"two nodes": [[0, 1], [2, 3]], "four nodes": [[0, 1], [2, 3], [4, 5], [6, 7]]}


def test_each_rank_remembers_what_its_node_owes(many):
    for nodes in NODES.values():
        _, bound = in_memory(nodes, HOOKS["int8"], lambda rank: many[rank, :2])
        assert sum(owed.numel() for owed in bound.residuals()) == 96 * 80


def sent_between(rank, world, hook, steps=3):
    """Bytes of a step after DDP has built its buckets."""
    with attached(hook, bucket_cap_mb=25) as (ddp, attachment):
        for step in range(steps - 1):
            backward(ddp, full_rank_gradients(rank, step, SHAPES))
        before = attachment.metrics()
        backward(ddp, full_rank_gradients(rank, steps - 1, SHAPES))
        now = attachment.metrics()
        return {name: now[name] - before[name] for name in now if name.startswith("bytes")}


NUMEL = sum(torch.Size(shape).numel() for shape in SHAPES.values())


@pytest.mark.parametrize("label", LABELS)
def test_what_leaves_a_node_is_that_of_one_rank(run, label):
    among_two = run(sent_between, CASES[label].hook, world=2)[0]["bytes_sent"]
    counts = on_nodes(run)(sent_between, HOOKS[label], world=4)
    for count in counts:
        # Each of the two ranks of a node sends half of it. Shares are filled up to whole elements, or blocks.
        assert count["bytes_sent_between_nodes"] == pytest.approx(
            among_two / 2, rel=0.03 if label in ("int8", "int4") else 0.01
        )
        # Of a ring of four on two nodes every other message.
        assert count["bytes_dense_between_nodes"] == pytest.approx(count["bytes_dense"] / 2)
        # Within the node the mean, and what came from the others.
        within = count["bytes_sent"] - count["bytes_sent_between_nodes"]
        mean = 4 * NUMEL
        assert mean * 0.99 < within < 1.1 * (mean + among_two)


def test_bytes_between_nodes_of_all_kinds_of_collectives(run):
    """Of a ring those of ranks whose neighbor is elsewhere, of an exchange those of all pairs that are apart."""
    expected = {"allreduce": 1 / 2, "allgather": 1 / 2}
    for label, share in expected.items():
        for count in on_nodes(run)(sent_between, lc.get_hook(label), world=4):
            assert count["bytes_sent_between_nodes"] == pytest.approx(share * count["bytes_sent"])
    # Half of it is exchanged, the other half goes around a ring.
    for places, share, least in ((TWO_BY_TWO, 2 / 3, 0.55), ([0, 0, 0, 1], 1 / 2, 0.49)):
        hook = lc.Int8(use_error_feedback=False, **ALL_ENCODED)
        counts = on_nodes(run, places)(sent_between, hook, world=4)
        for count in counts:
            assert least < count["bytes_sent_between_nodes"] / count["bytes_sent"] < share * 1.01
    # Interleaved, every message of a ring leaves its node.
    for count in on_nodes(run, [0, 1, 0, 1])(sent_between, lc.AllReduce(), world=4):
        assert count["bytes_sent_between_nodes"] == pytest.approx(count["bytes_sent"])
    for count in on_nodes(run, [0, 0, 0, 0])(sent_between, lc.AllReduce(), world=4):
        assert not [name for name in count if name.endswith("_between_nodes")], "there is one node"


def far(rank, world, places, hook):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMMHOOKS_LATENCY_MS", "40")
        return placed(rank, world, places, outputs, (hook, full_rank_gradients, 3))


@pytest.mark.parametrize("label", ["int8", "powersgd"])
def test_far_nodes_have_the_same_result(run, label):
    near = on_nodes(run)(outputs, HOOKS[label], full_rank_gradients, 3, world=4)[0][0]
    results = run(far, TWO_BY_TWO, HOOKS[label], world=4)
    for result in results:
        assert all(same(a, b) for a, b in zip(results[0][0], result[0], strict=True))
    assert all(norm({n: a[n] - b[n] for n in a}) <= 1e-4 * norm(a) for a, b in zip(near, results[0][0], strict=True))


def unused_within(rank, world, hook):
    """Rank 1 does not use what rank 0 of its node uses; nobody uses "conv" in step 1."""
    means = []
    with attached(hook, find_unused_parameters=True) as (ddp, attachment):
        for step in range(4):
            gradients = full_rank_gradients(rank, step, SHAPES)
            if rank == 1:
                del gradients["first"]
            if step == 1:
                del gradients["conv"]
            means.append(backward(ddp, gradients))
        return means, attachment.state_dict()


@pytest.mark.parametrize("label", ["int8", "powersgd"])
def test_a_parameter_that_one_rank_of_a_node_does_not_use(run, label):
    results = on_nodes(run)(unused_within, HOOKS[label], world=4)
    for means, state in results[1:]:
        assert all(same(a, b) for a, b in zip(results[0][0], means, strict=True))
        assert state.keys() == results[0][1].keys()
    assert "conv" not in results[0][0][1]
    mean = mean_gradients(
        lambda rank, step, *rest: {
            n: g for n, g in full_rank_gradients(rank, step, *rest).items() if (rank, n) != (1, "first")
        },
        4,
        0,
    )
    first = results[0][0][0]["first"]
    assert (first - mean["first"]).norm() < (0.05 if label == "int8" else 1.0) * mean["first"].norm()


def after_three_steps(rank, hook):
    """The exact state of a hook."""
    with attached(hook, exact_state=True) as (ddp, attachment):
        for step in range(3):
            backward(ddp, full_rank_gradients(rank, step, SHAPES))
        return attachment.state_dict()


def resumed(rank, world, first, second):
    """Three steps with one hook, its exact state, and two more with another; then one's own memory."""
    with attached(first, exact_state=True) as (ddp, attachment):
        before = [backward(ddp, full_rank_gradients(rank, step, SHAPES)) for step in range(5)]
    state = after_three_steps(rank, first)
    with attached(second, exact_state=True) as (ddp, attachment):
        attachment.load_state_dict(state)
        after = [backward(ddp, full_rank_gradients(rank, step, SHAPES)) for step in range(3, 5)]
    return before[3:], after


@pytest.mark.parametrize("label", ["int8", "powersgd"])
def test_a_run_goes_on_with_and_without(run, label):
    plain, by_node = CASES[label].hook, HOOKS[label]
    for before, after in on_nodes(run)(resumed, by_node, by_node, world=4):
        assert all(same(a, b) for a, b in zip(before, after, strict=True))
    for first, second in ((plain, by_node), (by_node, plain)):
        results = on_nodes(run)(resumed, first, second, world=4)
        for before, after in results:
            assert all(same(a, b) for a, b in zip(results[0][1], after, strict=True))
            # What is owed goes on, in another form.
            assert norm({n: before[0][n] - after[0][n] for n in before[0]}) < 0.7 * norm(before[0])


def taken_over(rank, world, first, second):
    """What is owed after three steps, and what another hook owes that goes on from there; each of all ranks."""
    state = after_three_steps(rank, first)
    with attached(second, exact_state=True) as (_, attachment):
        attachment.load_state_dict(state)
        after = attachment.state_dict()
    return [
        {name: entry["residual"] for name, entry in saved["hook"]["state"]["entries"].items() if "residual" in entry}
        for saved in (state, after)
    ]


@dataclasses.dataclass(frozen=True)
class AroundInt8(lc.CommHook):
    """Somebody's hook, which has another one on nodes."""

    name = "around_int8"

    def bind(self, group):
        return bind_by_node("node", group, CASES["int8"].hook.bind)


HOOKS_WITH_MEMORY = {"int8": HOOKS["int8"], "powersgd": HOOKS["powersgd"], "around_int8": AroundInt8()}


@pytest.mark.parametrize("label", HOOKS_WITH_MEMORY)
def test_a_node_owes_what_its_ranks_owed(run, label):
    by_node = HOOKS_WITH_MEMORY[label]
    if label != "around_int8":
        from_all_ranks(run, CASES[label].hook, by_node)
    before, after = on_nodes(run)(taken_over, by_node, by_node, world=4)[0]
    for name, of_ranks in before.items():
        assert torch.equal(of_ranks, after[name])
        assert torch.equal(of_ranks[0], of_ranks[1])
        assert not torch.equal(of_ranks[0], of_ranks[2])


def from_all_ranks(run, plain, by_node):
    before, after = on_nodes(run)(taken_over, plain, by_node, world=4)[0]
    assert before.keys() == after.keys() != set()
    for name, of_ranks in before.items():
        of_nodes = of_ranks.view(2, 2, -1).mean(dim=1)
        torch.testing.assert_close(after[name].view(2, 2, -1), of_nodes.view(2, 1, -1).expand(2, 2, -1), msg=name)


@dataclasses.dataclass(frozen=True)
class Halves(lc.CommHook):
    """Somebody's hook: owes half of everything."""

    name = "halves"
    hierarchy: Hierarchy = "node"

    def bind(self, group):
        return bind_by_node(self.hierarchy, group, lambda ranks: _BoundHalves(ranks, self))


class _BoundHalves(lc.ErrorFeedback):
    def average(self, owed, bucket, ranks):
        sent = owed / 2
        return (yield from ranks.all_reduce_mean_(sent.clone())), sent


def test_somebody_elses_hook(run):
    results = on_nodes(run)(outputs, Halves(), full_rank_gradients, 2, world=4)
    first, second = (mean_gradients(full_rank_gradients, 4, step) for step in range(2))
    for means, _, metrics in results:
        for name, gradient in means[1].items():
            expected = (second[name] + first[name] / 2) / 2
            torch.testing.assert_close(gradient.double(), expected, rtol=1e-5, atol=1e-6)
        assert 0 < metrics["bytes_sent_between_nodes"] < metrics["bytes_sent"] / 2


def sparse(rank, world, hook):
    model = torch.nn.Embedding(20, 4, sparse=True)
    with torch.no_grad():
        model.weight.zero_()
    ddp = DistributedDataParallel(model)
    attachment = lc.attach(ddp, hook)
    ddp(torch.tensor([rank, 7])).sum().backward()
    attachment.close()
    return model.weight.grad.to_dense()


def ratio_of_sparse(rank, world):
    model = torch.nn.Embedding(200, 64, sparse=True)
    ddp = DistributedDataParallel(model)
    attachment = lc.attach(ddp, "allreduce")
    ddp(torch.arange(20) + rank).sum().backward()
    ratio = attachment.metrics()["compression_ratio"]
    attachment.close()
    return ratio


def test_without_a_hook_sparse_gradients_go_to_all_ranks(run):
    """As they do with "allreduce", which sends the number of rows besides."""
    for ratio in run(ratio_of_sparse, world=4):
        assert ratio == pytest.approx(1, abs=0.01)


def test_sparse_gradients_are_averaged_over_all_ranks(run):
    expected = torch.zeros(20, 4)
    expected[:4], expected[7] = 0.25, 1.0
    for gradient in on_nodes(run)(sparse, lc.BF16(hierarchy="node"), world=4):
        assert torch.equal(gradient, expected)


def attach_on(rank, world, hook):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            lc.attach(DistributedDataParallel(Params(SHAPES)), hook).close()
        except ValueError as error:
            return str(error)
    return [str(warning.message) for warning in caught if "hierarchy" in str(warning.message)]


def test_uneven_nodes_are_refused_on_all_ranks(run):
    texts = on_nodes(run, [0, 0, 0, 1])(attach_on, lc.Int8(hierarchy="node"), world=4)
    assert len(set(texts)) == 1
    assert "hierarchy='node' needs the same number of ranks on every node, and the nodes have [3, 1]" in texts[0]


def test_one_node_is_warned_of(run):
    texts = on_nodes(run, [0, 0])(attach_on, lc.PowerSGD(hierarchy="node"), world=2)
    assert "does nothing: all 2 ranks are on one node" in texts[0][0]
    assert texts[1] == []


@pytest.mark.parametrize("hook_class", [lc.Int8, lc.Int4, lc.FP8, lc.FP16, lc.BF16, lc.PowerSGD, lc.BatchedPowerSGD])
def test_another_hierarchy_is_refused(hook_class):
    with pytest.raises(ValueError, match="hierarchy must be None or 'node', got 'rack'"):
        hook_class(hierarchy="rack")


def test_fsdp_refuses_it():
    from lightning_commhooks.sources.fsdp import resolve_sharded_hook

    with pytest.raises(ValueError, match=r"BF16\(hierarchy='node'\) does not work with FSDP"):
        resolve_sharded_hook(lc.BF16(hierarchy="node"))


WRAPPED = {
    "cast": lc.Cast(HOOKS["powersgd"], "bf16"),
    "cast_int8": lc.Cast(HOOKS["powersgd"], "int8"),
    "schedule": lc.Schedule({0: lc.BF16(hierarchy="node"), 2: HOOKS["int8"]}),
    "per_parameter": lc.PerParameter({"first": HOOKS["int8"], "*": "allreduce"}),
    "scaled": lc.ScaleByGradAccumulation(HOOKS["int8"], "mean"),
}


@pytest.mark.parametrize("label", WRAPPED)
def test_in_a_wrapper(run, label):
    results = on_nodes(run)(outputs, WRAPPED[label], full_rank_gradients, 4, world=4)
    for step in range(4):
        assert all(same(results[0][0][step], means[step]) for means, _, _ in results)
    mean = mean_gradients(full_rank_gradients, 4, 0)
    assert norm({n: mean[n] - g for n, g in results[0][0][0].items()}) < norm(mean)


def foreseen(rank, world, hook, steps):
    """Bytes that a forecast says before the last step, and those of the run; what it warns of; steps."""
    with attached(hook, bucket_cap_mb=25) as (ddp, attachment):
        for step in range(steps):
            backward(ddp, full_rank_gradients(rank, step, SHAPES))
            if step == steps - 2:
                forecast = attachment.forecast(steps)
        told = forecast.bytes_sent, forecast.warnings, str(forecast)
        return *told, attachment.metrics()["bytes_sent"], attachment.steps_not_compressed()


@pytest.mark.parametrize("label", ["int8", "powersgd"])
def test_it_is_foreseen(run, label):
    for told, texts, line, sent, not_compressed in on_nodes(run)(foreseen, HOOKS[label], 8, world=4):
        assert told == pytest.approx(sent, rel=0.01)
        # By what leaves the node: within it gradients are sent as they are.
        assert (texts, not_compressed) == ((), {})
        assert "fewer bytes" in line
        assert "; of those that leave a node" in line


def closing_line(rank, world, hook):
    with attached(hook) as (ddp, attachment):
        monitor = lc.Monitor(attachment, measure_link=False)
        for step in range(3):
            backward(ddp, full_rank_gradients(rank, step, SHAPES))
        return monitor.values(), monitor.summary()


def test_monitor_says_what_leaves_the_node(run):
    values, line = on_nodes(run)(closing_line, HOOKS["int8"], world=4)[0]
    assert values["comm/compression_ratio_between_nodes"] > 2 * values["comm/compression_ratio"]
    assert "left the node instead of" in line
    for places in ([0, 0, 0, 0], [0, 1, 2, 3]):  # where that says nothing new
        values, line = on_nodes(run, places)(closing_line, lc.AllReduce(), world=4)[0]
        assert "comm/bytes_sent_between_nodes" not in values
        assert "left the node" not in line
    assert "NODE_RANK" not in os.environ
