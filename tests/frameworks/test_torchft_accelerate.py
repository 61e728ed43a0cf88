"""An `Accelerator` as a replica of a torchft run, with a real lighthouse: replicas are killed and come back."""

import itertools
import pickle
from types import SimpleNamespace

import pytest

pytest.importorskip("torchft")
pytest.importorskip("accelerate")

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import DistributedType
from forks import PATIENCE
from torchft_runs import (
    NAMES,
    LocalSimulation,
    assert_equals_local_simulation,
    assert_equals_simulation,
    gap_after,
    run_docs,
    simulate,
    starting,
)

import lightning_commhooks as lc
from accelerate_integration import CommHookKwargs
from lightning_commhooks import FaultTolerance
from lightning_commhooks.collectives.errors import HookError


@pytest.fixture
def start(tmp_path):
    yield from starting("torchft_accelerator.py", tmp_path)


@pytest.mark.parametrize(("hook", "micros", "divided_by"), [("int8", 1, 3), ("powersgd", 3, 0)])
def test_one_dies_and_comes_back(start, hook, micros, divided_by):
    """And the run ends, and goes on from what one replica has saved."""
    run = start(hook=hook, micros=micros, divided_by=divided_by, saves=[10], of={"two": {"dies": [12, 1]}})
    run.wait_until_it_joins_again("two")
    printed = run.finish()
    assert "replica 'replica_1' left at step 12: 2 go on" in printed["one"], printed["one"]
    assert "replica 'replica_1' joined at step " in printed["three"]
    assert gap_after(run, "one", 11) < 2 * PATIENCE, "seconds until the next step"
    end = run.end("one")
    assert end["skipped"] == end["metrics"]["steps_not_committed"] >= 1
    assert end["attempts"] == (end["skipped"] + len(run.steps("one"))) * micros
    read = itertools.chain(*(batch for name in NAMES for batch in run.end(name)["batches"]))
    assert sorted(read) == list(range(30)), "each replica has a share of the data, shuffled alike"
    for name in NAMES:
        for line in run.steps(name):
            assert line["lr"] == pytest.approx(0.01 / (1 + 0.1 * (line["step"] + 1)))
    growth = 1.12 if hook == "powersgd" else 1
    assert_equals_simulation(run, simulate(run, hook, micros), lambda step: 1e-9 * growth**step)
    if hook == "powersgd":
        again = run.go_on("one-10", hook=hook, micros=micros)
        assert [again.steps(name)[0]["lr"] for name in NAMES] == pytest.approx([0.01 / (1 + 0.1 * 11)] * 3)


@pytest.mark.parametrize("hook", ["diloco", "diloco with a delay"])
def test_one_dies_in_an_average_of_models_and_comes_back(start, hook):
    simulation = LocalSimulation(hook, is_scheduled=True)
    run = start(hook=hook, of={"two": {"dies": [12]}})
    run.wait_until_it_is_back("two")
    printed = run.finish()
    assert "replica 'replica_1' left at step 12: 2 go on" in printed["one"], printed["one"]
    for name in NAMES:
        for line in run.steps(name):
            lr = 0.01 / (1 + 0.1 * simulation.end_of(line["step"]))
            assert line["lr"] == pytest.approx(lr), "also who has joined"
    assert_equals_local_simulation(run, simulation, is_first_of_one=True)


def test_script_and_commands_of_the_docs(tmp_path):
    commands = {name: ([], {"REPLICA_GROUP_ID": name, "NUM_REPLICA_GROUPS": "3"}) for name in "012"}
    printed = run_docs("train_replica_accelerate.py", commands, "2", tmp_path)
    for name in "01":
        assert "replica 'replica_2' left at step " in printed[name]
        assert f"replica {name}: " in printed[name]


# In this process ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hook": "auto"}, "hook='auto' measures one group of ranks"),
        ({"hook": lc.DiLoCo()}, "post_local_gradient_allreduce=True needs ranks that stay"),
        ({"accumulation": "mean"}, "needs accumulation='framework'"),
        ({"exact_state": True}, "exact_state=True keeps differences between ranks"),
        ({"static_graph": True}, "does not work with static_graph=True"),
    ],
)
def test_options_that_cannot_work_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        CommHookKwargs(**{"hook": "int8", "fault_tolerance": FaultTolerance(0, 2), **options})


def accelerator_of(**options):
    handler = CommHookKwargs(hook="int8", fault_tolerance=FaultTolerance(0, 2, lighthouse_addr="http://127.0.0.1:1"))
    return Accelerator(cpu=True, kwargs_handlers=[handler], **options), handler


def test_accelerators_that_cannot_work_are_refused(monkeypatch):
    accelerator, _ = accelerator_of(dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    with pytest.raises(ValueError, match="does not work with dispatch_batches=True"):
        accelerator.prepare(torch.nn.Linear(2, 2))
    accelerator, _ = accelerator_of()
    accelerator.scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(ValueError, match="does not work with mixed_precision='fp16'"):
        accelerator.prepare_model(torch.nn.Linear(2, 2))
    monkeypatch.setattr(Accelerator, "distributed_type", DistributedType.MULTI_CPU)
    accelerator, _ = accelerator_of()
    with pytest.raises(ValueError, match="is MULTI_CPU, of 1: start each replica with python, or"):
        accelerator.prepare(torch.nn.Linear(2, 2))


def test_what_is_not_trained_stays_as_it_is():
    accelerator, handler = accelerator_of()
    frozen, evaluated = torch.nn.Linear(2, 2).requires_grad_(False), torch.nn.Linear(2, 2)
    assert accelerator.prepare(frozen) is frozen
    assert accelerator.prepare_model(evaluated, evaluation_mode=True) is evaluated
    assert handler.manager is None
    data = accelerator.prepare(torch.utils.data.DataLoader(range(8), batch_size=2))
    assert accelerator.prepare(data) is data
    assert [batch.tolist() for batch in data] == [[0, 1], [4, 5]]


def test_a_step_with_a_closure_is_refused():
    accelerator, _ = accelerator_of()
    optimizer = accelerator.prepare(torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1))
    with pytest.raises(ValueError, match="votes on a backward before the optimizer's step"):
        optimizer.step(lambda: None)


def test_a_copy_of_the_configuration_has_no_replica():
    accelerator, handler = accelerator_of()
    copied = pickle.loads(pickle.dumps(handler))
    assert copied.fault_tolerance == handler.fault_tolerance
    assert copied.manager is None
    accelerator.end_training()


def test_what_nobody_has_voted_on_is_refused():
    accelerator, handler = accelerator_of()
    replica = handler.events(accelerator)
    replica.manager = SimpleNamespace(start_quorum=lambda: None, should_commit=lambda: True)
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = accelerator.prepare(torch.optim.SGD([parameter], lr=0.1))
    for _ in range(2):
        replica._before_forward(None, ())
        optimizer.step()
    with pytest.raises(HookError, match="Call the model that prepare"):
        optimizer.step()


def test_the_model_between_averages_is_told():
    accelerator, handler = accelerator_of()
    model = torch.nn.Linear(2, 2)
    own = SimpleNamespace(is_closed=False, averages_models=True, averages_when_asked=False, models_differ=True)
    own.runtime = SimpleNamespace(model=lambda: model)
    handler.events(accelerator).add(own)
    with pytest.warns(UserWarning, match=r"the model of one rank.*when the manager's current_step\(\) has changed"):
        accelerator.get_state_dict(model)
    own.models_differ = False
    accelerator.get_state_dict(model)
    own.is_closed = True


def test_metrics_of_a_share_are_refused():
    accelerator, _ = accelerator_of()
    assert accelerator.gather_for_metrics(torch.ones(2)).sum() == 2
    data = accelerator.prepare(torch.utils.data.DataLoader(range(8), batch_size=2))
    for batch in data:
        with pytest.raises(ValueError, match="Do not prepare the loader of an evaluation"):
            accelerator.gather_for_metrics(batch)
