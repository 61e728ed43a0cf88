"""Hooks that wrap other hooks. Each is a `CommHook` itself, so they nest."""

from lightning_commhooks.wrappers.auto import Auto
from lightning_commhooks.wrappers.cast import Cast
from lightning_commhooks.wrappers.per_parameter import PerParameter
from lightning_commhooks.wrappers.scale import ScaleByGradAccumulation
from lightning_commhooks.wrappers.schedule import Schedule

__all__ = ["Auto", "Cast", "PerParameter", "ScaleByGradAccumulation", "Schedule"]
