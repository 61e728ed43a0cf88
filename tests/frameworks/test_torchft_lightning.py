"""Trainers as replicas of a torchft manager, with a real lighthouse: they are killed, and come back."""

import re
import sys
import warnings
from types import SimpleNamespace

import pytest

pytest.importorskip("torchft")

import torch
from forks import PATIENCE, free_port
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.data import DataLoader, TensorDataset
from torchft_runs import (
    NAMES,
    LocalSimulation,
    assert_equals_local_simulation,
    assert_equals_simulation,
    gap_after,
    run_docs,
    simulate,
    start_lighthouse,
    starting,
)

import lightning_commhooks as lc
from lightning_commhooks import FaultTolerance
from lightning_commhooks.collectives.errors import HookError
from lightning_commhooks.torchft import start_manager
from lightning_commhooks.torchft.trainer import TrainerReplica, _once

LOCAL = lc.DiLoCo(period=4, post_local_gradient_allreduce=False)
SCALED = [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))]


@pytest.fixture
def start(tmp_path):
    yield from starting("torchft_trainer.py", tmp_path)


@pytest.mark.parametrize(("hook", "micros", "divided_by"), [("int8", 1, 3), ("allreduce", 3, 0)])
def test_one_dies_and_comes_back(start, hook, micros, divided_by):
    run = start(hook=hook, micros=micros, divided_by=divided_by, of={"two": {"dies": [12, 1]}})
    run.wait_until_it_joins_again("two")
    printed = run.finish()
    assert "replica 'replica_1' left at step 12: 2 go on" in printed["one"], printed["one"]
    assert "replica 'replica_1' joined at step " in printed["three"]
    for name in NAMES:
        for line in run.steps(name):
            assert line["global_step"] == line["step"] + 1
            assert line["lr"] == pytest.approx(0.01 / (1 + 0.1 * (line["step"] + 1)))
    assert gap_after(run, "one", 11) < 2 * PATIENCE, "seconds until the next step"
    end = run.end("one")
    assert end["attempts"] == end["metrics"]["steps_not_committed"] + len(run.steps("one")) * micros
    assert [run.end(name)["sampler"] for name in NAMES] == [0, 1, 2]
    assert_equals_simulation(run, simulate(run, hook, micros))


@pytest.mark.parametrize("hook", ["diloco", "diloco with a delay"])
def test_one_dies_in_an_average_of_models_and_comes_back(start, hook):
    """And the run goes on from what one replica has saved, on two of three."""
    simulation = LocalSimulation(hook, is_scheduled=True)
    saved = simulation.end_of(9)
    run = start(hook=hook, saves=[saved, saved + 1], of={"two": {"dies": [12]}})
    run.wait_until_it_is_back("two")
    printed = run.finish()
    assert "replica 'replica_1' left at step 12: 2 go on" in printed["one"], printed["one"]
    assert re.findall(r"(\w+-\d+).ckpt is between averages", printed["one"]) == [f"one-{saved + 1}"]
    for name in NAMES:
        for line in run.steps(name):
            assert line["global_step"] == simulation.end_of(line["step"]), "also of who has joined"
            assert line["lr"] == pytest.approx(0.01 / (1 + 0.1 * line["global_step"]))
    assert_equals_local_simulation(run, LocalSimulation(hook, is_scheduled=True), is_first_of_one=True)
    again = run.go_on(f"one-{saved}.ckpt", hook=hook)
    assert_equals_local_simulation(run, simulation, is_first_of_one=True, last=9)
    simulation.restart()
    assert_equals_local_simulation(again, simulation, joins=["three"])
    for name in NAMES:
        for line in again.steps(name):
            assert line["global_step"] == simulation.end_of(line["step"])


def test_a_scaler_and_a_checkpoint_of_the_whole_run(start):
    """A replica dies while losses are scaled; the run ends, and goes on from what one replica has saved."""
    run = start(hook="powersgd", micros=3, scaler=True, saves=[10], of={"two": {"dies": [12, 0]}})
    run.wait_until_it_joins_again("two")
    run.finish()
    simulation = simulate(run, "powersgd", micros=3)
    assert_equals_simulation(run, simulation, lambda step: 1e-9 * 1.12**step)
    again = run.go_on("one-10.ckpt", hook="powersgd", micros=3, scaler=True)
    for name in NAMES:
        for line in again.steps(name):
            assert line["lr"] == pytest.approx(0.01 / (1 + 0.1 * (line["step"] + 1)))


def test_script_and_commands_of_the_docs(tmp_path):
    commands = {name: ([], {"REPLICA_GROUP_ID": name, "NUM_REPLICA_GROUPS": "3"}) for name in "012"}
    printed = run_docs("train_replica.py", commands, "2", tmp_path)
    for name in "01":
        assert "replica 'replica_2' left at step " in printed[name]
        assert " quorums" in printed[name]


# In this process ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hook": "auto"}, "hook='auto' measures one group of ranks"),
        ({"hook": default_hooks.fp16_compress_hook}, "among replicas use a CommHook"),
        ({"hook": lc.DiLoCo()}, "post_local_gradient_allreduce=True needs ranks that stay"),
        ({"accumulation": "mean"}, "needs accumulation='framework'"),
        ({"exact_state": True}, "exact_state=True keeps differences between ranks"),
        ({"static_graph": True}, "does not work with static_graph=True"),
        ({"hook": LOCAL, "resync": True}, "resync=True is for averages that ranks make to look at"),
    ],
)
def test_options_that_cannot_work_are_refused(options, message):
    with pytest.raises(MisconfigurationException, match=message):
        lc.CompressedDDPStrategy(**{"hook": "int8", "fault_tolerance": FaultTolerance(0, 2), **options})


def test_a_closure_runs_once():
    closure = _once(3.0)
    assert closure() == 3.0
    with pytest.raises(HookError, match="an optimizer that runs several backwards in a step"):
        closure()


def test_a_run_goes_on_from_a_checkpoint_after_an_average():
    steps, own = [], object.__new__(TrainerReplica)
    own._period, own._votes, own._has_begun, own._is_due = 4, 2, False, False
    own.manager = SimpleNamespace(load_state_dict=steps.append)
    own._progress = lambda: SimpleNamespace(completed=8)
    own.begin_batch()
    own.begin_batch()
    assert steps == [{"step": 4, "batches_committed": 0}], "two votes in a period"
    own._has_begun, own._progress = False, lambda: SimpleNamespace(completed=6)
    with pytest.raises(ValueError, match="the checkpoint is of step 6, between averages of models, which come after"):
        own.begin_batch()
    with pytest.raises(HookError, match="training_step returned None for a batch"):
        own.committed(None, lambda: None)()


def test_torchft_is_not_installed(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchft"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "lightning_commhooks.torchft.manager", raising=False)
    with pytest.raises(ImportError, match=r"pip install 'lightning-commhooks\[torchft\]'"):
        lc.CompressedDDPStrategy(hook="int8", fault_tolerance=FaultTolerance(0, 2))


def test_there_is_no_lighthouse(monkeypatch):
    monkeypatch.delenv("TORCHFT_LIGHTHOUSE", raising=False)
    with pytest.raises(ValueError, match="the variable TORCHFT_LIGHTHOUSE is not set: start torchft_lighthouse"):
        start_manager("one", dict, print)


def test_replicas_are_told_which_they_are(monkeypatch):
    monkeypatch.delenv("NUM_REPLICA_GROUPS", raising=False)
    with pytest.raises(ValueError, match="the variable NUM_REPLICA_GROUPS is ''"):
        FaultTolerance()
    monkeypatch.setenv("NUM_REPLICA_GROUPS", "4")
    monkeypatch.setenv("REPLICA_GROUP_ID", "x")
    with pytest.raises(ValueError, match="the variable REPLICA_GROUP_ID is 'x'"):
        FaultTolerance()
    monkeypatch.setenv("REPLICA_GROUP_ID", "4")
    with pytest.raises(ValueError, match="replica_rank=4 is none of num_replica_groups=4"):
        FaultTolerance()
    assert FaultTolerance(3) == FaultTolerance(3, 4)
    for options, message in (
        ({"timeout": 0}, "timeout must be"),
        ({"min_replica_size": 0}, "min_replica_size"),
        ({"min_replica_size": 5}, "more than the num_replica_groups=4"),
    ):
        with pytest.raises(ValueError, match=message):
            FaultTolerance(0, **options)


class Module(LightningModule):
    """A module whose optimizer and scheduler a test chooses."""

    def __init__(self, make=None, automatic=True):
        super().__init__()
        self.layer, self.make = torch.nn.Linear(2, 2), make
        self.automatic_optimization = automatic

    def training_step(self, batch, batch_idx):
        return self.layer(torch.ones(1, 2)).sum()

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return self.make(optimizer) if self.make else optimizer


def sharded(optimizer):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # when it is imported
        from torch.distributed.optim import ZeroRedundancyOptimizer
    return ZeroRedundancyOptimizer(optimizer.param_groups[0]["params"], optimizer_class=torch.optim.SGD, lr=0.1)


def scheduled(**options):
    def make(optimizer):
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, **options}}

    return make


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        (lambda: Module(), {"max_epochs": 1}, r"needs Trainer\(max_steps=...\) without max_epochs"),
        (lambda: Module(), {"max_epochs": 1, "max_steps": -1}, r"needs Trainer\(max_steps=...\) without max_epochs"),
        (lambda: Module(scheduled()), {}, "the scheduler StepLR counts epochs or batches, whose number differs"),
        (lambda: Module(scheduled(interval="step", frequency=2)), {}, "the scheduler StepLR counts"),
        (lambda: Module(), {"default_root_dir": None}, "in one folder they delete each other's files"),
        (lambda: Module(), {"default_root_dir": "."}, "in one folder they delete each other's files"),
        (lambda: Module(automatic=False), {}, "which it cannot in manual optimization"),
        (lambda: Module(lambda o: torch.optim.LBFGS(o.param_groups[0]["params"])), {}, "does not work with LBFGS"),
        (lambda: Module(), {"hook": LOCAL, "max_steps": 6}, "max_steps=6 is no multiple of the hook's period=4"),
        (lambda: Module(sharded), {"hook": LOCAL}, "do not work with ZeroRedundancyOptimizer"),
        (lambda: Module(), {"hook": LOCAL, "plugins": SCALED}, "whose scaler has each replica skip other steps"),
    ],
)
def test_trainers_that_cannot_work_are_refused(module, options, message, lighthouse, tmp_path, monkeypatch):
    port = str(free_port())
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_RANK": "0", "NODE_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    replica, options = FaultTolerance(0, 2, lighthouse_addr=lighthouse), dict(options)
    strategy = lc.CompressedDDPStrategy(hook=options.pop("hook", "int8"), fault_tolerance=replica)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        enable_progress_bar=False,
        **{"default_root_dir": tmp_path, "max_steps": 4, **options},
    )
    try:
        with pytest.raises(MisconfigurationException, match=message):
            trainer.fit(module(), DataLoader(TensorDataset(torch.zeros(4))))
        assert strategy._replica is None
    finally:
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def lighthouse():
    address = f"127.0.0.1:{free_port()}"
    served, environment = start_lighthouse(address, "--bind", address, "--min_replicas", "1")
    yield environment["TORCHFT_LIGHTHOUSE"]
    served.kill()
    served.wait()
