"""For authors of hooks: the contract as a check."""

from lightning_commhooks.testing.check import Case, check_hook
from lightning_commhooks.testing.rules import BrokenRule

__all__ = ["BrokenRule", "Case", "check_hook"]
