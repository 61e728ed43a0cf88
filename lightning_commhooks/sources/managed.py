"""Buckets of `DistributedDataParallel` among replicas that come and go: those of the quorums of a torchft manager."""

# No `from __future__ import annotations`: DDP compares the annotations of the hooks that are made here.

import functools
import logging
import time
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from lightning_commhooks.codecs.announce import announce
from lightning_commhooks.collectives.averaging import flat_view
from lightning_commhooks.collectives.errors import HookError
from lightning_commhooks.collectives.group import Group
from lightning_commhooks.hooks import DiLoCo, PostLocalSGD
from lightning_commhooks.hooks._local_sgd import LocalSGDConfig
from lightning_commhooks.interface.averages_models import averages_models
from lightning_commhooks.interface.bucket import Bucket
from lightning_commhooks.interface.hook import CommHook
from lightning_commhooks.interface.hook_state import describe
from lightning_commhooks.interface.models import OptimizerStep
from lightning_commhooks.interface.user_function import DDPHook, UserFunction
from lightning_commhooks.runtime.members import Members
from lightning_commhooks.runtime.runtime import Runtime
from lightning_commhooks.sources.ddp import DDPSource
from lightning_commhooks.sources.ddp_model import Trampoline
from lightning_commhooks.wrappers.auto import Auto
from lightning_commhooks.wrappers.scale import without_scale

logger = logging.getLogger(__name__)

# What was attached with a manager so far.
_attached: MutableMapping[Any, list[Runtime]] = weakref.WeakKeyDictionary()
# Characters of a replica's name that others are told.
_NAME_BYTES = 32


def _check_local(hook: LocalSGDConfig) -> None:
    """Refuse what replicas would have to do together between averages."""
    if not isinstance(hook, (DiLoCo, PostLocalSGD)):
        raise ValueError(f"hook={hook.name!r} averages in subgroups, which replicas that come and go have none of")
    wanted: dict[str, object] = {"start_localSGD_iter": 0, "post_local_gradient_allreduce": False}
    wanted |= {"optimizer_state": "keep"}
    if isinstance(hook, DiLoCo):
        wanted |= {"fragments": 1, "delay": 0, "eager": False, "period_seconds": None}
    for name, value in wanted.items():
        if getattr(hook, name) != value:
            raise ValueError(
                f"hook={hook.name!r}: {name}={getattr(hook, name)!r} needs ranks that stay; with manager= set it to "
                f"{value!r}"
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


class Reporting:
    """Tells a manager of a failure within, which ends there; but for one of options, not of ranks that have gone."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception) or isinstance(error, ValueError):
            return False
        if self._manager.errored() is None:
            logger.warning("step %d is not committed: %s", self._manager.current_step(), error)
            self._manager.report_error(error)
        return True


class ManagedDDP(DDPSource):
    """The reducer of a DDP model that is alone in its process group; its gradients are averaged among replicas.

    A failure is reported to the manager and raises nothing: the step is not committed, and what the hook remembers is
    as after a step with inf or NaN. The next quorum has those that are left.

    Args:
        process_group: DDP's own, of one process.
        manager: a `torchft.Manager`, with a process group of `lightning_commhooks.torchft`.
    """

    ranks_change: ClassVar[bool] = True
    refused: ClassVar[Mapping[str, str]] = {
        **DDPSource.refused,
        "exact_state": "keeps what differs between ranks, of which replicas ask no others; leave it out with manager=",
    }

    def __init__(self, process_group: dist.ProcessGroup, manager: Any) -> None:
        super().__init__(process_group)
        self._manager = manager
        # The group that the hook runs among, and names of the replicas in it.
        self._members: object | None = None
        self._names: list[str] = []
        # A state that another replica has handed over.
        self._given: Mapping[str, Any] | None = None
        # Parameters without gradients here in this step, and the means of their gradients.
        self._unused: dict[str, Tensor] = {}
        # Whether there was a backward that replicas have not voted on.
        self._awaits_vote = False
        self._quorums, self._not_committed, self._lost_seconds = 0, 0, 0.0
        self._last_commit, self._is_losing = time.perf_counter(), False

    @contextmanager
    def agreeing(self, what: str) -> Iterator[dict[str, object]]:
        # Nobody else is there yet; members compare when a quorum begins.
        yield {}

    def resolve_hook(self, hook: object) -> CommHook | DDPHook:
        resolved = super().resolve_hook(hook)
        check_hook(resolved)
        return resolved

    def check(self, model: nn.Module) -> None:
        super().check(model)
        assert isinstance(model, DistributedDataParallel)
        if self.process_group.size() != 1:
            raise ValueError(
                f"with manager= a replica is one process, and the model's process group has {self.process_group.size()}"
            )
        if model.static_graph or not model.find_unused_parameters:
            raise ValueError(
                "with manager= the model needs find_unused_parameters=True and no static_graph: otherwise DDP builds "
                "its buckets anew after the first step, and those of a replica that joins later differ. See "
                "lightning_commhooks.torchft.DistributedDataParallel"
            )
        if getattr(self._manager, "_use_async_quorum", False):
            raise ValueError(
                "the manager has use_async_quorum=True, with which replicas that join do not count in their first "
                "step: give it use_async_quorum=False"
            )
        if not hasattr(self._manager._pg, "members"):
            raise ValueError(
                f"the manager has pg={type(self._manager._pg).__name__}: hooks communicate in groups of "
                "lightning_commhooks.torchft.ProcessGroupGloo"
            )

    def connect(self, model: nn.Module, runtime: Runtime) -> None:
        before = _attached.setdefault(self._manager, [])
        if any(not other.is_closed for other in before):
            raise ValueError("this manager has a model with a hook, and one is all it takes: put both in one module")
        if averages_models(runtime.bound) and not isinstance(runtime.method, LocalSGDConfig):
            raise ValueError(f"hook={runtime.name!r} has a hook that averages models; with manager= give that alone")
        super().connect(model, runtime)
        before.append(runtime)
        manager, self._runtime, self._ranks = self._manager, runtime, Members(runtime)
        self._vote: Callable[..., bool] = manager.should_commit
        if not averages_models(runtime.bound):
            manager.should_commit = functools.partial(self._should_commit, runtime)
        key = f"lightning_commhooks {len(_attached[manager])}"
        manager.register_state_dict_fn(key, self._take, self._ranks.state_for_others)

    def trampoline(self, runtime: Runtime, model: DistributedDataParallel) -> Trampoline:
        plainly = super().trampoline(runtime, model)
        if averages_models(runtime.bound):
            return plainly

        def trampoline(state: object, bucket: GradBucket) -> Future[Tensor]:
            flat = bucket.buffer()
            if bucket.index() == 0:
                self._begin(runtime)
                self._awaits_vote = True
            with self.reporting(), self._part_of_step(runtime):
                plain = self._plain(bucket, runtime)
                self._note_unused(plain)
                return self._survived(runtime.submit(plain, is_late=False), flat)
            given_up: Future[Tensor] = Future()
            given_up.set_result(flat)
            return given_up

        return trampoline

    @contextmanager
    def _part_of_step(self, runtime: Runtime) -> Iterator[None]:
        with runtime.aborting():
            if self._manager.errored() is not None:
                raise HookError("the step is lost")  # also for those that wait for this rank
            yield

    def _survived(self, reduced: Future[Tensor], flat: Tensor) -> Future[Tensor]:
        """The gradients, also where that failed: DDP ends the process otherwise."""

        def value(done: Future[Tensor]) -> Tensor:
            with self.reporting():
                return done.value()
            return flat

        return reduced.then(value)

    def reporting(self) -> "Reporting":
        return Reporting(self._manager)

    def _begin(self, runtime: Runtime) -> None:
        """Begin a step: among other replicas, if there is a new quorum."""
        manager = self._manager
        if self._awaits_vote:
            raise HookError("call manager.should_commit() after each backward, before the optimizer's step")
        try:
            manager.wait_quorum()
        except AssertionError:
            raise HookError(
                "call manager.start_quorum() before each forward, and manager.should_commit() after its backward"
            ) from None
        if manager.errored() is None and manager._pg.members is not self._members:
            with self.reporting():
                about = repr((describe(runtime.method), self.layout.shapes))
                self._ranks.go_on_among(manager._pg.members, lambda group: self._compare(group, about))
                self._members = manager._pg.members
                self._quorums += 1
        if manager.errored() is None and self._given is not None:
            self._ranks.take_state(self._given)
            self._given = None
            if averages_models(runtime.bound):
                runtime.bound.join(self.layout.trained)
        if self._is_losing:
            now = time.perf_counter()
            self._lost_seconds += now - self._last_commit
            self._last_commit, self._is_losing = now, False
        if not averages_models(runtime.bound):
            # Attempts that were not committed do not count, nor where a replica began.
            runtime.clock.steps = manager.current_step()

    def _compare(self, group: Group, about: str) -> None:
        """Compare what members have to have alike, or gloo ends them; tell who came and left."""
        name = self._manager._pg.replica_name[:_NAME_BYTES].encode().ljust(_NAME_BYTES)[:_NAME_BYTES]
        own = zlib.crc32(about.encode())
        told = group.all_gather_quietly([own, *name])
        names = [bytes(one[1:]).decode(errors="replace").strip() for one in told]
        unlike = [name for name, one in zip(names, told, strict=True) if one[0] != own]
        # Those who were there before go on when it has gone.
        if unlike and self._given is not None:
            raise ValueError(f"replica {unlike[0]!r} has another hook, other options of it, or another model")
        if unlike:
            raise HookError(f"replica {unlike[0]!r} has another hook, other options of it, or another model")
        changes = {"left": sorted({*self._names} - {*names}), "joined": sorted({*names} - {*self._names})}
        said = [f"{', '.join(map(repr, those))} {what}" for what, those in changes.items() if those]
        if said and self._names:
            announce(f"replica {' and '.join(said)} at step {self._manager.current_step()}: {len(names)} go on")
        self._names = names

    def _note_unused(self, bucket: Bucket) -> None:
        for slot in bucket.slots:
            if slot.name in (bucket.unused or ()) and not bucket.flat.is_sparse:
                self._unused[slot.name] = slot.view(bucket.flat)

    def _should_commit(self, runtime: Runtime, *args: Any, **kwargs: Any) -> bool:
        if runtime.is_closed:
            return bool(self._vote(*args, **kwargs))
        with self.reporting(), self._part_of_step(runtime):
            runtime.call(lambda: self._give_unused(runtime.bound.group))
        self._unused, self._awaits_vote = {}, False
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
            self._last_commit = time.perf_counter()
        self._is_losing = not committed
        return committed

    def average(self, stepped: OptimizerStep, average: Callable[[], None]) -> None:
        """Let replicas average their models, and vote on that; where it fails, each goes on from its own.

        It is tried again after the next step.
        """
        runtime, manager = self._runtime, self._manager
        if averages_models(runtime.bound) and not runtime.bound.communicates_after(stepped):
            average()
            return
        manager.start_quorum()
        self._begin(runtime)
        tensors = [*self.layout.trained.values(), *self.layout.float_buffers().values()]
        own, state = [tensor.detach().clone() for tensor in tensors], self._ranks.own_state()
        if manager.errored() is None:
            with self.reporting():
                average()
        if not self._voted():
            with torch.no_grad():
                for tensor, before in zip(tensors, own, strict=True):
                    tensor.copy_(before)
            self._ranks.go_on_alone(state)
            self._members = None

    def watch_local(self, runtime: Runtime, step: int) -> None:
        if averages_models(runtime.bound):
            # As long as there are no others, no step is one that ranks take alone.
            runtime.local.check_optimizers()
        super().watch_local(runtime, step)

    def _give_unused(self, group: Group) -> None:
        """Give parameters that got gradients on other replicas only their mean, as DDP does for its own ranks."""
        names = list(self.layout.trained)
        used = torch.tensor([float(name not in self._unused) for name in names], device=self.device)
        group.finish(group.quiet().all_reduce_(used))
        for name, num in zip(names, used.tolist(), strict=True):
            if num and name in self._unused:
                parameter = self.layout.trained[name]
                parameter.grad = torch.empty_like(parameter)
                own = flat_view(parameter.grad)
                own.copy_(self._unused[name].reshape(own.shape))

    def _take(self, state: Mapping[str, Any]) -> None:
        self._given = state

    def metrics(self) -> dict[str, float]:
        return {
            "replicas": len(self._names),
            "quorums": self._quorums,
            "steps_not_committed": self._not_committed,
            "lost_ms": 1e3 * self._lost_seconds,
        }
