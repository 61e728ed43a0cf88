"""For authors of hooks: the contract as a check."""

from lightning_commhooks.testing.check import check_hook, check_rule
from lightning_commhooks.testing.rules import BrokenRule, Case

__all__ = ["BrokenRule", "Case", "check_hook", "check_rule"]
