"""`accelerate_integration` by another name: `from lightning_commhooks.accelerate import CommHookKwargs`."""

import sys

import accelerate_integration
from accelerate_integration import *  # noqa: F403  # for type checkers and editors

sys.modules[__name__] = accelerate_integration
