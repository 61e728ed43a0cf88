"""README followed word for word, with the wheel in an empty environment; other pages' scripts, by their first lines."""

import re
import shlex
import subprocess
import sys

import pytest

pytest.importorskip("markdown_it")

from docs_pages import DOCS, ROOT, blocks
from forks import alone, free_port
from test_examples import launched, needs

README = ROOT / "README.md"
SCRIPTS = {block.command: block.text for block in blocks(README) if block.command}


def follow(command, folder):
    """What a command of the README prints, of stdout and stderr."""
    program, *arguments = shlex.split(command, comments=True)
    start = {"python": (), "torchrun": ("torch.distributed.run",)}[program]
    # An option of torchrun, whose own port another test may have taken.
    return launched(*start, *arguments, cwd=folder, PET_MASTER_PORT=str(free_port()))


def test_readme_is_short():
    assert len(README.read_text().splitlines()) <= 120


def test_readme_has_a_script_for_each_of_three_frameworks():
    assert [command.split()[-1] for command in SCRIPTS] == ["train_lightning.py", "train_accelerate.py", "train_ddp.py"]


def test_first_page_of_the_site_has_the_same_scripts():
    assert {block.command: block.text for block in blocks(DOCS / "index.md")} == SCRIPTS


def check_first_run(command, output):
    """The page that shows what is printed has what is printed, but for numbers."""
    (block,) = (block for block in blocks(DOCS / "first_run.md") if block.text.startswith(f"$ {command}\n"))
    shown = [line for line in block.text.splitlines()[1:] if "communication hook" in line.lower() or "sent" in line]
    assert shown, "python docs/first_run.py"
    plain = re.sub(r"[\d.]+", "0", output)
    assert not [line for line in shown if re.sub(r"[\d.]+", "0", line) not in plain], "python docs/first_run.py"


def ratio_of(output):
    """How many times fewer bytes were sent, from the one line that says so."""
    (ratio,) = re.findall(r"(\d+\.\d+) times fewer", output)
    return float(ratio)


@pytest.fixture(scope="module")
def followed(tmp_path_factory):
    """The output of each command of the README, in an environment with the wheel and its requirements only."""
    pytest.importorskip("build")
    pytest.importorskip("hatchling")
    command = [sys.executable, str(ROOT / ".ci" / "release.py"), "--outdir", str(tmp_path_factory.mktemp("dist"))]
    environment = alone(PET_MASTER_PORT=str(free_port()), COLUMNS="88")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(re.findall(r"^\$ (.+)\n((?:[^$].*\n|\n)*)", done.stdout, re.MULTILINE))


@needs("lightning", "accelerate")
@pytest.mark.parametrize("command", SCRIPTS)
def test_scripts_of_the_readme(followed, command):
    output = followed[command]
    check_first_run(command, output)
    if "lightning" in command:
        assert "`Trainer.fit` stopped: `max_steps=400` reached." in output
        assert "Forecast for communication hook PowerSGD(start_powerSGD_iter=40): " in output
        assert 6 < ratio_of(output) < 7
    else:
        assert 9 < ratio_of(output) < 10, "20 steps in full of 200"


@needs("lightning", "accelerate")
def test_commands_of_the_readme(followed):
    commands = re.findall("^lightning-commhooks .+$", README.read_text(), re.MULTILINE)
    headroom, advise = (followed[command] for command in commands)
    assert "Communication costs " in headroom
    assert "dense (no hook)" in advise
    assert "powersgd" in followed["lightning-commhooks list"]


USE = {block.command: block.text for block in blocks(DOCS / "use.md") if block.command}


@needs("lightning", "accelerate", "transformers")
@pytest.mark.parametrize("command", USE)
def test_scripts_of_use(tmp_path, command):
    (tmp_path / command.split()[-1]).write_text(USE[command])
    stdout, stderr = follow(command, tmp_path)
    check_first_run(command, stdout + stderr)
    assert 8 < ratio_of(stdout + stderr) < 10, "10 steps in full of 100"


def test_use_has_a_script_for_each_other_framework():
    assert [command.split()[-1] for command in USE] == ["train_transformers.py", "train_fabric.py"]


@needs("accelerate")
def test_accelerate_launch_as_the_page_says(tmp_path):
    script = next(text for command, text in SCRIPTS.items() if "train_accelerate.py" in command)
    (tmp_path / "train_accelerate.py").write_text(script)
    (block,) = (block for block in blocks(DOCS / "use.md") if block.text.startswith("accelerate launch"))
    _, _, *arguments = shlex.split(block.text.replace("\\\n", ""))
    port = f"--main_process_port={free_port()}"
    stdout, stderr = launched("accelerate.commands.launch", port, *arguments, cwd=tmp_path)
    assert 9 < ratio_of(stdout + stderr) < 10
