"""`CompressedDDPFabricStrategy` with two models in two real processes."""

import pytest
import torch
from torchrun import run_twice

pytest.importorskip("lightning")
from fabric_runner import HOOKS  # after the check
from small_task import batch, loss, make_model

LOCAL = ["post_localsgd", "diloco, delay"]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fabric")
    run_twice("fabric_runner.py", folder)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


def distance(a, b):
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


def mean(a, b):
    return {name: (a[name] + b[name]) / 2 for name in a}


def apart(one, other):
    """Largest distance between two trajectories of two models."""
    return max(distance(a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True))


@pytest.mark.parametrize("name", HOOKS)
def test_hook_is_registered_on_each_model(results, name):
    for rank in results:
        assert rank[name, False]["registered"] == f"lightning_commhooks:{name.split(',')[0]}"
        assert rank[name, False]["steps"] == [14, 7]


@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.parametrize("exact", [False, True])
def test_resumes_from_the_middle_of_a_period(results, name, exact):
    for rank in results:
        result = rank[name, exact]
        # In the first step DDP has other buckets, and products of matrices may be rounded in another way.
        assert apart(result["whole"], result["resumed"]) < (1e-14 if exact else 1e-10)
        assert result["step"] == 6
        assert result["rest"] == [], "the hooks' state was taken out"


@pytest.mark.parametrize("name", HOOKS)
def test_evaluation_and_saving_do_not_disturb(results, name):
    for rank in results:
        undisturbed = rank["undisturbed"][name]["trajectory"]
        assert apart(rank[name, True]["before"], undisturbed[:3]) == 0
        assert apart(rank[name, True]["whole"], undisturbed[3:]) == 0
        assert (apart(rank[name, False]["whole"], undisturbed[3:]) > 1e-4) == (name in LOCAL), "resync=True"


@pytest.mark.parametrize("name", LOCAL)
@pytest.mark.parametrize("exact", [False, True])
def test_evaluation_sees_the_average(results, name, exact):
    for k in range(2):
        ranks = [rank[name, exact]["before"][-1][k] for rank in results]
        assert distance(*ranks) > 1e-3
        model = make_model()
        model.load_state_dict(mean(*ranks))
        for rank in results:
            assert rank[name, exact]["values"][k] == pytest.approx(loss(model, batch(9, 9)).item(), abs=1e-14)


def test_average_is_in_place_after_a_barrier(results):
    for k in range(2):
        last = [rank["undisturbed"]["post_localsgd"]["trajectory"][-1][k] for rank in results]
        for rank in results:
            assert distance(rank["undisturbed"]["post_localsgd"]["end"][k], mean(*last)) < 1e-15


def test_saving_sends_each_number_once(results):
    numel = sum(p.numel() for p in make_model().parameters())
    for rank in results:
        assert rank["undisturbed"]["post_localsgd"]["saved"] == [3 * 8 * numel] * 2, "parameters and moments"


def test_checkpoints_of_and_for_others(results):
    for rank in results:
        result = rank["checkpoints"]
        assert "lightning_commhooks" in result["rest"], "a plain Fabric loads the model and leaves the rest"
        assert any("no state of communication hooks" in text for text in result["warnings"])
        assert result["same"]
        assert "hook" in result["refused"]
        assert "strict_state" in result["refused"]


def test_states_of_hooks_belong_to_models_by_name(results):
    for rank in results:
        result = rank["by name"]
        assert apart(result["whole"], result["resumed"]) < 1e-14
        assert "has the state of communication hooks for ['model1'], and not for ['model0']" in result["refused"]
        assert result["loaded"] == [0, 3]
        assert any("They are reset to step 0" in text for text in result["warnings"])


def test_sharded_optimizer_is_refused(results):
    assert all("ZeroRedundancyOptimizer: it keeps its state in shards" in rank["sharded"] for rank in results)


def test_optimizers_of_earlier_models_are_freed(results):
    assert all(rank["replaced"] == [False, False] for rank in results)
