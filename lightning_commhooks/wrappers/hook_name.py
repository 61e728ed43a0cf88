"""The names of hooks as a type, for annotations that Lightning CLI reads."""

from typing import TYPE_CHECKING, Literal

import lightning_commhooks.hooks
import lightning_commhooks.wrappers.auto  # noqa: F401  # registers it
from lightning_commhooks.interface.registry import available_hooks

if TYPE_CHECKING:
    HookName = str
else:
    # A Literal of the names known now: Lightning CLI then refuses typos and lists the choices in its help. Annotate
    # with it in other modules only: jsonargparse would follow the TYPE_CHECKING branch of the same module.
    HookName = Literal[tuple(available_hooks())]
