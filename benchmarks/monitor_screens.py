"""The pictures in `docs/monitoring.md`: real runs of `examples/lightning/monitor.py`, in a terminal and in TensorBoard.

Needs matplotlib, tensorboard and pyte, a terminal emulator.

    python benchmarks/monitor_screens.py --out docs/images
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path

import matplotlib as mpl
import pyte

mpl.use("Agg")
import matplotlib.pyplot as plt  # after the choice of a backend
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "lightning" / "monitor.py"
COLUMNS, LINES = 132, 50
HOOKS = ("powersgd", "int8", "post_localsgd")
TITLES = {
    "bytes_sent": "bytes sent so far",
    "compression_ratio": "times fewer than plain DDP, since the last point",
    "relative_error": "of averaged gradients",
    "residual_norm": "norm of the residuals",
    "exposed_ms_per_step": "ms per step waited for communication",
    "codec_ms_per_step": "ms per step of compressing",
    "averagings": "averagings of the model so far",
    "nonfinite_steps": "steps with inf or NaN so far",
}
_COLORS = {"default": "#d8d8d8", "brown": "#d7a65f", "brightblack": "#808080", "black": "#606060"}


def run_in_terminal(command: list[str]) -> list[list[tuple[str, str]]]:
    """What a terminal shows at the end: characters and their colours, by line."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    environment = {
        **os.environ,
        "COLUMNS": str(COLUMNS),
        "LINES": str(LINES),
        "TERM": "xterm-256color",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{EXAMPLE.parents[2]}:{EXAMPLE.parent}",
        "PYTHONWARNINGS": "ignore",
    }
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment, close_fds=True)
    os.close(slave)
    screen = pyte.Screen(COLUMNS, LINES)
    stream, deadline = pyte.ByteStream(screen), time.monotonic() + 200
    while time.monotonic() < deadline:
        ready, _, _ = select.select([master], [], [], 0.5)
        try:
            data = os.read(master, 4096) if ready else b""
        except OSError:  # the last process has closed it
            break
        stream.feed(data)
        if not data and process.poll() is not None:
            break
    process.wait(20)
    if process.returncode:
        raise RuntimeError("\n".join(screen.display))
    lines = [[screen.buffer[y][x] for x in range(COLUMNS)] for y in range(LINES)]
    return [[(cell.data, cell.fg) for cell in line] for line in lines]


def draw_terminal(lines: list[list[tuple[str, str]]], path: Path) -> None:
    """Draw the lines from the last epoch's bar on."""
    texts = ["".join(character for character, _ in line).rstrip() for line in lines]
    used = [
        i for i, text in enumerate(texts) if text.startswith(("Epoch", "Communication", "`Trainer")) or "comm" in text
    ]
    first, last = used[0], max(i for i, text in enumerate(texts) if text)
    shown = lines[first : last + 1]
    width, height = 0.0865, 0.2
    figure = plt.figure(figsize=(COLUMNS * width + 0.4, len(shown) * height + 0.4), facecolor="#1e1e1e")
    w, h = figure.get_size_inches()
    for row, line in enumerate(shown):
        for column, (character, color) in enumerate(line):
            if character.strip():
                x, y = (0.2 + column * width) / w, 1 - (0.2 + (row + 0.8) * height) / h
                ink = _COLORS.get(color, color if len(color) != 6 else f"#{color}")
                figure.text(x, y, character, family="DejaVu Sans Mono", fontsize=10, color=ink)
    figure.savefig(path, dpi=110, facecolor=figure.get_facecolor())
    plt.close(figure)


def draw_scalars(folder: Path, path: Path) -> None:
    """Draw what TensorBoard would."""
    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = plt.subplots(2, 4, figsize=(15, 6.4), constrained_layout=True)
    for i, hook in enumerate(HOOKS):
        (version,) = (folder / hook).iterdir()
        events = EventAccumulator(str(version)).Reload()
        for axis, (name, title) in zip(axes.flat, TITLES.items(), strict=True):
            if f"comm/{name}" in events.Tags()["scalars"]:
                scalars = events.Scalars(f"comm/{name}")
                line = [s.step for s in scalars], [s.value for s in scalars]
                # Not all hooks have each value.
                axis.plot(*line, color=f"C{i}", marker=".", markersize=4, label=hook)
            axis.set_title(f"comm/{name}", fontsize=11, fontweight="bold")
            axis.set_xlabel(title)
    for name, axis in zip(TITLES, axes.flat, strict=True):
        if name == "compression_ratio":
            axis.set_yscale("log")
        else:
            axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes.flat[0].legend(frameon=False)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def main() -> None:
    """Run the example with each progress bar and each hook, draw all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as logs:
        for hook, bar in zip(HOOKS, ("tqdm", "rich", "tqdm"), strict=True):
            command = [sys.executable, str(EXAMPLE), "--hook", hook, "--bar", bar, "--logs", logs]
            screen = run_in_terminal(command)
            if hook != "post_localsgd":
                draw_terminal(screen, args.out / f"monitor_{bar}.png")
        draw_scalars(Path(logs), args.out / "monitor_tensorboard.png")


if __name__ == "__main__":
    main()
