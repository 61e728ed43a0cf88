"""What users are told while codecs are compiled, by real compilations on two ranks."""

import contextlib
import io
import logging

from driver import attached
from pool import compiling

import lightning_commhooks as lc
from lightning_commhooks.codecs import codec as core

# No other test compiles this one.
INT8 = lc.Int8(min_bytes=0, block_size=136)
SHAPES = {"weight": (500, 600)}
logger = logging.getLogger("lightning_commhooks")


class Records(logging.Handler):
    def __init__(self):
        super().__init__(logging.DEBUG)
        self.texts = []

    def emit(self, record):
        if "Int8Codec" in record.getMessage():
            self.texts.append(record.getMessage())


def said(long, level):
    """What attaching the hook says on standard error and in the log."""
    printed, records, before = io.StringIO(), Records(), (core.LONG, logger.level)
    core.LONG = long
    logger.setLevel(level)
    logger.addHandler(records)
    try:
        with contextlib.redirect_stderr(printed), compiling(), attached(INT8, SHAPES):
            pass
    finally:
        core.LONG = before[0]
        logger.setLevel(before[1])
        logger.removeHandler(records)
    # PyTorch may have something to say, too.
    return [line for line in printed.getvalue().splitlines() if "Int8Codec" in line], records.texts


def said_in_turn(rank, world):
    results = {}
    # From nothing, it takes longer than that with any cache.
    results["long"] = said(0.01, logging.NOTSET)
    results["again"] = said(0.0, logging.INFO)
    for name, long, level in (("short", 600, logging.NOTSET), ("log", 600, logging.INFO), ("off", 0, logging.WARNING)):
        core._compiled.clear()  # as in another process, with PyTorch's cache
        results[name] = said(long, level)
    return results


def test_said_on_the_first_rank_before_it_starts_and_after(run):
    first, other = run(said_in_turn, timeout=200)
    codec = "Int8Codec(block_size=136, rounding='nearest') for cpu"
    (before, after), logged = first["long"]
    assert before.startswith(f"preparing {codec}: PyTorch compiles it, for up to a minute, or loads it from its cache")
    assert after.startswith((f"compiled {codec} in ", f"loaded {codec} from PyTorch's cache in "))
    assert after.endswith(" s")
    assert logged == []
    assert first["again"] == ([], []), "it is compiled"
    assert first["short"] == ([], []), "nobody waits"
    printed, logged = first["log"]
    assert (printed, logged[0], len(logged)) == ([], f"preparing {codec}", 2)
    assert logged[1].startswith(f"loaded {codec} from PyTorch's cache in ")
    assert first["off"] == ([], [])
    assert all(result == ([], []) for result in other.values())
