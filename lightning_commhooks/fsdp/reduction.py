"""How gradients of sharded models are reduced: what an algorithm is, and which hooks have one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from lightning_commhooks.fsdp.shard_group import ShardGroup
from lightning_commhooks.interface.hook import CommHook
from lightning_commhooks.interface.registry import get_hook, get_hook_class

# PyTorch's FSDP has a hook of that name; here each plain hook does what the sharding strategy needs.
_SYNONYMS = {"reduce_scatter": "allreduce"}


class ShardedReduction(ABC):
    """Reduces flat gradients of a sharded model in one group of ranks. Keeps no memory of gradients.

    FSDP calls for one of its units after another, in the same order on every rank, and gets the result at once: on
    CUDA on the stream that is current.

    Args:
        group: the collectives it may use.
    """

    def __init__(self, group: ShardGroup) -> None:
        self.group = group

    @abstractmethod
    def reduce_scatter(self, flat: Tensor, out: Tensor, factor: float) -> None:
        """Write this rank's share of `factor` times the sum of all ranks' gradients.

        Args:
            flat: shape `(w * n,)`, this rank's gradients, n elements for each rank in turn. May be overwritten.
            out: shape `(n,)`, any floating-point dtype.
            factor: 1/w for the mean.
        """

    @abstractmethod
    def all_reduce_(self, flat: Tensor, factor: float) -> None:
        """Replace gradients that are not sharded by `factor` times their sum, equal on all ranks.

        Args:
            flat: shape `(n,)`.
            factor: 1/w for the mean.
        """


@dataclass(frozen=True)
class _Support:
    make: Callable[[Any, ShardGroup], ShardedReduction]
    options: Mapping[str, Any]


_Make = TypeVar("_Make", bound=Callable[[Any, ShardGroup], ShardedReduction])
_supported: dict[type[CommHook], _Support] = {}


def reduces_shards_of(*hook_classes: type[CommHook], **options: Any) -> Callable[[_Make], _Make]:
    """Decorator: let a function `(hook, group)` make the reduction of some hooks.

    Args:
        *hook_classes: their configurations.
        **options: values that fields of the configuration must have, because sharded gradients allow no other; a hook
            that is given by name has them.
    """

    def decorate(make: _Make) -> _Make:
        _supported.update(dict.fromkeys(hook_classes, _Support(make, options)))
        return make

    return decorate


def sharded_hooks() -> list[str]:
    """Names of the hooks that work with sharded models, sorted."""
    return sorted([*_SYNONYMS, *(hook_class.name for hook_class in _supported)])


def resolve_sharded_hook(hook: object) -> CommHook:
    """Check what a user passed as `hook=`, without a model.

    Raises:
        ValueError: unknown name; a hook that does not work with sharded models, or not with these options.
    """
    if isinstance(hook, str):
        hook_class = get_hook_class(_SYNONYMS.get(hook, hook))
        support = _supported.get(hook_class)
        return get_hook(hook_class.name, **support.options) if support else _refuse(hook)
    if not isinstance(hook, CommHook):
        return _refuse(hook)
    support = _supported.get(type(hook))
    if support is None:
        return _refuse(hook.name)
    wrong = {key: value for key, value in support.options.items() if getattr(hook, key) != value}
    if wrong:
        asked = ", ".join(f"{key}={getattr(hook, key)!r}" for key in wrong)
        needed = ", ".join(f"{key}={value!r}" for key, value in wrong.items())
        raise ValueError(
            f"{type(hook).__name__}({asked}) does not work with FSDP, which hands gradients over as flat shares "
            "without their shapes, and keeps no memory of what was not sent: it would be as large as the model before "
            f"it was sharded. Set {needed}"
        )
    return hook


def bind_sharded(hook: CommHook, group: ShardGroup) -> ShardedReduction:
    """Make what reduces gradients, for a hook from `resolve_sharded_hook`. Collective."""
    return _supported[type(hook)].make(hook, group)


def _refuse(hook: object) -> CommHook:
    raise ValueError(
        f"hook={hook!r} does not work with FSDP; these do: {', '.join(sharded_hooks())}, or one of them configured. "
        "Other methods need whole gradients, their shapes or models on every rank, which FSDP does not have"
    )


def predivide_factor(size: int) -> int:
    """What gradients are divided by before they are summed over `size` ranks, so that 16 bit hold them and their sum.

    About the square root of `size`, a power of 2: `DefaultState._get_gradient_predivide_factor` of
    `torch.distributed.algorithms._comm_hooks.default_hooks`. What is left to divide by comes after the sum.
    """
    factor = 1
    while size % factor == 0 and size / factor > factor:
        factor *= 2
    return factor
