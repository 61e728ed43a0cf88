"""`accelerate_integration` by another name: `from lightning_commhooks.accelerate import CommHookKwargs`."""

import sys
from importlib import import_module

# By name: that package is made of this one, and needs Accelerate.
sys.modules[__name__] = import_module("accelerate_integration")
