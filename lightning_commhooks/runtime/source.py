"""Where the buckets of a runtime come from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_commhooks.collectives.agreement import raise_on_all_ranks
from lightning_commhooks.collectives.group import Group
from lightning_commhooks.interface.hook import BoundHook, CommHook
from lightning_commhooks.interface.layout import Layout
from lightning_commhooks.interface.models import OptimizerStep
from lightning_commhooks.interface.user_function import DDPHook


class ChangingRanks(Protocol):
    """Ranks that come and go: there are none at first. They commit each step, or average of models, or drop it."""

    def reporting(self) -> AbstractContextManager[None]:
        """For what fails at the end of a step when ranks have gone: it raises nothing."""

    def average(self, stepped: OptimizerStep, average: Callable[[], None]) -> None:
        """Average models after an optimizer's step, if the hook averages them then."""

    def metrics(self) -> dict[str, float]:
        """Counts of the ranks."""


class Source(ABC):
    """Averages the gradients of a model, and lets a hook do so. Does not keep the model alive.

    Args:
        process_group: ranks that have the same hook.

    Attributes:
        refused: options of `attach` that do not fit, and why.
        kept: options of `attach` that the source itself needs.
        limits: why a hook does nothing here but reduce gradients, and what to use; empty if it does more.
        is_awaited: whether buckets are reduced where they are handed over, in process groups of the source's own.
        quorum: the ranks that train the model, if they come and go.
        device: device of the gradients.
        layout: names of the parameters.
        options: the kept options that were given.
        hooks: hooks other than the one for gradients, by the option that named them.
        shard_groups: ranks with the other shards of this replica, which the hook does not average over.
        shard: index of this rank's shard and number of shards, for each dimension; empty: the whole model.
    """

    refused: ClassVar[Mapping[str, str]] = {}
    kept: ClassVar[tuple[str, ...]] = ()
    limits: ClassVar[str] = ""
    is_awaited: ClassVar[bool] = False
    quorum: ChangingRanks | None = None

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self.process_group = process_group
        self.device = torch.device("cpu")
        self.layout = Layout(nn.Module())
        self.options: Mapping[str, Any] = {}
        self.hooks: dict[str, CommHook] = {}
        self.shard_groups: Sequence[dist.ProcessGroup] = ()
        self.shard: list[list[int]] = []

    @property
    def ranks_change(self) -> bool:
        """Whether ranks come and go."""
        return self.quorum is not None

    def set_options(self, given: Mapping[str, Any]) -> None:
        """Take options of `attach`, or raise a `ValueError` for one that does not fit."""
        for name in given:
            if name in self.refused:
                raise ValueError(f"{name} {self.refused[name]}")
        self.options = {name: given[name] for name in self.kept if name in given}

    @property
    def is_first_shard(self) -> bool:
        """Whether this rank has the first shard of its replica, or the whole model."""
        return not any(index for index, _ in self.shard)

    @contextmanager
    def agreeing(self, what: str) -> Iterator[dict[str, object]]:
        """As `raise_on_all_ranks`, among all ranks that train the model together."""
        same: dict[str, object] = {}
        with ExitStack() as stack:
            if self.device.type == "cuda":
                # NCCL gathers objects on the current device, which is another one without `torch.cuda.set_device`.
                stack.enter_context(torch.cuda.device(self.device))
            groups = [group for group in (*self.shard_groups, self.process_group) if group.size() > 1]
            values = [stack.enter_context(raise_on_all_ranks(group, what)) for group in groups]
            yield same
            for one in values:
                one |= same
            if self.shard and self.process_group.size() > 1:
                # Gradients of different shards have nothing in common.
                values[-1]["the shard [index, number] in replicate_group=mesh['replicas'].get_group()"] = self.shard

    @abstractmethod
    def resolve_hook(self, hook: object) -> CommHook | DDPHook:
        """Check the value that a user passed as `hook=`, with the options; raises a `ValueError`."""

    @abstractmethod
    def check(self, model: nn.Module) -> None:
        """Find device and names of the parameters; raises a `ValueError` if the model takes no hook."""

    def bind(self, hook: CommHook, group: Group) -> BoundHook:
        """Make the runtime object of a hook for these ranks. Collective."""
        return hook.bind(group)

    @abstractmethod
    def connect(self, model: nn.Module, runtime: Any) -> None:
        """Hand over buckets to this `Runtime` from now on. Collective."""

    def smallest(self, value: Tensor) -> Tensor:
        """The smallest value of all shards of a replica, of one element; of booleans, whether all hold. Collective."""
        if not self.shard_groups:
            return value
        number = value.to(torch.int64, copy=True).view(1)
        for group in self.shard_groups:
            dist.all_reduce(number, dist.ReduceOp.MIN, group=group)
        return number.to(value.dtype).view(())

    def gradients(self, reduced: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the gradients that the optimizer gets, from the reduced ones, when the step ends."""
        return reduced

    def metrics(self) -> dict[str, float]:
        """Counts of the source itself."""
        return {}

    def weights_replaced(self) -> None:  # noqa: B027  # optional to override
        """Called after averages took the place of this rank's own weights, or the reverse."""

    def end_step(self) -> None:  # noqa: B027  # optional to override
        """Called at the end of each synchronized backward."""

    def close(self) -> None:
        """Release the model: a closed attachment keeps no parameters."""
        self.layout = Layout(nn.Module())
