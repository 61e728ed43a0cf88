"""Descriptions of options, read from docstrings, for tables and lists."""

from __future__ import annotations

import inspect
import re


def documented_arguments(cls: type) -> dict[str, str]:
    """Descriptions under `Args:` of a class's docstring, each on one line, by name."""
    found = re.search(r"^Args:\n((?:    .*\n?|\n)+)", inspect.getdoc(cls) or "", re.MULTILINE)
    if found is None:
        return {}
    entries = re.findall(r"^    (\w+): ((?:.*\n?)(?:^      +.*\n?|\n)*)", found[1], re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}
