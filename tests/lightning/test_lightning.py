"""`CompressedDDPStrategy` with the real `Trainer` on CPU, two processes; the scenarios are in lightning_runner.py."""

import importlib.util
import json
import math
import os
import pickle
import signal
import subprocess
import sys
import time

import pytest

pytest.importorskip("lightning")

from forks import FOLDER, FORKS, alone, free_port, run_ranks
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from traces import named, read

import lightning_commhooks as lc
from lightning_commhooks.lightning.refusals import misconfigured

RUNNER = FOLDER / "lightning_runner.py"


class Results:
    """What the ranks wrote, by label."""

    def __init__(self, out, stderr):
        self.out = out
        self.stderr = stderr

    def __call__(self, label, rank=0):
        return json.loads((self.out / f"{label}.{rank}.json").read_text())

    def both(self, label):
        """Rank 0's results, after a check that the model is the same on rank 1."""
        mine, other = self(label), self(label, 1)
        assert mine["params"] == other["params"]
        assert all(map(math.isfinite, mine["params"]))
        assert mine["pid"] != other["pid"]
        assert mine["world_size"] == 2
        return mine

    def distance(self, label, reference):
        pairs = zip(self(label)["params"], self(reference)["params"], strict=True)
        return max(abs(a - b) for a, b in pairs)


def launch(out, *scenarios, package="lightning.pytorch", runner=RUNNER, world=2, **environment):
    """Run scenarios on several ranks that torchrun has started, as Lightning is told."""
    printed = run_ranks(runner, package, out, *scenarios, world=world, timeout=200, DEVICES=str(world), **environment)
    return Results(out, "".join(errors for _, errors in printed))


def start(out, *scenarios, runner=RUNNER, **extra):
    """A process in which Lightning starts the others, as forks, too."""
    environment = alone(**FORKS.launching(), **extra)
    return FORKS.start(runner, "lightning.pytorch", out, *scenarios, environment=environment)


def finish(process, timeout=150):
    """Standard error of a process that ends."""
    with process:
        return process.finish(timeout)[1]


@pytest.fixture(scope="module")
def hooks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hooks")
    return launch(folder, "names", "configured", "functions", "strings", "copied", "profiled")


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    return launch(tmp_path_factory.mktemp("options"), "options", "repeated", "evaluate", "late_start")


NAMES = ("allreduce", "allgather", "noop", "bf16", "powersgd", "int8", "post_localsgd")


@pytest.mark.parametrize("name", NAMES)
def test_name(hooks, name):
    result = hooks(f"name-{name}") if name == "noop" else hooks.both(f"name-{name}")
    assert result["strategy"] == "CompressedDDPStrategy"
    assert result["comm_hook"] == f"lightning_commhooks:{name}"
    assert result["metrics"]["steps"] == 8
    assert result["metrics"]["bytes_dense"] == 8 * len(result["params"]) * 4
    # Those that are 1 begin later, or leave so few gradients as they are.
    ratio = {"noop": math.inf, "bf16": 2, "powersgd": 8.02}
    assert result["metrics"]["compression_ratio"] == pytest.approx(ratio.get(name, 1), rel=0.01)


def test_noop_leaves_ranks_alone(hooks):
    assert hooks("name-noop")["params"] != hooks("name-noop", 1)["params"]
    assert "hook='noop' does not average gradients" in hooks.stderr


def test_allreduce_equals_plain_ddp(hooks):
    assert hooks("dense")["comm_hook"] == ""
    assert hooks.distance("name-allreduce", "dense") == 0
    assert hooks.distance("name-allgather", "dense") < 1e-6
    assert 0 < hooks.distance("name-bf16", "dense") < 1e-2


@pytest.mark.parametrize(
    ("label", "least_ratio"),
    [("powersgd", 2.5), ("batched_powersgd", 2.5), ("cast", 5), ("schedule", 2), ("per_parameter", 3)],
)
def test_configured_hook(hooks, label, least_ratio):
    result = hooks.both(f"configured-{label}")
    assert result["comm_hook"] == f"lightning_commhooks:{label}"
    assert result["metrics"]["compression_ratio"] > least_ratio
    # The state for a checkpoint after training is made at its end.
    metrics = [{**each["metrics"], "bytes_evaluation": None} for each in (hooks(f"after-{label}"), result)]
    assert metrics[0] == metrics[1], "metrics() stays readable after fit"


def test_auto(hooks):
    assert hooks.both("configured-auto")["comm_hook"] == "lightning_commhooks:auto"
    chosen = hooks("after-auto")["chosen"]
    assert chosen in ("allreduce", "bf16")
    assert chosen == hooks("after-auto", 1)["chosen"]
    assert f"hook='auto' chose {chosen}" in hooks.stderr


def test_copied_callbacks_that_hold_the_trainer(hooks):
    assert hooks.both("copied")["params"] == hooks.both("not-copied")["params"]
    (said,) = hooks("copied-said")["said"]
    assert "'post_localsgd', which is not copied" in said
    assert hooks("copied-said", 1)["said"] == []


def test_profiler_of_lightning_has_ranges(hooks):
    """What is in them is looked at in test_ranges.py."""
    found = [read(path)[0] for path in (hooks.out / "traces").glob("*.json")]
    for kind in ("reduce", "encode", "decode"):
        numbers = [len(named(ranges, "int8", kind)) for ranges in found]
        assert len([num for num in numbers if num >= 3]) == 2, "on each rank, in the steps of the default schedule"


def test_own_function(hooks):
    result = hooks.both("function-own")
    assert result["comm_hook"].startswith("lightning_commhooks:")
    assert result["comm_hook"].endswith(".own_hook")
    assert hooks("own-state")["calls"] == hooks("own-state", 1)["calls"] >= result["metrics"]["steps"] == 8
    assert hooks.distance("function-own", "dense") == 0


def test_stock_functions(hooks):
    assert hooks.both("function-stock")["comm_hook"].endswith("default_hooks.fp16_compress_hook")
    assert "fp16_compress_wrapper" in hooks.both("function-wrapper")["comm_hook"]
    assert hooks("wrapper-state")["calls"] == 8


def test_strategy_string_trains(hooks):
    assert hooks.both("string")["comm_hook"] == "lightning_commhooks:powersgd"
    assert hooks.distance("string-bf16", "name-bf16") == 0


@pytest.mark.parametrize(("label", "steps"), [("static-manual", 8), ("manual", 8), ("accumulate", 4), ("gan", 16)])
def test_options_of_ddp_and_trainer(options, label, steps):
    options.both(f"{label}-dense")
    allreduce, powersgd = options.both(f"{label}-allreduce"), options.both(f"{label}-powersgd")
    assert options.distance(f"{label}-allreduce", f"{label}-dense") == 0
    assert allreduce["metrics"]["steps"] == powersgd["metrics"]["steps"] == steps
    assert powersgd["metrics"]["compression_ratio"] > 2
    assert 0 < options.distance(f"{label}-powersgd", f"{label}-dense") < 0.05


@pytest.mark.parametrize("label", ["auto", "static-manual"])
def test_second_fit_is_like_the_first(options, label):
    first, second = options.both(f"repeated-{label}-1"), options.both(f"repeated-{label}-2")
    assert second["global_step"] == 2 * first["global_step"]
    assert first["metrics"]["steps"] == 8
    assert first["params"] == second["params"]
    counts = [{k: v for k, v in result["metrics"].items() if not k.endswith("_ms")} for result in (first, second)]
    assert counts[0] == counts[1]


def test_validate_and_test_after_fit_keep_the_metrics(options):
    result = options("repeated-auto")
    assert result["before"] == result["after"]
    assert result["after"]["steps"] == 8


def test_validate_and_test_only(options):
    result = options("evaluate")
    assert not result["attached"]
    assert result["validated"].keys() == result["tested"].keys() == {"loss"}
    assert result["validated"] == options("evaluate", 1)["validated"]


def test_warns_when_nothing_was_compressed(options):
    reason = "8 steps not compressed (hook='powersgd' compresses from start_powerSGD_iter=8 on)"
    assert reason in options.stderr
    assert options("late")["metrics"]["compression_ratio"] == 1


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_spawn_and_fork(tmp_path):
    process = start(tmp_path, "processes")
    stderr = finish(process)
    assert process.returncode == 0, stderr[-3000:]
    results = Results(tmp_path, stderr)
    for label in ("spawn", "fork"):
        assert results.both(label)["comm_hook"] == "lightning_commhooks:powersgd"
        assert results(label)["metrics"]["compression_ratio"] > 2
    assert results.distance("spawn", "fork") == 0


def test_standalone_package(tmp_path):
    pytest.importorskip("pytorch_lightning")
    results = launch(tmp_path, "names", "strings", package="pytorch_lightning")
    assert results.distance("name-allreduce", "dense") == 0
    for label in ("name-powersgd", "string"):
        assert results.both(label)["comm_hook"] == "lightning_commhooks:powersgd"
        assert results(label)["strategy"] == "CompressedDDPStrategyPL"


def test_two_nodes_under_torchrun(tmp_path):
    port = str(free_port())
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    shared |= {"LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "test"}
    nodes = [start(tmp_path, "nodes", **shared, RANK=node, GROUP_RANK=node) for node in "01"]
    for node in nodes:
        stderr = finish(node)
        assert node.returncode == 0, stderr[-3000:]
    result = Results(tmp_path, "").both("nodes")
    assert result["metrics"]["steps"] == 8
    assert result["metrics"]["compression_ratio"] > 2


def test_exception_on_one_rank_ends_the_run(tmp_path):
    process = start(tmp_path, "crash_rank_1")
    stderr = finish(process, timeout=90)
    assert process.returncode != 0
    assert "crash in training_step" in stderr
    assert not list(tmp_path.iterdir()), "no rank got to the end"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 1)])
def test_signal_in_the_middle_of_a_step_ends_the_run(tmp_path, number, code):
    process = start(tmp_path, "late")
    while process.poll() is None and len(list(tmp_path.glob("late.*.json"))) < 2:
        time.sleep(0.1)
    time.sleep(0.5)
    ranks = [json.loads((tmp_path / f"late.{rank}.json").read_text())["pid"] for rank in (0, 1)]
    # Lightning passes SIGTERM on, and its handler broadcasts: ranks that get another number of signals hang in it,
    # with any strategy. Ctrl-C reaches all processes of a terminal.
    for pid in ranks[:1] if number == signal.SIGTERM else ranks:
        os.kill(pid, number)
    stderr = finish(process, timeout=60)
    assert process.returncode == code, stderr[-3000:]  # Lightning's choice: its SIGTERMException is a SystemExit
    assert "terminate called" not in stderr
    assert not list(tmp_path.glob("trained.*")), "no rank got to the end"


ORDER = """
import sys
import time
{imports}
import lightning_commhooks
assert not ({{"lightning.pytorch", "pytorch_lightning"}} - {{"{package}"}}) & sys.modules.keys()
assert bool("{imports}") == ("{package}" in sys.modules)
from {package} import Trainer
from {package}.strategies import StrategyRegistry
made = [StrategyRegistry.get("ddp_" + hook) for hook in lightning_commhooks.available_hooks()]
made.append(Trainer(accelerator="cpu", devices=2, strategy="ddp_powersgd", logger=False).strategy)
for strategy, hook in zip(made, [*lightning_commhooks.available_hooks(), "powersgd"], strict=True):
    assert type(strategy) is lightning_commhooks.{strategy}, strategy
    assert strategy._hook == lightning_commhooks.get_hook(hook)
print("fine")
"""


@pytest.mark.parametrize(
    ("imports", "package", "strategy"),
    [
        ("", "lightning.pytorch", "CompressedDDPStrategy"),
        ("import pytorch_lightning", "pytorch_lightning", "CompressedDDPStrategyPL"),
    ],
)
def test_strategy_names_in_either_order_of_import(imports, package, strategy):
    """With one of the packages alone; other tests have both."""
    if importlib.util.find_spec(package.partition(".")[0]) is None:
        pytest.skip(f"{package} is not installed")
    code = ORDER.format(imports=imports, package=package, strategy=strategy)
    command = [sys.executable, "-c", code]  # a new process: about what is imported first
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert "fine" in done.stdout, done.stderr[-3000:]


def test_passes_arguments_on_and_pickles():
    strategy = lc.CompressedDDPStrategy(hook=lc.PowerSGD(matrix_approximation_rank=4), find_unused_parameters=True)
    assert strategy._ddp_kwargs == {"find_unused_parameters": True}
    assert strategy.attachment is None
    assert pickle.loads(pickle.dumps(strategy)).hook == lc.PowerSGD(matrix_approximation_rank=4)


EXCEPTIONS = {
    "lightning": "lightning.fabric.utilities.exceptions",
    "pytorch_lightning": "pytorch_lightning.utilities.exceptions",
}


@pytest.mark.parametrize("package", ["lightning", "pytorch_lightning"])
def test_classes_are_of_their_package_and_pickle(package):
    classes = [("CommHookMonitor", "Callback")]
    classes += [(f"Compressed{base}", base) for base in ("DDPStrategy", "FSDPStrategy", "ModelParallelStrategy")]
    if package == "pytorch_lightning":
        pytest.importorskip("pytorch_lightning")
        classes = [(f"{name}PL", base) for name, base in classes]
    for name, base in classes:
        made = getattr(lc, name)
        assert {c.__module__.partition(".")[0] for c in made.__mro__ if c.__name__ == base} == {package}
        exception = importlib.import_module(EXCEPTIONS[package]).MisconfigurationException
        assert type(misconfigured(made.__new__(made), "")) is exception
        if base == "DDPStrategy":
            assert made._callback_class.__module__.partition(".")[0] == package
        assert pickle.loads(pickle.dumps(made)) is made
        assert made.__name__ == made.__qualname__ == name
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = sys.modules[made.__module__].Nothing


def test_a_checkpoint_for_a_model_without_ddp_is_refused_with_a_sentence():
    with pytest.raises(MisconfigurationException, match=r"no hook to load.*super\(\)\.configure_ddp"):
        lc.CompressedDDPStrategy(hook="bf16")._load({})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hook": "powersdg"}, "did you mean 'powersgd'"),
        ({"hook": lc.PowerSGD}, r"did you mean PowerSGD\(\)"),
        ({"hook": 3}, "must be a name, a CommHook or a callable"),
        ({"hook": lambda state, buckets: None}, "needs a parameter named 'bucket'"),
        ({"hook": "powersgd", "hook_state": object()}, "set its options instead"),
        ({"hook": "bf16", "ddp_comm_state": object()}, "hook_state="),
        ({"hook": "bf16", "ddp_comm_hook": default_hooks.fp16_compress_hook}, r"hook=\.\.\."),
        ({"hook": "bf16", "ddp_comm_wrapper": default_hooks.fp16_compress_wrapper}, "hook=Cast"),
        ({"hook": "bf16", "fault_tolerance": True}, r"fault_tolerance must be a FaultTolerance\(\.\.\.\), got True"),
        ({"hook": "bf16", "model_averaging_period": 2}, "use hook=PostLocalSGD"),
    ],
)
def test_constructor_refuses(arguments, message):
    with pytest.raises(MisconfigurationException, match=message):
        lc.CompressedDDPStrategy(**arguments)


def test_constructor_passes_over_replaced_arguments_that_are_none():
    lc.CompressedDDPStrategy(hook="bf16", ddp_comm_hook=None, model_averaging_period=None)
