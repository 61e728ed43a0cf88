"""The wheel and the source distribution, built and installed; floors of what is required."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import lightning_commhooks as lc

ROOT = Path(__file__).parents[2]
FLOORS = runpy.run_path(str(ROOT / ".ci/floors.py"))
PROJECT = FLOORS["tomllib"].loads((ROOT / "pyproject.toml").read_text())
LOOK = """
import contextlib, importlib.metadata as metadata, io, json, sys
import accelerate_integration, lightning_commhooks
own = metadata.distribution("lightning-commhooks")
(command,) = own.entry_points
sys.argv[1:] = ["list", "--json"]
with contextlib.redirect_stdout(io.StringIO()) as listed, contextlib.suppress(SystemExit):
    command.load()()
print(json.dumps({
    "from": [accelerate_integration.__file__, lightning_commhooks.__file__],
    "version": own.version,
    "scripts": {point.name: point.value for point in own.entry_points},
    "listed": [hook["name"] for hook in json.loads(listed.getvalue())],
    "files": sorted(str(path) for path in own.files),
    "missing": [name for name in lightning_commhooks.__all__ if not hasattr(lightning_commhooks, name)],
}))
"""


def call(*command, **kwargs):
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, **kwargs)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder with the source distribution, and the wheel that was built from it; no network."""
    pytest.importorskip("build")
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("dist")
    call(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT))
    return folder


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """Runs a command with the installed wheel, far from the sources."""
    folder = tmp_path_factory.mktemp("installed")
    (wheel,) = built.glob("*.whl")
    options = ("--quiet", "--no-deps", "--no-index", "--disable-pip-version-check", "--no-compile")
    call(sys.executable, "-m", "pip", "install", *options, "--target", str(folder), str(wheel))

    def run(*command):
        return call(*command, cwd=folder, env={**os.environ, "PYTHONPATH": str(folder)})

    run.folder = folder
    return run


def test_installed_wheel(installed):
    pytest.importorskip("accelerate")
    found = json.loads(installed(sys.executable, "-c", LOOK).splitlines()[-1])
    assert all(Path(path).is_relative_to(installed.folder) for path in found["from"])
    assert found["version"] == lc.__version__
    assert found["scripts"] == {"lightning-commhooks": "lightning_commhooks.__main__:main"}
    assert {"bf16", "powersgd"} <= set(found["listed"])
    assert (installed.folder / "bin" / "lightning-commhooks").is_file()
    assert {"lightning_commhooks/py.typed", "accelerate_integration/py.typed"} <= set(found["files"])
    allowed = r"(lightning_commhooks|accelerate_integration|lightning_commhooks-[\w.]+\.dist-info|\.\./\.\./bin|bin)/"
    assert [path for path in found["files"] if not re.match(allowed, path)] == []
    assert found["missing"] == []


def test_source_distribution_has_everything(built):
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("no git checkout to compare with")
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    tracked = call("git", "-C", str(ROOT), "ls-files", "-z").split("\0")
    assert sorted(set(filter(None, tracked)) - names) == []


def test_every_requirement_has_a_floor():
    floors = FLOORS["floors"](PROJECT)
    names = {re.match(r"[\w.-]+", text)[0] for text in FLOORS["requirements"](PROJECT)}
    assert set(floors) == names
    assert {"torch", "wrapt", "lightning", "accelerate", "transformers", "sphinx", "hatchling"} < names
    lines = call(sys.executable, str(ROOT / ".ci/floors.py")).splitlines()
    assert lines == [f"{name}=={floor}" for name, floor in sorted(floors.items())]


@pytest.mark.parametrize(
    ("requirements", "message"),
    [
        (["numpy"], "'numpy' has no floor"),
        (["numpy>=1,<2"], "has no floor"),
        (["numpy>1"], "has no floor"),
        (["numpy>=1", "numpy>=2"], "numpy has two floors, 1 and 2"),
    ],
)
def test_requirements_without_a_floor(requirements, message):
    metadata = {"name": "ours", "dependencies": requirements, "optional-dependencies": {"dev": ["ours[a,b]"]}}
    with pytest.raises(ValueError, match=message):
        FLOORS["floors"]({"build-system": {"requires": ["hatchling>=1"]}, "project": metadata})
