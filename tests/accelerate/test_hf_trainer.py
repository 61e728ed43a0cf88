"""`use_comm_hook` on a real `transformers.Trainer` in two real processes; a tiny model from a config."""

import pytest
import torch
from torchrun import run_twice
from versions import has

transformers = pytest.importorskip("transformers")
from hf_runner import HOOKS, Counting, make  # noqa: E402  # after the check

LOCAL = ["post_localsgd", "diloco"]


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    """What Accelerate 1.4 and transformers 4 set by themselves, and leave."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    monkeypatch.setenv("ACCELERATE_USE_IPEX", "false")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("hf")


@pytest.fixture(scope="module")
def results(folder):
    run_twice("hf_runner.py", folder)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


def distance(a, b):
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


@pytest.mark.parametrize("name", HOOKS)
def test_trains_with_the_hook_and_the_trainers_own_settings(results, name):
    for rank in results:
        result = rank[name, False]
        assert result["registered"] == f"lightning_commhooks:{name}"
        assert result["settings"] == [False, 2**20]
        assert result["steps"] == 11, "one for two accumulated batches"
        assert result["checkpoints"] == ["checkpoint-11"], "save_total_limit=1"
    assert distance(results[0][name, False]["whole"], results[1][name, False]["whole"]) == 0


@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.parametrize("exact", [False, True])
def test_resumes_from_the_middle_of_a_period(results, name, exact):
    for rank in results:
        apart = distance(rank[name, exact]["whole"], rank[name, exact]["resumed"])
        assert apart < (1e-300 if exact else 1e-10)


@pytest.mark.parametrize("name", HOOKS)
def test_evaluation_and_saving_do_not_disturb(results, name):
    for rank in results:
        assert distance(rank[name, True]["whole"], rank["undisturbed"][name]) == 0
        disturbed = distance(rank[name, False]["whole"], rank["undisturbed"][name])
        assert (disturbed > 1e-5) == (name in LOCAL), "resync=True"


def test_what_evaluation_and_checkpoints_send(results):
    for rank in results:
        result = rank["post_localsgd", True]
        # Twice an evaluation with a checkpoint: the model and Adam's moments, for their average and each rank's own,
        # and the model at the end. The GPT-2 of transformers 4 has a few numbers that are no parameters.
        assert result["sent"] == pytest.approx(8 * (2 * (3 + 3) + 1) * result["numel"], rel=0.01)


@pytest.mark.parametrize("name", LOCAL)
def test_checkpoint_evaluates_to_what_the_trainer_printed(results, folder, tmp_path, name):
    double = {"dtype" if has("transformers", "4.56") else "torch_dtype": torch.float64}
    model = transformers.GPT2LMHeadModel.from_pretrained(folder / f"{name}-True-kept" / "checkpoint-6", **double)
    arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True)
    expected = transformers.Trainer(model, arguments, eval_dataset=Counting(300, 332)).evaluate()["eval_loss"]
    for rank in results:
        assert rank[name, True]["eval"][0] == pytest.approx(expected, abs=1e-6)
    assert distance(results[0][name, True]["whole"], results[1][name, True]["whole"]) == 0, "the average at the end"
    assert results[0][name, True]["final_eval"] == results[1][name, True]["final_eval"]


def test_best_model_is_loaded_and_training_goes_on(results):
    for rank in results:
        result = rank["best_model"]
        assert result["again"] == pytest.approx(result["best"], abs=1e-7)
        assert result["steps"] == [21], "9, and 12 more with the same model"
    assert distance(results[0]["best_model"]["end"], results[1]["best_model"]["end"]) == 0


def test_subclass_new_accelerator_and_second_hook(results):
    for rank in results:
        result = rank["subclass_and_search"]
        assert result["names"] == ["lightning_commhooks:bf16"] * 2
        assert "has the communication hook BF16" in result["twice"]


def test_checkpoint_without_state_gives_a_warning(results):
    for rank in results:
        assert any("no state of communication hooks" in text for text in rank["without_state"])


def test_a_model_that_transformers_does_not_wrap_is_an_error(results):
    for rank in results:
        # Older versions wrap it.
        found = rank["evaluated_before"]
        assert found == 1 or "use_comm_hook(hook='bf16'): the model is not in DistributedDataParallel" in str(found)


def test_a_checkpoint_of_a_callback_has_the_average(results):
    own = [rank["saved_by_callback"]["own"] for rank in results]
    assert distance(*own) > 1e-4
    average = {name: (own[0][name] + own[1][name]) / 2 for name in own[0]}
    assert distance(results[0]["saved_by_callback"]["saved"], average) < 1e-12


def test_a_hook_after_the_first_training_is_an_error(results):
    for rank in results:
        assert rank["hook_after_training"] == (
            "use_comm_hook(hook='bf16'): train() has wrapped the model already; call use_comm_hook() before the first "
            "train()"
        )


def test_one_process_says_that_it_does_nothing(tmp_path):
    trainer, _ = make(str(tmp_path), "powersgd", max_steps=1)
    with pytest.warns(UserWarning, match=r"CommHookKwargs\(hook='powersgd'\) does nothing"):
        trainer.train()
