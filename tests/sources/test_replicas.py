"""Hooks between replicas of sharded models, on two times two ranks, against FSDP2 by itself and against DDP."""

import contextlib
import copy
import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from fsdp_driver import NAMES, leaving_no_groups, shard2
from pool import ignoring
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

import lightning_commhooks as lc
from lightning_commhooks.collectives.counters import Counters
from lightning_commhooks.runtime import checkpoint
from lightning_commhooks.runtime.passes import StepClock
from lightning_commhooks.sources import replicas

WORLD = 4
POWERSGD = lc.PowerSGD(start_powerSGD_iter=1, matrix_approximation_rank=2, min_compression_rate=0.1)
INT8 = lc.Int8(min_bytes=0, block_size=64)


class Network(nn.Module):
    """Layers of which one has fewer rows than ranks, one is not always used, and one is frozen."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(24, 40), nn.Linear(40, 34), nn.Linear(34, 1), nn.Linear(40, 34)])
        self.layers[0].bias.requires_grad_(False)

    def forward(self, x, uses_last=True):
        x = self.layers[0](x).tanh()
        x = self.layers[1](x) + (self.layers[3](x) if uses_last else 0)
        return self.layers[2](x.tanh())


def mesh_of_two():
    return init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicas", "shards"))


def sharded(mesh, **options):
    torch.manual_seed(0)
    model = Network()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def mixed_meshes(two, other):
    """A layer is on another mesh than the others: sharded over all ranks, or with replicas among other ranks."""
    torch.manual_seed(0)
    model = Network()
    for i, layer in enumerate(model.layers):
        fully_shard(layer, mesh=other if i == 1 else two)
    return fully_shard(model, mesh=two)


def batch(step, micro=0, rank=None):
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro + (dist.get_rank() if rank is None else rank))
    return torch.randn(8, 24, generator=generator)


def train(model, num_steps=3, before=lambda model, step: None, backward=None):
    """Weights after some steps, those of this rank."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    for step in range(num_steps):
        before(model, step)
        if backward is None:
            model(batch(step)).square().mean().backward()
        else:
            backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().to_local().clone() for p in model.parameters()]


def accumulate_without_reduction(model, step):
    for micro in range(3):
        model.set_requires_gradient_sync(micro == 2)
        model(batch(step, micro)).square().mean().backward()


def accumulate_within_a_replica(model, step):
    for micro in range(3):
        model.set_requires_all_reduce(micro == 2)
        model(batch(step, micro)).square().mean().backward()


def several_backwards(model, step):
    for micro in range(2):
        model(batch(step, micro)).square().mean().backward()


def two_losses(model, step):
    out = model(batch(step))
    out.square().mean().backward(retain_graph=True)
    out.abs().mean().backward()


def not_all_used(model, step):
    model(batch(step), uses_last=step % 2 == 0).square().mean().backward()


def units(model):
    return [*model.layers, model]


def divided(model, step):
    for unit in units(model):
        unit.set_gradient_divide_factor(2.0)


def summed(model, step):
    for unit in units(model):
        unit.set_force_sum_reduction_for_comms(True)


def all_reduce_hook(model, step):
    for unit in units(model):
        unit.set_all_reduce_hook(lambda share: share.mul_(0.5))


HALF, BRAIN = torch.float16, torch.bfloat16
SETTINGS = {
    "plain": {},
    "kept": {"options": {"reshard_after_forward": False}},
    "partly": {"options": {"reshard_after_forward": 1}},
    "columns": {"options": {"shard_placement_fn": lambda p: Shard(1) if p.dim() > 1 and p.shape[0] > 1 else None}},
    "offloaded": {"options": {"offload_policy": CPUOffloadPolicy(pin_memory=False)}},
    "reduced in bfloat16": {"options": {"mp_policy": MixedPrecisionPolicy(reduce_dtype=BRAIN)}},
    "computed in bfloat16": {
        "options": {"mp_policy": MixedPrecisionPolicy(param_dtype=BRAIN, reduce_dtype=torch.float32)}
    },
    "reduced in float16": {"options": {"mp_policy": MixedPrecisionPolicy(reduce_dtype=HALF)}, "tolerance": 1e-5},
    "without reduction": {"backward": accumulate_without_reduction},
    "within a replica": {"backward": accumulate_within_a_replica},
    "several backwards": {"backward": several_backwards},
    "two losses": {"backward": two_losses},
    "not all used": {"backward": not_all_used},
    "divided": {"before": divided},
    "summed": {"before": summed},
    "all-reduce hook": {"before": all_reduce_hook},
}


def difference(weights, expected):
    return max((a - b).abs().max().item() for a, b in zip(weights, expected, strict=True) if a.numel())


def against_fsdp2(rank, world, names):
    """Difference to FSDP2 by itself, of an average that is no approximation, with each setting."""
    found = {}
    with leaving_no_groups():
        mesh = mesh_of_two()
        for name in names:
            setting = dict(SETTINGS[name])
            options, tolerance = setting.pop("options", {}), setting.pop("tolerance", 0.0)
            expected = train(sharded(mesh, **options), **setting)
            model = sharded(mesh, **options)
            attachment = lc.attach(model, "allreduce")
            distances = [
                (a - b).abs().max().item() for a, b in zip(train(model, **setting), expected, strict=True) if a.numel()
            ]
            found[name] = max(distances), tolerance, attachment.num_steps
    return found


def test_allreduce_is_what_fsdp2_does(run):
    for found in run(against_fsdp2, [*SETTINGS], world=WORLD, timeout=120):
        for name, (distance, tolerance, steps) in found.items():
            assert distance <= tolerance, name
            assert steps == (6 if name in ("several backwards", "two losses") else 3), name


class Checkpointed(Network):
    """Its first layers in backwards of their own within the backward, or not."""

    def __init__(self, is_nested):
        super().__init__()
        self.is_nested = is_nested

    def forward(self, x):
        x = x.requires_grad_()
        for layer in (self.layers[0], self.layers[1]):
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=True) if self.is_nested else layer(x)
        return self.layers[2](x.tanh())


def nested(rank, world, is_nested):
    """Weights and number of steps, with a hook that begins to compress in the second step."""
    with leaving_no_groups():
        torch.manual_seed(0)
        model, mesh = Checkpointed(is_nested), mesh_of_two()
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        attachment = lc.attach(model, POWERSGD)
        return train(model, 5), attachment.num_steps


def test_backwards_within_a_backward_are_no_steps(run):
    ranks = zip(run(nested, True, world=WORLD), run(nested, False, world=WORLD), strict=True)
    for (weights, steps), (expected, _) in ranks:
        assert steps == 5
        assert difference(weights, expected) == 0


def test_a_backward_that_raises_is_left():
    seen = []
    clock = StepClock(Counters(), lambda in_time: seen.append("ended"), lambda: seen.append("broken off"))
    for raises in (True, False, False):

        def place(grad, raises=raises):
            clock.enter_backward()
            seen.append(clock.place_in_backward(ends=True))
            if raises:
                raise ValueError("of the model")

        x = torch.ones(3, requires_grad=True)
        x.register_hook(place)
        with contextlib.suppress(ValueError):
            x.sum().backward()
    assert seen[:2] == [(0, 0), "broken off"]
    assert seen[-4:] == [(1, 0), "ended", (2, 0), "ended"]


def test_a_backward_whose_callback_raises_is_left():
    steps = []
    clock = StepClock(Counters(), lambda in_time: None, lambda: None)
    for raises in (True, False, False):

        def fail(raises=raises):
            if raises:
                raise ValueError("of another callback")

        def place(grad, fail=fail):
            clock.enter_backward()
            torch.autograd.Variable._execution_engine.queue_callback(fail)
            steps.append(clock.place_in_backward(ends=True))

        x = torch.ones(3, requires_grad=True)
        x.register_hook(place)
        with contextlib.suppress(ValueError):
            x.sum().backward()
    assert steps == [(0, 0), (1, 0), (2, 0)]


def on_one_dimension(rank, world):
    """Ranks that the user names, `replicate`, and training after the hook was closed, against FSDP2 by itself."""
    found = {}
    with leaving_no_groups():
        mesh = mesh_of_two()
        expected = train(sharded(mesh), num_steps=4)
        named = sharded(mesh["shards"])
        for wrong in (mesh["shards"].get_group(), dist.group.WORLD):
            with pytest.raises(ValueError, match=r"the shard .* in replicate_group=.* must be the same on all ranks"):
                lc.attach(named, "allreduce", replicate_group=wrong)
        lc.attach(named, "allreduce", replicate_group=mesh["replicas"].get_group())
        found["named"] = difference(train(named, num_steps=4), expected)
        whole = init_device_mesh("cpu", (world,))
        expected_mixed, *_ = mixed = [mixed_meshes(mesh, whole) for _ in range(2)]
        lc.attach(mixed[1], "allreduce")
        found["mixed"] = difference(train(mixed[1]), train(expected_mixed))
        closed = sharded(mesh)
        attachment = lc.attach(closed, "allreduce")
        weights = train(closed, num_steps=4, before=lambda model, step: attachment.close() if step == 2 else None)
        found["closed"] = difference(weights, expected)
        again = lc.attach(closed, POWERSGD)
        train(closed, num_steps=3)
        return found, attachment.num_steps, again.metrics()["numel_compressed"] > 0


def test_other_ways_to_have_replicas(run):
    for found, steps, compressed in run(on_one_dimension, world=WORLD):
        assert found == {"named": 0.0, "closed": 0.0, "mixed": 0.0}
        assert steps == 2
        assert compressed


def replicated(rank, world):
    """PowerSGD of `replicate`, whose gradients are whole, against PowerSGD of DDP."""
    replicate = pytest.importorskip("torch.distributed._composable.replicate_with_fsdp").replicate

    def network():
        torch.manual_seed(0)
        return Network()

    with leaving_no_groups():
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("replicas",))
        model, ddp = network(), DistributedDataParallel(network())
        for layer in model.layers:
            replicate(layer, mesh=mesh)
        replicate(model, mesh=mesh)
        attachments = lc.attach(model, POWERSGD), lc.attach(ddp, POWERSGD)
        optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, ddp)]
        for step in range(4):
            for one, optimizer in zip((model, ddp), optimizers, strict=True):
                one(batch(step)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        weights = [p.detach() for p in ddp.module.parameters()]
        distance = max((a.to_local() - b).abs().max().item() for a, b in zip(model.parameters(), weights, strict=True))
        return distance, [attachment.metrics()["numel_compressed"] for attachment in attachments]


def test_replicate_is_averaged_as_ddp_is(run):
    for distance, (compressed, expected) in run(replicated):
        assert distance < 1e-6
        assert compressed == expected > 0


class Shares(nn.Module):
    """What one rank has of `Blocks`, whole: the reference that DDP averages over replicas."""

    def __init__(self, of):
        super().__init__()
        for name, p in of.named_parameters():
            module, _, last = name.rpartition(".")
            if module not in dict(self.named_children()):
                self.add_module(module, nn.Module())
            self.get_submodule(module).register_parameter(last, nn.Parameter(torch.zeros_like(p.to_local())))

    def forward(self, gradients):
        return sum((p * gradients[name]).sum().double() for name, p in self.named_parameters())


def gradients_of(step, rank):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {name: torch.randn(shape, generator=generator) for name, shape in NAMES.items()}


def rows(gradient, p):
    """This rank's share of a gradient."""
    shares = gradient.chunk(p.device_mesh.size(1), dim=0)
    return shares[p.device_mesh.get_local_rank(1)].contiguous()


def compressed(rank, world, labels):
    """Differences, over steps and parameters, to the same hook on plain replicas of this rank's shares."""
    found = {}
    with leaving_no_groups():
        mesh = mesh_of_two()
        replicas = mesh["replicas"].get_group()
        column = dist.get_process_group_ranks(mesh["shards"].get_group())
        for label in labels:
            hook = HOOKS[label]
            model = shard2("hybrid", mesh=mesh)
            shares = DistributedDataParallel(Shares(model), process_group=replicas)
            attachment, other = lc.attach(model, hook), lc.attach(shares, hook)
            worst = 0.0
            for step in range(4):
                model.zero_grad()
                shares.zero_grad()
                model(gradients_of(step, rank)).backward()
                ranks = [gradients_of(step, one) for one in column]
                mean = {n: sum(own[n] for own in ranks) / len(ranks) for n in NAMES}
                shares({name: rows(mean[name], p) for name, p in model.named_parameters()}).backward()
                expected = {name: p.grad for name, p in shares.module.named_parameters()}
                for name, p in model.named_parameters():
                    worst = max(worst, (p.grad.to_local() - expected[name]).abs().max().item())
            sent = [one.metrics()["bytes_sent"] for one in (attachment, other)]
            found[label] = worst, sent, sorted(attachment.bound.memory) == sorted(other.bound.memory)
    return found


# Those that encode a bucket as one vector see other buckets here.
HOOKS = {
    "powersgd": POWERSGD,
    "int8": INT8,
    "int4": lc.Int4(min_bytes=0),
    "bf16": lc.BF16(),
    "schedule": lc.Schedule({0: "bf16", 2: POWERSGD}),
    "per_parameter": lc.PerParameter({"*odd": INT8, "*": POWERSGD}),
}


def test_compressed_hooks_do_to_shares_what_they_do_to_parameters(run):
    for found in run(compressed, [*HOOKS], world=WORLD, timeout=120):
        for label, (worst, (sent, expected), same_names) in found.items():
            assert worst < 1e-6, label
            assert sent == pytest.approx(expected, rel=0.02), label
            assert same_names, label


def bad_step(rank, world):
    """What is left of a step in which one share of one rank is infinite."""
    with leaving_no_groups():
        mesh = mesh_of_two()
        model = shard2("hybrid", mesh=mesh)
        attachment = lc.attach(model, INT8)
        for step in range(2):
            gradients = gradients_of(step, rank)
            if step == 1 and rank == 0:
                gradients["first.matrix"][0, 0] = torch.inf
            model.zero_grad()
            model(gradients).backward()
            norm = attachment.residual_norm()
            if step == 0:
                before = norm
        grads = [p.grad.to_local() for p in model.parameters()]
        bad = all(bool(g.isnan().any()) for g in grads if g.numel())
        return before, norm, bad, attachment.metrics()["nonfinite_steps"]


def test_a_step_is_bad_on_all_shards(run):
    for before, after, bad, steps in run(bad_step, world=WORLD):
        assert before > 0
        assert (after, bad, steps) == (0.0, True, 1)


def resumed(rank, world):
    """Gradients after a state was loaded, those without, and what is said where a state is another shard's."""
    with leaving_no_groups():
        mesh = mesh_of_two()
        models = [shard2("hybrid", mesh=mesh) for _ in range(2)]
        first, second = (lc.attach(model, POWERSGD, exact_state=True) for model in models)
        for step in range(3):
            models[0](gradients_of(step, rank)).backward()
        state = first.state_dict()
        second.load_state_dict(copy.deepcopy(state))
        for model in models:
            model.zero_grad()
            model(gradients_of(3, rank)).backward()
        pairs = zip(*map(nn.Module.parameters, models), strict=True)
        same = all(torch.equal(a.grad.to_local(), b.grad.to_local()) for a, b in pairs)
        told = [None] * 2
        dist.all_gather_object(told, state, group=mesh["shards"].get_group())
        with pytest.raises(lc.StateError) as refused:
            second.load_state_dict(told[1 - mesh["shards"].get_local_rank()])
        for wrong, text in ((told[::-1], "not the states of all shards in order"), ([], "there is none")):
            with pytest.raises(lc.StateError, match=text):
                second.load_state_dict(wrong)
        second.load_state_dict(told)
        damaged = copy.deepcopy(state)
        damaged["num_tensors"] += mesh["shards"].get_local_rank()
        with pytest.raises(lc.StateError) as elsewhere:
            second.load_state_dict(damaged)
        return same, second.num_steps, str(refused.value), str(elsewhere.value)


def test_state_is_of_a_shard(run):
    for rank, (same, steps, message, elsewhere) in enumerate(run(resumed, world=WORLD)):
        assert same
        assert steps == 1
        text = "it is truncated" if rank % 2 else "does not fit on the ranks of another shard"
        assert text in elsewhere, "an error on all ranks"
        assert "save the state of each shard, and load it on the ranks of that shard" in message


def several_groups(rank, world):
    """Distances to FSDP2 by itself; refusals; whether each hook has the state and bytes of its own parameters."""
    with leaving_no_groups():
        two = mesh_of_two()
        other = DeviceMesh("cpu", torch.arange(world).view(2, 2).T, mesh_dim_names=("replicas", "shards"))
        plain, hooked, compressed = (mixed_meshes(two, other) for _ in range(3))
        groups = [mesh.get_group("replicas") for mesh in (two, other)]
        texts = []
        for hook, options in (
            ("allreduce", {}),
            ("allreduce", {"replicate_group": dist.group.WORLD}),
            (HOOKS_CUT_ANEW["diloco"], {"replicate_group": groups[0]}),
        ):
            with pytest.raises(ValueError, match="replica") as refused:
                lc.attach(hooked, hook, **options)
            texts.append(str(refused.value))
        with_uneven_shards = mixed_meshes(two, DeviceMesh("cpu", torch.arange(world)))
        with pytest.raises(ValueError, match="or none: use a hook of gradients"):
            lc.attach(with_uneven_shards, HOOKS_CUT_ANEW["diloco"])
        attachment = lc.attach(with_uneven_shards, POWERSGD)
        train(with_uneven_shards)
        attachment.load_state_dict(attachment.state_dict())
        for group in groups:
            lc.attach(hooked, "allreduce", replicate_group=group)
        with pytest.raises(ValueError, match="has a communication hook between its replicas already"):
            lc.attach(hooked, "allreduce", replicate_group=groups[1])
        distance = difference(train(hooked), train(plain))
        both = [lc.attach(compressed, POWERSGD, replicate_group=group) for group in groups]
        train(compressed)
        states = [attachment.state_dict() for attachment in both]
        for attachment, state in zip(both, states, strict=True):
            attachment.load_state_dict(state)
        remembered = [sorted(state["hook"]["state"]["entries"]) for state in states]
        steps = [attachment.metrics()["steps"] for attachment in both]
        own = Network()
        own.layers[2].weight.data.fill_(rank)
        fully_shard(own, mesh=two, ignored_params={*own.layers[2].parameters()})
        optimizer = torch.optim.SGD([p for p in own.parameters() if p.requires_grad], lr=0.0)
        attachment = lc.attach(own, LOCAL["diloco"], optimizers=[optimizer])
        for step in range(3):
            own(batch(step)).sum().backward()
            optimizer.step()
        averagings = attachment.metrics()["averagings"]
        own.load_state_dict({name: value.clone() for name, value in own.state_dict().items()}, assign=True)
        with pytest.raises(lc.HookError, match=r"'layers\.[0-9]\.weight' is another tensor than when the hook was att"):
            own(batch(3)).sum().backward()
        attachment.close()
        return distance, texts, remembered, steps, averagings, own.layers[2].weight.unique().tolist()


def test_several_groups_of_replicas(run):
    for rank, (distance, texts, remembered, steps, averagings, own) in enumerate(run(several_groups, world=WORLD)):
        assert (averagings, own) == (1, [rank]), "FSDP2 leaves parameters alone that it is to ignore"
        assert distance == 0
        assert "have replicas in 2 process groups" in texts[0]
        assert "where there are several groups of them name one" in texts[1]
        assert "hook='diloco' averages models" in texts[2]
        assert {"layers.0.weight", "layers.3.weight"} <= {*remembered[0]} <= {f"layers.{i}.weight" for i in (0, 2, 3)}
        assert remembered[1] == ["layers.1.weight"]
        assert steps == [3, 3]


def one_file(rank, world, folder):
    """What is said where the last rank finds a file, and the others do not; and a state that all of them find."""
    with leaving_no_groups():
        attachment = lc.attach(shard2("hybrid", mesh=mesh_of_two()), POWERSGD)
        replicas.save_shard(attachment, replicas.shard_file(attachment, folder, "state"))
        dist.barrier()
        file = replicas.shard_file(attachment, folder, "state")
        found = replicas.load_shard(attachment, file)
        with pytest.raises(
            (ValueError, lc.HookError), match="number of files with the state must be the same on all ranks"
        ) as raised:
            replicas.load_shard(attachment, file if rank == world - 1 else file.with_name("lost"))
        return found, str(raised.value), replicas.load_shard(attachment, file.with_name("lost"))


def test_only_one_rank_has_the_file(run, tmp_path):
    for found, text, lost in run(one_file, tmp_path, world=WORLD):
        assert found is None
        assert "and 1 on rank 3" in text
        assert "is reset: the checkpoint has no state of these shards" in lost
    assert sorted(file.name for file in tmp_path.iterdir()) == ["state-0-of-2.pt", "state-1-of-2.pt"]


HOOKS_CUT_ANEW = {
    "int8": lc.Int8(min_bytes=0, block_size=8, compress_1d=True),
    "powersgd": lc.PowerSGD(start_powerSGD_iter=1, matrix_approximation_rank=1, min_compression_rate=0.1),
    "diloco": lc.DiLoCo(
        period=2, post_local_gradient_allreduce=False, pseudo_gradient=lc.Int8(min_bytes=0, block_size=8)
    ),
}


def cut_anew(rank, world, folder, sizes, hook):
    """States of a model sharded one way, and of the same model sharded another way that has loaded it."""
    hook, states = HOOKS_CUT_ANEW[hook], []
    with leaving_no_groups():
        for num_shards in sizes:
            mesh = init_device_mesh("cpu", (world // num_shards, num_shards), mesh_dim_names=("replicas", "shards"))
            model = sharded(mesh)
            optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
            attachment = lc.attach(model, hook, optimizers=[optimizer])
            file = replicas.shard_file(attachment, folder, "state")
            if not states:
                for step in range(5):
                    model(batch(step)).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                replicas.save_shard(attachment, file)
                dist.barrier()
            else:
                assert replicas.load_shard(attachment, file) is None
            states.append((attachment.shard, attachment.state_dict(), attachment.num_steps))
            if len(states) == 2 and not attachment.averages_models:
                model(batch(5)).square().mean().backward()
            attachment.average_weights()
            attachment.close()
    return states


def of_all_shards(results, which):
    """Each tensor of the memory of a hook, by its path, with those of all shards one after another."""
    by_shard = {result[which][0]: result[which][1] for result in results}
    paths = {}
    for (index, _), state in sorted(by_shard.items()):
        for path, leaf in leaves(state["hook"]["state"]):
            paths.setdefault(path, {})[index] = leaf
    return paths


def leaves(state, path=()):
    for key, value in state.items():
        yield from leaves(value, (*path, key)) if isinstance(value, dict) else [((*path, key), value)]


@pytest.mark.parametrize(("hook", "sizes"), [*((hook, (2, 1)) for hook in HOOKS_CUT_ANEW), ("powersgd", (1, 2))])
def test_state_of_another_number_of_shards(run, tmp_path, sizes, hook):
    results = run(cut_anew, tmp_path, sizes, hook, world=WORLD)
    before, after = (of_all_shards(results, which) for which in (0, 1))
    elements = {"residual", "anchor", "momentum"}
    found = 0
    for path, parts in before.items():
        if path[-1] in elements:
            whole, cut = (torch.cat([*one.values()]) for one in (parts, after[path]))
            torch.testing.assert_close(cut, whole, rtol=0, atol=0)
            found += bool(whole.count_nonzero())
    assert found > 2
    for (_, first, _), (_, second, _) in results:
        assert second["steps"] == first["steps"]


def layout_of(rows, columns=3):
    """What `resharded` looks at in a layout: a parameter of which this shard has some rows."""
    return SimpleNamespace(trained={"weight": torch.empty(rows, columns)})


ROWS = {1: [7], 2: [4, 3], 3: [3, 3, 1], 4: [2, 2, 2, 1], 5: [2, 2, 2, 1, 0]}


def saved_state(index, num, tensor, q):
    rows = tensor.split(ROWS[num], dim=-2)[index]
    entry = {"residual": rows, "flat": rows.flatten(-2), "factor": q + index, "factor_p": torch.ones(2, rows.shape[-2])}
    memory = {"weight": entry if rows.numel() else {}, "weight\nbias": {"factor": q}}
    return {
        "per_rank": "exact" if tensor.dim() == 3 else "mean",
        "shard": [[index, num]],
        "world_size": 2,
        "parameters": {"weight": list(rows.shape[-2:])} if rows.numel() else {},
        "hook": {
            "name": "x",
            "options": {"a": None, "weight": 1},
            "state": {"entries": memory, "numbers": {"weight": 5}},
        },
    }


@pytest.mark.parametrize("lead", [(), (2,)])
@pytest.mark.parametrize(("num_before", "num_after"), [(2, 3), (3, 2), (1, 4), (4, 1), (5, 2), (2, 5)])
def test_rows_of_shards_are_cut_anew(lead, num_before, num_after):
    tensor, q = torch.randn(*lead, 7, 3), torch.zeros(2, 3)
    states = [saved_state(i, num_before, tensor, q) for i in range(num_before)]
    for i, rows in enumerate(ROWS[num_after]):
        found, lost = checkpoint.resharded(states, [[i, num_after]], layout_of(rows))
        assert lost == ["weight\nbias"]
        state = found["state"]
        assert found["options"] == {"a": None, "weight": 1}
        assert state["numbers"] == {"weight": 5}
        entry = state["entries"].get("weight", {})
        assert entry.keys() == ({"residual", "flat", "factor"} if rows else set())
        assert state["entries"].keys() <= {"weight"}
        if rows:
            begin = sum(ROWS[num_after][:i])
            expected = tensor[..., begin : begin + rows, :]
            assert torch.equal(entry["residual"], expected)
            assert torch.equal(entry["flat"], expected.flatten(-2))
            first = next(j for j in range(num_before) if begin < sum(ROWS[num_before][: j + 1]))
            assert torch.equal(entry["factor"], q + first)


def test_a_shard_whose_gradient_was_not_compressed_has_no_residual():
    tensor = torch.randn(7, 3)
    states = [saved_state(i, 2, tensor, torch.zeros(2, 3)) for i in range(2)]
    del states[1]["hook"]["state"]["entries"]["weight"]
    found, _ = checkpoint.resharded(states, [], layout_of(7))
    (entry,) = found["state"]["entries"].values()
    assert torch.equal(entry["residual"], torch.cat([tensor[:4], torch.zeros(3, 3)]))


def test_another_model_is_not_cut():
    states = [saved_state(i, 2, torch.randn(7, 3), torch.zeros(2, 3)) for i in range(2)]
    for layout in (layout_of(8), layout_of(7, columns=4)):
        found, lost = checkpoint.resharded(states, [], layout)
        assert not found["state"]["entries"]
        assert lost == ["weight", "weight\nbias"]


def lengths(rank, world):
    with leaving_no_groups():
        model = shard2("hybrid", mesh=mesh_of_two())
        return lc.attach(model, "powersgd", num_steps=40 + 20 * rank).hook.start_powerSGD_iter


def test_all_shards_go_by_one_length(run):
    assert run(lengths, world=WORLD) == [4] * WORLD


def metrics(rank, world):
    with leaving_no_groups():
        mesh = mesh_of_two()
        model = shard2("hybrid", mesh=mesh)
        attachment = lc.attach(model, POWERSGD, shard_hook="bf16")
        attachment.sample_error(every=1, numel=None)
        for step in range(3):
            model.zero_grad()
            model(gradients_of(step, rank)).backward()
        numel = sum(p.to_local().numel() for p in model.parameters())
        return attachment.metrics(), numel, str(attachment.forecast(10))


def test_metrics(run):
    for found, numel, forecast in run(metrics, world=WORLD):
        assert found["bytes_dense"] == 3 * 4 * numel
        assert found["compression_ratio"] > 1
        assert 0 < found["relative_error"] < 2
        # bf16 of the reduce-scatter within a replica.
        assert found["shard_compression_ratio"] == pytest.approx(2)
        assert found["shard_bytes_dense"] >= 3 * 4 * numel
        assert "fewer bytes" in forecast or forecast == "None"


def refusals(rank, world):
    with leaving_no_groups():
        mesh = mesh_of_two()
        model = shard2("hybrid", mesh=mesh)
        for hook, options, message in (
            (lc.ScaleByGradAccumulation("bf16", "mean"), {}, "call set_gradient_divide_factor"),
            (lambda state, bucket: None, {}, "hook"),
            ("bf16", {"loss_divided_by": 2}, "loss_divided_by is for DistributedDataParallel"),
            ("bf16", {"shard_hook": "powersgd"}, "^shard_hook='powersgd' does not work with FSDP"),
            ("bf16", {"replicate_group": mesh["replicas"].get_group()}, "leave it out"),
        ):
            with pytest.raises((ValueError, TypeError), match=message):
                lc.attach(model, hook, **options)
        with pytest.raises(ValueError, match="shard_hook is for models with replicas"):
            lc.attach(shard2("full"), "bf16", shard_hook="bf16")
        with pytest.raises(ValueError, match="shard_hook is for fully_shard"):
            lc.attach(DistributedDataParallel(nn.Linear(2, 2)), "bf16", shard_hook="bf16")
        lc.attach(model, "bf16")
        with pytest.raises(ValueError, match="has a communication hook between its replicas already"):
            lc.attach(model, "bf16")
        # Ranks of one replica were given another hook than those of the other, and one of a shard.
        told = []
        for odd in (rank // 2 == 1, rank % 2 == 1, rank == 3):
            with pytest.raises((ValueError, lc.HookError)) as raised:
                lc.attach(shard2("hybrid", mesh=mesh), "fp16" if odd else "bf16")
            told.append(str(raised.value))
        return told


def test_refusals(run):
    for told in run(refusals, world=WORLD):
        for text in told:
            assert "hook must be the same on all ranks" in text


def collected(rank, world):
    """Whether model and hook are gone with the last reference to the model."""
    with leaving_no_groups():
        model = shard2("hybrid", mesh=mesh_of_two())
        attachment = lc.attach(model, POWERSGD)
        model(gradients_of(0, rank)).backward()
        gone = weakref.ref(model)
        del model
        gc.collect()
        return gone() is None, attachment.is_closed


def test_the_hook_does_not_keep_the_model(run):
    assert run(collected, world=WORLD) == [(True, True)] * WORLD


def test_shares_on_cuda_are_kept_until_they_are_averaged(monkeypatch):
    """FSDP2 frees a share in the order of its own stream."""
    order = []
    share = SimpleNamespace(is_cuda=True, device=torch.device("cpu"), record_stream=order.append)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "stream of all-reduces")
    unit = SimpleNamespace(average_=lambda share: order.append("averaged"))
    ranks = SimpleNamespace(rank=lambda: 0, size=lambda: 2)
    replicas._HookedGroup(unit, ranks).allreduce([share], SimpleNamespace(reduceOp=dist.ReduceOp.AVG))
    assert order == ["stream of all-reduces", "averaged"]


LOCAL = {
    "diloco": lc.DiLoCo(period=3, post_local_gradient_allreduce=False),
    "fragments": lc.DiLoCo(period=4, fragments=2, pseudo_gradient="bf16", post_local_gradient_allreduce=False),
    "beside": lc.DiLoCo(period=4, fragments=2, delay=3, post_local_gradient_allreduce=False),
    "post_localsgd": lc.PostLocalSGD(
        start_localSGD_iter=2, period=2, post_local_gradient_allreduce=False, optimizer_state="average"
    ),
}


def stepping_alone(rank, world, labels):
    """Weights, and averages for evaluation, of local SGD between replicas, against that of DDP on the same data."""
    found = {}
    with leaving_no_groups():
        mesh = mesh_of_two()
        column = dist.get_process_group_ranks(mesh["shards"].get_group())
        for label in labels:
            model = sharded(mesh)
            torch.manual_seed(0)
            ddp = DistributedDataParallel(Network(), process_group=mesh["replicas"].get_group())
            seen = []
            for one in (model, ddp):
                parameters = [p for p in one.parameters() if p.requires_grad]
                optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
                attachment = lc.attach(one, LOCAL[label], optimizers=[optimizer], exact_state=True)
                for step in range(9):
                    own = [batch(step)] if one is model else [batch(step, rank=other) for other in column]
                    one(torch.cat(own)).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                with attachment.averaged_weights():
                    averaged = whole(one)
                attachment.load_state_dict(attachment.state_dict())
                seen.append((whole(one), averaged, attachment.metrics()["averagings"], attachment.models_differ))
                attachment.average_weights()
                seen[-1] += (difference(whole(one), averaged),)
            found[label] = seen
    return found


def whole(model):
    return [getattr(p, "full_tensor", p.clone)().detach() for p in model.parameters()]


def test_replicas_step_alone_as_ddp_does(run):
    for found in run(stepping_alone, [*LOCAL], world=WORLD, timeout=120):
        for label, ((weights, averages, *ours, left), (expected, expected_averages, *theirs, _)) in found.items():
            assert difference(weights, expected) < 2e-6, label
            assert difference(averages, expected_averages) < 2e-6, label
            assert ours == theirs, label
            assert left == 0
            if theirs[1]:
                assert difference(weights, averages) > 1e-4, label


class WithScale(Network):
    """With a parameter of the root, which FSDP2 keeps gathered after a forward without gradients."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 24))

    def forward(self, x):
        return super().forward(x * self.scale)

    def method(self, x):
        return self.forward(x)


def evaluated(model):
    with torch.no_grad():
        return model(batch(99, rank=0)).square().mean().item()


def evaluate_within(attachment, model):
    own = evaluated(model)
    with attachment.averaged_weights():
        return own, evaluated(model)


def evaluate_after(attachment, model):
    own = evaluated(model)
    attachment.show_average()
    return own, evaluated(model)


def show_only(attachment, model):
    attachment.show_average()
    return 1.0, 0.0


EVALUATIONS = {"none": lambda *_: (1.0, 0.0), "within": evaluate_within, "after": evaluate_after, "shown": show_only}


def evaluating(rank, world, options, trained_by):
    """Weights in the end, and losses of the own model and the average in the middle, by the kind of evaluation."""
    found = {}
    with leaving_no_groups():
        mesh = mesh_of_two()
        for label, evaluate in EVALUATIONS.items():
            torch.manual_seed(0)
            model = WithScale()
            for layer in model.layers:
                fully_shard(layer, mesh=mesh, **options)
            fully_shard(model, mesh=mesh, **options)
            register_fsdp_forward_method(model, "method")
            optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.3)
            attachment = lc.attach(model, LOCAL["diloco"], optimizers=[optimizer])
            for step in range(8):
                getattr(model, trained_by)(batch(step)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if step == 4:
                    losses = evaluate(attachment, model)
            found[label] = losses, [p.detach().to_local().clone() for p in model.parameters()]
            evaluated(model)
            attachment.reset_state()
            found[label] += (evaluated(model),)
            attachment.average_weights()
            attachment.close()
    return found


@pytest.mark.parametrize(
    ("options", "trained_by"),
    [({}, "__call__"), ({}, "method"), ({"reshard_after_forward": False}, "__call__")],
    ids=["default", "method", "kept"],
)
def test_evaluation_between_averages_is_of_the_average_and_changes_nothing(run, options, trained_by):
    results = run(evaluating, options, trained_by, world=WORLD, timeout=120)
    for found in results:
        for label, (_, weights, _) in found.items():
            assert all(map(torch.equal, weights, found["none"][1])), label
    ends = [end for found in results for *_, end in found.values()]
    assert max(ends) - min(ends) < 1e-6, "after reset_state() all replicas have the same model"
    for label in ("within", "after"):
        owns, averages = zip(*(found[label][0] for found in results), strict=True)
        assert max(owns) - min(owns) > 1e-4
        assert max(averages) - min(averages) < 1e-6


class WithForces(Network):
    """A frozen layer is in eval mode and without gradients, and others have gradients also in an evaluation."""

    def forward(self, x):
        with torch.no_grad():
            y = self.layers[0].eval()(x)
        with torch.enable_grad():
            return self.layers[2](self.layers[1](y))


def forces(rank, world):
    """Losses of the average, as shown, and in a `with`; sizes and names of a compiled model that is sharded itself."""
    with leaving_no_groups():
        mesh = mesh_of_two()
        torch.manual_seed(0)
        model = WithForces()
        model.layers[0].requires_grad_(False)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.3)
        attachment = lc.attach(model, LOCAL["diloco"], optimizers=[optimizer])
        for step in range(4):
            model(batch(step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        with attachment.averaged_weights():
            losses = [evaluated(model)]
        attachment.show_average()
        losses += [evaluated(model), evaluated(model)]
        attachment.average_weights()
        alive = [weakref.ref(p) for p in model.parameters()]
        attachment.close()
        del model, layer, optimizer
        gc.collect()
        compiled = torch.compile(Network(), backend="eager")
        fully_shard(compiled, mesh=mesh)
        with_hook = lc.attach(compiled, "allreduce")
        names = sorted(with_hook.runtime.layout.parameters)
        compiled(batch(0)).square().mean().backward()
        return losses, sum(one() is not None for one in alive), names, with_hook.num_steps


def test_a_forward_shows_one_model_from_begin_to_end(run):
    for losses, num_alive, names, steps in run(forces, world=WORLD, timeout=120):
        assert losses == losses[:1] * 3
        assert num_alive == 0, "a closed attachment keeps no parameters"
        assert names == sorted(f"layers.{i}.{name}" for i in range(4) for name in ("weight", "bias"))
        assert steps == 1


def handed_out(attachment, model, inputs, num_steps):
    """The sum of the gradients of some steps, in each of which a rank has its own input, or zeros."""
    total = 0
    for step in range(num_steps):
        x = inputs[step] if inputs else torch.zeros_like(model.weight.full_tensor())
        (model(x) * x.cos()).sum().backward()
        total = total + model.weight.grad.full_tensor()
        model.zero_grad()
    attachment.note_end(as_planned=False)
    return total


def left_over(rank, world, dtype, factor):
    """What is left to send when two shards become one, and what is sent of it then."""
    inputs = {r: [batch(step, rank=r)[:, :8].to(dtype) for step in range(3)] for r in range(world)}
    left, states = 0, []
    with leaving_no_groups():
        for num_shards in (2, 1):
            mesh = init_device_mesh("cpu", (world // num_shards, num_shards), mesh_dim_names=("replicas", "shards"))
            model = nn.Linear(8, 8, bias=False, dtype=dtype)
            fully_shard(model, mesh=mesh)
            if factor:
                model.set_gradient_divide_factor(factor)
                model.set_force_sum_reduction_for_comms(True)
            attachment = lc.attach(model, lc.PowerSGD(start_powerSGD_iter=0, min_compression_rate=1))
            if not states:
                sent = handed_out(attachment, model, inputs[rank], 3)
                wanted = sum(x.cos().T @ x for own in inputs.values() for x in own)
                left = wanted / (factor or world) - sent
                told = [None] * world
                dist.all_gather_object(told, (attachment.shard[0], attachment.state_dict()))
                states = [dict(told)[index] for index in range(2)]
            else:
                attachment.load_state_dict(states, strict_state=False)
                sent = handed_out(attachment, model, (), 40)
            attachment.close()
    return left, sent


@pytest.mark.parametrize(("dtype", "factor"), [(torch.float32, None), (torch.float64, None), (torch.float32, 3.0)])
def test_residuals_are_in_units_of_the_loss(run, dtype, factor):
    """Whatever FSDP2 divides by before and after the average: on other shards, it may be another number."""
    for left, sent in run(left_over, dtype, factor, world=WORLD):
        assert left.norm() > 0.5
        assert difference([sent], [left]) < 1e-5


def left_out(rank, world):
    with leaving_no_groups():
        model = shard2("hybrid", mesh=mesh_of_two())
        attachment = lc.attach(model, LOCAL["diloco"])
        with pytest.raises(lc.HookError, match="knows no optimizer"):
            model(gradients_of(0, rank)).backward()
        attachment.close()


def test_an_optimizer_is_asked_for(run):
    run(left_out, world=WORLD)


def loaded_while_shown(rank, world):
    """Distance of the weights in the next forward from those that were loaded while the average was in place."""
    with leaving_no_groups():
        torch.manual_seed(0)
        model = WithScale()
        fully_shard(model, mesh=mesh_of_two())
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.3)
        attachment = lc.attach(model, LOCAL["diloco"], optimizers=[optimizer])
        saved = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        model(batch(0)).square().mean().backward()
        optimizer.step()
        attachment.show_average()
        model.load_state_dict(saved)
        model(batch(1))
        now = model.state_dict()
        distances = [(now[name].to_local() - tensor.to_local()).abs().max().item() for name, tensor in saved.items()]
        with ignoring("hook='.*' ended while", "training ended after"):
            attachment.close()
    return max(distances)


def test_weights_that_are_loaded_while_the_average_is_shown_stay(run):
    assert run(loaded_while_shown) == [0, 0]
