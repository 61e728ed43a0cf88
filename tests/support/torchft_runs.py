"""Runs of replicas with a real lighthouse, and the same run in one process."""

import contextlib
import copy
import functools
import itertools
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sysconfig
import time

import pytest
import torch
from docs_pages import DOCS, blocks
from forks import FOLDER, FORKS, PATIENCE, alone, free_port
from torchft_replica import HOOKS, NAMES, batch, loss_of, make_model, make_optimizer

import lightning_commhooks as lc
from lightning_commhooks.collectives.in_memory import groups_in_memory, run_together
from lightning_commhooks.interface.bucket import Bucket, Slot


def start_lighthouse(address, *words):
    """A lighthouse, and the variables of what looks for it."""
    program = shutil.which("torchft_lighthouse", path=f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}")
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    started = subprocess.Popen([program, *words], **quiet)
    host, port = address.rsplit(":", 1)
    deadline = time.monotonic() + 20 * PATIENCE
    while True:
        try:
            socket.create_connection((host, int(port)), 1).close()
            break
        except OSError:
            assert time.monotonic() < deadline, "the lighthouse does not listen"
            time.sleep(0.05)
    return started, alone(TORCHFT_LIGHTHOUSE=f"http://{address}", RUST_LOG="error", PYTHONWARNINGS="ignore")


class Run:
    """Replicas of one run, by name, and their lighthouse.

    Args:
        script: of a replica.
        folder: where it writes.
        join_timeout_ms: of the lighthouse.
        **options: of all replicas.

    Attributes:
        replicas: the first process of each.
        others: its other processes.
    """

    def __init__(self, script, folder, join_timeout_ms=5000, **options):
        self.script, self.folder, self.options = FOLDER / script, folder, options
        address = f"127.0.0.1:{free_port()}"
        times = {"join_timeout_ms": join_timeout_ms, "heartbeat_timeout_ms": 1000}
        times |= {"quorum_tick_ms": 20, "min_replicas": 2}
        words = [word for name, value in times.items() for word in (f"--{name}", str(value))]
        self._lighthouse, self._environment = start_lighthouse(address, "--bind", address, *words)
        self.replicas, self.others = {}, {}

    def start(self, name, **options):
        """Start a replica, another time perhaps."""
        given = json.dumps({**self.options, **options})
        if name in self.replicas:
            for process in (self.replicas.pop(name), *self.others.pop(name)):
                with process as before:
                    before.wait(10)
        # For a process group of this replica alone.
        environment = {**self._environment, "MASTER_PORT": str(free_port())}
        num = self.options.get("processes", 1)
        if num > 1:
            environment |= {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(num)}
        self.replicas[name], *self.others[name] = (
            FORKS.start(
                self.script,
                self.folder,
                name,
                given,
                environment={**environment, "RANK": str(rank)} if num > 1 else environment,
            )
            for rank in range(num)
        )

    def wait_until_killed(self, name):
        """Wait until a process of a replica is gone, and end the others of it, as torchrun does."""
        processes = [self.replicas[name], *self.others[name]]
        self.wait_until(lambda: any(one.poll() is not None for one in processes), may_fail=name)
        for one in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(one.pid, signal.SIGKILL)
        self.wait_until(lambda: processes[0].poll() is not None, may_fail=name)

    def steps(self, name):
        """What a replica has said of each step that it has committed."""
        path = self.folder / f"{name}.steps"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def wait_until(self, what, seconds=30, may_fail=""):
        """Wait until a function returns something true, while no replica fails but that one."""
        deadline = time.monotonic() + seconds * PATIENCE
        while not what():
            codes = {name: one.poll() for name, one in self.replicas.items()}
            failed = {name for name, code in codes.items() if code not in (None, -signal.SIGKILL)}
            if failed - {may_fail} or time.monotonic() > deadline:
                pytest.fail(f"it did not happen, {codes}: {self.close()}")
            time.sleep(0.02)

    def wait_until_it_is_back(self, name):
        """Wait until a replica is killed and the others have gone on, start it again, and wait for its steps."""
        self.wait_until_killed(name)
        # Where it has several processes, the others of it may have ended by themselves.
        self.wait_until(lambda: len(self.steps("one")) > 20, may_fail=name if self.others[name] else "")
        self.start(name)
        self.wait_until(lambda: len(self.steps(name)) > 20)

    def wait_until_it_joins_again(self, name, **options):
        """Wait until a replica has ended, as where `dies` says, start it again, and wait for its steps."""
        self.wait_until(lambda: self.replicas[name].poll() is not None, may_fail=name)
        self.wait_until(lambda: len(self.steps("one")) > 20, may_fail=name)
        self.start(name, **options)
        self.wait_until(lambda: len(self.steps(name)) > 20)

    def go_on(self, checkpoint, **options):
        """A run of the same script from a checkpoint, which "three" does not have; it has ended well."""
        folder = self.folder / "second"
        folder.mkdir()
        again = Run(self.script.name, folder, **options)
        try:
            for name in NAMES:
                given = {} if name == "three" else {"checkpoint": str(self.folder / checkpoint)}
                again.start(name, begins_with=list(NAMES), **given)
            again.wait_until(lambda: len(again.steps("one")) > 5)
            again.finish(first=10)
        finally:
            again.close()
        assert all(again.steps(name)[0]["step"] == 10 for name in NAMES), "also who has no checkpoint"
        return again

    def hashes(self):
        """Those of weights that there were after each step."""
        hashes = {}
        for name in NAMES:
            for line in self.steps(name):
                hashes.setdefault(line["step"], set()).add(line["hash"])
        return hashes

    def finish(self, first=0):
        """What the replicas printed, by name, after a check that all ended well with the same weights in each step."""
        last, printed = first + len(self.steps("one")) + 20, {}
        (self.folder / "to_be_last").write_text(str(last))
        (self.folder / "to_be_last").rename(self.folder / "last")
        for name in self.replicas:
            for replica in (*self.others[name], self.replicas[name]):
                replica.finish(60)
                with replica:
                    printed[name] = "".join(replica.printed())
                assert replica.returncode == 0, printed[name]
        self.replicas, self.others = {}, {}
        hashes = self.hashes()
        assert sorted(hashes) == list(range(first, last))
        assert not [step for step, different in hashes.items() if len(different) > 1]
        return printed

    def end(self, name):
        """What a replica has written in the end."""
        return json.loads((self.folder / f"{name}.end").read_text())

    def close(self):
        """Kill what is left; returns what it printed."""
        printed = ""
        for replica in (*self.replicas.values(), *itertools.chain(*self.others.values())):
            with replica, contextlib.suppress(ProcessLookupError):
                os.kill(replica.pid, signal.SIGKILL)
                replica.wait(10)
                printed += "".join(replica.printed())
        self.replicas, self.others = {}, {}
        self._lighthouse.kill()
        self._lighthouse.wait()
        return printed


def starting(script, tmp_path):
    """For a fixture: `start(**options)`, a `Run` of three replicas, of which nothing is left in the end."""
    runs = []

    def start(of=(), names=NAMES, **options):
        runs.append(Run(script, tmp_path, **options))
        for name in names:
            runs[-1].start(name, begins_with=list(names), **dict(of).get(name, {}))
        return runs[-1]

    yield start
    for run in runs:
        run.close()


def gap_after(run, name, step):
    """Seconds between two steps that a replica has committed."""
    times = [line["time"] for line in run.steps(name)]
    return times[step + 1] - times[step]


class Simulation:
    """The same run in one process, among those that were there in each step.

    Args:
        hook: of the run.
        names: of the parameters in each bucket.
        micros: batches of a replica in a step.
        prefix: of the names of parameters.
        num_shards: ranks of a replica, each of which has so many of the rows of each parameter.

    Attributes:
        divided_by: see `Options`.
    """

    def __init__(self, hook, names, micros=1, prefix="", num_shards=1):
        self.hook, self.names, self.micros, self.prefix, self.model = hook, names, micros, prefix, make_model()
        self.num_shards, self.divided_by = num_shards, 0
        self.optimizer = make_optimizer(self.model)
        self.bound, self.members = {}, []
        self.schedule = None

    def step(self, step, members, fresh, is_bad=False):
        """A step of these members, of which the residuals of some are zero; a bad one is not taken."""
        shards, factor = range(self.num_shards), len(members) / (self.divided_by or len(members))
        if members != self.members:
            self._regroup(members)
        for name, shard in itertools.product(fresh, shards):
            for residual in self.bound[name, shard].residuals():
                residual.zero_()
        of_shards = [[] for _ in shards]
        for name in members:
            self.optimizer.zero_grad()
            for micro in range(self.micros):
                (loss_of(self.model, *batch(name, step, micro)) * factor / self.micros).backward()
            for shard, ranks in enumerate(of_shards):
                ranks.append(self._buckets(step, shard))
        for shard, ranks in enumerate(of_shards):
            for buckets in zip(*ranks, strict=True):
                bounds = [self.bound[name, shard] for name in members]
                works = [
                    functools.partial(bound.reduce, bucket, bound.group.for_bucket(1))
                    for bound, bucket in zip(bounds, buckets, strict=True)
                ]
                run_together(works)
        for bound in self.bound.values():
            bound.end_step(torch.tensor(not is_bad))
        if is_bad:
            return
        for bucket in itertools.chain(*(ranks[-1] for ranks in of_shards)):
            for slot in bucket.slots:
                slot.parameter.copy_(slot.view(bucket.flat))
        self.optimizer.step()
        if self.schedule is not None:
            self.schedule.step()

    def _regroup(self, members):
        """All have the same warm starts."""
        before = {place: bound.memory for place, bound in self.bound.items()}
        self.bound = {}
        for shard in range(self.num_shards):
            shared = next((memory for (_, of), memory in before.items() if of == shard), {})
            for name, group in zip(members, groups_in_memory(len(members)), strict=True):
                bound = self.hook.bind(group)
                for parameter, entry in before.get((name, shard), shared).items():
                    bound.memory[parameter] = {kind: tensor.clone() for kind, tensor in entry.items()}
                self.bound[name, shard] = bound
        self.members = members

    def _buckets(self, step, shard):
        """Buckets of a shard. The parameter of a slot is the gradient, as long as the model has it."""
        parameters = {
            self.prefix + name: p.grad.chunk(self.num_shards)[shard] for name, p in self.model.named_parameters()
        }
        last = len(self.names) - 1
        return [
            self._bucket(i, [(name, parameters[name]) for name in names], step, i == last)
            for i, names in enumerate(self.names)
        ]

    def _bucket(self, index, named, step, is_last):
        flat, slots, offset = torch.cat([p.reshape(-1) for _, p in named]), [], 0
        for name, p in named:
            slots.append(Slot(name, tuple(p.shape), offset, p))
            offset += p.numel()
        return Bucket(flat, index, is_last, step, tuple(slots))


def simulate(run, hook, micros):
    """That of a framework's run, with its schedule."""
    simulation = Simulation(HOOKS[hook], run.end("one")["buckets"], micros, prefix="model.")
    simulation.divided_by = run.options.get("divided_by", 0)
    simulation.schedule = torch.optim.lr_scheduler.LambdaLR(simulation.optimizer, lambda step: 1 / (1 + 0.1 * step))
    return simulation


def lost_before(lines, step):
    """Whether a replica joined at a step, or had lost one just before."""
    return step - 1 not in lines or any(lines[step][of] != lines[step - 1][of] for of in ("lost", "process"))


def assert_equals_simulation(run, simulation, tolerance_of=lambda step: 1e-9):
    """What replicas have written of each step, against a run in one process among those that were there."""
    lines = {name: {line["step"]: line for line in run.steps(name)} for name in NAMES}
    # A replica that has not committed a step as others have gets it from them.
    for step, line in sorted({**lines["three"], **lines["two"], **lines["one"]}.items()):
        names = line["names"]
        begun_anew = [name for name in names if lost_before(lines[name], step)]
        simulation.step(step, names, begun_anew, line.get("skipped", False))
        total = sum(p.sum().item() for p in simulation.model.parameters())
        assert line["sum"] == pytest.approx(total, abs=tolerance_of(step)), (line, total)
    for mine, theirs in zip(run.end("one")["parameters"], simulation.model.parameters(), strict=True):
        expected = theirs.detach()
        torch.testing.assert_close(torch.tensor(mine, dtype=theirs.dtype), expected, rtol=0, atol=tolerance_of(step))


class LocalSimulation:
    """DiLoCo, or local SGD, in one process, among those that were there at each average; each of so many processes.

    Args:
        hook: name of one of `HOOKS`, with one fragment or two.
        num_processes: of a replica.
        is_scheduled: whether the learning rate is that of a framework's run.
    """

    def __init__(self, hook="diloco", num_processes=1, is_scheduled=False):
        self.hook, self.num_processes, self.is_scheduled = HOOKS[hook], num_processes, is_scheduled
        outer = isinstance(self.hook, lc.DiLoCo)
        self.num_fragments, self.delay = (self.hook.fragments, self.hook.delay) if outer else (1, 0)
        self.outer_lr, self.outer_momentum = (0.7, 0.9) if outer else (1.0, 0.0)
        self.anchor = copies(make_model().parameters())
        self.momentum = [torch.zeros_like(p) for p in self.anchor]
        # Indices of the parameters in each fragment: of half the elements, or as close as that gets.
        self.fragments = [[0, 1, 2, 3, 4, 5]] if self.num_fragments == 1 else [[0, 1], [2, 3, 4, 5]]
        self.restart()

    def restart(self):
        """All begin at the common model."""
        # Of each replica: its model, the common one at its last average, and what it has begun to send.
        self.own, self.common, self.begun = {}, {}, {}
        self.last = {}

    def end_of(self, step):
        """Number of local steps up to an average."""
        period, fragments = self.hook.period, self.num_fragments
        return step // fragments * period + (step % fragments + 1) * period // fragments

    def step(self, step, lines, joined):
        """An average of members, by what they have written of it; some have just come."""
        there = list(lines)
        for name in there:
            if name in joined:
                self.own[name], self.begun[name] = copies(self.anchor), {}
            else:
                self.train(name, step, lines[name]["local"])
        k = step % self.num_fragments
        begun = [self.begun[name].get(k) for name in there]
        # An average in flight is lost if replicas come or go.
        in_time = self.delay and all(
            one is not None and one[0] == lines[name]["quorums"] for name, one in zip(there, begun, strict=True)
        )
        for i in self.fragments[k]:
            sent = [one[1][i] for one in begun] if in_time else [self.own[name][i] for name in there]
            mean = sum(self.anchor[i] - p for p in sent) / len(there)
            # Nesterov's momentum, as of `torch.optim.SGD`.
            self.momentum[i] = self.outer_momentum * self.momentum[i] + mean
            self.anchor[i] = self.anchor[i] - self.outer_lr * (mean + self.outer_momentum * self.momentum[i])
            for name in there:
                own = self.own[name]
                own[i] = (own[i] + self.anchor[i]) / 2 if in_time else self.anchor[i].clone()
        for name in there:
            self.common[name], self.last[name] = copies(self.anchor), (step, lines[name]["quorums"])

    def train(self, name, step, num):
        """Local steps of a replica since its last average. If it has missed some, its changes are added to them."""
        last, quorums = self.last.get(name, (step - 1, 0))
        model, before = make_model(), self.end_of(last) if last >= 0 else 0
        optimizer = make_optimizer(model, momentum=0)
        with torch.no_grad():
            for p, own in zip(model.parameters(), self.own.get(name, self.anchor), strict=True):
                p.copy_(own)
        begun = self.begun.setdefault(name, {})
        for i in range(num):
            if self.is_scheduled:
                optimizer.param_groups[0]["lr"] = 0.01 / (1 + 0.1 * (before + i))
            optimizer.zero_grad()
            for rank in range(self.num_processes):
                (loss_of(model, *batch(name, last + 1, i + 1000 * rank)) / self.num_processes).backward()
            optimizer.step()
            for k in range(self.num_fragments):
                if (self.end_of(k) - before - i - 1 - self.delay) % self.hook.period == 0:
                    begun[k] = quorums, copies(model.parameters())
        self.own[name] = copies(model.parameters())
        if last < step - 1:
            moved = zip(self.own[name], self.common[name], self.anchor, strict=True)
            self.own[name] = [own - common + anchor for own, common, anchor in moved]


def copies(tensors):
    return [tensor.detach().clone() for tensor in tensors]


def assert_equals_local_simulation(run, simulation, is_first_of_one=False, last=None, joins=()):
    """What replicas have written of each average, against a run in one process among those that were there.

    Args:
        run: of DiLoCo.
        simulation: of the same.
        is_first_of_one: whether all get the model of one of them in the first average, so that its steps alone count.
        last: average; `None`: all.
        joins: replicas that are given the others' model in the first average.
    """
    lines = {name: {line["step"]: line for line in run.steps(name)} for name in NAMES}
    process, first = {}, min(lines["one"])
    for step, line in sorted({**lines["three"], **lines["two"], **lines["one"]}.items()):
        if last is not None and step > last:
            return
        there = {name: lines[name][step] for name in line["names"]}
        joined = {name for name in there if process.get(name) != there[name]["process"]}
        if step == first:
            joined = set(joins)
        process |= {name: there[name]["process"] for name in there}
        if is_first_of_one and not step and len(there) > 1:
            first_of_one(simulation, there, line["sum"])
        else:
            simulation.step(step, there, joined)
        assert line["sum"] == pytest.approx(sum(p.sum().item() for p in simulation.anchor), abs=1e-9), line


def first_of_one(simulation, there, total):
    """The first average, in which the steps of one replica count: the one that fits the result."""
    for name in there:
        tried = copy.deepcopy(simulation)
        tried.step(0, there, {*there} - {name})
        if sum(p.sum().item() for p in tried.anchor) == pytest.approx(total, abs=1e-9):
            vars(simulation).update(vars(tried))
            return
    pytest.fail(f"{total} is the average of none of {there}")


# In front of a script of the docs: one replica dies in the middle of it.
DIES = """
import os, signal, sys, time
from torch.optim.optimizer import register_optimizer_step_post_hook
steps = []
def after_step(*_):
    steps.append(None)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        time.sleep(0.03)  # until torchrun has started it again
    is_last = os.environ.get("RANK") in (None, "1") and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    if len(steps) == 100 and "dies" in os.environ and is_last:
        os.kill(os.getpid(), signal.SIGKILL)
register_optimizer_step_post_hook(after_step)
"""


def run_docs(script, commands, dies, tmp_path):
    """Run a script of docs/replicas.md on several replicas, of which one dies, with the lighthouse of that page.

    Where the page has torchrun, it starts that one again.

    Args:
        script: its name.
        commands: arguments and variables of each replica, by its name; of the first one those that the page has.
        dies: the name of the one that dies.
        tmp_path: where to.

    Returns:
        what the others printed, by name.
    """
    page = blocks(DOCS / "replicas.md")
    (text,) = (block.text for block in page if block.text.startswith(f"# {script}\n"))
    path = tmp_path / script
    path.write_text(DIES + text)
    words = [shlex.split(block.text.replace("\\\n", "")) for block in page if block.language == "bash"]
    (lighthouse,) = (line[1:] for line in words if line[0] == "torchft_lighthouse")
    (replica,) = (line for line in words if script in line and "TORCHFT_LIGHTHOUSE=http://localhost:29510" in line)
    arguments, variables = next(iter(commands.values()))
    assert {*replica} >= {*arguments, *(f"{name}={value}" for name, value in variables.items())}
    port = str(free_port())
    served, environment = start_lighthouse(f"localhost:{port}", *(word.replace("29510", port) for word in lighthouse))
    printed, replicas = {}, {}
    for name, (arguments, variables) in commands.items():
        given = {**environment, "MASTER_PORT": str(free_port()), **variables, **({"dies": "1"} if name == dies else {})}
        launcher = []
        if "torchrun" in replica:
            launcher = ["torch.distributed.run", *replica[replica.index("torchrun") + 1 : replica.index(script)]]
            given |= {**FORKS.launching(), **dict(line.split("=", 1) for line in replica if line.startswith("TORCH_"))}
        replicas[name] = FORKS.start(*launcher, path, *arguments, environment=given, cwd=tmp_path)
    try:
        for name, process in replicas.items():
            with process:
                process.finish(60)
                printed[name] = "".join(process.printed())
        codes = {name: process.returncode for name, process in replicas.items()}
        is_over = "torchrun" not in replica
        assert codes == {name: -signal.SIGKILL if name == dies and is_over else 0 for name in commands}, printed
    finally:
        served.kill()
        served.wait()
    return printed
