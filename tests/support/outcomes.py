"""A plugin of pytest, `-p outcomes`: writes how each test ended to a file at once, also when pytest is killed later.

A line for each is a list in JSON: name, `passed`, `failed` or `skipped`, and why. For `benchmarks/gpu.py`. Tests that
would begin after a moment of `time.time()`, which is in the environment, are skipped.
"""

import json
import os
import time

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    if time.time() > float(os.environ.get("COMMHOOKS_TESTS_LAST_BEGIN", "inf")):
        pytest.skip("no time left")


def _write(name, outcome, why=""):
    with open(os.environ["COMMHOOKS_TESTS_OUTCOMES"], "a") as file:
        file.write(json.dumps([name, outcome, why]) + "\n")


def pytest_runtest_logreport(report):
    if report.failed:
        _write(report.nodeid, "failed", _why(report))
    elif report.skipped:
        _write(report.nodeid, "skipped", report.longrepr[2].removeprefix("Skipped: "))
    elif report.when == "call":
        _write(report.nodeid, "passed")


def pytest_collectreport(report):
    if report.failed:
        _write(report.nodeid, "failed", _why(report))


def _why(report):
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = (crash.message if crash else str(report.longrepr)).strip().splitlines() or ["?"]
    # The error of a rank is the last line of a traceback.
    return lines[0][:300] if len(lines) == 1 else f"{lines[0][:200]} ... {lines[-1][:300]}"
