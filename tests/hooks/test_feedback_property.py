"""Error feedback loses nothing but in bad steps, whatever happens: random sequences of events, made by hypothesis."""

import math

import pytest
import torch
from broken_hooks import TopK
from driver import (
    HOOKS,
    SMALL_BUCKETS,
    TOO_EARLY,
    Params,
    attached,
    backward,
    full_rank_gradients,
    mean_gradients,
    mean_residuals,
    norm,
    owes,
)
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pool import ignoring
from torch.nn.parallel import DistributedDataParallel

import lightning_commhooks as lc

SHAPES = {"first": (12, 20), "bias": (20,), "second": (20, 12), "third": (12, 20)}
FREEZABLE = ["first", "second"]

STEP = st.tuples(st.just("step"))
OVERFLOW = st.tuples(
    st.just("overflow"), st.integers(0, 1), st.sampled_from(sorted(SHAPES)), st.sampled_from([math.inf, math.nan])
)
SCALE = st.tuples(st.just("scale"), st.sampled_from([2.0, 0.5, 2.0**8, 2.0**-8]))
SAVE_AND_LOAD = st.tuples(st.just("save_and_load"), st.booleans())
FREEZE = st.tuples(st.just("freeze"), st.sampled_from(FREEZABLE))
UNFREEZE = st.tuples(st.just("unfreeze"), st.sampled_from(FREEZABLE))
EVENTS = st.lists(st.one_of(STEP, OVERFLOW, SCALE, SAVE_AND_LOAD, FREEZE, UNFREEZE), min_size=3, max_size=12)


class Run:
    """One rank's model and hook, and what went in and out of it, in float64."""

    def __init__(self, rank, world, hook):
        self.rank, self.world, self.hook = rank, world, hook
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        self.scaler.scale(torch.ones(()))
        self.frozen = set()
        self.produced = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
        self.received = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
        self.size = 0.0
        self.num_steps = 0
        self.num_bad = 0
        self._attach(exact=False)

    def _attach(self, exact):
        self.ddp = DistributedDataParallel(Params(SHAPES, torch.float64), bucket_cap_mb=SMALL_BUCKETS)
        self.attachment = lc.attach(self.ddp, self.hook, exact_state=exact, grad_scaler=self.scaler)

    def step(self, bad_rank=None, bad_name=None, value=None):
        ranks = [full_rank_gradients(rank, self.num_steps, SHAPES, torch.float64) for rank in range(self.world)]
        self.num_steps += 1
        names = [name for name in SHAPES if name not in self.frozen]
        if bad_rank == self.rank:
            ranks[self.rank][bad_name].view(-1)[0] = value
        is_bad = bad_rank is not None and bad_name in names
        owed = mean_residuals(self.attachment.state_dict(), SHAPES) if is_bad else None
        self.ddp.zero_grad()
        loss = self.ddp({name: ranks[self.rank][name] for name in names})
        (loss * self.scaler.get_scale()).backward()
        means = {name: self.ddp.module.get_parameter(name).grad / self.scaler.get_scale() for name in names}
        if is_bad:
            self.num_bad += 1
            for name in SHAPES:  # and forgets what was owed
                self.produced[name] -= owed[name]
            assert not any(mean.isfinite().all() for mean in means.values()), "every gradient of a bad step is bad"
            return
        for name, mean in means.items():
            assert mean.isfinite().all()
            self.received[name] += mean
            expected = sum(gradients[name] for gradients in ranks) / self.world
            self.produced[name] += expected
            self.size += expected.norm().item()

    def overflow(self, rank, name, value):
        self.step(rank, name, value)

    def scale(self, factor):
        self.scaler.update(min(max(self.scaler.get_scale() * factor, 1.0), 2.0**30))

    def save_and_load(self, exact):
        self.attachment._exact_state = exact
        state = self.attachment.state_dict()
        self.num_bad -= self.attachment.metrics()["nonfinite_steps"]
        self.close()
        self.frozen = set()
        self._attach(exact)
        self.attachment.load_state_dict(state)

    def freeze(self, name):
        self.frozen.add(name)
        self._wrap_again()

    def unfreeze(self, name):
        self.frozen.discard(name)
        self._wrap_again()

    def _wrap_again(self):
        module = self.ddp.module
        for name in FREEZABLE:
            module.get_parameter(name).requires_grad_(name not in self.frozen)
            module.get_parameter(name).grad = None
        ddp = DistributedDataParallel(module, bucket_cap_mb=SMALL_BUCKETS)
        self.attachment.move_to(ddp)
        self.ddp = ddp

    def imbalance(self):
        """What went in and neither came out nor is owed, as a fraction of what went in."""
        owed = mean_residuals(self.attachment.state_dict(), SHAPES)
        lost = {name: self.produced[name] - self.received[name] - owed[name] for name in SHAPES}
        return norm(lost) / max(self.size, 1e-300)

    def close(self):
        with ignoring(TOO_EARLY):
            self.attachment.close()


def follow(rank, world, hook, events):
    run = Run(rank, world, hook)
    imbalances = []
    for name, *arguments in events:
        getattr(run, name)(*arguments)
        imbalances.append(run.imbalance() if run.num_steps else 0.0)
    bad = run.attachment.metrics()["nonfinite_steps"], run.num_bad
    received = run.received
    run.close()
    return imbalances, bad, received


# What int4 does, int8 does by the same code; with more than two ranks there are two roundings.
LABELS = {label: 2 for label, hook in HOOKS.items() if owes(hook)} | {"int4": 4}


# Patterns that match nothing when parameters are frozen are an error.
BY_PATTERN = {"per_parameter", "powersgd+half inside"}


@pytest.mark.parametrize("label", [label for label in LABELS if label not in {"int8", "powersgd+batch", *BY_PATTERN}])
def test_what_was_sent_and_what_is_owed_is_what_was_produced(run, label):
    rounding = {"cast": 2.0**-6, "schedule": 2.0**-6}.get(label, 1e-12)

    @settings(
        max_examples=6,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(events=EVENTS)
    def check(events):
        (imbalances, bad, received), (_, _, others), *_ = run(follow, HOOKS[label], events, world=LABELS[label])
        assert max(imbalances) <= rounding, f"after event {imbalances.index(max(imbalances))} of {events}"
        assert bad[0] == bad[1]
        assert all(torch.equal(received[name], others[name]) for name in SHAPES)

    check()


def in_16_bit(rank, world, hook):
    """What is missing of the gradients of some steps, as a fraction of them."""
    steps, names = 3, list(SHAPES)
    with attached(hook, SHAPES, torch.bfloat16) as (ddp, attachment):
        means = [backward(ddp, full_rank_gradients(rank, step, SHAPES, torch.bfloat16)) for step in range(steps)]
        owed = mean_residuals(attachment.state_dict(), SHAPES)
    expected = [mean_gradients(full_rank_gradients, world, step, SHAPES, torch.bfloat16) for step in range(steps)]
    total = {name: sum(mean[name].double() for mean in means) + owed[name] for name in names}
    produced = {name: sum(mean[name] for mean in expected) for name in names}
    return {name: ((total[name] - produced[name]).norm() / produced[name].norm()).item() for name in names}


@pytest.mark.parametrize(
    "hook",
    [
        TopK(ratio=1.0),
        lc.Int8(min_bytes=0, block_size=8, compress_1d=True),
        lc.PowerSGD(start_powerSGD_iter=0, matrix_approximation_rank=2),
        lc.BatchedPowerSGD(start_powerSGD_iter=0),
    ],
    ids=lambda hook: hook.name,
)
def test_what_rounding_to_16_bit_leaves_is_owed(run, hook):
    for lost in run(in_16_bit, hook):
        # PowerSGD averages vectors as they are.
        assert all(fraction <= 1e-6 for name, fraction in lost.items() if name != "bias"), lost
