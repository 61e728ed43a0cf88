"""Applies a mutation to a copy of the checkout and runs the tests that must see it."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mutation import Mutation

ROOT = Path(__file__).resolve().parents[2]
# The tests' own options, but for what says how many processes run them.
PYTEST = ["-m", "pytest", "-p", "no:cacheprovider", "-o", "addopts=--strict-markers", "-q", "-rfE", "--tb=line"]
# What a copy must not find: the user's own ranks.
LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK")


class BrokenEntryError(Exception):
    """An entry of the table that proves nothing: its text has moved on, or its tests do not run."""


@dataclass(frozen=True)
class Outcome:
    """What the tests said.

    Attributes:
        failed: whether one failed.
        first: the first that did.
        seconds: that they took.
        output: of pytest.
    """

    failed: bool
    first: str
    seconds: float
    output: str


def mutated(mutation: Mutation, root: Path = ROOT) -> str:
    """The file with the mutation.

    Raises:
        BrokenEntryError: the file is not there, or does not have the old text exactly once.
    """
    path = root / mutation.file
    if not path.is_file():
        raise BrokenEntryError(f"there is no {mutation.file}")
    text = path.read_text()
    if (count := text.count(mutation.old)) != 1:
        raise BrokenEntryError(f"{mutation.file} has the old text {count} times instead of once: {mutation.old!r}")
    text = text.replace(mutation.old, mutation.new)
    if path.suffix == ".py":
        try:
            compile(text, mutation.file, "exec")
        except SyntaxError as error:
            raise BrokenEntryError(f"{mutation.file} is no Python any more: {error}") from error
    return text


@contextmanager
def copied_checkout() -> Iterator[Path]:
    """A copy of what git tracks or does not ignore, as it is now; gone afterwards."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    with tempfile.TemporaryDirectory(prefix="mutation-", ignore_cleanup_errors=True) as folder:
        for name in filter(None, names):
            if (ROOT / name).is_file():  # or it was deleted
                target = Path(folder, name)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, target)
        yield Path(folder)


def run(mutation: Mutation, timeout: float) -> Outcome:
    """Run the tests of a mutation, until one fails.

    Raises:
        BrokenEntryError: see `mutated` and `run_tests`.
    """
    text = mutated(mutation)
    with copied_checkout() as folder:
        (folder / mutation.file).write_text(text)
        return run_tests(folder, ["-x", *shlex.split(mutation.tests)], timeout)


def run_tests(folder: Path, arguments: Sequence[str], timeout: float) -> Outcome:
    """Run tests in a copy of the checkout.

    Raises:
        BrokenEntryError: they did not run: none is selected, they cannot be collected, or they took too long.
    """
    env = {key: value for key, value in os.environ.items() if key not in LAUNCHED}
    env = {**env, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    begin = time.monotonic()
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(
        [sys.executable, *PYTEST, *arguments], cwd=folder, env=env, start_new_session=True, **pipes
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        raise BrokenEntryError(f"no end after {timeout:g} s: pytest {shlex.join(arguments)}") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    # 2: not collected; 4: wrong arguments; 5: nothing selected. With 3 and signals pytest itself has failed.
    if process.returncode not in (0, 1):
        raise BrokenEntryError(f"pytest {shlex.join(arguments)} ended with {process.returncode}:\n{output[-3000:]}")
    found = re.search(r"^(FAILED|ERROR) (.+?)(?: - |$)", output, re.MULTILINE)
    return Outcome(process.returncode == 1, found[2] if found else "", time.monotonic() - begin, output)


def selections(mutations: Sequence[Mutation]) -> dict[str, list[str]]:
    """What tests the mutations need, by file, as arguments of pytest that select all of them at once."""
    expressions: dict[str, list[str | None]] = defaultdict(list)
    for mutation in mutations:
        file, *options = shlex.split(mutation.tests)
        if options and (len(options) != 2 or options[0] != "-k"):
            raise BrokenEntryError(f"{mutation.name}: tests must be a file and perhaps -k, are {mutation.tests!r}")
        expressions[file].append(options[1] if options else None)
    arguments = {}
    for file, words in expressions.items():
        chosen = [] if None in words else ["-k", " or ".join(f"({word})" for word in dict.fromkeys(map(str, words)))]
        arguments[file] = [file, *chosen]
    return arguments
