"""Writes a record of a run of a suite: versions, counts, date. `docs/support.py` makes a table of the records."""

import datetime
import importlib.metadata
import json
import os
import platform
import re
import shlex
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("torch", "lightning", "accelerate", "transformers", "ray", "torchft")


def take():
    """The file that this run is asked for by `make ... RECORD=name`, or `None`; processes of tests are not asked."""
    name = os.environ.pop("COMMHOOKS_RECORD", "")
    return ROOT / "docs" / "records" / f"{name}.json" if name else None


def write(path, suite, passed, failed, skipped, device="CPU"):
    """Write the record.

    Args:
        path: what `take` returned; `None` writes nothing.
        suite: the tests that ran, as the command that runs them.
        passed: number of tests that passed.
        failed: number of tests that failed, or could not run.
        skipped: number of tests that were skipped, or fail as expected.
        device: name of the device, for tests on GPUs.
    """
    if path is None:
        return
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    found = {
        "suite": suite,
        "date": f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d}",
        "commit": commit.strip(),
        "passed": passed,
        "failed": failed,
        "skipped": skipped,
        "device": device,
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
    }
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(found, indent=2) + "\n")


def of_pytest(path, config, stats, exitstatus):
    """Write the record of a run of pytest, which names the tests that were selected if not all were."""
    words = shlex.split(os.environ.get("PYTEST_ADDOPTS", "")) + [str(word) for word in config.invocation_params.args]
    selected = re.sub(r"-n \d+|--dist \w+|--durations=\d+|--no-loadscope-reorder|-[qv]+\b", "", " ".join(words)).split()
    suite = " ".join(["only", *selected]) if selected else "make test"
    if exitstatus not in (0, 1):
        suite += ", interrupted"
    passed, failed, errors, skipped, expected = (
        len(stats.get(name, ())) for name in ("passed", "failed", "error", "skipped", "xfailed")
    )
    write(path, suite, passed, failed + errors, skipped + expected)


def _version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
