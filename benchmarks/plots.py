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


plt.rcParams.update(STYLE)


def grid(rows: int, columns: int, size: tuple[float, float], *, share: bool = False) -> tuple[Figure, list[list[Axes]]]:
    """An empty figure of `size` inches; `share`: all panels have the same axes."""
    figure, axes = plt.subplots(
        rows, columns, figsize=size, squeeze=False, layout="constrained", sharex=share, sharey=share
    )
    return figure, [list(row) for row in axes]


def curves(axes: Axes, runs: Iterable[tuple[list[float], list[float]]], line: Line, label: str) -> None:
    """Lines of one method: the first in full and with the label, the others thin."""
    for number, (x, y) in enumerate(runs):
        width, alpha, text = (2, 1, label) if number == 0 else (0.8, 0.6, None)
        axes.plot(x, y, line.dashes, color=line.colour, lw=width, alpha=alpha, label=text)


def named_ranges(axes: Axes, points: Mapping[str, tuple[float, list[float]]], lines: Mapping[str, Line]) -> None:
    """For each name a marker at x and the mean of y, a bar from the lowest y to the highest, and the name."""
    above = True
    for name, (x, y) in sorted(points.items(), key=lambda item: item[1]):
        line, middle = lines[name], sum(y) / len(y)
        reach = [[middle - min(y)], [max(y) - middle]]
        axes.errorbar([x], [middle], reach, color=line.colour, marker=line.marker, ms=8, lw=1.2, capsize=4)
        # Names of neighbours by turns above and below.
        axes.annotate(
            name,
            (x, max(y) if above else min(y)),
            textcoords="offset points",
            xytext=(0, 8 if above else -18),
            ha="center",
            fontsize=10,
            color=line.colour,
        )
        above = not above
    axes.margins(x=0.2, y=0.2)


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
