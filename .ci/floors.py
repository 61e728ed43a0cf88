"""Prints the lowest versions that `pyproject.toml` allows, as constraints for pip: `torch==2.10`.

For `make test-oldest`. Needs Python 3.11, or `tomli`.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PYPROJECT = Path(__file__).parent.parent / "pyproject.toml"
_REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)(\[[\w,-]+\])?>=(?P<floor>[\d.]+)(?P<marker>\s*;.*)?")


def requirements(project: dict[str, Any]) -> Iterator[str]:
    """All requirements of a `pyproject.toml`, of building and of every extra but linting, without the project."""
    metadata = project["project"]
    extras = {name: group for name, group in metadata["optional-dependencies"].items() if name != "lint"}
    for group in (project["build-system"]["requires"], metadata["dependencies"], *extras.values()):
        yield from (text for text in group if not text.startswith(f"{metadata['name']}["))


def floors(project: dict[str, Any]) -> dict[str, str]:
    """The lowest version of each requirement, by name, with its marker.

    Raises:
        ValueError: a requirement is not written as `name>=version`, or has two floors.
    """
    found: dict[str, str] = {}
    for text in requirements(project):
        match = _REQUIREMENT.fullmatch(text)
        if match is None:
            raise ValueError(f"pyproject.toml: {text!r} has no floor that could be tested; write name>=version")
        floor = match["floor"] + (match["marker"] or "")
        if found.setdefault(match["name"], floor) != floor:
            raise ValueError(f"pyproject.toml: {match['name']} has two floors, {found[match['name']]} and {floor}")
    return found


if __name__ == "__main__":
    print(
        *(f"{name}=={floor}" for name, floor in sorted(floors(tomllib.loads(PYPROJECT.read_text())).items())), sep="\n"
    )
