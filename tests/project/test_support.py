"""The page of tested versions has exactly the records of the suites."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import record

ROOT = Path(__file__).parents[2]
PAGE = runpy.run_path(str(ROOT / "docs" / "support.py"))


def test_page_has_the_records():
    text = (ROOT / "docs" / "support.md").read_text()
    assert PAGE["updated"](text) == text, "run: python docs/support.py"


def test_table():
    one = {"suite": "make test", "date": "2026-11-27", "passed": 3521, "failed": 0, "skipped": 12, "device": "CPU"}
    one |= {"python": "3.11.7", "torch": "2.13.0+cpu", "lightning": "2.6.6", "accelerate": "1.15.0"}
    one |= {"transformers": "5.24.0", "ray": "2.60.0", "torchft": None}
    _, _, row, *missing = PAGE["table"]([one]).splitlines()
    cells = ("3.11.7", "2.13.0", "2.6.6", "1.15.0", "5.24.0", "2.60.0", "none")
    assert row == f"| {' | '.join([*cells, '`make test`', 'CPU', '3,521', '0', '12', '2026-11-27'])} |"
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in missing]
    assert [cells[1] for cells in found if cells[1]] == ["2.15", "2.14", "2.12", "2.11", "2.10"]
    assert [cells[0] for cells in found if cells[0]] == ["3.13", "3.12", "3.10"]
    assert all(cells[7] == "not run" for cells in found)


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        ([], "there is no record of `make test`"),
        ([{"suite": "only -k powersgd", "failed": 0}, {"suite": "make gpu", "failed": 0}], "there is no record"),
        ([{"suite": "make test", "failed": 1}], "records of make test have failed tests"),
        ([{"suite": "make test", "failed": 0}, {"suite": "make gpu", "failed": 2}], "records of make gpu have failed"),
    ],
)
def test_records_that_do_not_allow_a_release(found, reason):
    assert PAGE["reason_against_release"](found).startswith(reason)


def test_records_that_allow_a_release():
    assert PAGE["reason_against_release"]([{"suite": "make test", "failed": 0}]) == ""


def test_the_release_checks_its_records():
    assert "run: python docs/support.py --check\n" in (ROOT / ".github/workflows/release.yml").read_text()


def test_a_run_writes_its_record(tmp_path):
    test = "tests/docs/test_docs.py::test_two_anchors_of_one_name"
    environment = {**os.environ, "COMMHOOKS_RECORD": str(tmp_path / "run"), "PYTEST_ADDOPTS": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, timeout=200)
    found = json.loads((tmp_path / "run.json").read_text())
    assert found["suite"] == f"only -p no:cacheprovider {test}"
    assert (found["passed"], found["failed"], found["skipped"]) == (1, 0, 0)
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert {"torch", "lightning", "accelerate", "transformers", "ray", "torchft", "date", "commit"} < set(found)


@pytest.mark.parametrize(
    ("arguments", "exitstatus", "suite"),
    [
        (["-n", "3", "--dist", "loadfile", "--no-loadscope-reorder"], 1, "make test"),
        (["-n", "2", "-x"], 1, "only -x"),
        (["-k", "powersgd"], 0, "only -k powersgd"),
        ([], 2, "make test, interrupted"),
    ],
)
def test_what_a_record_says_of_a_run(tmp_path, monkeypatch, arguments, exitstatus, suite):
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    stats = {"passed": [0] * 5, "failed": [0], "error": [0], "skipped": [0] * 2, "xfailed": [0], "": [0]}
    config = SimpleNamespace(invocation_params=SimpleNamespace(args=arguments))
    record.of_pytest(tmp_path / "one.json", config, stats, exitstatus)
    found = json.loads((tmp_path / "one.json").read_text())
    assert found["suite"] == suite
    assert (found["passed"], found["failed"], found["skipped"]) == (5, 2, 3)
