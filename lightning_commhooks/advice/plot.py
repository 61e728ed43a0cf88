"""A picture of a result."""

from __future__ import annotations

from lightning_commhooks.advice.candidates import TITLES
from lightning_commhooks.advice.study import Result

_COMPUTE, _EXPOSED, _PREDICTED = "#4c72b0", "#dd8452", "#222222"


def save_plot(result: Result, path: str) -> None:
    """Bars of step times, divided into compute and what communication adds; predictions as marks.

    The ending of the path says which format the file has.

    Raises:
        ValueError: matplotlib is missing, or cannot write such a file.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError("--plot needs matplotlib: pip install 'lightning-commhooks[cli]'") from error
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    rows = list(reversed(result.rows))
    names = [TITLES.get(row.label, _folded(row.label)) for row in rows]
    steps = [row.step_ms for row in rows]
    compute = [min(result.compute_ms, step) for step in steps]
    figure, axes = plt.subplots(figsize=(9, 1.6 + 0.48 * len(rows)), layout="constrained")
    axes.barh(names, compute, color=_COMPUTE, label="compute (step of noop)")
    rest = [step - base for step, base in zip(steps, compute, strict=True)]
    axes.barh(names, rest, left=compute, color=_EXPOSED, label="added by communication and codec")
    is_measured = any(row.measured_ms is not None for row in rows)
    if is_measured and any(row.predicted_ms is not None for row in rows):
        predicted = [row.predicted_ms or 0.0 for row in rows]
        axes.plot(predicted, names, "|", color=_PREDICTED, markersize=16, markeredgewidth=2.5, label="predicted")
    longest = max([*steps, *(row.predicted_ms or 0 for row in rows)])
    for place, (row, step) in enumerate(zip(rows, steps, strict=True)):
        end = max(step, row.predicted_ms or 0)
        axes.text(end + 0.01 * longest, place, f"{step:.1f}", va="center", fontsize=9)
    axes.set_xlim(0, longest * 1.1)
    axes.set_xlabel(f"milliseconds per step, {'measured' if is_measured else 'predicted'}")
    axes.set_title(_title(result), fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, fontsize=9, loc="outside lower center", ncols=3)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ValueError(f"--plot {path}: {error}") from error
    finally:
        plt.close(figure)


def _folded(label: str) -> str:
    return label.replace(":", ":\n", 1) if len(label) > 24 else label


def _title(result: Result) -> str:
    parts = [f"{result.world_size} ranks", f"{result.gradient_bytes / 1e6:.1f} MB of gradients"]
    if result.link is not None:
        parts.append(f"{result.link.bandwidth * 8 / 1e9:.3g} Gbit/s")
    title = ", ".join(parts)
    if result.verdict is not None:
        choice = result.verdict.choice
        title += "\n" + (f"use {choice}: {result.verdict.gain:.0%} less time a step" if choice else "do not compress")
    return title
