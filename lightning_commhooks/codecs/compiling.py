"""Messages to the user while codecs are compiled."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from lightning_commhooks.basics.announce import announce

_logger = logging.getLogger("lightning_commhooks")

# Seconds; a shorter pause needs no explanation.
LONG = 2.0


@contextmanager
def said(what: str) -> Iterator[None]:
    """Say before something is compiled, or loaded from PyTorch's cache, that it is; then which, and how long it took.

    In the log at level INFO always. To the eye, see `announce`, only if it takes long: not where it comes from a cache.

    Args:
        what: the codec and the device.
    """
    before, is_logged = f"preparing {what}", _logger.isEnabledFor(logging.INFO)
    _logger.info(before)
    at_length = (
        f"{before}: PyTorch compiles it, for up to a minute, or loads it from its cache, which takes some seconds too"
    )
    timer = threading.Timer(LONG, announce, [at_length])
    timer.daemon = True
    begin, missing = time.perf_counter(), _num_missing()
    if not is_logged:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if not is_logged:
            timer.join()
    seconds = time.perf_counter() - begin
    done = f"compiled {what}" if _num_missing() > missing else f"loaded {what} from PyTorch's cache"
    text = f"{done} in {seconds:.1f} s"
    if seconds < LONG:
        _logger.info(text)
    else:
        announce(text)


def _num_missing() -> int:
    """How many graphs PyTorch has not found in its cache so far."""
    from torch._dynamo.utils import counters  # takes a second, which `torch.compile` takes anyway

    return int(counters["inductor"]["fxgraph_cache_miss"])
