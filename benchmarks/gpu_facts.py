"""Prints, as JSON, what a bug report about GPUs needs to know of a machine; for `gpu.py`."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent


def output(*command: str) -> str | None:
    """The first line that a command prints; `None` where it fails."""
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else None


def version(distribution: str) -> str | None:
    """Of what is installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def nccl() -> str | None:
    """Version of NCCL."""
    if not torch.distributed.is_nccl_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))


def facts() -> dict[str, Any]:
    """Versions, and the devices that PyTorch can use."""
    found = []
    for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        of = torch.cuda.get_device_properties(i)
        found.append(f"{of.name}, {of.total_memory / 2**30:.0f} GiB, compute capability {of.major}.{of.minor}")
    return {
        "commit": output("git", "rev-parse", "--short", "HEAD"),
        "torch": torch.__version__,
        "CUDA": torch.version.cuda,
        "NCCL": nccl() if found else None,
        "driver": output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "Triton": version("triton"),
        "Lightning": version("lightning"),
        "Accelerate": version("accelerate"),
        "Python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "devices": found,
    }


if __name__ == "__main__":
    print(json.dumps(facts()))
