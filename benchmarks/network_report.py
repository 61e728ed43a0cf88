"""Tables and plots of `network.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import plots

# Those that come later are drawn above.
LINES = {
    "dense": plots.Line(plots.BLACK),
    "bf16": plots.Line(plots.SKY),
    "int8": plots.Line(plots.BLUE),
    "int4": plots.Line(plots.PURPLE),
    "powersgd, rank 4": plots.Line(plots.ORANGE),
    "diloco, 16, int4": plots.Line(plots.RED),
    "stock fp16": plots.Line(plots.GREY, "--", "x"),
    "stock powersgd, rank 4": plots.Line(plots.ORANGE, "--", "x"),
    "noop": plots.Line(plots.GREEN, ":", ""),
}
TITLES = {"resnet": "ResNet, 6.3 M parameters", "gpt": "GPT, 6.1 M parameters"}


def floor_ms(row: dict[str, Any], noop_ms: float) -> float:
    """A step with these bytes is hardly faster, however well it hides the one behind the other.

    Args:
        row: what was measured.
        noop_ms: best step that sends nothing. Others have been seen to be a little faster yet.
    """
    wire = row["bytes"] * 8 / row["gbit"] / 1e6 + (row["delay_ms"] / row["period"] if row["bytes"] > 1e3 else 0.0)
    return max(noop_ms, wire)


def tables(rows: list[dict[str, Any]]) -> None:
    """A table for each configuration."""
    keys = ("shape", "world", "gbit", "delay_ms")
    for configuration in sorted({tuple(row[key] for key in keys) for row in rows}):
        own = {row["hook"]: row for row in rows if tuple(row[key] for key in keys) == configuration}
        shape, world, gbit, delay_ms = configuration
        print(f"\n{TITLES[shape]}; {world} hosts, {gbit:g} Gbit/s, delay {delay_ms:g} ms one way")
        print(f"{'hook':<25}{'ms':>9}{'lowest':>9}{'highest':>9}{'MB':>9}{'floor ms':>10}{'of floor':>10}", end="")
        print(f"{'as fast as: dense':>19}{'stock fp16':>12}{'stock bf16':>12}")
        for hook, row in own.items():
            floor = floor_ms(row, min(own["noop"]["rounds"]))
            print(f"{hook:<25}{row['ms']:>9.1f}{min(row['rounds']):>9.1f}{max(row['rounds']):>9.1f}", end="")
            print(f"{row['bytes'] / 1e6:>9.3f}{floor:>10.1f}{row['ms'] / floor:>10.2f}", end="")
            for base, width in (("dense", 18), ("stock fp16", 11), ("stock bf16", 11)):
                print(f"{own[base]['ms'] / row['ms']:>{width}.2f}x" if base in own else f"{'-':>{width}} ", end="")
            print()


def draw(rows: list[dict[str, Any]], folder: Path) -> None:
    """Step time against bandwidth, for each shape and number of hosts, without delay and with it."""
    for delay_ms in sorted({row["delay_ms"] for row in rows}):
        name = "network.png" if not delay_ms else "network_delay.png"
        draw_delay([row for row in rows if row["delay_ms"] == delay_ms], delay_ms, folder / name)


def draw_delay(rows: list[dict[str, Any]], delay_ms: float, path: Path) -> None:
    """A panel for each shape and number of hosts."""
    worlds = sorted({row["world"] for row in rows})
    present = [shape for shape in TITLES if any(row["shape"] == shape for row in rows)]
    figure, panels = plots.grid(len(present), len(worlds), (10.5, 4 * len(present)), share=True)
    for shape, of_shape in zip(present, panels, strict=True):
        for world, axes in zip(worlds, of_shape, strict=True):
            for hook, line in LINES.items():
                own = [r for r in rows if (r["shape"], r["world"], r["hook"]) == (shape, world, hook)]
                points = sorted((row["gbit"], row["ms"]) for row in own)
                x, y = [p[0] for p in points], [p[1] for p in points]
                axes.plot(x, y, line.dashes, color=line.colour, marker=line.marker or None, label=hook)
            axes.set_title(f"{TITLES[shape]}, {world} hosts")
            axes.set(xlabel="link, Gbit/s", ylabel="ms per step")
            plots.log_axis(axes.xaxis, subs=(1,))
            plots.log_axis(axes.yaxis)
            axes.label_outer()
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside right center")
    far = f", {delay_ms:g} ms away" if delay_ms else ""
    figure.suptitle(f"Time of a training step against the speed of the link{far} (both log)")
    plots.save(figure, path)
