"""A check of the contract, for authors of hooks."""

from lightning_commhooks.testing.check import check_hook
from lightning_commhooks.testing.rules import BrokenRule

__all__ = ["BrokenRule", "check_hook"]
