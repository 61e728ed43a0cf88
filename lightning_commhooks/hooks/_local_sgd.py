"""Base classes of hooks with local steps, which average the ranks' models."""

from __future__ import annotations

import dataclasses
import warnings
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from lightning_commhooks.collectives.group import Group
from lightning_commhooks.collectives.steps import Steps
from lightning_commhooks.interface.averages_models import ALONE, AveragesModels
from lightning_commhooks.interface.bucket import Bucket
from lightning_commhooks.interface.checks import check_bool, check_integer
from lightning_commhooks.interface.hook import ANY_LATER_STEP, CommHook
from lightning_commhooks.interface.models import OptimizerStep
from lightning_commhooks.interface.python_code import code, earlier
from lightning_commhooks.interface.start import check_start, start_of

# At most this multiple of plain DDP's bytes counts as equal, to allow for rounding.
_SLIGHTLY_MORE = 1.005


@dataclass(frozen=True, kw_only=True)
class LocalSGDConfig(CommHook):
    """Options that these hooks share.

    Args:
        start_localSGD_iter: number of initial steps of each optimizer during which gradients are averaged over all
            ranks; or a fraction of the run, such as 0.1, if its length is known; or `"auto"`: see [`PowerSGD`][].
            PyTorch counts backward passes instead.
        post_local_gradient_allreduce: after the initial steps, average gradients over the subgroup; if not, send no
            gradients at all.
        subgroup_size: number of ranks in a subgroup, which consists of consecutive ranks; the last subgroup is smaller
            if the ranks do not divide evenly. `None`: the ranks of one node.
        average_buffers: average the running statistics of normalization layers (`running_*`, as in BatchNorm) with the
            parameters. Other buffers are set to rank 0's when all ranks average, if DDP has `broadcast_buffers=True`;
            otherwise each rank keeps its own. DDP's broadcast in each forward is then off during local steps. `False`
            leaves that broadcast as it is.
        optimizer_state: treatment of optimizer state, such as momenta, when models are averaged. `"keep"`: each rank
            keeps its own. `"average"`: averaged too. `"reset"`: discarded.

    Attributes:
        together_from_start: what begins at `start_localSGD_iter` if all ranks continue to average gradients at every
            step; `None`: nothing.
    """

    together_from_start: ClassVar[str | None] = None

    start_localSGD_iter: int | float | Literal["auto"] = 100
    post_local_gradient_allreduce: bool = True
    subgroup_size: int | None = None
    average_buffers: bool = True
    optimizer_state: Literal["keep", "average", "reset"] = "keep"

    def __post_init__(self) -> None:
        check_start("start_localSGD_iter", self.start_localSGD_iter)
        if self.subgroup_size is not None:
            check_integer("subgroup_size", self.subgroup_size, 1)
        for field in ("post_local_gradient_allreduce", "average_buffers"):
            check_bool(field, getattr(self, field))
        if not self.post_local_gradient_allreduce and self.subgroup_size is not None:
            raise ValueError(
                f"subgroup_size={self.subgroup_size} has no effect with post_local_gradient_allreduce=False, which "
                "averages gradients over no subgroup; leave one of the two out"
            )
        if self.optimizer_state not in ("keep", "average", "reset"):
            raise ValueError(f"optimizer_state must be 'keep', 'average' or 'reset', got {self.optimizer_state!r}")

    def changes_at(self) -> set[int]:
        start = start_of(self, "start_localSGD_iter")
        return set() if isinstance(start, float) else {start}

    @abstractmethod
    def bytes_of_averages(self, num_ranks: int) -> float:
        """Bytes per step that averaging models sends, relative to an all-reduce of the gradients."""


class BoundLocalSGD(AveragesModels):
    """Averages gradients first over all ranks, and later over this rank's subgroup; knows which steps are local.

    Args:
        config: the options.
        group: all ranks.
    """

    def __init__(self, config: LocalSGDConfig, group: Group) -> None:
        super().__init__(group)
        self._config = config
        self._first_step = start_of(config, "start_localSGD_iter")
        self.average_buffers = config.average_buffers
        # None: gradients stay as they are.
        self._subgroup = group.split(self._subgroups()) if config.post_local_gradient_allreduce else None
        if self._subgroup is not None and self._subgroup.size > 1:
            together = self._subgroup.size == group.size
            self.from_start = config.together_from_start if together else f"subgroups of {self._subgroup.size} {ALONE}"
        if group.rank == 0 and (text := self._costs()) is not None:
            warnings.warn(text, stacklevel=2)
        # Number of steps that each optimizer has taken since local steps began.
        self._num_steps = self.numbers["num_steps"] = {}
        # Number of the first backward after the start, as {"backward": number}; empty before it.
        self._start = self.numbers["start"] = {} if self._first_step else {"backward": 0}
        # Number of the current backward.
        self._current_step = -1

    def _costs(self) -> str | None:
        """Return why ranks will send at least as much as plain DDP after the start, and what to write instead."""
        config, size = self._config, self.group.size
        if self._subgroup is None or size == 1:
            return None
        averages = config.bytes_of_averages(size)
        alone = code(dataclasses.replace(config, post_local_gradient_allreduce=False, subgroup_size=None))
        if self._subgroup.size == size:
            more = ""
            if config.together_from_start is not None:
                more = f", and models besides, which sends about {1 + averages:.3g}x as many bytes as plain DDP"
            return (
                f"hook={config.name!r}: gradients go on being averaged over all {size} ranks at every step, because "
                f"{'all are on one node' if config.subgroup_size is None else 'they are one subgroup'}{more}. To let "
                f"them step alone: hook={alone}; or set a smaller subgroup_size"
            )
        largest = max(map(len, self._subgroups()))
        sent = ring_share(largest, size) + averages
        # If there are several nodes, and not each has a single rank, only traffic between nodes counts.
        if sent <= _SLIGHTLY_MORE or len(self.group.nodes()) not in (1, size):
            return None
        return (
            f"hook={config.name!r} sends about {sent:.3g}x as many bytes as plain DDP: gradients are averaged over "
            f"{largest} ranks at every step, and models besides. Average models more seldom, or let each rank step "
            f"alone: hook={alone}; or set a smaller subgroup_size"
        )

    def _own_subgroup(self) -> list[int]:
        """Return the ranks, this one included, that average gradients with this one during local steps."""
        if self._subgroup is None:
            return [self.group.rank]
        return next(ranks for ranks in self._subgroups() if self.group.rank in ranks)

    def _subgroups(self) -> list[list[int]]:
        size = self._config.subgroup_size
        if size is None:
            return self.group.nodes()
        return consecutive(self.group.size, size)

    def begin_backward(self, step: int, num_steps: Mapping[str, int]) -> None:
        self._current_step = step
        # If no optimizer is known, each backward counts as a step.
        if not self._start and self._starts_after(num_steps or {"": step}):
            self._start["backward"] = step

    def _starts_after(self, num_steps: Mapping[str, int]) -> bool:
        """Whether each optimizer has taken `start_localSGD_iter` steps.

        An optimizer that has not stepped is ignored once another one has taken twice that many steps. An optimizer that
        steps less often, or is no longer used, is ignored once another one has taken ten times that many.
        """
        start, most = self._first_step, max(num_steps.values())
        return all(num >= start or most >= (10 if num else 2) * start for num in num_steps.values())

    def has_started(self, step: int) -> bool:
        """Whether a backward comes after `start_localSGD_iter` steps of the optimizers; an estimate for the future."""
        guess = max(self._first_step, self._current_step + 1)
        return step >= self._start.get("backward", guess)

    def is_local(self, step: int) -> bool:
        size = 1 if self._subgroup is None else self._subgroup.size
        return size < self.group.size and self.has_started(step)

    def averages_gradients(self, step: int) -> bool:
        group = self._group_at(step)
        return group is not None and group.size > 1

    def _group_at(self, step: int) -> Group | None:
        return self._subgroup if self.has_started(step) else self.group

    def reduce(self, bucket: Bucket, ranks: Group) -> Steps[None]:
        group = self._group_at(bucket.step)
        if group is not None:
            yield from group.for_bucket(ranks).all_reduce_mean_(bucket.flat)

    def reduce_sparse(self, grad: Tensor, bucket: Bucket, ranks: Group) -> Steps[Tensor]:
        group = self._group_at(bucket.step)
        if group is None:
            return grad.coalesce()
        return (yield from group.for_bucket(ranks).all_reduce_sparse_mean(grad))

    def after_optimizer_step(self, stepped: OptimizerStep) -> None:
        # A step before the first synchronized backward is not counted, but ranks may differ after it.
        step = max(stepped.step, 0)
        if not self.has_started(step):
            return
        if self.is_local(step):
            stepped.models.diverge(stepped)
        if stepped.step < 0:
            return
        num_steps = self._steps_with(stepped)
        if stepped.num_steps:
            self._after_local_step(num_steps, stepped)
        self._num_steps[stepped.optimizer] = num_steps

    def communicates_after(self, stepped: OptimizerStep) -> bool:
        if not stepped.num_steps or stepped.step < 0:
            return False
        if self.has_started(stepped.step):
            return self._averages_after(self._steps_with(stepped), stepped)
        models = stepped.models
        most = {key: num + models.num_undecided.get(key, 0) for key, num in models.num_steps.items()}
        return self._starts_after({**most, stepped.optimizer: most.get(stepped.optimizer, stepped.num_steps)})

    def _steps_with(self, stepped: OptimizerStep) -> int:
        return self._num_steps.get(stepped.optimizer, 0) + stepped.num_steps

    @abstractmethod
    def _averages_after(self, num_steps: int, stepped: OptimizerStep) -> bool:
        """Whether models, or a part of them, are averaged after that many steps of an optimizer."""

    @abstractmethod
    def _after_local_step(self, num_steps: int, stepped: OptimizerStep) -> None:
        """Average models if an average is due.

        Args:
            num_steps: number of steps that this optimizer has taken since local steps began, including this one.
            stepped: the parameters of the optimizer.
        """

    def _follow_up_optimizer(self, stepped: OptimizerStep, group: Group) -> None:
        """Treat the optimizer's state as `optimizer_state` says, after `group` has averaged the parameters."""
        if self._config.optimizer_state == "average":
            stepped.models.average_state_(stepped, group)
        elif self._config.optimizer_state == "reset":
            stepped.models.reset_state_(stepped)

    def inactive_reason(self, step: int) -> str | None:
        start, name = self._first_step, self._config.name
        if not self.has_started(step):
            advice = earlier(self._config, step + 1)
            return f"hook={name!r} averages gradients over all ranks until start_localSGD_iter={start}; {advice}"
        never = step != ANY_LATER_STEP and self.is_local(step + 1) and not self.group.counters.averagings
        # Before a resume there may have been averages.
        never = never and max(self._num_steps.values(), default=0) < self._config.repeats_after()
        return f"hook={name!r} has never averaged models, the first period of steps has not ended" if never else None


def ring_share(size: int, num_ranks: int) -> float:
    """Return the bytes of an all-reduce among `size` ranks, divided by those of one among all ranks."""
    return (1 - 1 / size) / (1 - 1 / num_ranks)


def consecutive(num_ranks: int, size: int) -> list[list[int]]:
    """Divide the ranks into groups of `size`; the last group is smaller if they do not divide evenly."""
    return [list(range(first, min(first + size, num_ranks))) for first in range(0, num_ranks, size)]
