"""Which replica of a run a framework's process is, for those that come and go."""

from __future__ import annotations

import os
from dataclasses import dataclass

from lightning_commhooks.interface.checks import check_integer


@dataclass(frozen=True)
class FaultTolerance:
    """The place of a `Trainer` or an `Accelerator` among a run's replicas, and its timeouts. Needs torchft.

    `pip install 'lightning-commhooks[torchft]'`. The names are those of `torchft.Manager` and
    `torchft.data.DistributedSampler`.

    Args:
        replica_rank: index of this replica, from 0 on, which it keeps when it comes back: it trains on that share of
            the data. `None`: the environment's `REPLICA_GROUP_ID`.
        num_replica_groups: number of replicas when all are present. `None`: the environment's `NUM_REPLICA_GROUPS`.
        min_replica_size: with fewer replicas no step, or average of models, is taken; the present replicas wait for
            more.
        timeout: seconds that a replica waits for one that neither answers nor closes its connections, in a collective
            and while it hands over its state. One that ends is noticed at once.
        quorum_timeout: seconds that a replica waits for the rest when a step begins. Must be longer than a replica may
            stay away, as in a validation of its own; with a hook that averages models, longer than its period of steps.
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
                raise ValueError(f"{name} must be a positive number of seconds, got {getattr(self, name)!r}")


def check_fault_tolerance(value: object) -> None:
    """Require `None` or a `FaultTolerance`; works without torchft."""
    if value is not None and not isinstance(value, FaultTolerance):
        raise ValueError(f"fault_tolerance must be a FaultTolerance(...), got {value!r}")


def _from_environment(name: str, variable: str) -> int:
    value = os.environ.get(variable, "")
    if not value.isdecimal():
        raise ValueError(f"FaultTolerance({name}=...) is not given, and the variable {variable} is {value!r}: set one")
    return int(value)
