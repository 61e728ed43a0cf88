"""All tests and benchmarks that need a GPU, in at most ten minutes, and one page about them for a bug report.

`--only quality` trains a language model with each of some hooks instead, which is not part of the rest.

    make gpu
    python benchmarks/gpu.py --output gpu.txt
    python benchmarks/gpu.py --only tests --minutes 4
    python benchmarks/gpu.py --only quality --minutes 5

The page goes to standard output and to `--output`; all that tests and benchmarks print, to a file beside it that ends
in `.log`. Exit codes: 0, all passed; 1, something failed or took too long; 3, this machine has no NVIDIA GPU; 4, it has
one, but this Python cannot use it. 3 and 4 come with one line that says so, before anything is run.

`--check` does no more than to look for a GPU, in the standard library alone: before anything is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FAILED, NO_GPU, NO_CUDA = 1, 3, 4
NEEDED = ("torch", "wrapt", "pytest", "pytest_timeout")


def devices(folder: Path = Path("/dev")) -> list[str]:
    """The NVIDIA GPUs of this machine, whether PyTorch can use them or not."""
    if program := shutil.which("nvidia-smi"):
        listed = subprocess.run([program, "-L"], capture_output=True, text=True, check=False).stdout
        if found := [line for line in listed.splitlines() if line.startswith("GPU ")]:
            return found
    return sorted(path.name for path in folder.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name))


def facts() -> dict[str, Any]:
    """Versions and devices, by a process that ends: one that has found a GPU takes some of its memory."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        return {"problem": f"has no {', '.join(missing)}"}
    script = ROOT / "benchmarks" / "gpu_facts.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    if done.returncode:
        return {"problem": f"cannot import PyTorch: {(done.stderr.strip().splitlines() or ['?'])[-1]}"}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if not found["devices"]:
        found["problem"] = f"has PyTorch {found['torch']}, which finds no GPU that it can use"
    return found


def main() -> None:
    """Look for a GPU, run everything, write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only look for a GPU; exit code 3 if there is none")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "gpu.txt", help="the page")
    parser.add_argument("--minutes", type=float, default=9.5, help="that all may take")
    parser.add_argument("--only", choices=("tests", "benchmarks", "quality"), help="one part")
    args = parser.parse_args()
    if not devices():
        print("No NVIDIA GPU on this machine: nvidia-smi lists none, and there is no /dev/nvidia0. Nothing was done.")
        sys.exit(NO_GPU)
    if args.check:
        return
    found = facts()
    if "problem" in found:
        print(f"There is a GPU, but this Python {found['problem']}. Try another: make gpu GPU_PYTHON=... or TORCH=...")
        sys.exit(NO_CUDA)
    sys.exit(run(args, found))


def run(args: argparse.Namespace, found: dict[str, Any]) -> int:
    """Run tests, then benchmarks, which are alone then, or the quality of hooks; write the page. The exit code."""
    # Here: what is above needs no other file.
    from gpu_page import outcomes, page
    from gpu_parts import benchmarks, quality, run_alone, run_together, tests

    sys.path.insert(0, str(ROOT / "tests" / "support"))
    import record

    recorded = record.take()  # here: the processes of tests write none

    begin = time.monotonic()
    args.output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, args.output.with_suffix(".log").open("w") as log:
        ran, measured = [], []
        if args.only in (None, "tests"):
            seconds = 60 * args.minutes * (0.55 if args.only is None else 1.0)
            print("Tests, some minutes", file=sys.stderr, flush=True)
            ran = run_together(tests(os.cpu_count() or 1), seconds, folder, log)
        if args.only == "quality":
            print("Quality, some minutes", file=sys.stderr, flush=True)
            # It ends by itself, a while before it is ended.
            table = args.output.resolve().with_name(f"{args.output.stem}_quality.txt")
            measured = run_alone(quality(0.85 * args.minutes, table), 60 * args.minutes, folder, log)
        if args.only in (None, "benchmarks"):
            rest = 60 * args.minutes - (time.monotonic() - begin)
            print("Benchmarks, some minutes", file=sys.stderr, flush=True)
            measured = run_alone(benchmarks(), rest, folder, log)
        text = page(found, ran, measured, time.monotonic() - begin)
        if ran:
            ended = Counter(outcome for outcome, _ in outcomes(ran).values())
            counts = [ended[outcome] for outcome in ("passed", "failed", "skipped")]
            suite = "make gpu" if all(part.code is not None for part in ran) else "make gpu, interrupted"
            record.write(recorded, suite, *counts, device=found["devices"][0].split(",")[0])
    args.output.write_text(text)
    print(text, end="")
    print(f"\nThis page is {args.output}; all that was printed is beside it, {args.output.with_suffix('.log').name}")
    return 0 if all(part.is_fine for part in [*ran, *measured]) else FAILED


if __name__ == "__main__":
    main()
