"""One line for the user, without a framework that would show it."""

from __future__ import annotations

import logging
import sys

_logger = logging.getLogger("lightning_commhooks")


def is_silenced() -> bool:
    """Whether the user wants no such lines."""
    return _logger.level > logging.INFO


def announce(text: str) -> None:
    """Log a line at level INFO; where logging is not set up, which would swallow it, print it to stderr.

    To silence it: `logging.getLogger("lightning_commhooks").setLevel(logging.WARNING)`.
    """
    if _logger.isEnabledFor(logging.INFO):
        _logger.info(text)
    elif _logger.level == logging.NOTSET:
        # In one piece, so that lines of several processes stay apart where streams are not buffered.
        print(f"{text}\n", end="", file=sys.stderr, flush=True)
