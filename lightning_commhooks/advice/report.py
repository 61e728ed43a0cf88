"""The findings of a study as text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from lightning_commhooks.advice.candidates import DENSE, NOOP
from lightning_commhooks.advice.ranking import MIN_GAIN, is_conclusive

_TITLES = {DENSE: "dense (no hook)", NOOP: "noop (sends nothing)"}


def text_of(found: dict[str, Any]) -> str:
    """Return the findings of a study as text: a table and its conclusions."""
    return "\n".join([*_heading(found), "", *_table(found), "", *_conclusions(found)])


def _heading(found: dict[str, Any]) -> Iterator[str]:
    yield f"{found['world_size']} ranks, each on {found['device']}; {found['gradient_bytes'] / 1e6:.3g} MB of gradients"
    if link := found["link"]:
        bits, kind = 8 * link["bandwidth"], "given" if found["is_what_if"] else "measured"
        rate = f"{bits / 1e9:.2f} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.1f} Mbit/s"
        yield f"link ({kind}): {rate} of payload per rank, {1e3 * link['latency']:.2f} ms for a message"
    yield f"compute: {found['compute_ms']:.1f} ms a step that sends nothing"


def _dense_ms(found: dict[str, Any]) -> float:
    return next(float(row["step_ms"]) for row in found["hooks"] if row["label"] == DENSE)


def _table(found: dict[str, Any]) -> Iterator[str]:
    dense_ms = _dense_ms(found)
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "predicted ms" if found["is_what_if"] else "step ms": lambda row: f"{row['step_ms']:.1f}",
        "±": lambda row: f"{row['spread_ms']:.1f}",
    }
    if found["command"] != "headroom":
        columns |= {
            "of dense": lambda row: f"{row['step_ms'] / dense_ms:.2f}x",
            "exposed ms": lambda row: _number(row["exposed_ms"], ".1f"),
            "codec ms": lambda row: _number(row["codec_ms"], ".1f"),
            "MB sent": lambda row: f"{row['bytes_sent'] / 1e6:.3g}",
            "fewer bytes": lambda row: _number(row["ratio"], ".3g"),
            "error": lambda row: _number(row["error"], ".2g"),
        }
    lines = [["hook", *columns]]
    lines += [
        [_TITLES.get(row["label"], row["label"]), *(of(row) for of in columns.values())] for row in found["hooks"]
    ]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    for first, *cells in lines:
        yield "  ".join([first.ljust(widths[0]), *(c.rjust(w) for c, w in zip(cells, widths[1:], strict=True))])


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _conclusions(found: dict[str, Any]) -> Iterator[str]:
    yield from (f"{row['label']}: {row['note']}" for row in found["hooks"] if row["note"])
    yield from found["notes"]
    if found["command"] == "headroom":
        dense_ms, room, (low, high) = _dense_ms(found), found["headroom"], found["headroom_interval"]
        if not is_conclusive((low, high)):
            yield (
                f"Communication costs between {low * dense_ms:.1f} ms and {high * dense_ms:.1f} ms of {dense_ms:.1f} "
                f"ms a step, {low:.0%} to {high:.0%}: the measurement is too noisy for a conclusion. Repeat it on a "
                "quiet machine, or with more --rounds."
            )
            return
        costs = f"Communication costs {room * dense_ms:.1f} ms of {dense_ms:.1f} ms a step"
        yield f"{costs}: {room:.0%} ({low:.0%} to {high:.0%})."
        yield "Do not compress." if room < MIN_GAIN else "No hook can save more; `advise` finds how much each saves."
    if verdict := found["verdict"]:
        for reason in dict.fromkeys(verdict["apart"].values()):
            labels = " and ".join(label for label, own in verdict["apart"].items() if own == reason)
            yield f"Not recommended by default: {labels}; {reason}."
        choice = verdict["choice"]
        against = "No conclusion" if verdict["is_noisy"] else "Do not compress"
        yield f"\n{against if choice is None else f'Use {choice}'}: {verdict['reason']}."
        if choice is not None:
            yield f"    {verdict['line']}"
