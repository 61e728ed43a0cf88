"""`accelerate_integration` by another name: `from lightning_commhooks.accelerate import CommHookKwargs`."""

import sys

import accelerate_integration

sys.modules[__name__] = accelerate_integration
