"""Hierarchical local SGD: neighbours average their models often, all ranks seldom."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from lightning_commhooks.collectives.group import Group
from lightning_commhooks.hooks._local_sgd import LocalSGDConfig, consecutive, ring_share
from lightning_commhooks.hooks.post_localsgd import BoundPeriodicAverages
from lightning_commhooks.interface.checks import check_integer
from lightning_commhooks.interface.hook import BoundHook
from lightning_commhooks.interface.registry import register

# Enough to count averages in, where periods end together more seldom.
_MANY_STEPS = 10_000


@register
@dataclass(frozen=True, kw_only=True)
class HierarchicalLocalSGD(LocalSGDConfig):
    """After a warm-up, step alone on each rank and average models in groups: the larger the group, the less often.

    Lin et al. 2018, https://arxiv.org/abs/1808.07217, section 5; PyTorch's `HierarchicalModelAverager` together with
    `post_localSGD_hook`. When several periods end at once, only the longest one's group averages. Differs from PyTorch
    in that each optimizer counts its own steps, from 1 on and only those that ranks take alone; periods may be given in
    any order; and groups need not divide evenly.

    Args:
        period_group_size_dict: for each period, in steps of an optimizer, the number of ranks that average then:
            `{4: 8, 16: 64}` averages 8 neighbours every 4 steps and all 64 every 16. Sizes grow with periods. The
            largest must be the number of ranks, or `None`, which stands for it. By default all ranks, every 8 steps.
        subgroup_size: ranks in a subgroup that averages gradients; `None`: the ranks of one node.
        average_buffers: see `PostLocalSGD`. In smaller groups than all ranks buffers are averaged as well.

    Raises:
        ValueError: a value is out of range; sizes that do not grow with periods; or, when attached, the largest size is
            not the number of ranks.
    """

    name: ClassVar[str] = "hierarchical_localsgd"
    aliases: ClassVar[tuple[str, ...]] = ("hierarchical_local_sgd",)

    # Not `Mapping[int, ...]`, whose keys jsonargparse rounds.
    period_group_size_dict: Mapping[int | str, int | None] = field(default_factory=lambda: {8: None})

    def __post_init__(self) -> None:
        super().__post_init__()
        given = self.period_group_size_dict
        if not isinstance(given, Mapping) or not given:
            example = {4: 8, 16: None}
            raise ValueError(f"period_group_size_dict must be a dict of sizes by period, as {example}, got {given!r}")
        # Keys of a JSON object are strings.
        sizes_by_period = {int(p) if str(p).isdecimal() else p: size for p, size in given.items()}
        for period, size in sizes_by_period.items():
            check_integer("a period in period_group_size_dict", period, 1)
            if size is not None:
                check_integer("a group size in period_group_size_dict", size, 2)
        if len(sizes_by_period) < len(given):
            raise ValueError(f"period_group_size_dict must have each period once, got {given!r}")
        levels = sorted(sizes_by_period.items())
        sizes = [float("inf") if size is None else size for _, size in levels]
        if any(later <= earlier for earlier, later in itertools.pairwise(sizes)):
            raise ValueError(f"group sizes in period_group_size_dict must grow with periods, are {dict(levels)}")
        object.__setattr__(self, "period_group_size_dict", dict(levels))

    def __hash__(self) -> int:
        return hash(tuple(self.period_group_size_dict.items()))

    @property
    def _sizes(self) -> dict[int, int | None]:
        return {int(period): size for period, size in self.period_group_size_dict.items()}

    def repeats_after(self) -> int:
        return math.lcm(*self._sizes)

    def bytes_of_averages(self, num_ranks: int) -> float:
        num_steps = min(self.repeats_after(), _MANY_STEPS)
        # Of several periods that end at once the longest counts.
        ends = [[p for p in self._sizes if step % p == 0] for step in range(1, num_steps + 1)]
        sizes = [self._sizes[max(periods)] or num_ranks for periods in ends if periods]
        return sum(ring_share(size, num_ranks) for size in sizes) / num_steps

    def bind(self, group: Group) -> BoundHook:
        *_, largest = self.period_group_size_dict.values()
        if largest not in (None, group.size):
            raise ValueError(
                f"the largest group in period_group_size_dict={dict(self.period_group_size_dict)} must be all "
                f"{group.size} ranks; None stands for that"
            )
        # The longest period first.
        levels = {
            period: group if size is None else group.split(consecutive(group.size, size))
            for period, size in reversed(self._sizes.items())
        }
        return BoundPeriodicAverages(self, group, levels)
