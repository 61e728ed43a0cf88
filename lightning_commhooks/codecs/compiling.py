"""Messages to the user while codecs are compiled."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from lightning_commhooks.codecs.announce import announce

_logger = logging.getLogger("lightning_commhooks")

# Seconds; with less nobody wonders what a program does.
LONG = 2.0


@contextmanager
def said(what: str) -> Iterator[None]:
    """Say before something is compiled that it is, and then how long it took.

    In the log at level INFO always. To the eye, see `announce`, only if it takes long: not where it comes from a cache.

    Args:
        what: the codec and the device.
    """
    before, is_logged = f"compiling {what}", _logger.isEnabledFor(logging.INFO)
    _logger.info(before)
    at_length = f"{before}, which takes up to a minute, once on this machine: later runs take it from PyTorch's cache"
    timer = threading.Timer(LONG, announce, [at_length])
    timer.daemon = True
    begin = time.perf_counter()
    if not is_logged:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if not is_logged:
            timer.join()
    seconds = time.perf_counter() - begin
    text = f"compiled {what} in {seconds:.1f} s"
    if seconds < LONG:
        _logger.info(text)
    else:
        announce(text)
