"""Results as JSON, one row per measured run, so that a benchmark can be run in parts."""

from __future__ import annotations

import datetime
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).resolve().parent / "results"


class Records:
    """Rows of a file, told apart by some of their fields.

    Args:
        path: of the JSON; made when it does not exist.
        keys: fields that tell rows apart. A new row replaces the one with the same values.
    """

    def __init__(self, path: Path, keys: tuple[str, ...]) -> None:
        self.path, self._keys = path, keys
        self.rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"] if path.exists() else []

    def has(self, **values: object) -> bool:
        """Whether there is a row with these values of its keys."""
        return any(all(row[key] == value for key, value in values.items()) for row in self.rows)

    def put(self, row: dict[str, Any]) -> None:
        """Add or replace a row, and write the file."""
        new = {**row, "torch": torch.__version__, "date": str(datetime.date.today()), "cores": os.cpu_count()}
        same = [all(old[key] == new[key] for key in self._keys) for old in self.rows]
        self.rows = [old for old, is_same in zip(self.rows, same, strict=True) if not is_same] + [new]
        lines = ",\n".join(json.dumps(row) for row in self.rows)
        self.path.write_text(f'{{"command": {json.dumps(command(options=False))}, "rows": [\n{lines}\n]}}\n')


def command(*, options: bool = True) -> str:
    """What was typed to get here, as from the repository's root; without options, what does all of it."""
    script = os.path.relpath(sys.argv[0], RESULTS.parent.parent)
    return f"python {shlex.join([script, *(sys.argv[1:] if options else [])])}"


def machine(rows: list[dict[str, Any]]) -> str:
    """Versions, dates and cores of rows, for the head of a table."""
    seen = {key: sorted({str(row[key]) for row in rows}) for key in ("torch", "date", "cores")}
    return f"torch {', '.join(seen['torch'])}; {' to '.join(seen['date'])}; {', '.join(seen['cores'])} cores"
