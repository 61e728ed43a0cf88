"""Like `python [-u] SCRIPT`, `python [-u] -m MODULE` and `python [-u] -c CODE`, with arguments, but a fork.

For what starts `sys.executable`: pytest-xdist, and launchers (see `Forks.launching`). Signals are passed on.
"""

import os
import signal
import sys

from forks import FORKS, Fork

if __name__ == "__main__":
    arguments = sys.argv[1:]
    while arguments[0] in ("-u", "-m"):
        del arguments[0]
    streams = (sys.stdin, sys.stdout, sys.stderr)
    fork = Fork(FORKS.address(), arguments[0], arguments[1:], None, None, ((None,) * 3, streams))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: os.kill(fork.pid, number))
    code = fork.wait()
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)
