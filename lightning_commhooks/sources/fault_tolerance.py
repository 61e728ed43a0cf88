"""Which replica of a run a framework's process is, for those that come and go."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from lightning_commhooks.hooks._local_sgd import LocalSGDConfig
from lightning_commhooks.interface.checks import check_integer
from lightning_commhooks.interface.hook import CommHook
from lightning_commhooks.interface.user_function import DDPHook
from lightning_commhooks.sources.quorum import check_hook
from lightning_commhooks.wrappers.scale import accumulation_of, without_scale


@dataclass(frozen=True)
class FaultTolerance:
    """Which replica of a run a `Trainer` or an `Accelerator` is, and how long it waits for the others. Needs torchft.

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


def check_options(hook: CommHook | DDPHook, options: Mapping[str, Any]) -> None:
    """Refuse hooks, and options of a framework's adapter, that need ranks that stay.

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
            f"hook={method.name!r} lets replicas step alone, and with fault_tolerance= each step is voted on: use a "
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
