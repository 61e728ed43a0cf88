"""A list of all hooks and wrappers with their options."""

from __future__ import annotations

import inspect
import re
import shutil
import textwrap
import warnings
from collections.abc import Iterator
from typing import Any

from lightning_commhooks import wrappers
from lightning_commhooks.interface.hook import CommHook
from lightning_commhooks.interface.registry import available_hooks, get_hook_class

_ITEM = re.compile(r"\w+: |[*-] ")
_WHOLE: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}


def listed(only: str | None = None) -> list[dict[str, Any]]:
    """Describe all hooks, then all wrappers, or the one named `only`, as `--json` prints them."""
    classes: list[type[CommHook]] = [getattr(wrappers, name) for name in wrappers.__all__]
    if only is None:
        # Registered wrappers are listed once, among the wrappers.
        classes = [*(cls for cls in _available() if cls not in classes), *classes]
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


def _available() -> Iterator[type[CommHook]]:
    for name in available_hooks():
        try:
            yield get_hook_class(name)
        except ValueError as error:  # of another package
            warnings.warn(f"not listed: {error}", stacklevel=2)


def _option(parameter: inspect.Parameter) -> str:
    return str(parameter).replace(repr(parameter.annotation), str(parameter.annotation))  # without quotes


def text_of_list(hooks: list[dict[str, Any]]) -> str:
    """Format the list for the terminal's width (80 columns in a pipe); one hook alone gets its full documentation."""
    width = max(40, shutil.get_terminal_size().columns)
    lines = []
    for hook in hooks:
        names = ", also ".join([hook["name"], *hook["aliases"]])
        text = hook["doc"] if len(hooks) == 1 else hook["doc"].partition("\n\n")[0]
        # Keep each option on one line.
        options = [option.replace(" ", "\0") for option in hook["options"]]
        head = textwrap.fill(
            f"{names}: {hook['class_name']}({', '.join(options)})", width, subsequent_indent=" " * 8, **_WHOLE
        )
        lines += [head.replace("\0", " "), _indented(text, width)]
    return "\n".join(lines)


def _indented(text: str, width: int) -> str:
    """Indent documentation by four and wrap it at `width`; each argument and list item begins a line."""
    paragraphs: list[tuple[int, str]] = []
    for line in text.splitlines():
        indent, words = len(line) - len(line.lstrip()), line.strip()
        before, begun = paragraphs[-1] if paragraphs else (0, "")
        is_continued = (indent == before and not _ITEM.match(words)) or (indent > before and _ITEM.match(begun))
        if words and begun and is_continued:
            paragraphs[-1] = before, f"{begun} {words}"
        else:
            paragraphs.append((indent, words))
    filled = []
    for indent, words in paragraphs:
        hanging = " " * 4 if _ITEM.match(words) else ""
        lines = textwrap.fill(words, width - 4 - indent, subsequent_indent=hanging, **_WHOLE)
        filled.append(textwrap.indent(lines, " " * (4 + indent)))
    return "\n".join(filled)
