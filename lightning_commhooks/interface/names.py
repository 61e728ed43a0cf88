"""Classes of hooks by their names: built in, or added by third parties through entry points."""

from __future__ import annotations

import inspect
import re
from importlib.metadata import EntryPoint, entry_points
from typing import TypeVar

from lightning_commhooks.interface.hook import CommHook
from lightning_commhooks.interface.options import did_you_mean, registered

ENTRY_POINT_GROUP = "lightning_commhooks.hooks"

# Wrappers, which have no registered names, with an example of each.
WRAPPERS = {
    "Cast": "Cast('powersgd', 'bf16')",
    "PerParameter": "PerParameter({'*bias': 'allreduce', '*': 'int4'})",
    "ScaleByGradAccumulation": "ScaleByGradAccumulation('bf16', 'mean')",
    "Schedule": "Schedule({0: 'bf16', 1000: 'powersgd'})",
}

HookClass = TypeVar("HookClass", bound=type[CommHook])
# The arguments in a docstring, and one of them.
_ARGUMENTS = re.compile(r"^Args:\n((?: {4}.*\n?)+)", re.MULTILINE)
_ARGUMENT = re.compile(r"^ {4}(\w+): .*\n(?: {5}.*\n)*", re.MULTILINE)


def register(hook_class: HookClass) -> HookClass:
    """Class decorator: make a [`CommHook`][] known by its `name` and `aliases`.

    Raises:
        ValueError: another class has that name already.
    """
    own = (hook_class.name, *hook_class.aliases)
    known = {_plain(name): taken for name, taken in registered.items()}
    for name in own:
        taken = known.get(_plain(name))
        # A cell of a notebook that runs again, or a reloaded module, replaces its own class.
        is_own = taken is not None and (taken.__module__, taken.__qualname__) == (
            hook_class.__module__,
            hook_class.__qualname__,
        )
        if taken is not None and not is_own:
            raise ValueError(
                f"the hook name {name!r} is taken by {taken.__module__}.{taken.__qualname__}; capitals and underscores "
                "make no other name"
            )
    registered.update(dict.fromkeys(own, hook_class))
    _describe_inherited_options(hook_class)
    return hook_class


def _describe_inherited_options(hook_class: type) -> None:
    """Add the options that only base classes describe to a docstring, which `help()`, the CLI and the site show."""
    texts = [inspect.cleandoc(vars(cls).get("__doc__") or "") + "\n" for cls in hook_class.__mro__]
    sections = [_ARGUMENTS.search(text) for text in texts]
    described: dict[str, str] = {}
    for section in filter(None, sections):
        for argument in _ARGUMENT.finditer(section[1]):
            described.setdefault(argument[1], argument[0])
    own = sections[0][1] if sections[0] else ""
    if any(text not in own for text in described.values()):
        before, raises, after = _ARGUMENTS.sub("", texts[0]).partition("Raises:\n")
        hook_class.__doc__ = f"{before.rstrip()}\n\nArgs:\n{''.join(described.values())}\n{raises}{after}"


def _third_party() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP)}


def _loaded(entry: EntryPoint) -> type[CommHook]:
    of = f"entry point {entry.name!r} of package {entry.dist.name if entry.dist else 'unknown'!r}"
    try:
        loaded = entry.load()
    except Exception as error:
        raise ValueError(f"{of} does not load: {error!r}. Repair or uninstall the package") from error
    if not (isinstance(loaded, type) and issubclass(loaded, CommHook)):
        raise ValueError(f"{of} must be a CommHook class, got {loaded!r}")
    if entry.name not in (loaded.name, *loaded.aliases):
        raise ValueError(f"{of} is a hook of the name {loaded.name!r}: both names have to be equal")
    return loaded


def available_hooks() -> list[str]:
    """Names that `get_hook`, `attach` and every adapter accept, sorted; those of entry points included."""
    return sorted({*(hook_class.name for hook_class in registered.values()), *_third_party()})


def get_hook_class(name: str) -> type[CommHook]:
    """Return the configuration class of a hook by one of `available_hooks()`, or an alias of one.

    Capitals and underscores do not matter, so that the name of the class does as well. An unknown name, or an entry
    point that does not load or is not a `CommHook` class of that name, raises a `ValueError`.
    """
    hook_class: type[CommHook] | None = registered.get(name)
    if hook_class is not None:
        return hook_class
    others = _third_party()
    if name in others:
        return _loaded(others[name])
    exact = {_plain(known): known for known in (*others, *registered)}
    if _plain(name) in exact:
        return get_hook_class(exact[_plain(name)])
    for wrapper, example in WRAPPERS.items():
        if _plain(name) == _plain(wrapper):
            raise ValueError(f"unknown hook {name!r}: {wrapper} goes around another hook; write hook={example}")
    if _plain(name) == "reducescatter":
        raise ValueError(
            f"unknown hook {name!r}: it is for the ranks of a sharded model; use 'allreduce' between replicas"
        )
    hint = did_you_mean(name, [*available_hooks(), *registered])
    raise ValueError(f"unknown hook {name!r}; {hint}available hooks: {', '.join(available_hooks())}")


def _plain(name: str) -> str:
    return name.replace("_", "").casefold()
