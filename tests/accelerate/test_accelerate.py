"""`CommHookKwargs` under torchrun in two real processes, and its refusals."""

import copy
import dataclasses
import inspect
import json
import os
import pickle
import warnings

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs, DistributedType
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torchrun import run_twice

import lightning_commhooks as lc
from accelerate_integration import CommHookKwargs
from lightning_commhooks import PowerSGD

PowerSGD2 = PowerSGD(matrix_approximation_rank=2, start_powerSGD_iter="auto")


@pytest.fixture(scope="module")
def results():
    stdout = run_twice("accelerate_runner.py", PYTHONWARNINGS="ignore")
    lines = stdout.splitlines()
    results = json.loads(next(line for line in lines if line.startswith("{")))
    return results | {"on_one_rank": [json.loads(line) for line in lines if line.startswith('"')]}


def test_loading_on_one_rank_is_an_error_on_all(results):
    first, second = results["on_one_rank"]
    assert "load_state() must be called on all ranks, and rank 1 has gone on" in first
    assert "load_state() must be called on all ranks, and rank 1 has gone on" in second


def test_scaler_of_the_accelerator_is_used(results):
    plain, scaled = results["scaled"]
    assert scaled == pytest.approx(plain, rel=1e-5)


@pytest.mark.parametrize(
    ("key", "hook"),
    [("name", "allreduce"), ("alias", "batched_powersgd"), ("enum", "bf16"), ("configured", "powersgd")],
)
def test_trains_with_the_hook(results, key, hook):
    result = results[key]
    assert result["comm_hook"] == f"lightning_commhooks:{hook}"
    assert result["find_unused_parameters"] is True
    assert result["steps"] == 5
    assert result["sums"][0] == result["sums"][1]


def test_each_model_has_its_own_state(results):
    result = results["two_models"]
    assert result["batches"] == [3, 2]
    assert result["steps"] == [2, 4]
    assert result["entries"] == [["module.weight"], ["module.weight"]] or result["entries"] == [["weight"], ["weight"]]
    assert result["sums"][0] == result["sums"][1]


def test_a_model_that_was_freed_has_no_part_in_a_checkpoint(results):
    result = results["freed"]
    assert result["states"] == 1
    # Accelerate 1.7 wraps a model that is prepared again once more.
    assert result["both"] in ([2, True], [3, False])
    assert result["steps"] == [3, 0]
    (text,) = result["texts"]
    assert "has the state of 2 communication hooks, but 1 models have one. They are reset to step 0" in text


def test_a_model_is_collected_with_its_accelerator(results):
    assert results["collected"] == [True, True]


def test_one_process_may_unwrap_the_model_under_the_same_name():
    stdout = run_twice("accelerate_runner.py", "unwrapped", PYTHONWARNINGS="ignore")
    first, second = sorted((json.loads(line) for line in stdout.splitlines() if line.startswith("{")), key=str)
    assert first["states"] == second["states"] == 1
    assert first["sums"] == second["sums"] == [first["sums"][0]] * 2
    # Freed by `free_memory`: at once where the model has no other name.
    assert {tuple(first["closed"]), tuple(second["closed"])} == {(True, True), (False, True)}


def test_mixed_precision(results):
    result = results["mixed_precision"]
    assert result["dtypes"] == ["torch.bfloat16"]
    assert result["comm_hook"] == "lightning_commhooks:powersgd"
    assert result["compressed"] == 4 * 64 * 64
    assert result["sums"][0] == result["sums"][1] != result["before"]


def test_a_pickled_accelerator_has_no_hook_and_says_so(results):
    result = results["pickled"]
    assert result["same"]
    (warning,), others = result["warnings"]
    assert "'int8', which is not copied" in warning
    assert others == []
    assert result["steps"] == [2, 3], "what is prepared with the copy has a hook of its own"


COPIES = {"pickle": lambda h: pickle.loads(pickle.dumps(h)), "deepcopy": copy.deepcopy, "replace": dataclasses.replace}


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize(
    "fields",
    [
        {"hook": "int8", "bucket_cap_mb": 7, "accumulation": "mean"},
        {"comm_hook": DDPCommunicationHookType.POWER_SGD, "comm_wrapper": DDPCommunicationHookType.BF16},
        {"hook": default_hooks.allreduce_hook, "hook_state": None, "exact_state": True},
    ],
)
def test_copies_of_the_handler(way, fields):
    handler = CommHookKwargs(**fields)
    twin = COPIES[way](handler)
    assert type(twin) is CommHookKwargs
    assert (twin, twin.hook, twin.to_kwargs()) == (handler, handler.hook, handler.to_kwargs())
    assert twin.attachments == []
    assert dataclasses.replace(twin, find_unused_parameters=True).to_kwargs() == {
        **handler.to_kwargs(),
        "find_unused_parameters": True,
    }


class OwnKwargs(CommHookKwargs):
    def __init__(self, *, rank):
        super().__init__(hook=PowerSGD(matrix_approximation_rank=rank))
        self.note = {"rank": rank}


@pytest.mark.parametrize("way", ["pickle", "deepcopy"])
def test_copies_of_a_handler_with_a_constructor_of_its_own(way):
    handler = OwnKwargs(rank=3)
    twin = COPIES[way](handler)
    assert type(twin) is OwnKwargs
    assert (twin, twin.note, twin.attachments, twin.manager) == (handler, {"rank": 3}, [], None)


def test_ddp_fields_reach_ddp_and_no_others():
    handler = CommHookKwargs(hook="bf16", bucket_cap_mb=7)
    assert handler.to_kwargs() == {"bucket_cap_mb": 7}


def test_accelerate_still_looks_handlers_up_by_exact_class():
    # When this fails, Accelerate accepts subclasses: CommHookKwargs.__class__ can go.
    class Subclass(DistributedDataParallelKwargs):
        pass

    with pytest.raises(KeyError):
        Accelerator(cpu=True, kwargs_handlers=[Subclass()])


POWER_SGD, BF16, FP16 = (DDPCommunicationHookType[name] for name in ("POWER_SGD", "BF16", "FP16"))


@pytest.mark.parametrize(
    ("fields", "hook"),
    [
        ({"comm_hook": FP16}, lc.FP16()),
        ({"comm_hook": POWER_SGD, "comm_state_option": {"matrix_approximation_rank": 2}}, PowerSGD2),
        ({"comm_hook": POWER_SGD, "comm_wrapper": BF16}, lc.Cast("powersgd", "bf16")),
        ({"hook": POWER_SGD}, lc.PowerSGD(start_powerSGD_iter="auto")),
    ],
)
def test_fields_of_accelerate_are_translated(fields, hook):
    assert CommHookKwargs(**fields).hook == hook


def test_hook_of_the_environment(monkeypatch):
    monkeypatch.setenv("COMMHOOKS_HOOK", "powersgd")
    assert CommHookKwargs().hook == lc.PowerSGD(start_powerSGD_iter="auto")
    monkeypatch.setenv("COMMHOOKS_OPTIONS", '{"matrix_approximation_rank": 2}')
    assert CommHookKwargs().hook == PowerSGD2
    assert CommHookKwargs(hook="bf16").hook == lc.BF16(), "an argument comes first"
    assert CommHookKwargs(comm_hook=FP16).hook == lc.FP16()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("powersdg", "", "did you mean 'powersgd'"),
        ("powersgd", "{'rank': 4}", "COMMHOOKS_OPTIONS=.* is not JSON"),
        ("powersgd", "[4]", "must be a JSON object"),
        ("powersgd", '{"ranks": 4}', "COMMHOOKS_HOOK='powersgd'.*Options of PowerSGD: matrix_approximation_rank"),
    ],
)
def test_refusals_of_the_environment(monkeypatch, name, options, message):
    monkeypatch.setenv("COMMHOOKS_HOOK", name)
    monkeypatch.setenv("COMMHOOKS_OPTIONS", options)
    with pytest.raises(ValueError, match=message):
        CommHookKwargs()


def in_one_process():
    handler = CommHookKwargs(hook="powersgd")
    accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        accelerator.prepare_model(torch.nn.Linear(2, 2))
        assert caught, "prepare_model() says it as well"
        accelerator.prepare(torch.nn.Linear(2, 2))
    assert handler.attachments == []
    return [str(w.message) for w in caught]


def test_one_process_says_once_that_it_does_nothing(run_code):
    stdout = run_code("from test_accelerate import in_one_process; print(in_one_process())")
    assert stdout.count("CommHookKwargs(hook='powersgd') does nothing: training runs in one process") == 1


def train_a_little():
    handler = CommHookKwargs(hook="bf16")
    accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
    model = accelerator.prepare(torch.nn.Linear(2, 2))
    accelerator.backward(model(torch.ones(1, 2)).sum())
    steps = [attachment.metrics()["steps"] for attachment in handler.attachments]
    os.write(1, f"{accelerator.num_processes} {steps}\n".encode())
    for attachment in handler.attachments:
        attachment.close()


@pytest.mark.parametrize(
    ("launch", "lines"),
    [
        ("debug_launcher(train_a_little, num_processes=2)", ["2 [1]"] * 2),
        ("notebook_launcher(train_a_little, num_processes=1)", ["1 []"]),
    ],
)
def test_functions_launched_from_a_notebook(run_code, launch, lines):
    imports = "from accelerate import debug_launcher, notebook_launcher; from test_accelerate import train_a_little"
    stdout = run_code(f"{imports}; {launch}")
    assert [line for line in stdout.splitlines() if line.endswith("]")] == lines


@pytest.mark.parametrize("kind", ["FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA"])
def test_what_is_not_ddp_is_refused_with_the_reason(monkeypatch, kind):
    accelerator = Accelerator(cpu=True, kwargs_handlers=[CommHookKwargs(hook="powersgd")])
    monkeypatch.setattr(accelerator.state, "distributed_type", DistributedType[kind])
    with pytest.raises(ValueError, match=r"hook='powersgd'.* works with DistributedDataParallel only: \w+"):
        accelerator.prepare(torch.nn.Linear(2, 2))


def test_accelerate_still_asks_a_handler_for_its_class_in_its_constructor():
    # When this fails, CommHookKwargs cannot know of accelerators that do not use it: see CommHookKwargs.__class__.
    accelerator = Accelerator(cpu=True, kwargs_handlers=[CommHookKwargs(hook="bf16")])
    assert "prepare" in vars(accelerator)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"comm_wrapper": FP16}, "need a comm_hook"),
        ({"comm_hook": POWER_SGD, "comm_state_option": {"ranks": 2}}, "Options of PowerSGD"),
        ({"comm_hook": POWER_SGD, "comm_wrapper": POWER_SGD}, "fp16"),
        ({"comm_hook": "int8"}, "comm_hook='int8': names of hooks go into hook='int8'; .*: NO, FP16, BF16, POWER_SGD"),
        ({"comm_hook": POWER_SGD, "comm_wrapper": "x"}, "comm_wrapper='x': write hook=Cast.*: NO, FP16, BF16"),
        ({"hook": "bf16", "fault_tolerance": {}}, r"fault_tolerance must be a FaultTolerance\(\.\.\.\), got {}"),
        ({"hook": "bf16", "num_steps": "100"}, "num_steps must be an integer of at least 1, got '100'"),
        ({"hook": "bf16", "strict_state": 0}, "strict_state must be True or False, got 0"),
        ({}, "needs hook="),
        ({"hook": "powersdg"}, "did you mean 'powersgd'"),
        ({"hook": PowerSGD}, "did you mean PowerSGD\\(\\)"),
        ({"hook": "bf16", "hook_state": object()}, "hook_state"),
        ({"hook": "bf16", "comm_hook": DDPCommunicationHookType.FP16}, "leave comm_hook out, or hook"),
        ({"hook": "bf16", "comm_wrapper": DDPCommunicationHookType.FP16}, "hook=Cast"),
    ],
)
def test_refusals_name_the_fix(fields, message):
    with pytest.raises(ValueError, match=message):
        CommHookKwargs(**fields)


def test_is_found_beside_the_rest():
    import accelerate_integration
    from lightning_commhooks.accelerate import CommHookKwargs

    assert CommHookKwargs is accelerate_integration.CommHookKwargs
    assert {"hook", "accumulation", "bucket_cap_mb"} < {*inspect.signature(CommHookKwargs).parameters}


ONE_WORKER = """
import torch
from accelerate import Accelerator
from accelerate_integration import CommHookKwargs

handler = CommHookKwargs(hook="int8", accumulation="mean")
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4, kwargs_handlers=[handler])
model = torch.nn.Linear(8, 8)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for _ in range(16):
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.randn(4, 8)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
print(type(model).__name__, handler.attachments[0].num_steps)
"""


def test_one_worker_of_torchrun_accumulates(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(ONE_WORKER)
    assert "DistributedDataParallel 4" in run_twice(script, num_processes=1, ACCELERATE_USE_CPU="true")


def test_processes_that_accelerate_does_not_join(monkeypatch):
    accelerator = Accelerator(cpu=True, kwargs_handlers=[CommHookKwargs(hook="powersgd")])
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.warns(UserWarning, match=r"2 processes were started, .* write Accelerator\(cpu=True\)"):
        accelerator.prepare(torch.nn.Linear(2, 2))
