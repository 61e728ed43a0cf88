"""Write the real output of a first run of each framework to first_run.md: `python docs/first_run.py`.

Runs the commands in the first lines of the scripts of README.md and use.md, in two processes each.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

DOCS = Path(__file__).parent
PAGE = DOCS / "first_run.md"
_SCRIPT = re.compile(r"```python\n# ((?:python|torchrun) [^\n]*?(\w+\.py))\n(.*?)```", re.DOTALL)
_BLOCK = re.compile(r"(<!-- (\w+\.py) -->\n```text\n).*?(```\n)", re.DOTALL)
# Paths of this machine, hints of other libraries, and progress bars.
_LEFT_OUT = re.compile(r"site-packages|💡|%\||it/s|^\[rank|OMP_NUM_THREADS|^[│┃┏┡└]|params|^Modules|FLOPs|^[-* ]*$")
_PROGRAMS = {"python": [sys.executable], "torchrun": [sys.executable, "-m", "torch.distributed.run"]}


def scripts() -> dict[str, tuple[str, str]]:
    """The command and the text of each script, by its name."""
    pages = ((DOCS.parent / "README.md").read_text(), (DOCS / "use.md").read_text())
    return {name: (command, text) for page in pages for command, name, text in _SCRIPT.findall(page)}


def printed(command: str, name: str, text: str) -> str:
    """The output of a script on a terminal, without lines that differ between machines."""
    program, *arguments = shlex.split(command)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, name).write_text(text)
        environment = {**os.environ, "COLUMNS": "88", "PYTHONPATH": str(DOCS.parent), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [*_PROGRAMS[program], *arguments],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=True,
        )
    # A line may follow a progress bar.
    lines = re.sub(r"\r|(?=Forecast for|Communication hook '|\{'train_runtime')", "\n", done.stdout).splitlines()
    return "".join(f"{line.rstrip()}\n" for line in lines if not _LEFT_OUT.search(line))


def main() -> None:
    """Update the page."""
    found = scripts()

    def anew(match: re.Match[str]) -> str:
        command, text = found[match[2]]
        return f"{match[1]}$ {command}\n{printed(command, match[2], text)}{match[3]}"

    PAGE.write_text(_BLOCK.sub(anew, PAGE.read_text()))
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
