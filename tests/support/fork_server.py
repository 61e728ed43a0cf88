"""The process that is forked: `python fork_server.py LISTENER OWNER`, two file descriptors of sockets; see forks.py.

Each connection is one process: a message with arguments, environment and working directory comes, with the standard
streams; the answers are the number of the process, and its exit code in the end. A process whose connection is closed
is killed.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import random
import runpy
import selectors
import signal
import socket
import sys
import threading
import types
import warnings
from pathlib import Path

from forks import EXECUTABLE, FOLDER, FOLDERS

PRELOADED = (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "lightning.pytorch.cli",
    "pytorch_lightning",
    "accelerate",
    "transformers.trainer",
    "transformers.models.gpt2.modeling_gpt2",
    "sklearn.datasets",
    "lightning_commhooks.testing",
    "accelerate_integration",
)
MESSAGE_BYTES = 1 << 17


class Server:
    """Forks for each request that comes from those who connect to `listener`, until `owner` is closed."""

    def __init__(self, listener, owner):
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._selector.register(owner, selectors.EVENT_READ, sys.exit)
        self._listener = listener

    def serve(self):
        """Returns in forks only: what one is to run, and its standard streams."""
        while True:
            for key, _ in self._selector.select():
                if key.fd in self._selector.get_map() and (request := key.data()):
                    return request

    def _accept(self):
        connection, _ = self._listener.accept()
        message, fds, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, 3)
        pid = os.fork()
        if pid == 0:
            for key in self._selector.get_map().values():
                os.close(key.fd if isinstance(key.fileobj, int) else key.fileobj.detach())
            self._selector.close()
            connection.close()
            return json.loads(message), fds
        for fd in fds:
            os.close(fd)
        connection.sendall(pid.to_bytes(8, "little"))
        ended = os.pidfd_open(pid)
        self._selector.register(ended, selectors.EVENT_READ, lambda: self._report(pid, ended, connection))
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._kill(pid, connection))
        return None

    def _report(self, pid, ended, connection):
        _, code = os.waitpid(pid, 0)
        self._selector.unregister(ended)
        os.close(ended)
        if connection.fileno() != -1:
            self._selector.unregister(connection)
            with contextlib.suppress(OSError):  # nobody waits for it
                connection.sendall(os.waitstatus_to_exitcode(code).to_bytes(8, "little", signed=True))
            connection.close()

    def _kill(self, pid, connection):
        if connection.fileno() == -1:
            return
        self._selector.unregister(connection)
        connection.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def become(request, fds):
    """Let this process be what was asked for."""
    for target, fd in enumerate(fds):
        os.dup2(fd, target)
        os.close(fd)
    os.setsid()
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    random.seed()
    script, *sys.argv[1:] = request["arguments"]
    sys.path[0] = "" if script == "-c" else request["cwd"]
    sys.path[1:1] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in sys.path]
    sys.executable = os.environ.get(EXECUTABLE, sys.executable)
    if os.environ.get("PYTHONWARNINGS") == "ignore":
        warnings.simplefilter("ignore")
    # Read from the environment when it was imported.
    sys.modules["torch._dynamo"].config.disable = os.environ.get("TORCH_COMPILE_DISABLE") == "1"
    if script == "-c":
        return be_main(script, sys.argv.pop(1))
    if not script.endswith(".py"):
        return runpy.run_module(script, run_name="__main__", alter_sys=True)
    # Scripts that tests write find the tests.
    sys.path[:1] = [str(Path(script).parent), *FOLDERS]
    return be_main(script, Path(script).read_bytes())


def be_main(name, code):
    """Run code as that of the program."""
    sys.argv[0] = name
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if name != "-c":
        main.__file__ = name
    exec(compile(code, name, "exec"), main.__dict__)


def end_quickly():
    """End as the interpreter does, but without clearing modules and libraries, which takes half a second."""
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    # pyarrow, which scikit-learn imports where it is installed, starts a thread otherwise.
    os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    assert len(os.listdir("/proc/self/task")) == 1, "forks have no other threads"
    become(*Server(*(socket.socket(fileno=int(fd)) for fd in sys.argv[1:])).serve())
    # Other scripts, and all that fail, show what the end of the interpreter is like.
    if Path(sys.argv[0]).parent == FOLDER:
        end_quickly()
