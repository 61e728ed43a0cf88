"""A Trainer as one replica of several, of which some may die: its steps are those that the replicas vote for."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from lightning_commhooks.collectives.errors import HookError
from lightning_commhooks.hooks._local_sgd import LocalSGDConfig
from lightning_commhooks.interface.checks import check_integer
from lightning_commhooks.interface.hook import CommHook
from lightning_commhooks.interface.user_function import DDPHook
from lightning_commhooks.sources.quorum import check_hook
from lightning_commhooks.wrappers.scale import accumulation_of, without_scale


@dataclass(frozen=True)
class FaultTolerance:
    """Which replica of a run a Trainer is, and how long it waits for the others. Needs torchft.

    `pip install 'lightning-commhooks[torchft]'`. The names are those of `torchft.Manager` and
    `torchft.data.DistributedSampler`.

    Args:
        replica_rank: which of the replicas this one is, from 0 on, also when it comes back: it trains on that share of
            the data. `None`: the environment's `REPLICA_GROUP_ID`.
        num_replica_groups: number of replicas when all are there. `None`: the environment's `NUM_REPLICA_GROUPS`.
        min_replica_size: with fewer replicas no step is taken; those that are there wait for others.
        timeout: seconds that a replica waits for one that neither answers nor closes its connections, in a collective
            and while it hands over its state. One that ends is noticed at once.
        quorum_timeout: seconds that a replica waits for others when a step begins. Has to be longer than one may stay
            away, as in a validation of its own.
        lighthouse_addr: the lighthouse, `"http://host:29510"`. `None`: the environment's `TORCHFT_LIGHTHOUSE`.
        hostname: name or address by which the other replicas reach this one. `None`: the machine's name.

    Raises:
        ValueError: a value is out of range, or neither given nor in the environment.
    """

    replica_rank: int | None = None
    num_replica_groups: int | None = None
    min_replica_size: int = 1
    timeout: float = 60.0
    quorum_timeout: float = 60.0
    lighthouse_addr: str | None = None
    hostname: str | None = None

    def __post_init__(self) -> None:
        for name, variable, least in (
            ("num_replica_groups", "NUM_REPLICA_GROUPS", 1),
            ("replica_rank", "REPLICA_GROUP_ID", 0),
        ):
            if getattr(self, name) is None:
                object.__setattr__(self, name, _from_environment(name, variable))
            check_integer(name, getattr(self, name), least)
        check_integer("min_replica_size", self.min_replica_size, 1)
        assert self.replica_rank is not None
        assert self.num_replica_groups is not None
        if self.replica_rank >= self.num_replica_groups:
            raise ValueError(
                f"replica_rank={self.replica_rank} is none of num_replica_groups={self.num_replica_groups}, which "
                "counts from 0"
            )
        if self.min_replica_size > self.num_replica_groups:
            raise ValueError(
                f"min_replica_size={self.min_replica_size} is more than the num_replica_groups="
                f"{self.num_replica_groups} that there are, so that no step would be taken"
            )
        for name in ("timeout", "quorum_timeout"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be a positive number of seconds, is {getattr(self, name)!r}")


def _from_environment(name: str, variable: str) -> int:
    value = os.environ.get(variable, "")
    if not value.isdecimal():
        raise ValueError(f"FaultTolerance({name}=...) is not given, and the variable {variable} is {value!r}: set one")
    return int(value)


class VotedSteps:
    """The optimizer's steps of a Trainer, each repeated until the replicas commit it.

    So a step of the Trainer is a step of all replicas: no batch is lost, and schedulers count right.
    """

    def __init__(self, options: FaultTolerance, strategy: Any) -> None:
        from lightning_commhooks.torchft import start_manager

        self._strategy = strategy
        self.manager = start_manager(
            f"replica_{options.replica_rank}",
            self._state,
            self._load,
            min_replica_size=options.min_replica_size,
            timeout=options.timeout,
            quorum_timeout=options.quorum_timeout,
            lighthouse_addr=options.lighthouse_addr,
            hostname=options.hostname,
        )
        # Whether the next batch begins a step.
        self._is_due = True

    @property
    def of_attach(self) -> dict[str, Any]:
        """Options of `attach`. A replica that joins goes by the length that the run had from its beginning on."""
        length = self._trainer.max_steps
        return {"manager": self.manager, "num_steps": length if length > 0 else None}

    def check_optimizers(self) -> None:
        """Refuse what makes replicas step differently, end at different steps, or meet in one folder.

        Raises:
            ValueError: says what to set instead.
        """
        trainer, strategy = self._trainer, self._strategy
        if trainer.max_steps < 0 or trainer.max_epochs not in (None, -1):
            raise ValueError(
                "fault_tolerance= needs Trainer(max_steps=...) without max_epochs, is "
                f"max_steps={trainer.max_steps}, max_epochs={trainer.max_epochs}: a replica that joins later has other "
                "epochs than those that are there"
            )
        is_here = os.path.realpath(trainer.default_root_dir) == os.path.realpath(os.getcwd())
        if (trainer.checkpoint_callbacks or trainer.loggers) and is_here:
            raise ValueError(
                "with fault_tolerance= each replica saves and logs for itself, and in one folder they delete each "
                f"other's files: give each a Trainer(default_root_dir=...) of its own, not {os.getcwd()!r}"
            )
        if not trainer.lightning_module.automatic_optimization:
            raise ValueError("fault_tolerance= repeats a step that failed, which it cannot in manual optimization")
        if any(isinstance(optimizer, LBFGS) for optimizer in strategy.optimizers):
            raise ValueError("fault_tolerance= votes on each backward, of which a step of LBFGS has several")
        for config in strategy.lr_scheduler_configs:
            if config.interval != "step" or config.frequency != 1 or config.reduce_on_plateau:
                raise ValueError(
                    f"the scheduler {type(config.scheduler).__name__} counts epochs or batches of this replica, and "
                    "others have other ones: return {'scheduler': ..., 'interval': 'step'} from "
                    "configure_optimizers(), without 'frequency', and no ReduceLROnPlateau"
                )

    def begin(self) -> None:
        """Meet the other replicas before the first batch of a step."""
        if self._is_due:
            self._start()

    def _start(self) -> None:
        progress, manager = self._progress(), self.manager
        if progress.completed > manager.current_step():
            # The Trainer goes on from a checkpoint.
            manager.load_state_dict({"step": progress.completed, "batches_committed": 0})
        manager.start_quorum()
        self._is_due = False
        if progress.completed != manager.current_step():
            # Others have given it their state.
            progress.ready += manager.current_step() - progress.completed
            progress.completed = manager.current_step()
            self._trainer.fit_loop.epoch_loop._batches_that_stepped = manager.current_step()

    @property
    def _trainer(self) -> Any:
        return self._strategy.lightning_module.trainer

    def _progress(self) -> Any:
        return self._trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total

    def committed(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """A closure that has run, as often as it took until the replicas committed its gradients."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        accumulated = _copies(parameters) if self._trainer.accumulate_grad_batches > 1 else []
        while True:
            result = closure()
            if result is None:
                raise HookError("training_step returned None for a batch, which a replica cannot skip alone")
            if self.manager.should_commit():
                self._is_due = True
                return _once(result)
            step = self.manager.current_step()
            self._start()
            for p, gradient in zip(parameters, accumulated, strict=False):
                # Those of weights that it has no more do not count.
                p.grad = gradient if self.manager.current_step() == step else None
            accumulated = _copies(parameters) if accumulated else []

    def _state(self) -> dict[str, Any]:
        strategy = self._strategy
        return {
            "module": strategy.lightning_module.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in strategy.optimizers],
            "lr_schedulers": [config.scheduler.state_dict() for config in strategy.lr_scheduler_configs],
            "precision": strategy.precision_plugin.state_dict(),
        }

    def _load(self, state: dict[str, Any]) -> None:
        strategy = self._strategy
        strategy.lightning_module.load_state_dict(state["module"])
        for optimizer, given in zip(strategy.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(given)
        for config, given in zip(strategy.lr_scheduler_configs, state["lr_schedulers"], strict=True):
            config.scheduler.load_state_dict(given)
        strategy.precision_plugin.load_state_dict(state["precision"])

    def close(self) -> None:
        """Leave the others."""
        self.manager.shutdown()


def _once(result: Any) -> Callable[[], Any]:
    """A closure that has run; an optimizer that asks twice would step by gradients that nobody has voted on."""
    left = [result]

    def closure() -> Any:
        if not left:
            raise HookError("fault_tolerance= votes on each backward, of which a step of this optimizer has several")
        return left.pop()

    return closure


def _copies(parameters: list[torch.nn.Parameter]) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.detach().clone() for p in parameters]


def check_options(hook: CommHook | DDPHook, options: Mapping[str, Any]) -> None:
    """Refuse hooks, and options of a strategy, that need ranks that stay.

    Raises:
        ImportError: torchft is not installed.
        ValueError: says what to set instead.
    """
    import_module("lightning_commhooks.torchft")  # says what to install
    check_hook(hook)
    assert isinstance(hook, CommHook)
    method = without_scale(hook)
    if isinstance(method, LocalSGDConfig):
        raise ValueError(
            f"hook={method.name!r} lets replicas step alone, and a Trainer's replicas evaluate and end together: use a "
            "loop of your own, as in docs/elastic.md"
        )
    if accumulation_of(hook) != "framework":
        raise ValueError("fault_tolerance= needs accumulation='framework': a step that is repeated has one micro-batch")
    if options.get("exact_state"):
        raise ValueError("exact_state=True keeps what differs between ranks, which replicas do not ask each other for")
    if options.get("static_graph"):
        raise ValueError(
            "fault_tolerance= does not work with static_graph=True: the buckets of a replica that joins later differ"
        )
