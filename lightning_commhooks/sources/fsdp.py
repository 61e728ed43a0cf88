"""Gradients that FSDP, version 1 or 2, reduces to shares, and the hooks that work with them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_commhooks.collectives.agreement import ATTACH, raise_on_all_ranks
from lightning_commhooks.collectives.group import Backend, Group, counted
from lightning_commhooks.collectives.steps import Steps
from lightning_commhooks.hooks import BF16, FP8, FP16, AllReduce, Int4, Int8
from lightning_commhooks.hooks.quantized import CodecConfig, EncodedResidual
from lightning_commhooks.interface.bucket import Bucket, Slot
from lightning_commhooks.interface.hook import BoundHook, CommHook, reduce_with
from lightning_commhooks.interface.misplaced import class_of, refusal
from lightning_commhooks.interface.options import did_you_mean
from lightning_commhooks.interface.registry import get_hook
from lightning_commhooks.runtime.runtime import Runtime
from lightning_commhooks.runtime.source import Source

# PyTorch's FSDP has a hook of that name; here each plain hook follows the sharding strategy.
_SYNONYMS = {"reduce_scatter": "allreduce"}
# Values that options must have with sharded gradients; a hook that is given by name has them.
_FLAT = {"compress_1d": True}
_FLAT_AND_FORGOTTEN = {"use_error_feedback": False, **_FLAT}
_CODECS: tuple[type[CommHook], ...] = (Int8, Int4, FP8)
_REQUIRED: dict[type[CommHook], dict[str, Any]] = {AllReduce: {}, FP16: {}, BF16: {}}
_REQUIRED |= dict.fromkeys(_CODECS, _FLAT_AND_FORGOTTEN)

# Why an option may not have error feedback.
_FORGETS = {
    "hook": "error feedback is for fully_shard",
    "shard_hook": "with manager= it has no error feedback",
    "gather_hook": "it has no error feedback",
}

_OF_DDP = (
    "is for DistributedDataParallel: hooks save no state of sharded gradients and do not know their micro-batches; "
    "leave it out with FSDP"
)


class Finished(dist.Work):
    """A collective whose result is there, in the order of the stream that it was issued on."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._done = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None

    def wait(self, timeout: Any = None) -> bool:
        if self._done is not None:
            torch.cuda.current_stream().wait_event(self._done)
        return True

    def is_completed(self) -> bool:
        return self._done is None or self._done.query()


def sharded_hooks() -> list[str]:
    """Names of the hooks that work with sharded models, sorted."""
    return sorted([*_SYNONYMS, *(hook_class.name for hook_class in _REQUIRED)])


def resolve_sharded_hook(hook: object, remembers: bool = False, option: str = "hook") -> CommHook:
    """Check the argument `hook=`, `shard_hook=` or `gather_hook=` of `attach`, without a model.

    Args:
        hook: the argument.
        remembers: whether it may have error feedback.
        option: its name.

    Raises:
        ValueError: unknown name; a hook that does not work with sharded models, or not with these options.
    """
    required = _REQUIRED | (dict.fromkeys(_CODECS, _FLAT) if remembers else {})
    if not isinstance(hook, (str, CommHook)):
        raise ValueError(refusal(hook, option, "bf16", required))
    hook_class = class_of(_SYNONYMS.get(hook, hook) if isinstance(hook, str) else hook)
    if hook_class in _REQUIRED and isinstance(hook, str):
        return get_hook(hook_class.name, **_REQUIRED[hook_class])
    if hook_class in _REQUIRED and isinstance(hook, CommHook):
        _check_options(hook, required[hook_class], option)
        return hook
    gathers = option == "gather_hook"
    works = [name for name in sharded_hooks() if not (gathers and name in ("allreduce", "reduce_scatter"))]
    if hook_class is None:
        hint = did_you_mean(str(hook), works)
        raise ValueError(
            f"unknown {option}={hook!r}{'; ' if hint else '. '}{hint}With FSDP these work: {', '.join(works)}"
        )
    why = "parameters" if gathers else "gradients, their shapes or models on every rank"
    raise ValueError(
        f"{option}={hook.name if isinstance(hook, CommHook) else hook!r} does not work with FSDP; these do: "
        f"{', '.join(works)}, or one of them configured. Other methods need whole {why}, which FSDP does not have"
    )


def _check_options(hook: CommHook, required: Mapping[str, Any], option: str) -> None:
    shown = f"{option}={type(hook).__name__}"
    if getattr(hook, "hierarchy", None) is not None:
        raise ValueError(
            f"{shown}(hierarchy={hook.hierarchy!r}) does not work with FSDP, which exchanges shares in "  # type: ignore[attr-defined]
            "groups of its own: shard within each node by HYBRID_SHARD, or by a mesh of two dimensions, and leave "
            "hierarchy out"
        )
    wrong = {key: value for key, value in required.items() if getattr(hook, key) != value}
    if wrong:
        asked = ", ".join(f"{key}={getattr(hook, key)!r}" for key in wrong)
        needed = ", ".join(f"{key}={value!r}" for key, value in wrong.items())
        what = "parameters" if option == "gather_hook" else "gradients"
        raise ValueError(
            f"{shown}({asked}) does not work with FSDP, which hands {what} over as flat shares without their "
            f"shapes{f'; {_FORGETS[option]}' if 'use_error_feedback' in wrong else ''}. Set {needed}"
        )


class Shares(BoundHook):
    """A hook in each group of ranks in which FSDP reduces gradients of one model.

    Args:
        hook: one of `sharded_hooks()`.
        group: ranks that have agreed on it.
    """

    def __init__(self, hook: CommHook, group: Group) -> None:
        super().__init__(group)
        self._hook = hook
        self._bound: dict[dist.ProcessGroup, tuple[Group, Any]] = {}

    def among(self, process_group: dist.ProcessGroup) -> tuple[Group, Any]:
        """These ranks, and the hook for them, which has `reduce_scatter`. Collective when they are asked for first."""
        if process_group not in self._bound:
            group = self.group
            if process_group is not group.process_group:
                with raise_on_all_ranks(process_group, ATTACH) as same:
                    same["hook"] = self._hook
                group = Group(Backend(process_group), group.counters, group.device, process_group)
            self._bound[process_group] = group, self._hook.bind(group)
        return self._bound[process_group]

    def reduce(self, bucket: Bucket, ranks: Group) -> Steps[None]:
        _, hook = self.among(ranks.process_group)
        yield from reduce_with(hook, bucket, ranks)

    def inactive_reason(self, step: int) -> str | None:
        counters = self.group.counters
        if not isinstance(self._hook, CodecConfig) or counters.numel_compressed or not counters.bytes_sent:
            return None
        return (
            f"hook={self._hook.name!r} compressed nothing: every unit that FSDP reduces by itself has less than "
            f"min_bytes of gradients, or a share of less than a block: wrap larger units, or change {self._hook!r}"
        )

    def release(self) -> None:
        for group, _ in self._bound.values():
            group.release()
        self._bound.clear()


class ShardedSource(Source):
    """A model that FSDP shards.

    Hooks run where FSDP calls them, in FSDP's own process groups: FSDP waits for the result there anyway, and issues
    its own collectives from the same place, so that all ranks have them in the same order.
    """

    refused: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("hook_state", "grad_scaler", "exact_state", "optimizers", "accumulation", "loss_divided_by"), _OF_DDP
    )
    limits = (
        "not available with FSDP, which hands over gradients flat and without names, so hooks have no state to save: "
        "leave the call out; for another wrapper call attach() again"
    )
    is_awaited = True
    # Whether hooks may have error feedback.
    remembers: ClassVar[bool] = False

    def resolve_hook(self, hook: object) -> CommHook:
        return resolve_sharded_hook(hook, self.remembers)

    def bind(self, hook: CommHook, group: Group) -> Shares:
        return Shares(hook, group)


def shares_of(runtime: Runtime) -> Shares:
    """The hook of a sharded model."""
    assert isinstance(runtime.bound, Shares)
    return runtime.bound


def reduce(
    runtime: Runtime,
    flat: Tensor,
    out: Tensor | None,
    process_group: dist.ProcessGroup,
    factor: float = 1.0,
    residual: EncodedResidual | None = None,
) -> None:
    """Reduce gradients where FSDP asks for it, on CUDA on the current stream.

    Args:
        runtime: of the hook.
        flat: gradients, shape `(w * n,)`, n elements for each rank in turn. May be overwritten.
        out: where to write this rank's share, shape `(n,)`. `None`: they are not sharded, and averaged in place.
        process_group: the ranks.
        factor: multiplier of the sum over ranks, for shares.
        residual: of these gradients, for shares, with hooks that have error feedback.
    """
    group, hook = runtime.call(lambda: shares_of(runtime).among(process_group))
    step, index = runtime.clock.place_in_backward()
    slot = Slot(f"unit {index}, {flat.numel()} elements", (flat.numel(),), 0)
    scale = 1.0 if out is None else factor * group.size
    bucket = Bucket(flat, index, False, step, (slot,), scale=scale)

    def reduced(ranks: Group) -> Steps[Tensor]:
        # Gradients may come in 16 bit already; without mixed precision they would be sent in float32.
        dense = (ranks.size - 1) / ranks.size * flat.numel() * max(4, flat.element_size())
        ranks.counters.bytes_dense += 2 * dense if out is None else dense
        with counted(flat, ranks):
            if out is not None:
                remembered = {} if residual is None else {"residual": residual}
                yield from hook.reduce_scatter(bucket, out, ranks, **remembered)
            elif ranks.size > 1:
                yield from reduce_with(hook, bucket, ranks)
        return flat

    runtime.run(bucket, group, reduced)
