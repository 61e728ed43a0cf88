"""Which hooks work with sharded models, and with which options."""

from __future__ import annotations

from typing import Any

from lightning_commhooks.hooks import BF16, FP8, FP16, AllReduce, Int4, Int8
from lightning_commhooks.interface.hook import CommHook
from lightning_commhooks.interface.misplaced import refusal
from lightning_commhooks.interface.registry import get_hook, get_hook_class

# PyTorch's FSDP has a hook of that name; here each plain hook follows the sharding strategy.
_SYNONYMS = {"reduce_scatter": "allreduce"}
# Values that options must have with sharded gradients; a hook that is given by name has them.
_FLAT = {"compress_1d": True}
_FLAT_AND_FORGOTTEN = {"use_error_feedback": False, **_FLAT}
_CODECS: tuple[type[CommHook], ...] = (Int8, Int4, FP8)
_REQUIRED: dict[type[CommHook], dict[str, Any]] = {AllReduce: {}, FP16: {}, BF16: {}}
_REQUIRED |= dict.fromkeys(_CODECS, _FLAT_AND_FORGOTTEN)


def sharded_hooks() -> list[str]:
    """Names of the hooks that work with sharded models, sorted."""
    return sorted([*_SYNONYMS, *(hook_class.name for hook_class in _REQUIRED)])


def resolve_sharded_hook(hook: object, remembers: bool = False) -> CommHook:
    """Check the argument `hook=` of `attach`, without a model.

    Args:
        hook: the argument.
        remembers: whether it may have error feedback.

    Raises:
        ValueError: unknown name; a hook that does not work with sharded models, or not with these options.
    """
    if isinstance(hook, str):
        hook_class = get_hook_class(_SYNONYMS.get(hook, hook))
        if hook_class in _REQUIRED:
            return get_hook(hook_class.name, **_REQUIRED[hook_class])
    elif isinstance(hook, CommHook) and type(hook) in _REQUIRED:
        _check_options(hook, remembers)
        return hook
    if not isinstance(hook, (str, CommHook)):
        raise ValueError(refusal(hook))
    raise ValueError(
        f"hook={hook.name if isinstance(hook, CommHook) else hook!r} does not work with FSDP; these do: "
        f"{', '.join(sharded_hooks())}, or one of them configured. "
        "Other methods need whole gradients, their shapes or models on every rank, which FSDP does not have"
    )


def _check_options(hook: CommHook, remembers: bool) -> None:
    if getattr(hook, "hierarchy", None) is not None:
        raise ValueError(
            f"{type(hook).__name__}(hierarchy={hook.hierarchy!r}) does not work with FSDP, which exchanges shares in "  # type: ignore[attr-defined]
            "groups of its own: shard within each node by HYBRID_SHARD, or by a mesh of two dimensions, and leave "
            "hierarchy out"
        )
    required = _FLAT if remembers and isinstance(hook, _CODECS) else _REQUIRED[type(hook)]
    wrong = {key: value for key, value in required.items() if getattr(hook, key) != value}
    if wrong:
        asked = ", ".join(f"{key}={getattr(hook, key)!r}" for key in wrong)
        needed = ", ".join(f"{key}={value!r}" for key, value in wrong.items())
        raise ValueError(
            f"{type(hook).__name__}({asked}) does not work with FSDP, which hands gradients over as flat shares "
            f"without their shapes{'; error feedback is for fully_shard' if 'use_error_feedback' in wrong else ''}. "
            f"Set {needed}"
        )
