"""Tables for people."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from lightning_commhooks.advice.candidates import DENSE, NOOP, TITLES
from lightning_commhooks.advice.ranking import MIN_GAIN, Row
from lightning_commhooks.advice.study import Result

if TYPE_CHECKING:
    from lightning_commhooks.advice.listing import Listed

_WIDTH = 120
_LONG_SETUP_MS = 1000


def make_console(stderr: bool = False) -> Console:
    """A console as wide as the terminal, or wide enough for the tables where there is none."""
    console = Console(stderr=stderr, highlight=False)
    return console if console.is_terminal else Console(stderr=stderr, highlight=False, width=_WIDTH)


def print_result(result: Result, console: Console) -> None:
    """What was measured, a table, and what follows."""
    console.print(_heading(result))
    console.print(_table(result))
    for label, notes in {row.label: row.notes for row in result.rows if row.notes}.items():
        console.print(Text(f"{label}: {'; '.join(notes)}", style="dim"))
    for row in result.rows:
        if row.setup_ms > _LONG_SETUP_MS:
            text = f"{row.label}: {row.setup_ms / 1e3:.0f} s to attach, once, most of it to compile the codec"
            console.print(Text(text, style="dim"))
    if result.command == "headroom":
        _print_headroom(result, console)
    for note in result.notes:
        console.print(Text(note, style="dim"))
    if result.verdict is not None:
        _print_verdict(result, console)


def _heading(result: Result) -> Text:
    text = Text()
    text.append(f"{result.world_size} ranks", style="bold")
    text.append(f", each on {result.device}; {_size(result.gradient_bytes)} of gradients\n")
    if result.link is not None:
        kind = "link (given)" if result.is_what_if else "link (measured)"
        text.append(kind, style="bold")
        text.append(f": {_rate(result.link.bandwidth)} per rank, {result.link.latency * 1e3:.2f} ms for the smallest ")
        text.append("all-reduce")
        if result.link.message_seconds:
            ring = result.link.without_hook.latency * 1e3
            text.append(f" by direct messages, {ring:.2f} ms without a hook")
        text.append("\n")
    text.append("compute", style="bold")
    text.append(f": {result.compute_ms:.1f} ms a step that sends nothing")
    return text


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes >= 1e6 else f"{num_bytes / 1e3:.1f} kB"


def _rate(bandwidth: float) -> str:
    bits = bandwidth * 8
    return f"{bits / 1e9:.2f} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.1f} Mbit/s"


Column = tuple[str, Callable[[Row], str]]


def _columns(result: Result) -> list[Column]:
    dense = next(row for row in result.rows if row.label == DENSE)
    columns: list[Column] = []
    if any(row.predicted_ms is not None for row in result.rows):
        columns.append(("predicted\nms", lambda row: _ms(row.predicted_ms)))
    if any(row.measured_ms is not None for row in result.rows):
        columns.append(("measured\nms", lambda row: _ms(row.measured_ms)))
    columns.append(("±", lambda row: _ms(row.spread_ms)))
    if len(columns) == 3:
        columns.append(("off\nby", lambda row: _percent(row.prediction_error)))
    if result.command == "headroom":
        return columns
    columns += [
        ("of\ndense", lambda row: f"{row.step_ms / dense.step_ms:.2f}x"),
        ("exposed\nms", lambda row: _ms(row.exposed_ms)),
        ("codec\nms", lambda row: _ms(row.codec_ms)),
        ("MB\nsent", lambda row: f"{row.bytes_sent / 1e6:.3g}"),
        ("fewer\nbytes", lambda row: "-" if math.isinf(row.ratio) else f"{row.ratio:.3g}x"),
        ("error of\na step", _error),
    ]
    return columns


def _error(row: Row) -> str:
    if row.label == DENSE:
        return "0"
    return "-" if math.isnan(row.error) else f"{row.error:.2g}"


def _table(result: Result) -> Table:
    table = Table(header_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("hook", overflow="fold", min_width=22)
    columns = _columns(result)
    for title, _ in columns:
        table.add_column(title, justify="right")
    apart = result.verdict.apart if result.verdict is not None else {}
    choice = result.verdict.choice if result.verdict is not None else None
    for row in result.rows:
        style = "bold green" if row.label == choice else "dim" if row.label in apart or row.label == NOOP else ""
        table.add_row(TITLES.get(row.label, row.label), *(show(row) for _, show in columns), style=style)
    return table


def _ms(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.1f}"


def _percent(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:+.0%}"


def _print_headroom(result: Result, console: Console) -> None:
    dense = next(row for row in result.rows if row.label == DENSE)
    exposed = max(0.0, dense.step_ms - result.compute_ms)
    console.print(
        f"Communication costs {exposed:.1f} ms of {dense.step_ms:.1f} ms a step: [bold]{result.headroom:.0%}[/]"
    )
    if result.headroom < MIN_GAIN:
        console.print(Text("Do not compress", style="bold yellow").append(": no hook can save more than that."))
    else:
        most = dense.step_ms / result.compute_ms
        console.print(f"Without it a step would be {most:.2f} times as fast. `advise` finds what can be had of that.")


def _print_verdict(result: Result, console: Console) -> None:
    verdict = result.verdict
    assert verdict is not None
    for reason in dict.fromkeys(verdict.apart.values()):
        labels = " and ".join(label for label, own in verdict.apart.items() if own == reason)
        console.print(Text(f"Not recommended unasked: {labels}; {reason}.", style="dim"))
    off = [abs(row.prediction_error) for row in result.rows if not math.isnan(row.prediction_error)]
    if off:
        console.print(f"Predictions are off by {sum(off) / len(off):.0%} on average, {max(off):.0%} at most.")
    console.print()
    if verdict.choice is None:
        console.print(Text("Do not compress", style="bold yellow").append(f": {verdict.reason}."))
    else:
        console.print(Text(f"Use {verdict.choice}", style="bold green").append(f": {verdict.reason}."))
        console.print(Text(f"    {verdict.line}", style="bold"))
    if verdict.alternative is not None:
        row = next(row for row in result.rows if row.label == verdict.alternative)
        console.print(
            f"Faster still, {row.step_ms:.1f} ms a step, but another algorithm, whose result has to be checked:"
        )
        console.print(Text(f"    CompressedDDPStrategy(hook={row.code})"))


def print_list(listed: list[Listed], console: Console, with_docs: bool) -> None:
    """Hooks, what they send, and their options."""
    for hook in listed:
        title = Text(hook.name, style="bold cyan").append(f"  {hook.class_name}", style="bold")
        if hook.sends:
            sends = ", ".join(f"{fraction:.3g} at {world} ranks" for world, fraction in hook.sends.items())
            title.append(f"  sends {sends}", style="green")
        console.print(title)
        console.print(Padding(Text(hook.summary), (0, 0, 0, 4)))
        if hook.aliases:
            console.print(Text(f"    also: {', '.join(hook.aliases)}", style="dim"))
        for option in hook.options:
            default = "" if option.default is None else f" = {option.default}"
            console.print(Text(f"    {option.name}: {option.type}{default}", style="dim"))
            if with_docs and option.doc:
                console.print(Padding(Text(option.doc), (0, 0, 0, 8)))
    console.print()
    console.print("Sent bytes are of those of dense averaging in float32, per step in the long run, for 4 layers of")
    console.print("512 x 512 with biases. Options of one hook explained: list HOOK.")
