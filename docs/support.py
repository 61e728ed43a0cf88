"""The table of tested versions, from the records of the suites. `python docs/support.py` writes it into support.md.

`python docs/support.py --check` fails if the records do not allow a release.

`make test RECORD=name` and the other suites write a record each to `docs/records/`: tests/support/record.py.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
PAGE = FOLDER / "support.md"
_TABLE = re.compile(r"(<!-- records -->\n).*(<!-- end of records -->\n)", re.DOTALL)
# The versions of PyTorch that the code is written for; those of Python are in pyproject.toml.
TORCH = tuple(f"2.{minor}" for minor in range(10, 16))
_VERSIONS = ("python", "torch", "lightning", "accelerate", "transformers", "ray", "torchft")
_COLUMNS = (
    *("Python", "PyTorch", "Lightning", "Accelerate", "transformers", "Ray", "torchft"),
    *("suite", "on", "passed", "failed", "skipped", "date"),
)


def records() -> list[dict[str, Any]]:
    """All records, the newest PyTorch first."""
    found = [json.loads(path.read_text()) for path in (FOLDER / "records").glob("*.json")]
    return sorted(found, key=lambda one: (*_key(one["torch"]), *_key(one["python"]), one["suite"]), reverse=True)


def python_versions() -> list[str]:
    """Versions of Python that the package is for."""
    return re.findall(r'"Programming Language :: Python :: (3\.\d+)"', (FOLDER.parent / "pyproject.toml").read_text())


def table(found: list[dict[str, Any]]) -> str:
    """A line for each record, then one for each version of PyTorch and Python that no record has."""
    rows = [
        "| Python | PyTorch | Lightning | Accelerate | transformers | Ray | torchft | suite | on | passed | failed |"
    ]
    rows[0] += " skipped | date |"
    rows.append("|" + "---|" * (rows[0].count("|") - 1))
    for one in found:
        cells = [(one[name] or "none").partition("+")[0] for name in _VERSIONS]
        cells += [f"`{one['suite']}`", one["device"], *(f"{one[name]:,}" for name in ("passed", "failed", "skipped"))]
        rows.append(f"| {' | '.join([*cells, one['date']])} |")
    for column, versions in ((1, TORCH[::-1]), (0, python_versions()[::-1])):
        for version in versions:
            if not any(re.match(rf"{re.escape(version)}\b", one[_VERSIONS[column]]) for one in found):
                cells = [""] * len(_COLUMNS)
                cells[column], cells[7] = version, "not run"
                rows.append(f"|{'|'.join(f' {cell} ' if cell else ' ' for cell in cells)}|")
    return "\n".join(rows) + "\n"


def reason_against_release(found: list[dict[str, Any]]) -> str:
    """Why the records do not allow a release; empty if they do."""
    failed = [one["suite"] for one in found if one["failed"]]
    if failed:
        return f"records of {', '.join(failed)} have failed tests"
    if not any(one["suite"] == "make test" for one in found):
        return "there is no record of `make test`: make test RECORD=name"
    return ""


def updated(text: str) -> str:
    """The page with its table as it should be."""
    return _TABLE.sub(lambda match: f"{match[1]}\n{table(records())}\n{match[2]}", text)


def _key(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0]))[:2]


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        sys.exit(reason_against_release(records()) or None)
    PAGE.write_text(updated(PAGE.read_text()))
