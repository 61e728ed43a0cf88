"""What runs for one sharded model, whichever FSDP shards it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_commhooks.codecs.ranges import named
from lightning_commhooks.collectives.agreement import raise_on_all_ranks
from lightning_commhooks.collectives.counters import Counters
from lightning_commhooks.collectives.errors import HookError, raise_if_capturing
from lightning_commhooks.fsdp.reduction import ShardedReduction
from lightning_commhooks.fsdp.shard_group import ShardGroup
from lightning_commhooks.fsdp.supported import bind_sharded
from lightning_commhooks.hooks.int8 import CodecConfig
from lightning_commhooks.interface.hook import CommHook


class ShardedRuntime:
    """A hook's reductions, one for each group of ranks, and its counts.

    Runs where FSDP calls it, in FSDP's own process groups: FSDP waits for the result there anyway, and issues its own
    collectives from the same place, so that all ranks have them in the same order.
    """

    def __init__(self, hook: CommHook, device: torch.device) -> None:
        self.hook = hook
        self.counters = Counters()
        self.is_closed = False
        self.averages_replicas = False
        self.has_warned_of_replicas = False
        self._device = device
        self.reductions: dict[dist.ProcessGroup, ShardedReduction] = {}
        self._backward = -1

    def reduction(self, process_group: dist.ProcessGroup) -> ShardedReduction:
        """What reduces gradients among these ranks. Collective when they are asked for the first time."""
        if process_group not in self.reductions:
            with raise_on_all_ranks(process_group, "attach_fsdp()") as same:
                same["hook"] = self.hook
            group = ShardGroup(process_group, self.counters, self._device)
            self.reductions[process_group] = bind_sharded(self.hook, group)
        return self.reductions[process_group]

    def reduce(self, flat: Tensor, out: Tensor | None, process_group: dist.ProcessGroup, factor: float) -> None:
        """Reduce gradients: this rank's share of them to `out`; in place without it, where they are not sharded."""
        if self.is_closed:
            raise HookError("the communication hook was closed; attach another one to go on training")
        raise_if_capturing(flat.device)
        # FSDP says neither where a backward begins nor where it ends.
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:
            self._backward = backward
            self.counters.steps += 1
        try:
            # A backward may run inside the user's autocast, which must not round the hook's own products.
            autocast = torch.autocast(flat.device.type, enabled=False)
            with torch.no_grad(), autocast, named(self.hook.name, "reduce"):
                reduction = self.reduction(process_group)
                # Gradients may come in 16 bit already; without mixed precision they would be sent in float32.
                dense = reduction.group.shard_bytes(flat.numel(), max(4, flat.element_size()))
                self.counters.bytes_dense += 2 * dense if out is None else dense
                if out is None:
                    reduction.all_reduce_(flat, factor)
                else:
                    reduction.reduce_scatter(flat, out, factor)
        except Exception as error:
            raise HookError(
                f"communication hook {self.hook.name!r} failed on rank {dist.get_rank()} at step "
                f"{self.counters.steps - 1}, gradients of {flat.numel()} elements: {error}"
            ) from error

    def closing_warning(self) -> str:
        """What the user should know at the end of training, empty for nothing."""
        counters = self.counters
        is_plain = not isinstance(self.hook, CodecConfig)
        if is_plain or not counters.steps or counters.numel_compressed or not counters.bytes_sent:
            return ""
        return (
            f"hook={self.hook.name!r} compressed nothing: every unit that FSDP reduces by itself has less than "
            f"min_bytes of gradients, or a share of less than a block: wrap larger units, or change {self.hook!r}"
        )

    def close(self) -> None:
        """Let go of the process groups."""
        self.is_closed = True
        for reduction in self.reductions.values():
            reduction.group.release()
        self.reductions.clear()
