"""Hooks among the replicas of torchft: what the votes cost, and a run in which replicas die at random.

    python benchmarks/replicas_that_die.py > benchmarks/results/replicas_that_die.txt

Needs torchft, whose `torchft_lighthouse` is started with a quorum every 20 ms, half a second for those that join and a
second for those that are missed.

**Cost.** Two and four replicas on this machine train the same model twice, by turns of 20 steps: in one process group,
and in quorums of a manager. Reported is the time of a step with the manager over that without: the median over turns
of the first replica.

**Deaths.** Three replicas train; one of two is killed at a random time, and started again, 30 times. After each
committed step a replica notes a hash of its weights. Exits with 1 when replicas had different weights after a step,
when one hangs, or when the replica that was never killed has a dozen descriptors or threads more in the end than after
ten deaths. Then the same with replicas of two processes, which torchrun starts and starts again; one of the two is
killed. `--deaths` does that alone.

**A network that drops everything.** Three replicas on a host each (network namespaces, which need root); the network of
one drops all packets for ten seconds. The timeout of collectives is two seconds. Exits with 1 when the others do not go
on meanwhile, when that replica does not come back after it, or replicas had different weights after a step.
`--dropped` does that alone.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from datetime import date, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from netns import INTERFACE, Network, hosts
from records import command
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import parallel
from torchft import Manager

import lightning_commhooks as lc
from lightning_commhooks.torchft import DistributedDataParallel, start_manager

HOOKS: dict[str, lc.CommHook] = {
    "allreduce": lc.AllReduce(),
    "int8": lc.Int8(),
    "powersgd": lc.PowerSGD(matrix_approximation_rank=4, start_powerSGD_iter=10),
}
TURNS, STEPS_OF_A_TURN = 10, 20
DEATHS, STEPS = 30, 2000
BATCH_SIZE = 16
CUT_SECONDS, TIMEOUT = 10, 2


def make_model() -> nn.Module:
    """A model with the same weights everywhere."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 16))


def make_manager(name: str, state: dict[str, Any], min_replica_size: int) -> Manager:
    """A manager of a replica of one process, that hands over a model and an optimizer."""

    def load(saved: dict[str, Any]) -> None:
        for key, one in state.items():
            one.load_state_dict(saved[key])

    return start_manager(
        name,
        lambda: {key: one.state_dict() for key, one in state.items()},
        load,
        min_replica_size=min_replica_size,
        timeout=float(os.environ.get("TIMEOUT", "5")),
        hostname=os.environ.get("ADDRESS", "127.0.0.1"),
        heartbeat_interval=timedelta(milliseconds=50),
    )


def whole(model: nn.Module) -> list[torch.Tensor]:
    """Parameters; of a sharded model on all processes of a replica alike."""
    return [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, manager: Manager | None) -> bool:
    """One step; whether it was committed."""
    if manager is not None:
        manager.start_quorum()
    optimizer.zero_grad()
    model(x).square().mean().backward()
    is_committed = manager is None or manager.should_commit()
    if is_committed:
        optimizer.step()
    return is_committed


def cost(name: str, num_replicas: str, hook: str) -> None:
    """One replica; the first one prints the ratio of times."""
    rank, size = int(name), int(num_replicas)
    x = torch.randn(BATCH_SIZE, 256, generator=torch.Generator().manual_seed(rank))
    plain, managed = make_model(), make_model()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in (plain, managed)]
    # Before there is a process group, which would be one replica.
    manager = make_manager(name, {"model": managed, "optimizer": optimizers[1]}, size)
    dist.init_process_group("gloo", rank=rank, world_size=size)
    ddp = parallel.DistributedDataParallel(plain, find_unused_parameters=True)
    attachment = lc.attach(ddp, HOOKS[hook])
    with_manager = DistributedDataParallel(manager, managed, hook=HOOKS[hook])
    ratios = []
    for _ in range(TURNS + 1):
        seconds = []
        for model, optimizer, votes in ((ddp, optimizers[0], None), (with_manager, optimizers[1], manager)):
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(STEPS_OF_A_TURN):
                step(model, optimizer, x, votes)
            seconds.append((time.perf_counter() - begin) / STEPS_OF_A_TURN)
        ratios.append((seconds[1] / seconds[0], *seconds))
    ratio, plain_seconds, seconds_with = (statistics.median(one) for one in zip(*ratios[1:], strict=True))
    if rank == 0:
        print(f"{hook:10} {size} {ratio:6.2f} {1e3 * plain_seconds:8.1f} {1e3 * seconds_with:8.1f}", flush=True)
    attachment.close()
    with_manager.attachment.close()
    manager.shutdown(wait=False)


def last_step(folder: str) -> int:
    """How many steps there are to be, once that is known."""
    path = Path(folder, "last")
    return int(path.read_text()) if path.exists() else 10**9


def replica(name: str, folder: str, hook: str) -> None:
    """One that trains until all steps are committed, and notes its weights."""
    model, rank = make_model(), int(os.environ.get("RANK", "0"))
    Path(folder, f"{name}.{rank}.pid").write_text(str(os.getpid()))
    is_sharded = "RANK" in os.environ
    if is_sharded:
        dist.init_process_group("gloo")
        for layer in (*model[::2], model):
            fully_shard(layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    manager = make_manager(name, {"model": model, "optimizer": optimizer}, 2)
    if is_sharded:
        trained, attachment = model, lc.attach(model, HOOKS[hook], manager=manager)
    else:
        trained = DistributedDataParallel(manager, model, hook=HOOKS[hook])
        attachment = trained.attachment
    with Path(folder, name if rank == 0 else os.devnull).open("a") as notes:
        while manager.current_step() < last_step(folder):
            generator = torch.Generator().manual_seed(hash((name, rank, manager.current_step())) % 2**31)
            if is_sharded:
                time.sleep(0.02)  # for processes that start
            if step(trained, optimizer, torch.randn(BATCH_SIZE, 256, generator=generator), manager):
                numbers = b"".join(p.detach().numpy().tobytes() for p in whole(model))
                print(manager.current_step(), hashlib.sha1(numbers).hexdigest(), time.time(), file=notes, flush=True)
    metrics = attachment.metrics()
    if rank == 0:
        told = " ".join(str(int(metrics[k])) for k in ("quorums", "steps_not_committed"))
        Path(folder, f"{name}.end").write_text(told)
    if is_sharded:
        dist.barrier()  # one that ends is a death
    attachment.close()
    manager.shutdown(wait=False)


class Lighthouse:
    """A lighthouse, and processes that look for it; all end with the `with`.

    Args:
        network: its hosts; `None`: this machine. The lighthouse is on the first one.
    """

    def __init__(self, network: Network | None = None) -> None:
        self._network = network

    def __enter__(self) -> Lighthouse:
        self.folder = tempfile.mkdtemp()
        self._address = f"{self._addresses()[0]}:{free_port()}"
        times = {"quorum_tick_ms": 20, "join_timeout_ms": 500, "heartbeat_timeout_ms": 1000, "min_replicas": 2}
        words = [word for name, value in times.items() for word in (f"--{name}", str(value))]
        program = shutil.which("torchft_lighthouse", path=f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}")
        assert program is not None, "torchft is not installed"
        quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._processes = [subprocess.Popen([*self._on(0), program, "--bind", self._address, *words], **quiet)]
        return self

    def _addresses(self) -> list[str]:
        return ["127.0.0.1"] if self._network is None else [f"10.0.0.{i + 1}" for i in range(len(self._network.names))]

    def _on(self, host: int) -> list[str]:
        return [] if self._network is None else ["ip", "netns", "exec", self._network.names[host]]

    def start(
        self, *arguments: str, host: int = 0, launcher: Sequence[str] = (), **variables: str
    ) -> subprocess.Popen[bytes]:
        """This script in another process, with these arguments, or in those that a launcher starts."""
        ours = {"TORCHFT_LIGHTHOUSE": f"http://{self._address}", "RUST_LOG": "error", "OMP_NUM_THREADS": "1"}
        if self._network is not None:
            ours |= {"GLOO_SOCKET_IFNAME": INTERFACE, "ADDRESS": self._addresses()[host]}
        environment = {**os.environ, **ours, "PYTHONHASHSEED": "0", **variables}
        with Path(self.folder, "errors").open("ab") as errors:
            command = [*self._on(host), sys.executable, *launcher, __file__, *arguments]
            started = subprocess.Popen(command, env=environment, stderr=errors)
        self._processes.append(started)
        return self._processes[-1]

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        shutil.rmtree(self.folder)


def free_port() -> int:
    """A port that nobody listens on, below those that systems give to outgoing connections."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def costs() -> None:
    """Measure and print what managers cost."""
    print("# cost: hook, replicas, time of a step with a manager over that without, ms without, ms with", flush=True)
    for size in (2, 4):
        for hook in HOOKS:
            with Lighthouse() as lighthouse:
                variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
                ranks = [lighthouse.start("cost", str(i), str(size), hook, **variables) for i in range(size)]
                codes = [rank.wait(300) for rank in ranks]
                assert not any(codes), Path(lighthouse.folder, "errors").read_text()[-6000:]


def committed(folder: str, name: str) -> list[tuple[int, str, float]]:
    """Number, hash and time of each step that a replica has committed."""
    path = Path(folder, name)
    lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return [(int(number), numbers, float(at)) for number, numbers, at in (line for line in lines if len(line) == 3)]


def resources(pid: int) -> tuple[int, int, int]:
    """Descriptors, threads, and MiB of memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task")), pages * 4 // 1024


def pid_of(folder: str, name: str, rank: int = 0) -> int:
    """Of a process of a replica."""
    return int(Path(folder, f"{name}.{rank}.pid").read_text())


def wait_for(done: Any, seconds: float) -> bool:
    """Wait so long for something at most; whether it is so."""
    end = time.monotonic() + seconds
    while not done() and time.monotonic() < end:
        time.sleep(0.05)
    return bool(done())


def finish(folder: str, replicas: dict[str, subprocess.Popen[bytes]], last: int) -> tuple[bool, dict[int, set[str]]]:
    """Let replicas end after so many steps; whether they did, and the hashes that they noted after each step."""
    Path(folder, "unfinished").write_text(str(last))
    Path(folder, "unfinished").rename(Path(folder, "last"))
    is_over = wait_for(lambda: all(one.poll() is not None for one in replicas.values()), 300)
    hashes = defaultdict(set)
    for name in replicas:
        for number, numbers, _ in committed(folder, name):
            hashes[number].add(numbers)
    return is_over, hashes


def dropped(hook: str) -> bool:
    """A run in which the network of one replica drops everything for a while; whether all was well."""
    names = ("first", "second", "cut")
    with hosts(3) as network, Lighthouse(network) as lighthouse:
        folder = lighthouse.folder
        started = enumerate(names)
        replicas = {
            name: lighthouse.start("replica", name, folder, hook, host=i, TIMEOUT=str(TIMEOUT)) for i, name in started
        }
        is_well = wait_for(lambda: all(len(committed(folder, name)) > 50 for name in names), 60)
        assert is_well, Path(folder, "errors").read_text()[-6000:]
        network.cut(2)
        begin = time.time()
        time.sleep(CUT_SECONDS)
        network.mend(2)
        end = time.time()
        is_well &= wait_for(lambda: any(at > end + 1 for *_, at in committed(folder, "cut")), 60)
        back = min((at for *_, at in committed(folder, "cut") if at > end), default=float("nan")) - end
        there = sum(begin < at < end for *_, at in committed(folder, "first"))
        times = [at for *_, at in committed(folder, "first")]
        gap = max(later - earlier for earlier, later in pairwise(times))
        is_over, hashes = finish(folder, replicas, len(times) + 100)
    unequal = sum(len(different) > 1 for different in hashes.values())
    print(f"# all packets of one replica of three dropped for {CUT_SECONDS} s: {hook}, timeout {TIMEOUT} s")
    print(f"steps of the others meanwhile: {there}, the first after {gap:.1f} s; it is back {back:.1f} s after that")
    print(f"steps after which replicas had different weights: {unequal} of {len(hashes)}", flush=True)
    return is_well and is_over and not unequal and there > 0


def deaths(hook: str, processes: int = 1) -> bool:
    """A run with deaths; whether all was well."""
    chance = random.Random(0)
    names = ("stays", "first", "second")
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "--max-restarts=1000"]
    with Lighthouse() as lighthouse:
        folder = lighthouse.folder
        variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        start = functools.partial(lighthouse.start, launcher=torchrun if processes > 1 else (), **variables)
        replicas = {name: start("replica", name, folder, hook) for name in names}
        wait_for(lambda: all(len(committed(folder, name)) > 20 for name in names), 60)
        num_deaths, seen_resources = 0, [resources(pid_of(folder, "stays"))]
        while num_deaths < DEATHS:
            time.sleep(chance.uniform(0.2, 1.0))
            name, rank = chance.choice(names[1:]), chance.randrange(processes)
            os.kill(pid_of(folder, name, rank), signal.SIGKILL)
            num_deaths += 1
            if processes == 1:
                replicas[name].wait()
                replicas[name] = start("replica", name, folder, hook)
            else:
                time.sleep(1)
            seen = len(committed(folder, name))
            wait_for(lambda name=name, seen=seen: len(committed(folder, name)) > seen, 60)  # type: ignore[misc]
            if num_deaths % (DEATHS // 3) == 0:
                time.sleep(3)  # groups of the past take their time
                seen_resources.append(resources(pid_of(folder, "stays")))
        is_over, hashes = finish(folder, replicas, max(STEPS, len(committed(folder, "stays")) + 300))
        times = [at for *_, at in committed(folder, "stays")]
        gaps = sorted(later - earlier for earlier, later in pairwise(times))
        quorums, lost = Path(folder, "stays.end").read_text().split()
    unequal = sum(len(different) > 1 for different in hashes.values())
    of_several = f" in replicas of {processes} processes" if processes > 1 else ""
    counts = f"{num_deaths} deaths, {quorums} quorums, {lost} steps not committed"
    print(f"# deaths: {hook}{of_several}, {len(hashes)} steps, {counts}")
    print(f"steps after which replicas had different weights: {unequal} of {len(hashes)}")
    longest = [f"{gap:.2f}" for gap in gaps[-num_deaths:]]
    print(f"seconds until the next step, of the {num_deaths} longest: median {longest[num_deaths // 2]}, {longest[-1]}")
    print(f"descriptors, threads, MiB of the one that stays, every {DEATHS // 3} deaths: {seen_resources}", flush=True)
    (before, *_), (*_, after) = seen_resources[1:], seen_resources
    return is_over and not unequal and after[0] < before[0] + 12 and after[1] < before[1] + 12


def main() -> None:
    """Measure, or be a process of a measurement."""
    if sys.argv[1:2] == ["cost"]:
        cost(*sys.argv[2:])
    elif sys.argv[1:2] == ["replica"]:
        replica(*sys.argv[2:])
    else:
        print(f"$ {command()}\ntorch {torch.__version__}, {os.cpu_count()} cores, {date.today()}", flush=True)
        alone = next((one for one in ("--deaths", "--dropped") if one in sys.argv), None)
        if alone is None:
            costs()
        kinds = [(hook, num) for num in (1, 2) for hook in ("int8", "powersgd") if alone != "--dropped"]
        are_well = [deaths(*kind) for kind in kinds]
        are_well += [dropped(hook) for hook in ("int8", "powersgd") if alone != "--deaths"]
        sys.exit(not all(are_well))
    sys.stdout.flush()
    os._exit(0)  # threads of torchft may wait for a lighthouse


if __name__ == "__main__":
    main()
