"""Processes that begin with PyTorch and the frameworks imported: forks of one that has done nothing else.

Importing Lightning, Accelerate and transformers takes 7 s of processor time for each process, forking 0.01 s. In all
else a fork is like `python script.py`: arguments, environment, `__main__`, standard streams, a session of its own and
exit code. The interpreter ends as it always does, too, but for scripts of this folder that end well. What launchers
start with `sys.executable` is a fork as well where they are told to (`launching`). What is about starting Python or
importing needs new processes, and says so.
"""

import contextlib
import json
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
# Where tests and their helpers lie; both are imported by their names alone.
FOLDERS = sorted(str(path) for path in FOLDER.parent.iterdir() if path.is_dir())
# A launcher's, which a process that is to be alone must not see.
DISTRIBUTED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "GROUP_RANK")
# The variable with the address of the process that is forked, where several processes share one.
ADDRESS = "COMMHOOKS_TESTS_FORKS"
# The variable with what is `sys.executable` in a fork.
EXECUTABLE = "COMMHOOKS_TESTS_EXECUTABLE"
# Times that a machine may be slower than the one that time limits were written for.
PATIENCE = 3


class Forks:
    """The process that is forked; started when it is first needed."""

    def __init__(self):
        self._server = self._address = self._folder = None

    def start(self, script, *arguments, environment=None, cwd=None, pipes=False):
        """A new process that runs `script`, or the module of that name if it has no suffix.

        Args:
            script: path of the script.
            arguments: its command line.
            environment: all of its variables; those of this process if there is none.
            cwd: its working directory.
            pipes: whether its standard streams are pipes to talk through; otherwise `finish` returns what it printed.
        """
        return Fork(self.address(), script, arguments, environment, cwd, Fork.pipes() if pipes else Fork.files())

    def launching(self):
        """Variables with which what is started as `sys.executable` by a fork is a fork."""
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory()
        program = Path(self._folder.name) / "python"
        command = shlex.join([sys.executable, str(FOLDER / "forked_python.py")])
        program.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        program.chmod(0o755)
        return {ADDRESS: self.address(), EXECUTABLE: str(program)}

    def address(self):
        """The address that takes requests, of a process that is started if there is none."""
        if self._server is not None and self._server.poll() is not None:
            self._server = self._address = None
        if self._address is None:
            self._address = os.environ.get(ADDRESS) or self._start_server()
        return self._address

    def share(self):
        """Start it, for the processes that this one will start as well."""
        os.environ[ADDRESS] = self.address()

    def close(self):
        """End the process that is forked if it was started here."""
        if self._server is not None:
            self._owner.close()
            self._server.wait(10)
        if self._folder is not None:
            self._folder.cleanup()
        self.__init__()

    def _start_server(self):
        address = f"{ADDRESS}-{uuid.uuid4()}"
        self._owner, theirs = socket.socketpair()
        with theirs, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(f"\0{address}")
            listener.listen()
            fds = [listener.fileno(), theirs.fileno()]
            command = [sys.executable, str(FOLDER / "fork_server.py"), *map(str, fds)]
            self._server = subprocess.Popen(command, env=alone(TORCH_COMPILE_DISABLE="0"), pass_fds=fds)
        return address


class Fork:
    """A forked process; as much of `subprocess.Popen` as is needed."""

    def __init__(self, address, script, arguments, environment, cwd, streams):
        self.args = (str(script), *map(str, arguments))
        self.returncode = None
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._server.connect(f"\0{address}")
        ours, given = streams
        self.stdin, self.stdout, self.stderr = ours
        request = {
            "arguments": self.args,
            "environment": dict(os.environ if environment is None else environment),
            "cwd": str(cwd or os.getcwd()),
        }
        socket.send_fds(self._server, [json.dumps(request).encode()], [stream.fileno() for stream in given])
        for stream in given:
            if stream not in ours:
                stream.close()
        self._server.settimeout(30 * PATIENCE)  # the first one waits for the imports
        answer = self._server.recv(8)
        assert answer, "the process that is forked has died"
        self.pid = int.from_bytes(answer, "little")

    @staticmethod
    def files():
        """Standard streams that end in files: this process's, and those that are given to the other one."""
        output, errors = (tempfile.TemporaryFile("a+") for _ in range(2))  # noqa: SIM115  # of the Fork
        return (None, output, errors), (open(os.devnull), output, errors)

    @staticmethod
    def pipes():
        """The same, with pipes."""
        ours, given = [], []
        for ours_reads in (False, True, True):
            read, write = os.pipe()
            reader, writer = os.fdopen(read, "r"), os.fdopen(write, "w")
            ours.append(reader if ours_reads else writer)
            given.append(writer if ours_reads else reader)
        return tuple(ours), tuple(given)

    def wait(self, timeout=None):
        """Exit code, negative for a signal.

        Raises:
            subprocess.TimeoutExpired: it goes on for longer than `timeout` seconds.
        """
        if self.returncode is None:
            self._server.settimeout(timeout)
            try:
                answer = self._server.recv(8)
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired(self.args, timeout) from None
            assert answer, "the process that is forked has died"
            self.returncode = int.from_bytes(answer, "little", signed=True)
            self._server.close()
        return self.returncode

    def poll(self):
        """Exit code, or `None` if it still runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def finish(self, timeout):
        """What it printed on standard output and standard error, when it has ended; without pipes.

        Args:
            timeout: seconds that it may take, or `PATIENCE` times as long on a slow machine.

        Raises:
            AssertionError: it took longer; with what it printed.
        """
        try:
            self.wait(timeout * PATIENCE)
        except subprocess.TimeoutExpired:
            self.kill()
            stdout, stderr = self.printed()
            raise AssertionError(f"hang: no end after {timeout} s\n{stdout}\n{stderr[-6000:]}") from None
        return self.printed()

    def printed(self):
        """The same, of a process that has been killed or has ended."""
        for stream in (self.stdout, self.stderr):
            stream.seek(0)
        return self.stdout.read(), self.stderr.read()

    def send_signal(self, number):
        """Send a signal, if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        """Kill it and what it started."""
        if self.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)
            self.wait(10)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        self._server.close()


class NewProcess(Fork):
    """The same of a process that is no fork; its standard streams end in files."""

    def __init__(self, *command, environment=None, cwd=None):
        (self.stdin, self.stdout, self.stderr), given = self.files()
        streams = dict(zip(("stdin", "stdout", "stderr"), given, strict=True))
        self._process = subprocess.Popen(
            [sys.executable, *map(str, command)], env=environment, cwd=cwd, start_new_session=True, **streams
        )
        given[0].close()
        self.pid, self.returncode = self._process.pid, None
        self._server = given[0]  # nothing else is to be closed

    def wait(self, timeout=None):
        self.returncode = self._process.wait(timeout)
        return self.returncode


FORKS = Forks()


def free_port():
    """A TCP port of 127.0.0.1 that nobody listens on, below those that systems give to outgoing connections."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def alone(**extra):
    """The variables of a process that no launcher has started."""
    clean = {key: value for key, value in os.environ.items() if key not in DISTRIBUTED}
    # Compiling codecs takes seconds in each process. Who wants to see them compiled passes a 0.
    ours = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}
    # Lightning looks for a port itself otherwise, which a connection of another test may take before it listens.
    port = {"MASTER_PORT": str(free_port())}
    # Ray joins none that runs already, tells nobody that it is used, and its workers do not stand back.
    of_ray = {"RAY_ADDRESS": "local", "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    return {**clean, **ours, **port, **of_ray, **extra}


def torchrun_environment(rank, world, port, **extra):
    """What torchrun tells a process of one node."""
    of_torchrun = {
        **{"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "GROUP_RANK": 0},
        **{"ROLE_RANK": rank, "ROLE_WORLD_SIZE": world, "GROUP_WORLD_SIZE": 1, "ROLE_NAME": "default"},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "test"},
        **{"TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 0, "TORCHELASTIC_USE_AGENT_STORE": "True"},
    }
    return alone(**{key: str(value) for key, value in of_torchrun.items()}, **extra)


def run_alone(script, *arguments, environment=None, cwd=None, timeout=120):
    """What a process that ends well printed on standard output and standard error.

    Raises:
        AssertionError: it failed, or took longer than `timeout` seconds; with what it printed.
    """
    with FORKS.start(script, *arguments, environment=environment or alone(), cwd=cwd) as process:
        stdout, stderr = process.finish(timeout)
    assert process.returncode == 0, f"{script}: exit code {process.returncode}\n{stdout}\n{stderr[-6000:]}"
    return stdout, stderr


def run_ranks(script, *arguments, world=2, timeout=240, cwd=None, **environment):
    """Run a script on several ranks, as torchrun would, and end them all when one fails.

    Returns:
        a pair for each rank: what it printed on standard output and on standard error.

    Raises:
        AssertionError: a rank failed, or the ranks took longer than `timeout` seconds; with their errors.
    """
    from torch.distributed import TCPStore  # a second that `forked_python.py` does without

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # torchrun's own, in its agent
    ranks = [
        FORKS.start(
            script, *arguments, environment=torchrun_environment(rank, world, store.port, **environment), cwd=cwd
        )
        for rank in range(world)
    ]
    deadline, failed = time.monotonic() + timeout * PATIENCE, ""
    while not failed and any(rank.poll() is None for rank in ranks):
        if bad := [str(number) for number, rank in enumerate(ranks) if rank.returncode]:
            time.sleep(2)  # for the others to say what they think of it
            failed = f"ranks {', '.join(bad)} failed"
        elif time.monotonic() > deadline:
            failed = f"hang: no end after {timeout} s"
        time.sleep(0.01)
    for rank in ranks:
        rank.kill()
    outputs = []
    for rank in ranks:
        with rank:
            outputs.append(rank.printed())
    codes = [rank.returncode for rank in ranks]
    if failed or any(codes):
        texts = "\n".join(f"rank {rank}: {errors[-6000:]}" for rank, (_, errors) in enumerate(outputs))
        raise AssertionError(f"{Path(script).name} {failed}, exit codes {codes}\n{texts}")
    return outputs
