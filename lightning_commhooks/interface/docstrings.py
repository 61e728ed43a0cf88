"""What docstrings say of options, for tables and lists."""

from __future__ import annotations

import inspect
import re


def documented_arguments(cls: type) -> dict[str, str]:
    """What a class's docstring says under `Args:`, each on one line, by name."""
    found = re.search(r"^Args:\n((?:    .*\n?|\n)+)", inspect.getdoc(cls) or "", re.MULTILINE)
    if found is None:
        return {}
    entries = re.findall(r"^    (\w+): ((?:.*\n?)(?:^      +.*\n?|\n)*)", found[1], re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}
