"""All hooks and wrappers, and their options."""

from __future__ import annotations

import inspect
import textwrap
from typing import Any

from lightning_commhooks import wrappers
from lightning_commhooks.interface.hook import CommHook
from lightning_commhooks.interface.registry import available_hooks, get_hook_class


def listed(only: str | None = None) -> list[dict[str, Any]]:
    """All hooks, then wrappers; or the one of a name. As `--json` has it.

    Raises:
        ValueError: there is none of that name.
    """
    classes: list[type[CommHook]] = [getattr(wrappers, name) for name in wrappers.__all__]
    if only is None:
        classes = [*map(get_hook_class, available_hooks()), *classes]
    else:
        named = {name.lower(): cls for cls in classes for name in (cls.name, cls.__name__)}
        classes = [named.get(only.lower()) or get_hook_class(only)]
    return [
        {
            "name": cls.name,
            "class_name": cls.__name__,
            "aliases": cls.aliases,
            "is_wrapper": cls.__name__ in wrappers.__all__,
            "options": [_option(parameter) for parameter in inspect.signature(cls).parameters.values()],
            "doc": inspect.getdoc(cls) or "",
        }
        for cls in classes
    ]


def _option(parameter: inspect.Parameter) -> str:
    return str(parameter).replace(repr(parameter.annotation), str(parameter.annotation))  # without quotes


def text_of_list(hooks: list[dict[str, Any]]) -> str:
    """The same for people; of one hook with all of its documentation."""
    lines = []
    for hook in hooks:
        names = ", also ".join([hook["name"], *hook["aliases"]])
        text = hook["doc"] if len(hooks) == 1 else hook["doc"].partition("\n\n")[0]
        lines += [f"{names}: {hook['class_name']}({', '.join(hook['options'])})", textwrap.indent(text, "    ")]
    return "\n".join(lines)
