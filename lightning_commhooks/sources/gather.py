"""Parameters that `fully_shard` gathers, in low precision, by `set_custom_all_gather`."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

from lightning_commhooks.codecs.codec import Kernels
from lightning_commhooks.collectives.counters import Counters
from lightning_commhooks.collectives.group import Backend, Group
from lightning_commhooks.collectives.timing import NoTiming
from lightning_commhooks.hooks import BF16, FP16
from lightning_commhooks.hooks.quantized import CodecConfig
from lightning_commhooks.interface.hook import CommHook
from lightning_commhooks.sources.finished import Finished
from lightning_commhooks.sources.sharded_hooks import resolve_sharded_hook


def resolve_gather_hook(hook: object) -> CommHook:
    """Check the argument `gather_hook=` of `attach`; raises a `ValueError`."""
    resolved = resolve_sharded_hook(hook)
    if not isinstance(resolved, (BF16, FP16, CodecConfig)) or getattr(resolved, "accumulate_dtype", None) is not None:
        raise ValueError(
            f"gather_hook={hook!r} sends parameters as they are: leave it out, or use 'int8', 'fp8', 'bf16'"
        )
    if isinstance(resolved, CodecConfig) and resolved.codec.rounds_at_random:
        raise ValueError(
            f"gather_hook={resolved!r} rounds at random, so that a backward would see other weights than its forward: "
            "set rounding='nearest'"
        )
    return resolved


class Gather:
    """Gathers the parameters of a model in low precision; each rank's own share stays exact.

    The gathered weights are the weights as sent, on the sending rank too, so that all ranks compute with the same
    weights, in forward and backward: quantized weight communication of ZeRO++ (Wang et al. 2023,
    https://arxiv.org/abs/2306.10209, section 3.1), whose blocks are larger.

    Args:
        units: the modules of a model to which `fully_shard` was applied.
        hook: as `resolve_gather_hook` returns it.
        device: of the parameters.
    """

    def __init__(self, units: Iterable[FSDPModule], hook: CommHook, device: torch.device) -> None:
        self._hook, self._device = hook, device
        self._counters = Counters()
        self._counters.timing = NoTiming()
        self._groups: dict[dist.ProcessGroup, tuple[Group, Kernels | None]] = {}
        self._units = [weakref.ref(unit) for unit in units]
        for unit in self._units:
            unit().set_custom_all_gather(self)  # type: ignore[union-attr, arg-type]

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A new tensor for parameters."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Gather; on CUDA on the current stream, which is FSDP2's stream for this.

        Args:
            output_tensor: shape `(w * n,)`, for the shares of all ranks in turn.
            input_tensor: shape `(n,)`, this rank's share, perhaps in its place in `output_tensor`.
            group: the ranks.
            async_op: whether to return a work.
        """
        ranks, kernels = self._among(group)
        self._counters.bytes_dense += (ranks.size - 1) * input_tensor.numel() * max(4, input_tensor.element_size())
        if not input_tensor.is_floating_point():  # FSDP2 packs several dtypes into one tensor
            output_tensor.view(ranks.size, -1).copy_(ranks.finish(ranks.all_gather(input_tensor.clone())))
        elif kernels is None:
            half = input_tensor.to(self._hook.dtype)  # type: ignore[attr-defined]
            output_tensor.copy_(ranks.finish(ranks.all_gather(half)).view(-1))
        else:
            self._gather_encoded(output_tensor, input_tensor, ranks, kernels)
        return Finished(output_tensor.device) if async_op else None

    def _among(self, process_group: dist.ProcessGroup) -> tuple[Group, Kernels | None]:
        if process_group not in self._groups:
            group = Group(Backend(process_group), self._counters, self._device, process_group)
            codec = self._hook.codec if isinstance(self._hook, CodecConfig) else None
            kernels = None if codec is None else group.kernels(codec, feedback=False, two_shot=True)
            self._groups[process_group] = group, kernels
        return self._groups[process_group]

    def _gather_encoded(self, out: Tensor, share: Tensor, ranks: Group, kernels: Kernels) -> None:
        size, numel = kernels.codec.block_size, share.numel()
        assert size is not None
        blocks = torch.zeros(-(-numel // size) * size, dtype=torch.float32, device=share.device)
        blocks[:numel] = share
        one = blocks.new_ones(())
        payload = kernels.encode(blocks.view(-1, size), None, one, 0)
        gathered = ranks.finish(ranks.all_gather(payload.view(-1)))
        decoded = blocks.new_empty((ranks.size * payload.shape[0], size))
        kernels.decode_mean(gathered.view(1, decoded.shape[0], -1), one, decoded)
        out.view(ranks.size, -1).copy_(decoded.view(ranks.size, -1)[:, :numel])

    def metrics(self) -> dict[str, float]:
        """Bytes that were sent of parameters, and that float32 takes."""
        counts = self._counters.as_dict()
        return {f"gather_{name}": counts[name] for name in ("bytes_sent", "bytes_dense", "compression_ratio")}

    def close(self) -> None:
        """Leave the gathering to FSDP2 again."""
        for unit in self._units:
            if (module := unit()) is not None:
                module.set_custom_all_gather(DefaultAllGather())
        for group, _ in self._groups.values():
            group.release()
        self._groups.clear()
