"""Builds the distributions of a release, and follows the README with the wheel in an empty environment.

    python .ci/release.py --install torch==2.13.0
    python .ci/release.py --outdir /tmp/dist

With `--install`, pip installs these words from the network, PyTorch first, and then the requirements of the wheel.
Without it nothing is downloaded: the requirements, and theirs, are links to the packages of this Python. In both
cases the environment has no other package, and the folder of the commands has nothing but the README's scripts.
"""

from __future__ import annotations

import argparse
import importlib.metadata as metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# A step each: the extra that is installed, and the script of the README that runs then.
STEPS = {"": "train_ddp.py", "lightning": "train_lightning.py", "accelerate": "train_accelerate.py"}


class Environment:
    """An environment with the wheel and its requirements.

    Args:
        folder: where it is made.
        wheel: the wheel.
        install: words after `pip install` that install PyTorch from the network; `None` links packages of this Python.
    """

    def __init__(self, folder: Path, wheel: Path, install: str | None) -> None:
        self.folder, self._wheel, self._install, self._linked = folder / "environment", wheel, install, set[str]()
        self._work = folder / "work"
        self._work.mkdir()
        venv.create(self.folder, with_pip=install is not None, symlinks=True)
        self._site = Path(sysconfig.get_path("purelib", "posix_prefix", {"base": str(self.folder)}))
        if install is not None:
            self.run(f"pip install --quiet {install}")
        else:
            pip = [sys.executable, "-m", "pip", "--python", str(self.folder / "bin" / "python")]
            options = ["--quiet", "--no-deps", "--no-index", "--disable-pip-version-check"]
            subprocess.run([*pip, "install", *options, str(wheel)], check=True)

    def add(self, extra: str) -> None:
        """Install the wheel with one of its extras, or with none for the empty string."""
        if self._install is not None:
            self.run(f"pip install --quiet '{self._wheel}{extra and f'[{extra}]'}'")
        else:
            (own,) = metadata.distributions(name="lightning-commhooks", path=[str(self._site)])
            self._link(own, {extra})

    def _link(self, distribution: metadata.Distribution, extras: set[str]) -> None:
        from packaging.requirements import Requirement

        for requirement in map(Requirement, distribution.requires or ()):
            wanted = requirement.marker is None or any(
                requirement.marker.evaluate({"extra": extra}) for extra in extras | {""}
            )
            if not wanted or f"{requirement}" in self._linked:
                continue
            self._linked.add(f"{requirement}")
            found = metadata.distribution(requirement.name)
            if not requirement.specifier.contains(found.version, prereleases=True):
                sys.exit(f"{distribution.name} requires {requirement}, and this Python has {found.version}")
            for name in {path.parts[0] for path in found.files or ()} - {"..", "__pycache__"}:
                if not (self._site / name).exists():
                    (self._site / name).symlink_to(found.locate_file(name))
            for command in found.entry_points.select(group="console_scripts"):
                path = self.folder / "bin" / command.name
                start = f"import sys\nfrom {command.module} import {command.attr}\nsys.exit({command.attr}())\n"
                path.write_text(f"#!{self.folder}/bin/python\n{start}")
                path.chmod(0o755)
            self._link(found, set(requirement.extras))

    def run(self, command: str) -> None:
        """Run a command as a user of this environment types it, and end this script if it fails."""
        print(f"$ {command}", flush=True)
        # Not the packages of the checkout, and none of the user.
        left_out = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
        environment = {name: value for name, value in os.environ.items() if name not in left_out}
        environment |= {"PATH": f"{self.folder}/bin:{os.environ['PATH']}", "PYTHONNOUSERSITE": "1"}
        done = subprocess.run(
            ["bash", "-c", command], cwd=self._work, env=environment, stderr=subprocess.STDOUT, check=False
        )
        if done.returncode:
            sys.exit(f"exit code {done.returncode}: {command}")

    def write(self, name: str, text: str) -> None:
        """Save a script in the folder of the commands."""
        (self._work / name).write_text(text)


def readme_scripts() -> dict[str, tuple[str, str]]:
    """The command and the text of each script of the README, by its name."""
    found = re.findall(r"```python\n# ([^\n]* (\w+\.py))\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return {name: (command, text) for command, name, text in found}


def follow_readme(environment: Environment) -> None:
    """Import the packages, and run the commands and scripts of the README."""
    scripts = readme_scripts()
    (example,) = re.findall(r"```python\n# train.py\n(.*?)```", (ROOT / "docs/which_hook.md").read_text(), re.DOTALL)
    commands = re.findall(r"^lightning-commhooks .+$", (ROOT / "README.md").read_text(), re.MULTILINE)
    environment.write("train.py", example)
    for extra, name in STEPS.items():
        environment.add(extra)
        if not extra:
            environment.run("python -c 'import lightning_commhooks, lightning_commhooks.torchft'")
            for other in ("lightning", "accelerate", "transformers", "ray"):
                environment.run(f"! python -c 'import {other}' 2> /dev/null")
            for command in ("lightning-commhooks list", *commands):
                environment.run(command)
        command, text = scripts[name]
        environment.write(name, text)
        environment.run(command)


def main() -> None:
    """Build the distributions, and test the wheel."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--outdir", type=Path, default=ROOT / "dist", help="where the distributions go")
    parser.add_argument("--install", help="what pip installs first, PyTorch; downloads all requirements")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        # Not to `outdir`, which may have distributions of other versions.
        built = Path(folder, "dist")
        build = [sys.executable, "-m", "build", "--outdir", str(built)]
        subprocess.run([*build, *([] if args.install else ["--no-isolation"]), str(ROOT)], check=True)
        shutil.copytree(built, args.outdir, dirs_exist_ok=True)
        (wheel,) = built.glob("*.whl")
        follow_readme(Environment(Path(folder), wheel, args.install))


if __name__ == "__main__":
    main()
