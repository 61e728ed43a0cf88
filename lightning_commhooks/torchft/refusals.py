"""Refuses what needs ranks that stay, where replicas come and go."""

from __future__ import annotations

from typing import Any

from lightning_commhooks.hooks import DiLoCo, PostLocalSGD
from lightning_commhooks.hooks._local_sgd import LocalSGDConfig
from lightning_commhooks.interface.hook import CommHook
from lightning_commhooks.interface.user_function import DDPHook, UserFunction
from lightning_commhooks.wrappers.auto import Auto
from lightning_commhooks.wrappers.scale import without_scale

# An option of `attach` that is refused, and why.
EXACT_STATE = "keeps what differs between ranks, of which replicas ask no others; leave it out with manager="


def _check_local(hook: LocalSGDConfig) -> None:
    """Refuse what replicas would have to do together between averages."""
    if not isinstance(hook, (DiLoCo, PostLocalSGD)):
        raise ValueError(f"hook={hook.name!r} averages in subgroups, which replicas that come and go have none of")
    wanted: dict[str, object] = {"start_localSGD_iter": 0, "post_local_gradient_allreduce": False}
    wanted |= {"optimizer_state": "keep"}
    if isinstance(hook, DiLoCo):
        wanted |= {"fragments": 1, "delay": 0, "eager": False, "period_seconds": None}
    for name, value in wanted.items():
        if getattr(hook, name) != value:
            raise ValueError(
                f"hook={hook.name!r}: {name}={getattr(hook, name)!r} needs ranks that stay; with manager= set it to "
                f"{value!r}"
            )


def check_hook(hook: CommHook | DDPHook) -> None:
    """Refuse a hook that needs ranks that stay.

    Raises:
        ValueError: says which to use.
    """
    method = without_scale(hook) if isinstance(hook, CommHook) else hook
    if not isinstance(method, CommHook) or isinstance(method, UserFunction):
        raise ValueError(f"hook={hook!r} is a function for a process group that stays; among replicas use a CommHook")
    if isinstance(method, LocalSGDConfig):
        _check_local(method)
    if isinstance(method, Auto):
        raise ValueError("hook='auto' measures one group of ranks, and replicas come and go: choose a hook")


def check_manager(manager: Any, num_processes: int, rank: int) -> None:
    """Refuse a manager that hooks cannot ask, or that is not of this process, one of so many of its replica.

    Raises:
        ValueError: says what to give it.
    """
    given = {"world_size": manager._group_world_size, "rank": manager._group_rank}
    needed = {"world_size": num_processes, "rank": rank}
    if given != needed:
        raise ValueError(
            f"the manager has {given}, and the processes of the model, which are its replica, need {needed}: give "
            "torchft.Manager these; start_manager() takes those of the default process group, if there is one by then"
        )
    if getattr(manager, "_use_async_quorum", False):
        raise ValueError(
            "the manager has use_async_quorum=True, with which replicas that join do not count in their first step: "
            "give it use_async_quorum=False"
        )
    if not hasattr(manager._pg, "members"):
        raise ValueError(
            f"the manager has pg={type(manager._pg).__name__}: hooks communicate in groups of "
            "lightning_commhooks.torchft.ProcessGroupGloo"
        )
