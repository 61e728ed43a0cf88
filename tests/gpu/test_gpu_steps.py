"""On a CUDA device, one rank of NCCL: no step waits for the device; half iterations of PowerSGD take turns."""

import pytest
import torch
import torch.distributed as dist
from driver import HOOKS, SHAPES, attached, backward, distance, full_rank_gradients, norm
from gpu_steps import STEPS, WARM_UP, needs_one, step_without_waiting
from reference import powersgd
from test_powersgd import STEPS as REFERENCE_STEPS
from test_powersgd import with_a_bad_step

import lightning_commhooks as lc
from lightning_commhooks.testing.model import use_device

pytestmark = [pytest.mark.gpu, needs_one]
HALF = lc.PowerSGD(start_powerSGD_iter=0, matrix_approximation_rank=2, num_iters_per_step=1)


@pytest.fixture(autouse=True)
def _nccl(tmp_path):
    torch.cuda.set_device(0)
    use_device("cuda:0")
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    use_device("cpu")


@pytest.mark.parametrize("label", HOOKS)
def test_no_step_waits_for_the_device(label):
    """The host runs ahead: nothing in forward, backward and the optimizer's step asks the device for a value."""
    assert step_without_waiting(0, 1, HOOKS[label]) == WARM_UP + STEPS


def test_a_step_that_waits_is_seen():
    """By the mode that the other test relies on."""
    value = torch.ones((), device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchronizing"):
            value.item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def factors(attachment):
    """Those that are remembered of each parameter, by kind."""
    entries = attachment.state_dict()["hook"]["state"]["entries"]
    kinds = {name: {kind: own for kind, own in entry.items() if kind != "residual"} for name, entry in entries.items()}
    return {name: entry for name, entry in kinds.items() if entry}


def is_orthonormal(rows):
    return torch.allclose(rows @ rows.mT, torch.eye(len(rows)), atol=1e-4)


def test_half_iterations_take_turns():
    """P is made in even steps, and remembered until Q is made of it in odd ones."""
    with attached(HALF) as (ddp, attachment):
        for step in range(6):
            backward(ddp, full_rank_gradients(0, step, SHAPES))
            found = factors(attachment).values()
            assert found
            assert all(("factor_p" in entry) == (step % 2 == 0) for entry in found)
            assert not any(is_orthonormal(entry["factor" if step % 2 else "factor_p"]) for entry in found)


@pytest.mark.parametrize("feedback", [False, True], ids=["no_feedback", "feedback"])
@pytest.mark.parametrize("num_iters", [1, 2])
def test_iterations_equal_reference(num_iters, feedback):
    """With a bad step, which does not count; else the next one would begin with the other factor."""
    hook = lc.PowerSGD(
        matrix_approximation_rank=2,
        start_powerSGD_iter=1,
        num_iters_per_step=num_iters,
        use_error_feedback=feedback,
        random_seed=7,
    )
    expected = powersgd(hook, full_rank_gradients, 1, REFERENCE_STEPS, SHAPES, bad_before=3)
    for a, b in zip(with_a_bad_step(0, 1, hook), expected, strict=True):
        assert distance(a, b) <= 1e-9 * norm(b)


@pytest.mark.parametrize("bad_step", [0, 3, 4])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_bad_step_leaves_half_iterations_as_they_were(bad_step, value):
    """Factors bit for bit, and whose turn it is; nothing is owed."""
    with attached(HALF, exact_state=True) as (ddp, attachment):
        for step in range(6):
            if step == bad_step:
                before = factors(attachment)
                gradients = full_rank_gradients(0, 100, SHAPES)
                gradients["first"].view(-1)[0] = value
                assert not any(g.isfinite().all() for g in backward(ddp, gradients).values() if g.numel())
                after = factors(attachment)
                assert any("factor_p" in entry for entry in after.values()) == (bad_step % 2 == 1)
                for name, entry in before.items():
                    assert entry.keys() == after[name].keys()
                    assert all(torch.equal(factor, after[name][kind]) for kind, factor in entry.items())
                assert attachment.residual_norm() == 0
            backward(ddp, full_rank_gradients(0, step, SHAPES))
        assert attachment.metrics()["nonfinite_steps"] == 1
