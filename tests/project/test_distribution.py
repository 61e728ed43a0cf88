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
RELEASE = runpy.run_path(str(ROOT / ".ci/release.py"))
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


# Names of both packages, with the types that an editor shows; the last line is an error.
TYPED = """
from accelerate_integration import CommHookKwargs
from lightning_commhooks import Attachment, CommHook, PowerSGD, attach, available_hooks
from torch.nn.parallel import DistributedDataParallel

hook: CommHook = PowerSGD(matrix_approximation_rank=2)
names: list[str] = [*available_hooks()]


def train(model: DistributedDataParallel) -> Attachment:
    attachment = attach(model, hook)
    ratio: float = attachment.metrics()["compression_ratio"]
    print(f"{ratio:.1f}")
    return attachment


handler = CommHookKwargs(hook="powersgd")
attachments: list[Attachment] = handler.attachments
PowerSGD(matrix_approximation_rank="two")
"""


# PyTorch and Accelerate have a hundred times the code; the types in question are ours.
MYPY = """
[mypy]
strict = true
[mypy-torch.*,accelerate.*,transformers.*,numpy.*]
follow_imports = skip
"""


def test_types_of_the_installed_wheel(built, tmp_path):
    """A type checker finds `py.typed` of both packages."""
    pytest.importorskip("mypy")
    pytest.importorskip("accelerate")
    (wheel,) = built.glob("*.whl")
    environment = RELEASE["Environment"](tmp_path, wheel, None)
    environment.add("accelerate")
    (tmp_path / "program.py").write_text(TYPED)
    (tmp_path / "mypy.ini").write_text(MYPY)
    # Of this Python, which looks into the packages of that one.
    mypy = [sys.executable, "-m", "mypy", "--python-executable", str(environment.folder / "bin" / "python")]
    done = subprocess.run([*mypy, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=400, check=False)
    error, summary = done.stdout.splitlines()
    assert 'Argument "matrix_approximation_rank" to "PowerSGD" has incompatible type "str"' in error, done.stdout
    assert summary.startswith("Found 1 error in 1 file"), done.stdout + done.stderr


@pytest.mark.parametrize("address", ["", "https://example.org/ours/"])
def test_addresses_are_those_of_the_release(tmp_path, address):
    pytest.importorskip("hatchling")
    metadata = call(sys.executable, "-m", "hatchling", "metadata", cwd=ROOT, env={**os.environ, "PROJECT_URL": address})
    found = json.loads(metadata)
    at = f"https://example.org/ours/blob/v{lc.__version__}"
    if address:
        assert found["urls"]["Source"] == "https://example.org/ours"
        assert found["urls"]["Changelog"] == f"{at}/CHANGELOG.md"
        assert f"({at}/docs/use.md)" in found["readme"]["text"]
        assert f"({at}/docs/images/two_machines.svg?raw=true)" in found["readme"]["text"]
        assert re.findall(r"\]\((?!https?:|#)", found["readme"]["text"]) == []
    else:
        assert "urls" not in found
        assert found["readme"]["text"] == (ROOT / "README.md").read_text()


def test_version_is_the_same_everywhere():
    (cited,) = re.findall(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    unreleased, *released = re.findall(r"^## \[(.+?)\](?: - (.+))?$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert unreleased == ("Unreleased", "")
    assert cited == lc.__version__ == released[0][0]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d", date) for _, date in released)


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
