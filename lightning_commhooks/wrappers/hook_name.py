"""A type of hook names, for annotations that Lightning CLI reads."""

from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

import wrapt

import lightning_commhooks.hooks
import lightning_commhooks.wrappers.auto  # noqa: F401  # registers it
from lightning_commhooks.interface.misplaced import in_yaml
from lightning_commhooks.interface.registry import available_hooks

if TYPE_CHECKING:
    HookName = str
    NoHook = str
else:

    class NoHook:
        """A type without values. Lightning CLI tries it last, and its error explains what to write."""

    # With a Literal of the registered names, Lightning CLI rejects typos and lists the choices in its help. Use it for
    # annotations in other modules only: in this one, jsonargparse would follow the TYPE_CHECKING branch.
    HookName = Literal[tuple(available_hooks())] | NoHook


def _refuse(value: Any) -> None:
    raise ValueError(in_yaml(value))


def _is_none(value: object, kind: type) -> bool:
    return False


def _register(typing: ModuleType) -> None:
    typing.register_type(NoHook, _refuse, _refuse, type_check=_is_none)


wrapt.register_post_import_hook(_register, "jsonargparse.typing")
