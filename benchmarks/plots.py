"""Plots of benchmarks: one style, colours that colour-blind readers can tell apart, numbers written out on the axes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

# Okabe and Ito 2008, https://jfly.uni-koeln.de/color/, without yellow, which is pale on white.
BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
BLUE, RED, PURPLE = "#0072B2", "#D55E00", "#CC79A7"
GREY = "#888888"

STYLE = {
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "legend.frameon": False,
    "legend.fontsize": 10,
    "lines.linewidth": 2,
    "savefig.dpi": 130,
}


@dataclass(frozen=True)
class Line:
    """How a method is drawn, the same in all plots of a benchmark.

    Attributes:
        colour: of its line and marker.
        dashes: of its line, as matplotlib writes them.
        marker: of its points.
    """

    colour: str
    dashes: str = "-"
    marker: str = "o"


def grid(rows: int, columns: int, size: tuple[float, float], *, share: bool = False) -> tuple[Figure, list[list[Axes]]]:
    """An empty figure; `share`: all panels have the same axes."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            rows, columns, figsize=size, squeeze=False, layout="constrained", sharex=share, sharey=share
        )
    return figure, [list(row) for row in axes]


def curves(axes: Axes, runs: Iterable[tuple[list[float], list[float]]], line: Line, label: str) -> None:
    """Lines of one method: the first in full and with the label, the others thin."""
    for number, (x, y) in enumerate(runs):
        first = number == 0
        axes.plot(
            x,
            y,
            line.dashes,
            color=line.colour,
            lw=2 if first else 0.8,
            alpha=1 if first else 0.5,
            label=label if first else None,
        )


def labelled_points(axes: Axes, points: Mapping[str, tuple[float, float]], lines: Mapping[str, Line]) -> None:
    """A marker and its name for each; names of points that lie close are moved apart, above or below."""
    placed: list[tuple[float, float]] = []
    for name, (x, y) in sorted(points.items(), key=lambda item: item[1]):
        line = lines[name]
        axes.scatter([x], [y], color=line.colour, marker=line.marker, s=70, zorder=3, edgecolor="white")
        placed.append((x, y))
        axes.annotate(name, (x, y), textcoords="offset points", xytext=(7, 5), fontsize=10, color=line.colour)


def log_axis(axis: Axis, subs: tuple[float, ...] = (1, 2, 5)) -> None:
    """Logarithmic, with ticks at 1, 2, 5, 10 and so on in plain numbers."""
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    axis.set_major_locator(LogLocator(base=10, subs=subs))
    axis.set_major_formatter(FuncFormatter(lambda value, _: plain(value)))
    axis.set_minor_formatter(NullFormatter())


def plain(value: float) -> str:
    """`0.05`, `2`, `1,000`."""
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"


def save(figure: Figure, path: Path) -> None:
    """As PNG, without a date, so that the same numbers give the same file."""
    figure.savefig(path, metadata={"Software": None})
    plt.close(figure)
