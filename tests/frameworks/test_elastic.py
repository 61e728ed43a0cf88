"""The scripts and commands of docs/restarts.md: under torchrun, with workers and nodes that are killed."""

import functools
import json
import os
import re
import shlex
import signal
import time

import pytest

pytest.importorskip("lightning")
pytest.importorskip("accelerate")
pytest.importorskip("markdown_it")

from docs_pages import DOCS, blocks
from forks import FORKS, PATIENCE, alone, free_port

PAGE = [block for block in blocks(DOCS / "restarts.md") if block.language in ("python", "bash")]
ATTACHMENT = {"train.py": "trainer.strategy.attachment", "train_accelerate.py": "handler.attachments[0]"}
SCRIPTS = {name: block.text for block in PAGE for name in ATTACHMENT if block.text.startswith(f"# {name}\n")}
BEFORE = "import elastic_worker\n\nelastic_worker.disturb()\n"
STEPS = 48  # 6 epochs of 8


def command(script, nodes):
    """What the page exports, and the arguments of its torchrun, for a script on one node, or on up to two."""
    for block in PAGE:
        if "torchrun " in block.text:
            *exports, words = map(shlex.split, re.sub(r"\\\n\s*", "", block.text).splitlines())
            if words[-1] == script and ("--standalone" in words) == (nodes == 1):
                assert all(export[0] == "export" for export in exports)
                return dict(export[1].split("=") for export in exports), words[1:]
    raise AssertionError(f"the page does not start {script} on {nodes} nodes")


class Run:
    """The agents of one run, a node each, in a folder of their own."""

    def __init__(self, folder, script, nodes=1, disturb=()):
        model = "trainer.lightning_module" if script == "train.py" else "accelerator.unwrap_model(model)"
        after = f"\nelastic_worker.record({model}, {ATTACHMENT[script]}, inputs, targets)\n"
        (folder / script).write_text(BEFORE + SCRIPTS[script] + after)
        self.folder, self.script = folder, script
        self._port = free_port()
        self._environment = alone(
            **FORKS.launching(),
            DISTURB=json.dumps(disturb),
            GLOO_SOCKET_IFNAME="lo",
            PET_LOCAL_ADDR="127.0.0.1",
            TMPDIR=str(folder),
            PYTHONWARNINGS="ignore",
        )
        self.agents = [self._start(nodes, number) for number in range(nodes)]

    def _start(self, nodes, number):
        """torchrun on one of the nodes, all of which are `node1` here: they are told which one it is."""
        exports, words = command(self.script, nodes)
        is_first = f"--rdzv-conf=is_host={number == 0},".lower()
        here = {"node1:29400": f"127.0.0.1:{self._port}", "--rdzv-conf=": is_first}
        arguments = [functools.reduce(lambda word, old: word.replace(old, here[old]), here, word) for word in words]
        environment = {**self._environment, **exports}
        return FORKS.start("torch.distributed.run", *arguments, environment=environment, cwd=self.folder)

    def kill_node(self, number):
        """What a node that loses its power leaves of agent and workers."""
        agent = self.agents.pop(number)
        workers = [pid for pid in _processes() if _parent(pid) == agent.pid]
        os.kill(agent.pid, signal.SIGKILL)
        for worker in workers:
            os.kill(worker, signal.SIGKILL)
        agent.wait(10)
        with agent:
            return "".join(agent.printed())

    def wait_for(self, path):
        """Wait until there is such a file."""
        deadline = time.monotonic() + 30 * PATIENCE
        while not path.exists():
            assert time.monotonic() < deadline, f"there is no {path.name}: {self.close()}"
            time.sleep(0.02)

    def finish(self):
        """What the agents and their workers printed, after a check that all ended well."""
        codes = []
        for agent in self.agents:
            agent.finish(60)
            codes.append(agent.returncode)
        printed = self.close()
        assert not any(codes), printed
        return printed

    def close(self):
        """Kill what is left. Returns what it printed."""
        printed = ""
        while self.agents:
            with self.agents.pop() as agent:
                agent.kill()
                printed += "".join(agent.printed())
        return printed

    def ended(self):
        """What rank 0 wrote at the end, after a check that all ranks did, with the same model."""
        mine = json.loads((self.folder / "ended.0.json").read_text())
        for rank in range(1, mine["world_size"]):
            other = json.loads((self.folder / f"ended.{rank}.json").read_text())
            assert other["parameters"] == mine["parameters"]
        return mine


def _processes():
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _parent(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return int(stat.read().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return None


@pytest.fixture(scope="module")
def start():
    """`start(folder, script, ...)`: a `Run`, of which nothing is left in the end."""
    runs = []

    def start(*arguments, **options):
        runs.append(Run(*arguments, **options))
        return runs[-1]

    yield start
    for run in runs:
        run.close()


@pytest.fixture(scope="module", params=SCRIPTS)
def whole(request, start, tmp_path_factory):
    """How a script ends that nothing happens to."""
    run = start(tmp_path_factory.mktemp("whole"), request.param)
    run.finish()
    ended = run.ended()
    assert (ended["world_size"], ended["steps"]) == (2, STEPS)
    assert ended["compressed"] > 0
    return request.param, ended


def test_killed_workers_and_a_checkpoint_cut_off_make_no_difference(whole, start, tmp_path):
    script, undisturbed = whole
    # In the third epoch; and in the second checkpoint of those that Lightning writes two of in an epoch.
    writes = {"train.py": 4, "train_accelerate.py": 2}
    trouble = [{"attempt": 0, "rank": 1, "step": 20}, {"attempt": 1, "rank": 0, "write": writes[script]}]
    run = start(tmp_path, script, disturb=trouble)
    printed = run.finish()
    assert "rank 1 of attempt 0 dies after step 20" in printed
    assert re.search("rank 0 of attempt 1 dies (in a file|between files)", printed)
    ended = run.ended()
    assert ended["steps"] == STEPS - 3 * 8, "from the checkpoint after the third epoch"
    assert ended["parameters"] == undisturbed["parameters"]
    assert ended["loss"] == undisturbed["loss"]


@pytest.mark.parametrize("whole", ["train.py"], indirect=True)
def test_goes_on_with_fewer_when_a_node_is_gone(whole, start, tmp_path):
    script, undisturbed = whole
    there = tmp_path / "there"
    run = start(tmp_path, script, nodes=2, disturb=[{"attempt": 0, "rank": 1, "step": 20, "stays": str(there)}])
    run.wait_for(there)
    run.kill_node(1)
    printed = run.finish()
    assert "HookError" in printed, "the ranks that are left are told"
    ended = run.ended()
    assert (ended["world_size"], ended["steps"]) == (1, STEPS - 2 * 8)
    assert 0 < abs(ended["loss"] - undisturbed["loss"]) < 0.02
