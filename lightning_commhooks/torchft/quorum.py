"""The replicas in the quorums of a torchft manager: they come and go, and vote on each step."""

from __future__ import annotations

import logging
import os
import time
import warnings
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_commhooks.basics.announce import announce
from lightning_commhooks.collectives.averaging import flat_view
from lightning_commhooks.collectives.errors import HookError, keep_in_forks
from lightning_commhooks.collectives.group import Group
from lightning_commhooks.hooks import DiLoCo, PostLocalSGD
from lightning_commhooks.hooks._local_sgd import LocalSGDConfig
from lightning_commhooks.hooks._pseudo_gradients import at_least_float32, has_residuals
from lightning_commhooks.interface.averages_models import averages_models
from lightning_commhooks.interface.hook import BoundHook, CommHook
from lightning_commhooks.interface.hook_state import describe
from lightning_commhooks.interface.models import OptimizerStep, digest_of
from lightning_commhooks.interface.user_function import DDPHook, UserFunction
from lightning_commhooks.runtime import checkpoint
from lightning_commhooks.runtime.ranks import Ranks
from lightning_commhooks.runtime.runtime import Runtime
from lightning_commhooks.runtime.source import ChangingRanks
from lightning_commhooks.wrappers.auto import Auto
from lightning_commhooks.wrappers.scale import without_scale

logger = logging.getLogger(__name__)

# An option of `attach` that is refused, and why.
EXACT_STATE = "keeps differences between ranks, which replicas do not exchange; leave it out with manager="

# Runtimes attached with each manager so far.
_attached: MutableMapping[Any, list[Runtime]] = weakref.WeakKeyDictionary()
# Bytes of a replica's name that the other replicas receive.
_NAME_BYTES = 32
# Seconds between an average that failed and the next try, at first and at most; and how many may fail in a row.
_PAUSE, _LONGEST_PAUSE, _TRIES = 0.05, 1.0, 10


def meet(group: Group, device: torch.device) -> None:
    """Make sure that all ranks have finished their collectives."""
    group.finish(group.quiet().all_reduce_(torch.zeros(1, device=device)))


class Quorum(ChangingRanks):
    """Replicas of a model; a hook averages gradients, or models, among those that are present.

    A failure is reported to the manager and raises nothing: the step is not committed, and the hook's memory is as
    after a step with inf or NaN. The next quorum has the remaining replicas.

    Args:
        manager: a `torchft.Manager`, with a process group of `lightning_commhooks.torchft`.

    Attributes:
        names: of the replicas that are present.
    """

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        # The group that the hook runs among.
        self._members: object | None = None
        self.names: list[str] = []
        # With a number of this start, since a replica may return before its absence is noticed.
        self._there: set[tuple[str, int]] = set()
        self._start = int.from_bytes(os.urandom(4), "little")
        # A state that another replica has handed over.
        self._received_state: Mapping[str, Any] | None = None
        # This replica's own weights before it received that state, and whether the others may have averaged them.
        self._own: Mapping[str, Tensor] = {}
        self._took_part = False
        # Whether there was a backward that replicas have not voted on.
        self._awaits_vote = False
        self._quorums, self._not_committed, self._lost_seconds = 0, 0, 0.0
        self._last_commit, self._is_losing = time.perf_counter(), False
        self._has_committed = False

    def check_manager(self, num_processes: int, rank: int) -> None:
        """Refuse a manager that hooks cannot ask, or that is not of this process, one of so many of its replica.

        Raises:
            ValueError: says what to give it.
        """
        manager = self._manager
        given = {"world_size": manager._group_world_size, "rank": manager._group_rank}
        needed = {"world_size": num_processes, "rank": rank}
        if given != needed:
            raise ValueError(
                f"the manager has {given}, and the processes of the model, which are its replica, need {needed}: give "
                "torchft.Manager these values; start_manager() takes the values of the default process group, if it "
                "exists by then"
            )
        if getattr(manager, "_use_async_quorum", False):
            raise ValueError(
                "the manager has use_async_quorum=True, with which replicas that join do not count in their first "
                "step: give it use_async_quorum=False"
            )
        if not hasattr(manager._pg, "members"):
            raise ValueError(
                f"the manager has pg={type(manager._pg).__name__}: hooks communicate in groups of "
                "lightning_commhooks.torchft.ProcessGroupGloo"
            )

    def connect(self, runtime: Runtime, finish: Callable[[Group], None]) -> None:
        """Connect the hook whose steps the replicas vote on.

        Args:
            runtime: of the hook.
            finish: called before a vote, when all gradients are there. Collective; it fails on a replica that could
                not take part in the step.

        Raises:
            ValueError: the manager has a hook already, or a wrapper is around a hook that averages models.
        """
        manager, averages = self._manager, runtime.bound.averages_models
        before = _attached.setdefault(manager, [])
        if any(not other.is_closed for other in before):
            raise ValueError("this manager has a model with a hook, and one is all it takes: put both in one module")
        if averages and not isinstance(runtime.method, LocalSGDConfig):
            raise ValueError(
                f"hook={runtime.name!r} contains a hook that averages models; with manager= give that hook by itself, "
                "such as hook=DiLoCo(...)"
            )
        before.append(runtime)
        keep_in_forks(manager)
        self._runtime, self._finish = runtime, finish
        self._vote: Callable[..., bool] = manager.should_commit
        if not averages:
            # The training script and `torchft.Optimizer` call this manager, and would not call a wrapper of it.
            manager.should_commit = self._should_commit
        key = f"lightning_commhooks {len(before)}"
        manager.register_state_dict_fn(key, self._take, lambda: self._own_state("joining"))

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Report a failure within to the manager instead of raising it, except for options that do not fit."""
        try:
            yield
        except ValueError:
            raise
        except Exception as error:
            if self._manager.errored() is None:
                logger.warning("step %d is not committed: %s", self._manager.current_step(), error)
                self._manager.report_error(error)

    @contextmanager
    def part_of_step(self) -> Iterator[None]:
        """For what replicas do together in a step. What fails here fails for all that wait; not begun where it did."""
        with self._runtime.aborting():
            if self._manager.errored() is not None:
                raise HookError("this step was not committed, because a replica failed or left; it is repeated")
            yield

    def begin_backward(self) -> None:
        """Begin a step, before its gradients are averaged.

        Raises:
            HookError: the quorum of this step, or the vote on the last one, was not requested.
            ValueError: this replica joins replicas that have another hook or model.
        """
        if self._awaits_vote:
            raise HookError("call manager.should_commit() after each backward, before the optimizer's step")
        self._begin()
        self._awaits_vote = True

    def _begin(self) -> None:
        """Go on among other replicas, if there is a new quorum."""
        runtime, manager = self._runtime, self._manager
        try:
            manager.wait_quorum()
        except AssertionError:
            raise HookError(
                "call manager.start_quorum() before each forward, and manager.should_commit() after its backward"
            ) from None
        if manager.errored() is None and manager._pg.members is not self._members:
            with self.reporting():
                members = Ranks.of_members(runtime, manager._pg.members)
                self._go_on_among(members, self._own_state("own"), self._compare)
                self._members = manager._pg.members
                self._quorums += 1
        if manager.errored() is None and self._received_state is not None:
            # A replica that has just started has none, and its steps do not count.
            before = self._runtime.local.common_model() if self._has_committed else {}
            self._load(self._received_state, runtime.bind_again())
            self._received_state = None
            self._begin_at_common_model(before)
        if self._is_losing:
            now = time.perf_counter()
            self._lost_seconds += now - self._last_commit
            self._last_commit, self._is_losing = now, False
        if not runtime.bound.averages_models:
            # Attempts that were not committed do not count, nor where a replica began.
            runtime.clock.steps = manager.current_step()

    def _go_on_among(
        self, ranks: Ranks, state: Mapping[str, Any], compare: Callable[[Group], None] = lambda group: None
    ) -> None:
        """Go on among other ranks with a state of the hook, if `compare` raises nothing. Collective."""
        runtime, models = self._runtime, self._runtime.local.models
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the user got them when the hook was attached
            runtime.run_among(ranks, compare)
        models.regroup(ranks.group)
        models.begin = ranks.background.begin
        diverged = set(models.diverged)
        self._load(state, runtime.bound)
        models.diverged |= diverged

    def _load(self, state: Mapping[str, Any], fresh: BoundHook) -> None:
        checkpoint.load_alone(state, self._runtime, fresh)
        self._runtime.begin_at(fresh, state["steps"], state["optimizer_steps"])

    def _own_state(self, kind: Literal["own", "joining"]) -> dict[str, Any]:
        """The hook's state on this replica, or the part of it for a joining replica. Not collective."""
        return checkpoint.save_alone(self._runtime, kind)

    def _begin_at_common_model(self, before: Mapping[str, Tensor]) -> None:
        """Begin at the other replicas' last averages, with this replica's own changes that they do not include.

        A late replica's changes count in the next average: Decoupled DiLoCo, Douillard et al. 2026,
        https://arxiv.org/abs/2604.21428. A replica that loses an average at the last moment is in it, if the others
        have committed it; they have other common weights then.

        Args:
            before: the common weights from which this replica has changed; empty for a joining replica.
        """
        models, trained = self._runtime.local.models, self._runtime.layout.trained
        models.diverged.clear()
        for name, common in self._runtime.local.common_model().items():
            changed = name in before and not (self._took_part and not torch.equal(before[name], common))
            begin = common + (at_least_float32(self._own[name]) - before[name]) if changed else common
            own = flat_view(trained[name])
            own.copy_(begin.view(own.shape))
            if changed:
                models.diverged.add(name)

    def _digest(self) -> int:
        """Digest of the weights that must be equal on all replicas; 0 if this replica receives another's."""
        if self._received_state is not None:
            return 0
        # Where replicas step alone, their last common weights, if the hook keeps them.
        averages = self._runtime.bound.averages_models
        weights = self._runtime.local.common_model() if averages else self._runtime.layout.trained
        return 1 + digest_of(weights.values())

    def _compare_weights(self, names: list[str], digests: list[int], own: int) -> None:
        """Find replicas that committed a step which the rest lost at the last moment, and continued alone.

        Raises:
            HookError: there are such replicas, and they will receive the weights of the rest.
            ValueError: there are, and they cannot receive them.
        """
        counts = Counter(digest for digest in digests if digest)
        if len(counts) < 2:
            return
        manager, right = self._manager, counts.most_common(1)[0][0]
        step = manager.current_step()
        if step == 0:
            raise ValueError(
                "replicas begin with different weights, which Manager(init_sync=False) leaves as they are: make the "
                "model with the same seed everywhere, or leave that out, so that all get the weights of one"
            )
        wrong = next(name for name, one in zip(names, digests, strict=True) if one not in (0, right))
        text = f"at step {step} replica {wrong!r} has other weights than {names[digests.index(right)]!r}"
        if own not in (0, right):
            # Its other processes would not know.
            if self._runtime.source.shard:
                raise ValueError(f"{text}. Start all processes of replica {wrong!r} again")
            manager.load_state_dict({"step": step - 1, "batches_committed": manager.batches_committed()})
        raise HookError(f"{text}, and loads them")

    def _compare(self, group: Group) -> None:
        """Compare the properties that must agree between members, or gloo ends them; report arrivals and departures."""
        runtime, shard = self._runtime, self._runtime.source.shard
        about = repr((describe(runtime.method), runtime.layout.shapes, shard))
        name = self._manager._pg.replica_name[:_NAME_BYTES].encode().ljust(_NAME_BYTES)[:_NAME_BYTES]
        own = zlib.crc32(about.encode())
        step = self._manager.current_step()
        digest = self._digest()
        told = group.all_gather_quietly([own, self._start, step, digest, *name])
        names = [bytes(one[4:]).decode(errors="replace").strip() for one in told]
        if step < max(one[2] for one in told):
            # Its replica counts as one that has all, since another process of it has.
            raise ValueError(
                f"this process is at step {step} and the other replicas are further: it did not get its shards when "
                "its replica joined. Start the replica again"
            )
        if any(one[2] < step for one in told):
            raise HookError(
                "a replica joined, and one of its processes received no state: that replica has to start again"
            )
        unlike = [name for name, one in zip(names, told, strict=True) if one[0] != own]
        if unlike:
            # Earlier members, and newcomers in the majority, continue once that replica has left.
            is_new, are_few = self._received_state is not None or not self._there, 2 * len(unlike) >= len(told)
            kind = ValueError if is_new and are_few else HookError
            raise kind(
                f"replica {unlike[0]!r} differs from this one in its hook, the hook's options or the model's "
                f"parameters: this one has hook={runtime.method!r} and {len(runtime.layout.shapes)} parameters. Start "
                "all replicas with the same script and options"
            )
        self._compare_weights(names, [one[3] for one in told], digest)
        before, self._there = self._there, {(name, one[1]) for name, one in zip(names, told, strict=True)}
        changes = {"left": before - self._there, "joined": self._there - before}
        said = [
            f"{', '.join(repr(name) for name, _ in sorted(those))} {what}" for what, those in changes.items() if those
        ]
        if said and before and runtime.source.is_first_shard:
            announce(f"replica {' and '.join(said)} at step {self._manager.current_step()}: {len(names)} go on")
        self.names = names

    def _should_commit(self, *args: Any, **kwargs: Any) -> bool:
        runtime = self._runtime
        if runtime.is_closed:
            return bool(self._vote(*args, **kwargs))
        with self.reporting(), self.part_of_step():
            runtime.call(lambda: self._finish(runtime.bound.group))
        self._awaits_vote = False
        committed = self._voted(*args, **kwargs)
        runtime.decide(committed)
        return committed

    def _voted(self, *args: Any, **kwargs: Any) -> bool:
        committed = bool(self._vote(*args, **kwargs))
        manager = self._manager
        if not committed and not self._is_losing and manager.errored() is None:
            there, least = manager.num_participants(), manager._min_replica_size
            if there < least:
                announce(f"step {manager.current_step()} waits for replicas: {there} of at least {least} are there")
        self._not_committed += not committed
        if committed:
            self._last_commit, self._has_committed = time.perf_counter(), True
        self._is_losing = not committed
        return committed

    def average(self, stepped: OptimizerStep, average: Callable[[], None]) -> None:
        """Average the replicas' models; after a failure, try again among the remaining ones, until they vote for it.

        Raises:
            HookError: it failed too often in a row.
        """
        bound = self._runtime.bound
        if averages_models(bound) and not bound.applies_average_after(stepped):
            average()  # or begin to, among the replicas of the last vote
            return
        pause, failed = _PAUSE, 0
        while not self._has_averaged(average):
            failed = failed + 1 if (lost := self._manager.errored()) is not None else 0
            if failed == _TRIES:
                raise HookError(f"an average of models failed {_TRIES} times in a row: {lost.original_exception}")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _has_averaged(self, average: Callable[[], None]) -> bool:
        """Average models, and vote on that; where it fails, this replica has its own again."""
        runtime, manager = self._runtime, self._manager
        tensors = [*runtime.layout.trained.values(), *runtime.layout.float_buffers().values()]
        own = [tensor.detach().clone() for tensor in tensors]
        # Unless they are another replica's, received in an attempt that failed.
        if self._received_state is None:
            self._own = dict(zip(runtime.layout.trained, own, strict=False))
        manager.start_quorum()
        bound = runtime.bound
        self._begin()
        if self._received_state is None:
            self._own, self._took_part = {}, False
        if runtime.bound is not bound:  # this replica may have received another's weights
            own = [tensor.detach().clone() for tensor in tensors]
        state, diverged = self._own_state("own"), set(runtime.local.models.diverged)
        num_averaged = runtime.counters.averagings
        if manager.errored() is None:
            with self.reporting():
                average()
                self._took_part = True
                # Otherwise it might have failed on other replicas only.
                runtime.call(lambda: meet(runtime.bound.group, runtime.source.device))
        if self._voted():
            self._took_part = False
            return True
        with torch.no_grad():
            for tensor, before in zip(tensors, own, strict=True):
                tensor.copy_(before)
        runtime.counters.averagings = num_averaged
        runtime.local.models.diverged |= diverged
        self._go_on_among(Ranks.of_source(runtime, None), state)
        self._members = None
        return False

    def _take(self, state: Mapping[str, Any]) -> None:
        self._received_state = state

    def metrics(self) -> dict[str, float]:
        """Metrics of the attachment that only replicas have."""
        return {
            "replicas": len(self.names),
            "quorums": self._quorums,
            "steps_not_committed": self._not_committed,
            "lost_ms": 1e3 * self._lost_seconds,
        }


def _check_local(hook: LocalSGDConfig) -> None:
    """Refuse what replicas would have to do together between averages."""
    if not isinstance(hook, (DiLoCo, PostLocalSGD)):
        raise ValueError(f"hook={hook.name!r} averages in subgroups, which replicas that come and go have none of")
    wanted: dict[str, object] = {"start_localSGD_iter": 0, "post_local_gradient_allreduce": False}
    wanted |= {"optimizer_state": "keep"}
    if isinstance(hook, DiLoCo):
        wanted |= {"eager": False, "period_seconds": None}
    for name, value in wanted.items():
        if getattr(hook, name) != value:
            raise ValueError(
                f"hook={hook.name!r}: {name}={getattr(hook, name)!r} needs ranks that stay; with manager= set it to "
                f"{value!r}"
            )
    if not isinstance(hook, DiLoCo) or not hook.delay:
        return
    if hook.delay == hook.period:
        raise ValueError(
            f"hook={hook.name!r}: with delay={hook.delay}, the period, replicas keep no copy of the changes in flight "
            f"and lose them when one of them leaves; with manager= set it to at most {hook.period - 1}"
        )
    if has_residuals(hook.pseudo_gradient, hook.error_feedback):
        raise ValueError(
            f"hook={hook.name!r}: delay={hook.delay} does not work with pseudo_gradient={hook.pseudo_gradient!r} and "
            "manager=, because error feedback cannot be undone when replicas lose an average. Set delay=0, or "
            "pseudo_gradient='int4' with error_feedback=False"
        )


def check_hook(hook: CommHook | DDPHook) -> None:
    """Refuse a hook that needs ranks that stay.

    Raises:
        ValueError: says which to use.
    """
    method = without_scale(hook) if isinstance(hook, CommHook) else hook
    if not isinstance(method, CommHook) or isinstance(method, UserFunction):
        raise ValueError(f"hook={hook!r} is a function for a process group that stays; among replicas use a CommHook")
    if isinstance(method, LocalSGDConfig):
        _check_local(method)
    if isinstance(method, Auto):
        raise ValueError("hook='auto' measures one group of ranks, and replicas come and go: choose a hook")
