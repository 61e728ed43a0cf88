"""Table and plots of `time_to_loss.py`."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import plots

TARGET = 2.65  # nats per character
# What is left of that when one waits for more: methods that trade accuracy for bytes get there late, or not at all.
LOWER = 2.62
# How many times as fast the best of our hooks must be.
LIMITS = {"dense": 15.0, "stock 16 bit": 3.0}
# How many times as fast the best of our low-rank hooks is to be as PyTorch's best one.
LOW_RANK_LIMIT = 1.4


def reached(curve: list[list[float]], target: float = TARGET) -> tuple[float, float]:
    """Steps and seconds until the target; inf when it is not reached."""
    for before, after in itertools.pairwise(curve):
        if after[3] <= target:
            part = (before[3] - target) / (before[3] - after[3])
            return before[0] + part * (after[0] - before[0]), before[1] + part * (after[1] - before[1])
    return math.inf, math.inf


# Of seconds to each target by method and seed, and of losses at the end.
Judge = Callable[[dict[str, list[float]], dict[str, list[float]], dict[str, list[float]]], bool]


def report(rows: list[dict[str, Any]], judge: Judge) -> bool:
    """Print the table of the reported runs; whether `judge` is content."""
    runs = {
        method: sorted((r for r in rows if r["method"] == method), key=lambda r: r["seed"])
        for method in dict.fromkeys(r["method"] for r in rows)
    }
    seconds = {method: [reached(run["curve"])[1] for run in of] for method, of in runs.items()}
    reference, title = ("dense", "dense") if "dense" in runs else ("stock powersgd, rank 8", "stock 8")
    print(f"{'':<31}{'lr':>8}{'ms per':>8}{'kB per':>9}{'steps to':>10}{'seconds to':>12}{'':>22}", end="")
    print(f"{f'as fast as {title}':>20}{'loss at':>10}\n{'method':<31}{'':>8}{'step':>8}{'step':>9}", end="")
    print(f"{TARGET:>10}{TARGET:>12}{'with each seed':>22}{f'to {TARGET}':>10}{f'to {LOWER}':>10}{'the end':>10}")
    to_lower = {method: [reached(run["curve"], LOWER)[1] for run in of] for method, of in runs.items()}
    lower = {method: statistics.mean(of) for method, of in to_lower.items()}
    for method, of in sorted(runs.items(), key=lambda item: -statistics.mean(seconds[item[0]])):
        steps, total, sent, _ = (statistics.mean(values) for values in zip(*(r["curve"][-1] for r in of), strict=True))
        print(
            f"{method:<31}{of[0]['learning_rate']:>8g}{total / steps * 1e3:>8.1f}{sent / steps / 1e3:>9,.1f}"
            f"{statistics.mean(reached(run['curve'])[0] for run in of):>10.0f}{statistics.mean(seconds[method]):>12.2f}"
            f"{' '.join(f'{s:.1f}' for s in seconds[method]):>22}"
            f"{statistics.mean(seconds[reference]) / statistics.mean(seconds[method]):>9.1f}x"
            f"{lower[reference] / lower[method]:>9.1f}x"
            f"{statistics.mean(run['curve'][-1][3] for run in of):>10.3f}"
        )
    print()
    return judge(seconds, to_lower, {method: [run["curve"][-1][3] for run in of] for method, of in runs.items()})


def verdict(seconds: dict[str, list[float]], to_lower: dict[str, list[float]], losses: dict[str, list[float]]) -> bool:
    """Print how many times as fast the best of our hooks is; whether that is enough."""
    best = min((m for m in seconds if m != "dense" and not m.startswith("stock")), key=lambda m: sum(seconds[m]))
    stock_16_bit = min(("stock fp16", "stock bf16"), key=lambda m: sum(seconds[m]))
    ok = True
    for what, base in {"dense": "dense", "stock 16 bit": stock_16_bit}.items():
        mean = statistics.mean(seconds[base]) / statistics.mean(seconds[best])
        each = [b / a for a, b in zip(seconds[best], seconds[base], strict=True)]
        holds = min(mean, *each) >= LIMITS[what]
        ok &= holds
        print(
            f"{best!r} is {mean:.1f} times as fast as {base!r} ({', '.join(f'{e:.1f}' for e in each)} by seed); "
            f"limit {LIMITS[what]:g}: {'ok' if holds else 'MISSED'}"
        )
    return ok


def low_rank_verdict(
    seconds: dict[str, list[float]], to_lower: dict[str, list[float]], losses: dict[str, list[float]]
) -> bool:
    """Print how the best low-rank hook of ours compares with PyTorch's best; whether that is enough."""
    low_rank = [method for method in seconds if "powersgd" in method]
    ours, stock = (
        min((m for m in low_rank if m.startswith("stock") == is_stock), key=lambda m: sum(seconds[m]))
        for is_stock in (False, True)
    )
    mean = statistics.mean(seconds[stock]) / statistics.mean(seconds[ours])
    each = [b / a for a, b in zip(seconds[ours], seconds[stock], strict=True)]
    num_reached = {m: sum(math.isfinite(s) for s in to_lower[m]) for m in (ours, stock)}
    holds = mean >= LOW_RANK_LIMIT and num_reached[ours] == len(to_lower[ours])
    print(
        f"{ours!r} is {mean:.2f} times as fast as {stock!r} ({', '.join(f'{e:.2f}' for e in each)} by seed), and "
        f"reaches {LOWER} with {num_reached[ours]} seeds, that with {num_reached[stock]}; asked: {LOW_RANK_LIMIT:g}, "
        f"and all seeds: {'ok' if holds else 'MISSED'}"
    )
    return holds


def muon_verdict(
    seconds: dict[str, list[float]], to_lower: dict[str, list[float]], losses: dict[str, list[float]]
) -> bool:
    """Print by how much Muon lowers the loss of each method; whether it does for DiLoCo in 2 and 4 bits, each seed."""
    ok = True
    for method in (m for m in losses if f"muon: {m}" in losses):
        with_muon = losses[f"muon: {method}"]
        each = [b - a for a, b in zip(with_muon, losses[method], strict=True)]
        holds = min(each) > 0
        ok &= holds or "int" not in method or "diloco" not in method
        print(
            f"{method!r}: Muon ends {statistics.mean(each):.3f} below AdamW ({', '.join(f'{e:.3f}' for e in each)} by "
            f"seed), and {statistics.mean(losses['muon: dense']) - statistics.mean(with_muon):+.3f} below dense Muon"
        )
    return ok


# What is drawn, and how; the others would lie on top of these.
LINES = {
    "dense": plots.Line(plots.BLACK),
    "stock fp16": plots.Line(plots.GREY, "--", "s"),
    "stock bf16": plots.Line(plots.GREY, ":", "D"),
    "stock powersgd": plots.Line(plots.ORANGE, "--", "s"),
    "int8": plots.Line(plots.SKY),
    "int4": plots.Line(plots.BLUE),
    "powersgd": plots.Line(plots.ORANGE),
    "post_localsgd, 8": plots.Line(plots.PURPLE),
    "diloco, 16, int4, no momentum": plots.Line(plots.RED),
    "sparseloco, 8, k=128": plots.Line(plots.GREEN),
}


def draw(rows: list[dict[str, Any]], folder: Path) -> None:
    """Loss against seconds, and bytes against the loss at the end."""
    runs = {method: [row["curve"] for row in rows if row["method"] == method] for method in LINES}
    seconds = {method: statistics.mean(reached(curve)[1] for curve in of) for method, of in runs.items()}
    figure, [[axes]] = plots.grid(1, 1, (10, 5))
    for method in sorted(LINES, key=seconds.__getitem__, reverse=True):
        of = [([p[1] for p in curve[1:]], [p[3] for p in curve[1:]]) for curve in runs[method]]
        plots.curves(axes, of, LINES[method], f"{method}: {seconds['dense'] / seconds[method]:.1f}x")
    axes.axhline(TARGET, color=plots.GREY, lw=1)
    axes.annotate(f"{TARGET}", (0.005, TARGET), xycoords=("axes fraction", "data"), va="bottom", fontsize=10)
    plots.log_axis(axes.xaxis)
    axes.set(xlabel="seconds of training (log)", ylabel="validation loss, nats per character")
    axes.set_title("A small language model on two hosts, 100 Mbit/s: loss against time, 3 seeds")
    figure.legend(loc="outside right center", alignment="left", title=f"how many times as fast\nas dense to {TARGET}")
    plots.save(figure, folder / "time_to_loss.png")

    figure, [[axes]] = plots.grid(1, 1, (10, 5))
    ends = {
        method: (statistics.mean(curve[-1][2] for curve in of) / 1e6, [curve[-1][3] for curve in of])
        for method, of in runs.items()
    }
    plots.named_ranges(axes, ends, LINES)
    plots.log_axis(axes.xaxis)
    axes.set(xlabel=f"MB sent by a host in {rows[0]['curve'][-1][0]} steps (log)", ylabel="validation loss at the end")
    axes.set_title("Bytes against the loss at equal steps: mean, lowest and highest of 3 seeds")
    plots.save(figure, folder / "bytes_and_loss.png")
