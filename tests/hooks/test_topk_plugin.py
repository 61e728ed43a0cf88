"""examples/topk_plugin, installed: a hook in a package of its own is used by name, and checked, like one of ours."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys

import pytest
from forks import PATIENCE, ROOT, alone

EXAMPLE = ROOT / "examples" / "topk_plugin"
pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("hatchling", "lightning", "jsonargparse")),
    reason="needs hatchling, lightning and jsonargparse",
)


def call(*command, cwd, path):
    """Output of `python *command`, in a new process: names are read when packages are imported."""
    environment = alone(PYTHONPATH=os.pathsep.join(map(str, path)))
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120 * PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The folder that the example is installed in, from a copy, without network."""
    copy, folder = tmp_path_factory.mktemp("source") / "topk_plugin", tmp_path_factory.mktemp("installed")
    shutil.copytree(EXAMPLE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    options = ("--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check")
    call("-m", "pip", "install", *options, "--no-compile", "--target", folder, copy, cwd=copy, path=[])
    return folder


def test_known_by_name_to_strategies_and_configurations(installed, tmp_path):
    runner = ROOT / "tests" / "support" / "topk_plugin_runner.py"
    found = json.loads(call(runner, cwd=tmp_path, path=[installed, ROOT]).splitlines()[-1])
    assert "topk" in found["names"]
    assert found["hooks"] == ["TopK(ratio=0.01)", "TopK(ratio=0.01)", "TopK(ratio=0.5)"]


def test_what_every_hook_owes(installed, tmp_path):
    shutil.copy(EXAMPLE / "test_topk.py", tmp_path)
    options = ("-q", "-p", "no:cacheprovider")
    assert "1 passed" in call("-m", "pytest", *options, "test_topk.py", cwd=tmp_path, path=[installed, ROOT])
