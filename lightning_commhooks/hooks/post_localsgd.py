"""Post-local SGD: average gradients first, models later."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from lightning_commhooks.collectives.group import Group
from lightning_commhooks.hooks._local_sgd import BoundLocalSGD, LocalSGDConfig
from lightning_commhooks.interface.checks import check_integer
from lightning_commhooks.interface.hook import BoundHook
from lightning_commhooks.interface.models import OptimizerStep
from lightning_commhooks.interface.registry import register


@register
@dataclass(frozen=True, kw_only=True)
class PostLocalSGD(LocalSGDConfig):
    """After a warm-up, take local steps on each rank (or node), and average the models every `period` steps.

    Post-local SGD of Lin et al. 2018, https://arxiv.org/abs/1808.07217. It does the work of PyTorch's
    `post_localSGD_hook` and `PeriodicModelAverager`, with these differences: each optimizer counts its own steps, for
    the start too, and only steps that change something; models are averaged after the first `period` local steps, not
    already after the first one; parameters stay in their storage; parameters without a gradient on some rank are
    averaged too; and buffers are averaged.

    Sends 2(w-1)/w times the parameters every `period` steps, and gradients within subgroups only.

    Args:
        period: number of steps of an optimizer between averages of the models.

    Raises:
        ValueError: a value is out of range, or `subgroup_size` is given though no subgroup averages gradients.
    """

    name: ClassVar[str] = "post_localsgd"
    aliases: ClassVar[tuple[str, ...]] = ("post_local_sgd", "post_localSGD")

    period: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("period", self.period, 1)

    def repeats_after(self) -> int:
        return self.period

    def bytes_of_averages(self, num_ranks: int) -> float:
        return 1 / self.period

    def bind(self, group: Group) -> BoundHook:
        return BoundPeriodicAverages(self, group, {self.period: group})


class BoundPeriodicAverages(BoundLocalSGD):
    """Averages models over a group of ranks when its period ends.

    `levels` has the group for each period, in steps of an optimizer; when several end at once, the first counts.
    """

    def __init__(self, config: LocalSGDConfig, group: Group, levels: Mapping[int, Group]) -> None:
        super().__init__(config, group)
        self._levels = levels

    def _averages_after(self, num_steps: int, stepped: OptimizerStep) -> bool:
        # A replica is alone until it has asked for others at the end of a period.
        may_differ = self.is_local(stepped.step) or stepped.models.ranks_change
        return may_differ and any(num_steps % period == 0 for period in self._levels)

    def _after_local_step(self, num_steps: int, stepped: OptimizerStep) -> None:
        if not self._averages_after(num_steps, stepped):
            return
        for period, group in self._levels.items():
            if num_steps % period == 0:
                stepped.models.average_(stepped.parameters, group)
                self._follow_up_optimizer(stepped, group)
                return
