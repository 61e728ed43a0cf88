"""What `gpu.py` runs: tests in several processes side by side, and benchmarks one after another, each for a while."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
# Where tests say how they ended: see tests/support/outcomes.py.
OUTCOMES = "COMMHOOKS_TESTS_OUTCOMES"
# After what moment they skip tests, and which part of their time that leaves for the last ones that have begun.
LAST_BEGIN = "COMMHOOKS_TESTS_LAST_BEGIN"
_FOR_THE_LAST = 0.2


@dataclass
class Part:
    """A process: its command, and what became of it.

    Attributes:
        arguments: of Python.
        weight: its share of the time, among those that run one after another.
        output: what it printed on standard output.
        outcomes: where its tests say how they ended.
        code: its exit code; `None` if it took too long.
        seconds: that it took.
    """

    arguments: list[str]
    weight: float = 1.0
    output: str = ""
    outcomes: Path | None = None
    code: int | None = None
    seconds: float = 0.0
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    _files: tuple[Path, ...] = field(default=(), repr=False)
    _begin: float = 0.0

    @property
    def is_fine(self) -> bool:
        """Whether it came to a good end."""
        return self.code == 0

    @property
    def command(self) -> str:
        """What to type, from the repository's root."""
        return " ".join(["python", *self.arguments])

    def start(self, folder: str, number: int, last_begin: float = math.inf) -> None:
        """Begin; its files go to a folder, by a number. Tests do not begin after a time of `time.time`."""
        self._files = tuple(Path(folder) / f"{number}.{ending}" for ending in ("out", "err"))
        self.outcomes = Path(folder) / f"{number}.jsonl"
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(
                filter(None, [str(ROOT), str(ROOT / "tests" / "support"), os.environ.get("PYTHONPATH")])
            ),
            "PYTHONUNBUFFERED": "1",
            # Says where a process crashed.
            "PYTHONFAULTHANDLER": "1",
            # Others' plugins, whose warnings would be errors.
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            OUTCOMES: str(self.outcomes),
            LAST_BEGIN: str(last_begin),
        }
        with self._files[0].open("wb") as out, self._files[1].open("wb") as err:
            # A session of its own: what takes too long is ended with all that it started.
            self._process = subprocess.Popen(
                [sys.executable, *self.arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd=ROOT,
                env=environment,
                start_new_session=True,
            )
        self._begin = time.monotonic()

    def kill(self) -> None:
        """End it with all that it started, if it has begun and not ended: in a session of its own Ctrl-C does not."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def finish(self, deadline: float, log: IO[str]) -> None:
        """Wait until it ends, or end it at a time of `time.monotonic`."""
        assert self._process is not None
        try:
            self.code = self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.kill()
        self.seconds = time.monotonic() - self._begin
        self.output, errors = (path.read_text(errors="replace") for path in self._files)
        how = "took too long" if self.code is None else f"exit code {self.code}"
        log.write(f"$ {self.command}\n{self.output}\n{errors}\n({how}, {self.seconds:.0f} s)\n\n")
        log.flush()
        if self.code and not self.outcomes.exists():
            self.output += "".join(f"{line}\n" for line in errors.splitlines()[-3:])


def tests(num_cores: int) -> list[Part]:
    """All tests on GPUs; the contract, which is most of them, in as many processes as there are cores for."""
    pytest = ["-m", "pytest", "-p", "pytest_timeout", "-p", "outcomes", "-W", "default", "-q", "-m", "gpu"]
    files = [["tests/gpu/test_gpu.py", "tests/gpu/test_fsdp_gpu.py", "tests/gpu/test_gpu_peers.py"]]
    files += [[f"tests/gpu/test_gpu_{name}.py"] for name in ("failures", "frameworks", "training")]
    # Two ranks each, at the same time as the processes above.
    contract, num = "tests/gpu/test_gpu_contract.py", max(1, min(3, num_cores // 4 - 1))
    for backend in ("nccl", "gloo"):
        files += [[contract, "-k", backend, f"--part={i}/{num}"] for i in range(num)]
    return [Part([*pytest, *some]) for some in files]


def benchmarks() -> list[Part]:
    """All benchmarks on GPUs."""
    return [
        Part(["benchmarks/codecs.py", "--device", "cuda"], weight=4),
        Part(["benchmarks/cuda_step.py"], weight=4),
        Part(["benchmarks/cuda_overlap.py"], weight=3),
        Part(["benchmarks/powersgd_passes.py", "--device", "cuda"], weight=1),
    ]


def quality(minutes: float, output: Path) -> list[Part]:
    """Training of a language model with each of some hooks, which takes a number of minutes; results go to files."""
    options = ["--device", "cuda", "--minutes", f"{minutes:g}", "--output", str(output)]
    return [Part(["benchmarks/gpu_quality.py", *options])]


def run_together(parts: list[Part], seconds: float, folder: str, log: IO[str]) -> list[Part]:
    """Run parts side by side; returns them. Before the time is over, tests are skipped."""
    deadline = time.monotonic() + seconds
    last_begin = time.time() + (1 - _FOR_THE_LAST) * seconds
    try:
        for number, part in enumerate(parts):
            part.start(folder, number, last_begin)
        for part in parts:
            part.finish(deadline, log)
    finally:
        for part in parts:
            part.kill()
    return parts


def run_alone(parts: list[Part], seconds: float, folder: str, log: IO[str]) -> list[Part]:
    """Run parts one after another; what one leaves of its share of the time is for the next ones."""
    end = time.monotonic() + seconds
    for number, part in enumerate(parts):
        share = part.weight / sum(one.weight for one in parts[number:])
        part.start(folder, 100 + number)
        try:
            part.finish(time.monotonic() + max(0.0, end - time.monotonic()) * share, log)
        finally:
            part.kill()
    return parts
