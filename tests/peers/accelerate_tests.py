"""Accelerate's own test scripts with `CommHookKwargs`, on two CPU processes over gloo."""

import importlib
import os

from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate_scripts_runner import run_script
from attaching import SETUPS

NAMES = ("test_script", "test_sync")


def run_test(rank, world, name, setup):
    """Run one script in a set-up, on one rank.

    Returns:
        `("passed", number of hooks attached)`.

    Raises:
        Exception: the script failed.
    """
    # The process group is there: address and port are for nobody.
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}
    os.environ.update({key: str(value) for key, value in variables.items()}, ACCELERATE_USE_CPU="true")
    script = importlib.import_module(f"accelerate.test_utils.scripts.{name}")
    try:
        attachments = run_script(script, SETUPS[setup])
        for attachment in attachments:
            attachment.close()
    finally:
        AcceleratorState._reset_state()
        PartialState._reset_state()
        GradientState._reset_state()
    return "passed", len(attachments)
