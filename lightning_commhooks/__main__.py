"""`python -m lightning_commhooks`: see `cli.py`."""

from __future__ import annotations

import importlib.util
import sys

_NEEDED = ("typer", "rich")


def main() -> None:
    """Run the command line, or say what it needs."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"the command line needs {' and '.join(missing)}: pip install 'lightning-commhooks[cli]'", file=sys.stderr
        )
        sys.exit(2)
    from lightning_commhooks.advice.cli import app

    app()


if __name__ == "__main__":
    main()
