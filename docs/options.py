"""Tables of options, from the hooks' docstrings. `python docs/options.py` writes them into the pages."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

import lightning_commhooks

FOLDER = Path(__file__).parent
_TABLE = re.compile(r"(<!-- options: (\w+) -->\n).*?(<!-- end of options -->\n)", re.DOTALL)


def updated(text: str) -> str:
    """A page with its tables as they should be."""
    return _TABLE.sub(lambda match: f"{match[1]}\n{table(getattr(lightning_commhooks, match[2]))}\n{match[3]}", text)


def table(hook_class: type) -> str:
    """Options of a hook, their defaults and meaning, as a Markdown table.

    Raises:
        ValueError: an option is not in the docstring, or the docstring has one that there is not.
    """
    fields = {field.name: field for field in dataclasses.fields(hook_class)}
    meanings = documented_arguments(hook_class)
    if fields.keys() != meanings.keys():
        raise ValueError(f"{hook_class.__name__}: docstring and fields differ in {fields.keys() ^ meanings.keys()}")
    if not fields:
        return "None.\n"
    rows = ["| Option | Default | Meaning |", "|---|---|---|"]
    rows += [f"| `{name}` | {_default(fields[name])} | {_linked(meanings[name])} |" for name in meanings]
    return "\n".join(rows) + "\n"


def documented_arguments(cls: type) -> dict[str, str]:
    """Descriptions under `Args:` of a class's docstring, each on one line, by name."""
    found = re.search(r"^Args:\n((?:    .*\n?|\n)+)", inspect.getdoc(cls) or "", re.MULTILINE)
    if found is None:
        return {}
    entries = re.findall(r"^    (\w+): ((?:.*\n?)(?:^      +.*\n?|\n)*)", found[1], re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}


def _default(field: dataclasses.Field) -> str:
    if field.default is not dataclasses.MISSING:
        return f"`{field.default!r}`".replace("'", '"')
    if field.default_factory is not dataclasses.MISSING:
        return f"`{field.default_factory()!r}`"
    return "must be given"


def _linked(meaning: str) -> str:
    linked = re.sub(r"see `(\w+)`", lambda match: f"see [{match[0][4:]}]({_page(match[1])})", meaning)
    return linked.replace("|", "\\|")


def _page(class_name: str) -> str:
    return f"{getattr(lightning_commhooks, class_name).name}.md"


def main() -> None:
    """Write all tables."""
    for path in sorted(FOLDER.rglob("*.md")):
        old = path.read_text()
        if (new := updated(old)) != old:
            path.write_text(new)
            print(f"wrote {path}")


if __name__ == "__main__":
    main()
