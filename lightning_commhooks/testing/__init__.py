"""For authors of hooks: the contract as a check."""

from lightning_commhooks.testing.check import check_hook
from lightning_commhooks.testing.rules import BrokenRule

__all__ = ["BrokenRule", "check_hook"]
