"""Shell commands in the pages: are there such files, targets, options?"""

import re
import shlex
import subprocess

from docs_pages import ROOT

# Not on every machine; their options are not ours.
FOREIGN = {"cd", "export", "iperf3", "ip", "module", "scontrol", "sbatch", "tail", "git", "torchft_lighthouse"}


def check(text):
    """Raise an `AssertionError`, or what a parser of options raises, for a command that cannot work."""
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        words = [] if re.match(r"\w+=\$\(.*\)$", line) else shlex.split(line, comments=True)
        words = [word for word in words if word != "..."]
        while words and re.fullmatch(r"\w+=.*", words[0]):
            words.pop(0)
        if words:
            check_command(words)


def check_command(words):
    program, *arguments = words
    if program == "srun":
        while arguments and arguments[0].startswith("-"):
            arguments.pop(0)
        check_command(arguments)
    elif program in CHECKS:
        CHECKS[program](arguments)
    else:
        assert program in FOREIGN, f"nobody knows how to check {program!r}"


def _make(arguments):
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for target in (argument for argument in arguments if "=" not in argument):
        assert target in targets, f"the Makefile has no target {target!r}"


def _pip(arguments):
    _, _, section = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]\n")
    extras = re.findall(r"^(\w+) = \[", section.partition("\n[")[0], re.MULTILINE)
    for extra in (name for argument in arguments for name in re.findall(r"\[(.+)\]", argument)):
        assert set(extra.split(",")) <= set(extras), f"there are no extras {extra!r}"


def _torchrun(arguments):
    from torch.distributed.run import get_args_parser

    # Variables stand for numbers.
    parsed = get_args_parser().parse_args([re.sub(r"\$\w+|\$\(.+\)", "2", argument) for argument in arguments])
    if parsed.module:
        _module([parsed.training_script, *parsed.training_script_args])
    else:
        _script([parsed.training_script, *parsed.training_script_args])


def _accelerate(arguments):
    from accelerate.commands.launch import launch_command_parser

    command, *arguments = arguments
    assert command == "launch"
    launch_command_parser().parse_args([re.sub(r"\$\w+", "2", argument) for argument in arguments])


def _python(arguments):
    if arguments[0] == "-m":
        _module(arguments[1:])
    else:
        _script(arguments)


def _module(words):
    module, *arguments = words
    if module == "lightning_commhooks":
        from lightning_commhooks.advice.cli import parser

        parser().parse_args(arguments)
        for argument in arguments[1:]:
            path, _, factory = argument.partition(":")
            if "/" in path and factory:
                assert f"def {factory}(" in (ROOT / path).read_text(), f"{path} has no {factory}"
    else:
        raise AssertionError(f"nobody knows how to check python -m {module}")


def _console_script(arguments):
    _module(["lightning_commhooks", *arguments])


def _script(words):
    """A script of the user's, or one of ours, whose text must have the options."""
    script, *arguments = words
    path = ROOT / script
    if "/" not in script:
        of_pages = ("example", "main", "check_topk", "train", "train_lightning", "train_accelerate", "train_ddp")
        of_pages += ("train_transformers", "train_fabric", "train_torchft", "train_replica", "train_replica_accelerate")
        of_pages += ("train_sharded_replica",)
        assert script.removesuffix(".py") in of_pages, f"what is {script}?"
        return
    assert path.is_file(), f"there is no {script}"
    for option in (argument.split("=")[0] for argument in arguments if argument.startswith("--")):
        assert f'"{option}"' in path.read_text(), f"{script} has no option {option}"


CHECKS = {
    "make": _make,
    "pip": _pip,
    "torchrun": _torchrun,
    "accelerate": _accelerate,
    "lightning-commhooks": _console_script,
    "python": _python,
}
