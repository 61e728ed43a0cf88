"""Hooks among the replicas of a torchft manager, with a real lighthouse: replicas are killed, stop, and come back."""

import contextlib
import functools
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import types
from itertools import pairwise

import pytest

pytest.importorskip("torchft")

import torch
from docs_pages import DOCS, blocks
from forks import FOLDER, FORKS, PATIENCE, alone, free_port
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn import parallel
from torchft.process_group import ProcessGroupDummy
from torchft_replica import HOOKS, batch, loss_of, make_model, make_optimizer

import lightning_commhooks as lc
from lightning_commhooks.collectives.errors import HookError
from lightning_commhooks.collectives.in_memory import groups_in_memory, run_together
from lightning_commhooks.interface.bucket import Bucket, Slot
from lightning_commhooks.torchft import DistributedDataParallel

NAMES = ("one", "two", "three")


def start_lighthouse(address, *words):
    """A lighthouse, and the variables of what looks for it."""
    program = shutil.which("torchft_lighthouse", path=f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}")
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    started = subprocess.Popen([program, *words], **quiet)
    return started, alone(TORCHFT_LIGHTHOUSE=f"http://{address}", RUST_LOG="error", PYTHONWARNINGS="ignore")


class Run:
    """Replicas of one run, by name, and their lighthouse."""

    def __init__(self, folder, **options):
        self.folder, self.options = folder, options
        address = f"127.0.0.1:{free_port()}"
        times = {"quorum_tick_ms": 20, "join_timeout_ms": 500, "heartbeat_timeout_ms": 1000, "min_replicas": 2}
        words = [word for name, value in times.items() for word in (f"--{name}", str(value))]
        self._lighthouse, self._environment = start_lighthouse(address, "--bind", address, *words)
        self.replicas = {}

    def start(self, name, **options):
        """Start a replica, another time perhaps."""
        given = json.dumps({**self.options, **options})
        if name in self.replicas:
            with self.replicas.pop(name) as before:
                before.wait(10)
        script = FOLDER / "torchft_replica.py"
        self.replicas[name] = FORKS.start(script, self.folder, name, given, environment=self._environment)

    def steps(self, name):
        """What a replica has said of each step that it has committed."""
        path = self.folder / f"{name}.steps"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def wait_until(self, what, seconds=10, may_fail=""):
        """Wait until a function returns something true, while no replica fails but that one."""
        deadline = time.monotonic() + seconds * PATIENCE
        while not what():
            codes = {name: one.poll() for name, one in self.replicas.items()}
            failed = {name for name, code in codes.items() if code not in (None, -signal.SIGKILL)}
            if failed - {may_fail} or time.monotonic() > deadline:
                pytest.fail(f"it did not happen, {codes}: {self.close()}")
            time.sleep(0.02)

    def finish(self):
        """What the replicas printed, by name, after a check that all ended well with the same weights in each step."""
        last, printed = len(self.steps("one")) + 20, {}
        (self.folder / "to_be_last").write_text(str(last))
        (self.folder / "to_be_last").rename(self.folder / "last")
        for name, replica in self.replicas.items():
            replica.finish(60)
            with replica:
                printed[name] = "".join(replica.printed())
            assert replica.returncode == 0, printed[name]
        self.replicas = {}
        hashes = {}
        for name in NAMES:
            for line in self.steps(name):
                hashes.setdefault(line["step"], set()).add(line["hash"])
        assert sorted(hashes) == list(range(last))
        assert not [step for step, different in hashes.items() if len(different) > 1]
        return printed

    def end(self, name):
        """What a replica has written in the end."""
        return json.loads((self.folder / f"{name}.end").read_text())

    def close(self):
        """Kill what is left; returns what it printed."""
        printed = ""
        for replica in self.replicas.values():
            with replica, contextlib.suppress(ProcessLookupError):
                os.kill(replica.pid, signal.SIGKILL)
                replica.wait(10)
                printed += "".join(replica.printed())
        self.replicas = {}
        self._lighthouse.kill()
        self._lighthouse.wait()
        return printed


@pytest.fixture
def start(tmp_path):
    """`start(**options)`: a `Run` of three replicas, of which nothing is left in the end."""
    runs = []

    def start(of=(), names=NAMES, **options):
        runs.append(Run(tmp_path, **options))
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
    """The same run in one process, among those that were there in each step."""

    def __init__(self, hook, names):
        self.hook, self.names, self.model = hook, names, make_model()
        self.optimizer = make_optimizer(self.model)
        self.bound, self.members = {}, []

    def step(self, step, members, fresh):
        """A step of these members, of which the residuals of some are zero."""
        if members != self.members:
            self._regroup(members)
        for name in fresh:
            for residual in self.bound[name].residuals():
                residual.zero_()
        ranks = []
        for name in members:
            self.optimizer.zero_grad()
            loss_of(self.model, *batch(name, step)).backward()
            ranks.append(self._buckets(step))
        for buckets in zip(*ranks, strict=True):
            works = [
                functools.partial(bound.reduce, bucket, bound.group.channel(1))
                for bound, bucket in zip(self.bound.values(), buckets, strict=True)
            ]
            run_together(works)
        for bound in self.bound.values():
            bound.end_step(torch.tensor(True))
        for bucket in ranks[0]:
            for slot in bucket.slots:
                slot.parameter.grad = slot.view(bucket.flat).clone()
        self.optimizer.step()

    def _regroup(self, members):
        """All have the same warm starts."""
        before = {name: bound.memory for name, bound in self.bound.items()}
        shared = next(iter(before.values()), {})
        self.bound = {}
        for name, group in zip(members, groups_in_memory(len(members)), strict=True):
            bound = self.hook.bind(group)
            for parameter, entry in before.get(name, shared).items():
                bound.memory[parameter] = {kind: tensor.clone() for kind, tensor in entry.items()}
            self.bound[name] = bound
        self.members = members

    def _buckets(self, step):
        parameters = dict(self.model.named_parameters())
        last = len(self.names) - 1
        return [
            self._bucket(i, [(name, parameters[name]) for name in names], step, i == last)
            for i, names in enumerate(self.names)
        ]

    def _bucket(self, index, named, step, is_last):
        flat, slots, offset = torch.cat([p.grad.reshape(-1) for _, p in named]), [], 0
        for name, p in named:
            slots.append(Slot(name, tuple(p.shape), offset, p))
            offset += p.numel()
        return Bucket(flat, index, is_last, step, tuple(slots))


def lost_before(lines, step):
    """Whether a replica joined at a step, or had lost one just before."""
    return step - 1 not in lines or lines[step]["lost"] != lines[step - 1]["lost"]


@pytest.mark.parametrize("hook", ["allreduce", "int8", "powersgd"])
def test_one_dies_and_comes_back(start, hook):
    run = start(hook=hook, of={"two": {"dies": [12, 1]}})
    run.wait_until(lambda: run.replicas["two"].poll() is not None)
    run.wait_until(lambda: len(run.steps("one")) > 20)
    run.start("two")
    run.wait_until(lambda: len(run.steps("two")) > 20)
    printed = run.finish()
    assert "replica 'two' left at step 12: 2 go on" in printed["one"]
    assert "replica 'two' joined at step " in printed["three"]
    steps = [line["step"] for line in run.steps("two")]
    assert next(after for before, after in pairwise(steps) if after != before + 1) > 20, "it goes on where they are"
    for name in ("one", "three"):
        assert gap_after(run, name, 11) < 2 * PATIENCE, "seconds until the next step"
        metrics = run.end(name)["metrics"]
        assert metrics["replicas"] == 3
        assert metrics["steps_not_committed"] >= 1
        assert 0 < metrics["lost_ms"] < 2000 * PATIENCE
    simulation = Simulation(HOOKS[hook], run.end("one")["buckets"])
    lines = {name: {line["step"]: line for line in run.steps(name)} for name in NAMES}
    # A replica that has not committed a step as others have gets it from them.
    for step, line in sorted({**lines["three"], **lines["two"], **lines["one"]}.items()):
        names = line["names"]
        begun_anew = [name for name in names if lost_before(lines[name], step)]
        simulation.step(step, names, begun_anew)
        total = sum(p.sum().item() for p in simulation.model.parameters())
        # PowerSGD lets what is rounded in another order grow; with a wrong residual it is off by far more.
        tolerance = 1e-9 * 1.12 ** (step if hook == "powersgd" else 0)
        assert line["sum"] == pytest.approx(total, abs=tolerance), line
    for mine, theirs in zip(run.end("one")["parameters"], simulation.model.parameters(), strict=True):
        torch.testing.assert_close(torch.tensor(mine, dtype=theirs.dtype), theirs.detach(), rtol=0, atol=tolerance)


class LocalSimulation:
    """DiLoCo in one process, among those that were there at each average."""

    def __init__(self):
        self.anchor = [p.detach().clone() for p in make_model().parameters()]
        self.momentum = [torch.zeros_like(p) for p in self.anchor]

    def step(self, step, num_local):
        """An average of members that have taken so many steps, none if they have just come."""
        moves = []
        for name, num in num_local.items():
            model = make_model()
            with torch.no_grad():
                for p, anchor in zip(model.parameters(), self.anchor, strict=True):
                    p.copy_(anchor)
            optimizer = make_optimizer(model, momentum=0)
            for i in range(num):
                optimizer.zero_grad()
                loss_of(model, *batch(name, step, i)).backward()
                optimizer.step()
            moves.append([a - p.detach() for a, p in zip(self.anchor, model.parameters(), strict=True)])
        for i, mean in enumerate(sum(of_ranks) / len(moves) for of_ranks in zip(*moves, strict=True)):
            # Nesterov's momentum, as of `torch.optim.SGD`.
            self.momentum[i] = 0.9 * self.momentum[i] + mean
            self.anchor[i] = self.anchor[i] - 0.7 * (mean + 0.9 * self.momentum[i])


@pytest.mark.parametrize("hook", ["diloco", "diloco in int8"])
def test_one_dies_in_an_average_of_models_and_comes_back(start, hook):
    run = start(hook=hook, of={"two": {"dies": [12]}})
    run.wait_until(lambda: run.replicas["two"].poll() is not None)
    run.wait_until(lambda: len(run.steps("one")) > 20)
    run.start("two")
    run.wait_until(lambda: len(run.steps("two")) > 20)
    printed = run.finish()
    assert "replica 'two' left at step 12: 2 go on" in printed["one"], printed["one"]
    lines = {name: {line["step"]: line for line in run.steps(name)} for name in NAMES}
    assert lines["one"][12]["local"] >= 5, "tried again after one more step"
    if hook == "diloco":
        simulation = LocalSimulation()
        for step, line in sorted({**lines["three"], **lines["two"], **lines["one"]}.items()):
            there = {name: lines[name][step]["local"] for name in line["names"]}
            joined = {name for name in there if step and step - 1 not in lines[name]}
            simulation.step(step, {name: 0 if name in joined else num for name, num in there.items()})
            assert line["sum"] == pytest.approx(sum(p.sum().item() for p in simulation.anchor), abs=1e-9), line


def test_parts_of_a_model_batch_norm_micro_batches_and_a_scaler(start):
    """Weights are alike after each step, also of what one replica has not used, and somebody dies meanwhile."""
    run = start(hook="powersgd", parts=True, of={"two": {"dies": [12, 0]}})
    run.wait_until(lambda: run.replicas["two"].poll() is not None)
    run.start("two")
    run.wait_until(lambda: len(run.steps("two")) > 30)
    run.finish()


def test_one_stops_and_goes_on(start):
    """As when the network drops everything: nobody hears of it, the others wait for their timeout."""
    run = start(hook="int8", of={"three": {"stops": [12, 1]}})
    run.wait_until((run.folder / "three.ended").exists)
    run.wait_until(lambda: len(run.steps("one")) > 20)
    os.kill(run.replicas["three"].pid, signal.SIGCONT)
    run.wait_until(lambda: run.steps("three")[-1]["step"] > 20)
    printed = run.finish()
    assert "replica 'three' left at step 12: 2 go on" in printed["one"]
    assert gap_after(run, "one", 11) < 8 * PATIENCE, "a timeout of 5 s, and the time until the lighthouse misses it"


def test_another_hook_is_refused_where_it_joins(start):
    run = start(hook="int8", names=("one", "two"))
    run.wait_until(lambda: run.steps("one"))
    run.start("three", hook="bf16")
    run.wait_until(lambda: run.replicas["three"].poll() is not None, may_fail="three")
    with run.replicas.pop("three") as refused:
        refused.finish(10)
        assert refused.returncode == 1
        assert "replica 'one' has another hook, other options of it, or another model" in "".join(refused.printed())
    before = len(run.steps("one"))
    run.wait_until(lambda: len(run.steps("one")) > before + 5)
    run.finish()
    assert run.end("one")["metrics"]["steps_not_committed"] > 0


# In front of the script of the docs: replica "c" dies in the middle of it.
DIES = """
import os, signal, sys
from torch.optim.optimizer import register_optimizer_step_post_hook
steps = []
def after_step(*_):
    steps.append(None)
    if len(steps) == 100 and sys.argv[1] == "c":
        os.kill(os.getpid(), signal.SIGKILL)
register_optimizer_step_post_hook(after_step)
"""


def test_script_and_commands_of_the_docs(tmp_path):
    page = [block for block in blocks(DOCS / "elastic.md") if "torchft" in block.text]
    (script,) = (block.text for block in page if block.text.startswith("# train_torchft.py"))
    lighthouse, replica = (shlex.split(block.text.replace("\\\n", "")) for block in page if block.language == "bash")
    address = f"localhost:{free_port()}"
    assert replica[1:] == ["TORCHFT_LIGHTHOUSE=http://localhost:29510", "python", "train_torchft.py", "a"]
    (tmp_path / "train_torchft.py").write_text(DIES + script)
    assert lighthouse[0] == "torchft_lighthouse"
    words = [word.replace("29510", address.rpartition(":")[2]) for word in lighthouse[1:]]
    served, environment = start_lighthouse(address, *words)
    path = tmp_path / "train_torchft.py"
    replicas = {name: FORKS.start(path, name, environment=environment, cwd=tmp_path) for name in "abc"}
    try:
        for name, replica in replicas.items():
            with replica:
                replica.finish(30)
                printed = "".join(replica.printed())
                assert replica.returncode == (-signal.SIGKILL if name == "c" else 0), printed
                assert name == "c" or ("replica 'c' left at step " in printed and f"{name}: " in printed)
    finally:
        served.kill()
        served.wait()


# In this process ---------------------------------------------------------------------------------------------------


class Manager:
    """What `attach` looks at in a manager."""

    _use_async_quorum = False

    def __init__(self, members=True):
        self._pg = types.SimpleNamespace(**({"members": None} if members else {}))
        self.states = {}

    def errored(self):
        return None

    def should_commit(self):
        return True

    def wait_quorum(self):
        raise AssertionError("must call start_quorum before wait_quorum")

    def register_state_dict_fn(self, key, load, save):
        self.states[key] = save


def wrapped(manager, hook="int8", **options):
    return DistributedDataParallel(manager, torch.nn.Linear(2, 2), hook=hook, **options)


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        ("auto", "hook='auto' measures one group of ranks, and with manager= they change: choose a hook"),
        ("diloco", "hook='diloco': post_local_gradient_allreduce=True needs ranks that stay; .* set it to False"),
        (lc.DiLoCo(post_local_gradient_allreduce=False, delay=2), "delay=2 needs ranks that stay"),
        (lc.HierarchicalLocalSGD(period_group_size_dict={2: None}), "averages in subgroups"),
        (lc.Schedule({0: lc.DiLoCo(post_local_gradient_allreduce=False)}), "with manager= give that alone"),
        ("powersdg", "did you mean 'powersgd'"),
        (
            default_hooks.fp16_compress_hook,
            "is a function for a process group that stays; with manager= use a CommHook",
        ),
    ],
)
def test_hooks_that_cannot_work_are_refused(hook, message):
    with pytest.raises(ValueError, match=message):
        wrapped(Manager(), hook)


def test_models_and_managers_that_cannot_work_are_refused():
    model = parallel.DistributedDataParallel(torch.nn.Linear(2, 2), process_group=ProcessGroupDummy(0, 1))
    with pytest.raises(ValueError, match="needs find_unused_parameters=True and no static_graph"):
        lc.attach(model, "int8", manager=Manager())
    with pytest.raises(ValueError, match=r"lightning_commhooks.torchft.ProcessGroupGloo"):
        wrapped(Manager(members=False))
    manager = Manager()
    manager._use_async_quorum = True
    with pytest.raises(ValueError, match="give it use_async_quorum=False"):
        wrapped(manager)


def test_a_second_model_is_refused():
    manager = Manager()
    first = wrapped(manager)
    with pytest.raises(ValueError, match="this manager has a model with a hook"):
        wrapped(manager)
    first.attachment.close()
    wrapped(manager).attachment.close()
    assert list(manager.states) == ["lightning_commhooks 1", "lightning_commhooks 2"]


def test_a_backward_without_a_quorum_is_refused():
    model = wrapped(Manager())
    with pytest.raises(HookError, match=r"call manager.start_quorum\(\) before each forward"):
        model(torch.ones(2, 2)).sum().backward()
    model.attachment.close()


def test_a_backward_without_a_vote_is_refused():
    manager = Manager()
    manager.wait_quorum = lambda: None
    manager.current_step = lambda: 0
    model = wrapped(manager, "allreduce")
    model(torch.ones(2, 2)).sum().backward()
    with pytest.raises(HookError, match=r"call manager.should_commit\(\) after each backward"):
        model(torch.ones(2, 2)).sum().backward()
    assert manager.should_commit()
    model.attachment.close()


def test_the_state_of_a_replica_has_no_residual():
    manager = Manager()
    model = wrapped(manager)
    assert list(manager.states) == ["lightning_commhooks 1"]
    assert model.attachment.state_dict()["per_rank"] == "joining"
    model.attachment.load_state_dict(model.attachment.state_dict())
    assert manager.should_commit(), "after the hook was closed too"
    model.attachment.close()
    assert manager.should_commit()
