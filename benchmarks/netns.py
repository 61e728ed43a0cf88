"""Two to four hosts on one machine: network namespaces, veth pairs and a bridge. Needs root and iproute2.

    with hosts(2, rate="1gbit") as network:
        outputs = network.launch(["train.py", "--steps", "10"])

Each host is a namespace with one interface, joined to a bridge in a namespace of its own; nothing is made in the
machine's own namespace. `rate` is what a host may send, so a full-duplex link of that speed.

Give a rate whenever bytes or seconds matter. Without one, a sender overruns the receiver's queue: TCP retransmits
1 to 4% of what it sends, and the machine's cores are the bottleneck, at about 3 Gbit/s on two of them.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

INTERFACE = "eth0"
ROOT = Path(__file__).resolve().parent.parent

_PREFIX = "commhooks"
_OUTPUT_TAIL = 6_000
_HEADERS = 66  # bytes of Ethernet, IP and TCP with timestamps


@dataclass
class Network:
    """Hosts that are up; made by [`hosts`][].

    Attributes:
        names: the namespace of each host.
        hub: the namespace of the bridge that joins them.
        switch: what delays packets; `None` without delay.
    """

    names: list[str]
    hub: str
    switch: subprocess.Popen[str] | None = field(default=None, repr=False)
    _next_port: int = field(default=29_500, repr=False)

    def tx_bytes(self, host: int) -> int:
        """Bytes that a host has sent since it came up, Ethernet, IP and TCP headers included."""
        return int(_run("ip", "netns", "exec", self.names[host], "cat", _statistic("tx_bytes")))

    def set_rate(self, rate: str, burst: str = "128kb") -> None:
        """Change what each host may send; also while processes run."""
        for name in self.names:
            _shape(name, rate, burst, "change")

    def cut(self, host: int) -> None:
        """Drop what a host sends and is sent, until `mend`. Not with a delay."""
        _ip(self.hub, "link", "set", f"port{host}", "nomaster")

    def mend(self, host: int) -> None:
        """Join a host again that was cut."""
        _ip(self.hub, "link", "set", f"port{host}", "master", "bridge")

    def launch(
        self,
        script_args: Sequence[str],
        *,
        timeout: float = 300,
        env: Mapping[str, str] | None = None,
        per_host: int = 1,
    ) -> list[str]:
        """Run a Python script on every host, with the environment that `init_process_group("gloo")` reads.

        Args:
            script_args: path of the script and its arguments.
            timeout: seconds for all hosts together.
            env: more environment variables. `OMP_NUM_THREADS` is 1 unless it is set.
            per_host: processes on each host, a node of so many ranks: `NODE_RANK` says which, if there are several.

        Returns:
            what each rank wrote to stdout.

        Raises:
            RuntimeError: a host failed or took too long; with what the failed ones wrote.
        """
        port = self._next_port
        self._next_port += 1  # the last launch's may still be in TIME_WAIT
        with contextlib.ExitStack() as stack:
            ranks = [(host, local) for host in range(len(self.names)) for local in range(per_host)]
            outputs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in ranks]
            errors = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in ranks]
            processes: list[subprocess.Popen[str]] = []
            try:
                for rank, (host, local) in enumerate(ranks):
                    command = ["ip", "netns", "exec", self.names[host], sys.executable, *script_args]
                    environment = {**_environment(rank, len(ranks), port), **(env or {})}
                    if per_host > 1:
                        environment |= {"NODE_RANK": str(host), "LOCAL_RANK": str(local)}
                    processes.append(
                        subprocess.Popen(command, stdout=outputs[rank], stderr=errors[rank], text=True, env=environment)
                    )
                failed = _wait(processes, time.monotonic() + timeout, self.switch)
            finally:
                for process in processes:
                    process.kill()
                    process.wait()
            if failed:
                what = "rank" if per_host > 1 else "host"
                texts = [f"{what} {i}: {why}\n{_tail(outputs[i])}{_tail(errors[i])}" for i, why in failed]
                raise RuntimeError(f"{' '.join(script_args)} failed\n" + "\n".join(texts))
            return [_read(output) for output in outputs]


@contextlib.contextmanager
def hosts(
    num: int, rate: str | None = "1gbit", delay_ms: float = 0, mtu: int = 1500, burst: str = "128kb", loss: float = 0
) -> Iterator[Network]:
    """Make `num` hosts that reach each other at 10.0.0.1 and up; remove them at the end, whatever happens.

    Removes what earlier runs left that were killed, too.

    Args:
        num: 2 to 4.
        rate: what each host may send, as `tc` writes it; `None` for as fast as the machine is.
        delay_ms: of each packet that a host sends, so half of what a round trip takes longer. A process of its own
            (`delay_line.py`) forwards packets then, which takes a tenth of a core and more with more of them.
        mtu: of the interfaces, in bytes. Whatever it is, the kernel hands over packets of up to 64 KB, as to a
            network card that segments them (TSO), and the counters see those; the rate is kept as if segmented.
        burst: what an idle host may send at once before `rate` holds, as `tc` writes it. The default is two packets of
            64 KB. Take less where that is much of what a step sends: it costs the processor time to segment, 1500 bytes
            at a time, so only on slow links.
        loss: share of packets, of up to 64 KB, that do not arrive. Needs a delay.

    Raises:
        ValueError: `num` is out of range, or a loss without delay.
        RuntimeError: not root, no `ip` or `tc`, or a kernel without `sch_tbf`.
    """
    if not 2 <= num <= 4:
        raise ValueError(f"num must be 2 to 4 hosts, got {num}")
    if loss and not delay_ms:
        raise ValueError("packets are lost on links with a delay_ms only")
    _remove_leftovers()
    hub = f"{_PREFIX}-{os.getpid()}-hub"
    names = [f"{_PREFIX}-{os.getpid()}-{host}" for host in range(num)]
    forwarding: subprocess.Popen[str] | None = None
    # So that `timeout` or a closed terminal unwinds this function.
    previous = {number: signal.signal(number, _exit) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        _add_namespace(hub)
        _ip(hub, "link", "add", "bridge", "type", "bridge", "mcast_snooping", "0")
        _ip(hub, "link", "set", "bridge", "up", "mtu", str(mtu))
        for host, name in enumerate(names):
            _add_namespace(name)
            _add_link(hub, name, host, mtu, bridged=not delay_ms)
            _shape(name, rate, burst)
        if delay_ms:
            ports = [f"port{host}" for host in range(num)]
            switch = ["ip", "netns", "exec", hub, sys.executable, str(ROOT / "benchmarks" / "delay_line.py")]
            switch += [str(delay_ms), str(loss), *ports]
            forwarding = subprocess.Popen(switch, stderr=subprocess.PIPE, text=True)
        yield Network(names, hub, forwarding)
    finally:
        if forwarding is not None:
            forwarding.kill()
            forwarding.communicate()
        for name in [*names, hub]:
            _remove_namespace(name)
        for number, handler in previous.items():
            signal.signal(number, handler)


def pin(rank: int) -> None:
    """Keep this process on one core, each rank on another as long as there are enough."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})


def own_tx_bytes() -> int:
    """Bytes that the host sent on which this process runs."""
    return int(Path(_statistic("tx_bytes")).read_text())


def own_tx_packets() -> int:
    """Packets, of up to 64 KB each, that the host sent on which this process runs."""
    return int(Path(_statistic("tx_packets")).read_text())


def wire_bytes(num_bytes: float, packets: float) -> float:
    """What TCP packets of up to 64 KB are on a wire with an MTU of 1500 bytes, by which `rate` is kept.

    Args:
        num_bytes: that were counted.
        packets: the same.
    """
    payload = num_bytes - _HEADERS * packets
    return payload + _HEADERS * max(packets, payload / (1514 - _HEADERS))


def _add_namespace(name: str) -> None:
    _run("ip", "netns", "add", name)
    # Without it, IPv6 sends router solicitations of its own.
    _run("ip", "netns", "exec", name, "sysctl", "-qw", "net.ipv6.conf.default.disable_ipv6=1")
    _ip(name, "link", "set", "lo", "up")


def _add_link(hub: str, name: str, host: int, mtu: int, *, bridged: bool) -> None:
    port = f"port{host}"
    _ip(name, "link", "add", INTERFACE, "mtu", str(mtu), "type", "veth", "peer", "name", port, "mtu", str(mtu))
    _ip(name, "link", "set", port, "netns", hub)
    _ip(hub, "link", "set", port, *(["master", "bridge"] if bridged else []), "up")
    _ip(name, "addr", "add", f"10.0.0.{host + 1}/24", "dev", INTERFACE)
    _ip(name, "link", "set", INTERFACE, "up")


def _shape(name: str, rate: str | None, burst: str, action: str = "add") -> None:
    if rate is not None:
        qdisc = ["tc", "-n", name, "qdisc", action, "dev", INTERFACE]
        _run(*qdisc, "root", "tbf", "rate", rate, "burst", burst, "latency", "100ms")


def _remove_leftovers() -> None:
    for line in _run("ip", "netns", "list").splitlines():
        match = re.match(rf"{_PREFIX}-(\d+)-\w+", line)
        if match and not _is_alive(match[1]):
            _remove_namespace(match[0])


def _is_alive(pid: str) -> bool:
    try:
        status = Path("/proc", pid, "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"  # zombie, dead


def _remove_namespace(name: str) -> None:
    listed = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
    for pid in listed.stdout.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _environment(rank: int, num: int, port: int) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        "PYTHONPATH": path,
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(num),
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": INTERFACE,
    }


def _wait(
    processes: list[subprocess.Popen[str]], deadline: float, switch: subprocess.Popen[str] | None
) -> list[tuple[int, str]]:
    """Wait for all, or for the first failure; the ranks that failed, and why."""
    while True:
        if switch is not None and switch.poll() is not None:
            assert switch.stderr is not None
            raise RuntimeError(f"delay_line.py ended with code {switch.returncode}\n{switch.stderr.read()}")
        codes = [process.poll() for process in processes]
        if any(codes):
            time.sleep(1)  # let others that fail with it write why
            codes = [process.poll() for process in processes]
            return [(rank, f"exit code {code}") for rank, code in enumerate(codes) if code]
        if None not in codes:
            return []
        if time.monotonic() > deadline:
            return [(rank, "timed out") for rank, code in enumerate(codes) if code is None]
        time.sleep(0.05)


def _ip(name: str, *args: str) -> None:
    _run("ip", "-n", name, *args)


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise RuntimeError(f"{command[0]!r} is not installed; it comes with iproute2") from error
    if done.returncode:
        reason = done.stderr.strip()
        if "qdisc kind is unknown" in reason:
            reason = "this kernel lacks it; rate= needs sch_tbf"
        raise RuntimeError(f"{' '.join(command)}: {reason} (needs root)")
    return done.stdout


def _statistic(name: str) -> str:
    return f"/sys/class/net/{INTERFACE}/statistics/{name}"


def _read(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def _tail(file: IO[str]) -> str:
    return _read(file)[-_OUTPUT_TAIL:]


def _exit(number: int, frame: object) -> None:
    sys.exit(128 + number)
