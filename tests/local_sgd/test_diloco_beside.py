"""DiLoCo that averages beside training, against a simulation in one process, and against torchft's own numbers."""

import pytest
import torch
from local_sgd_driver import ALONE, local, one_step, params, through_a_file

import lightning_commhooks as lc

SMALL_INT8 = lc.Int8(block_size=8, compress_1d=True, min_bytes=0)
# Before each step, of both layers: `test_fixtures/torchft.diloco_regression_test.DiLoCoMockedUpdateTest.
# test_diloco_mocked_updates_*.json` of torchft; gradient 2, inner lr 1, outer plain SGD of lr 2, `sync_every=6`.
TORCHFT = {
    (0, 0.0): (
        [1.0, -1.0, -3.0, -11.0, -13.0, -15.0, -17.0, -19.0, -21.0, -35.0, -37.0, -39.0, -41.0],
        [1.0, -1.0, -3.0, -5.0, -7.0, -9.0, -23.0, -25.0, -27.0, -29.0, -31.0, -33.0, -47.0],
    ),
    (0, 0.5): (
        [1.0, -1.0, -3.0, -8.0, -10.0, -12.0, -14.0, -16.0, -18.0, -24.5, -26.5, -28.5, -30.5],
        [1.0, -1.0, -3.0, -5.0, -7.0, -9.0, -17.0, -19.0, -21.0, -23.0, -25.0, -27.0, -32.0],
    ),
    (0, 1.0): (
        [1.0, -1.0, -3.0, -5.0, -7.0, -9.0, -11.0, -13.0, -15.0, -17.0, -19.0, -21.0, -23.0],
        [1.0, -1.0, -3.0, -5.0, -7.0, -9.0, -11.0, -13.0, -15.0, -17.0, -19.0, -21.0, -23.0],
    ),
    (1, 0.0): (
        [1.0, -1.0, -3.0, -7.0, -9.0, -11.0, -13.0, -15.0, -17.0, -27.0, -29.0, -31.0, -33.0],
        [1.0, -1.0, -3.0, -5.0, -7.0, -9.0, -19.0, -21.0, -23.0, -25.0, -27.0, -29.0, -39.0],
    ),
    (1, 0.5): (
        [1.0, -1.0, -3.0, -6.0, -8.0, -10.0, -12.0, -14.0, -16.0, -21.5, -23.5, -25.5, -27.5],
        [1.0, -1.0, -3.0, -5.0, -7.0, -9.0, -15.0, -17.0, -19.0, -21.0, -23.0, -25.0, -29.0],
    ),
    (1, 1.0): (
        [1.0, -1.0, -3.0, -5.0, -7.0, -9.0, -11.0, -13.0, -15.0, -17.0, -19.0, -21.0, -23.0],
        [1.0, -1.0, -3.0, -5.0, -7.0, -9.0, -11.0, -13.0, -15.0, -17.0, -19.0, -21.0, -23.0],
    ),
}


def mocked(rank, world, delay, mixing):
    """Both parameters before each of some steps."""
    model, gradients = params({"first": (1, 1), "second": (1, 1)})
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    hook = lc.DiLoCo(
        period=6, fragments=2, delay=delay, mixing=mixing, outer_lr=2, outer_momentum=0, nesterov=False, **ALONE
    )
    history = []
    with local(model, hook, [optimizer]) as (ddp, _):
        for _ in range(13):
            history.append([p.item() for p in model.parameters()])
            one_step(ddp, optimizer, {name: 2 * gradient for name, gradient in gradients.items()})
    return history


@pytest.mark.parametrize(("delay", "mixing"), TORCHFT)
def test_numbers_of_torchft(run, delay, mixing):
    for history in run(mocked, delay, mixing):
        assert [tuple(at) for at in history] == list(zip(*TORCHFT[delay, mixing], strict=True))


def batch(rank, step):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)


def make_model():
    torch.manual_seed(7)
    net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).double()
    return net, torch.optim.AdamW(net.parameters(), lr=0.02)


def loss(model, x):
    return (model(x) - 2 * x[:, :3].sin()).square().mean()


STEPS, PERIOD = 19, 4


def train(rank, world, options):
    """Parameters after each step, one after another."""
    model, optimizer = make_model()
    after = []
    with local(model, lc.DiLoCo(period=PERIOD, **options, **ALONE), [optimizer]) as (ddp, _):
        for step in range(STEPS):
            ddp.zero_grad()
            loss(ddp, batch(rank, step)).backward()
            optimizer.step()
            after.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    return after


def simulate(world, delay, mixing, eager):
    """The same in one process: outer SGD of PyTorch, on the common model, or with `eager` on one for each rank."""
    made = [make_model() for _ in range(world)]
    anchors = [[p.detach().clone() for p in made[0][0].parameters()] for _ in range(world)]
    outer = [torch.optim.SGD(anchor, lr=0.7, momentum=0.9, nesterov=True) for anchor in anchors]
    sent, trajectory = None, []
    for step in range(STEPS):
        for rank, (model, optimizer) in enumerate(made):
            optimizer.zero_grad()
            loss(model, batch(rank, step)).backward()
            optimizer.step()
        left = -(step + 1) % PERIOD
        last = sent
        if left == delay % PERIOD:
            sent = [
                [a - p.detach() for a, p in zip(anchors[rank], model.parameters(), strict=True)]
                for rank, (model, _) in enumerate(made)
            ]
        if left == 0:
            due = last if delay else sent
            for rank in range(world):
                for i, anchor in enumerate(anchors[rank]):
                    anchor.grad = None
                    if due is not None:
                        anchor.grad = sum(moves[i] for moves in due) / world
                    if eager:
                        own = sent[rank][i] / world - (due[rank][i] / world if due is not None else 0)
                        anchor.grad = own if anchor.grad is None else anchor.grad + own
            for rank, (model, _) in enumerate(made):
                if anchors[rank][0].grad is None and delay < PERIOD:
                    continue
                outer[rank].step()
                for anchor, p in zip(anchors[rank], model.parameters(), strict=True):
                    p.data.copy_(torch.lerp(anchor, p.data, mixing))
        trajectory.append([torch.cat([p.detach().reshape(-1) for p in model.parameters()]) for model, _ in made])
    return trajectory


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(
    ("delay", "mixing", "eager"), [(2, 0.5, False), (3, 0.0, False), (4, 0.0, False), (4, 0.0, True)]
)
def test_trajectory_is_that_of_the_simulation(run, world, delay, mixing, eager):
    options = {"eager": True} if eager else {"delay": delay, "mixing": mixing}
    expected = simulate(world, delay, mixing, eager)
    for rank, after in enumerate(run(train, options, world=world)):
        for step, own in enumerate(after):
            torch.testing.assert_close(own, expected[step][rank], rtol=0, atol=1e-12, msg=f"step {step}, rank {rank}")


def resumed(rank, world, options, saved_at):
    """Parameters at the end, of a run that is saved and goes on in another attachment; and of one that is not."""
    ends = []
    for stop in (None, saved_at):
        model, optimizer = make_model()
        hook = lc.DiLoCo(period=PERIOD, **options, **ALONE)
        with local(model, hook, [optimizer], exact_state=True) as (ddp, attachment):
            for step in range(STEPS):
                ddp.zero_grad()
                loss(ddp, batch(rank, step)).backward()
                optimizer.step()
                if step == stop:
                    state = through_a_file(attachment.state_dict())
                    keys = {key for entry in state["hook"]["state"]["entries"].values() for key in entry}
                    attachment.load_state_dict(state)
            ends.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    return ends, keys


@pytest.mark.parametrize("saved_at", [6, 8, 9])
@pytest.mark.parametrize(
    "options", [{"delay": 3}, {"eager": True}, {"delay": 2, "pseudo_gradient": SMALL_INT8}], ids=str
)
def test_state_in_the_middle_of_a_delay(run, options, saved_at):
    for (whole, parts), keys in run(resumed, options, saved_at):
        assert torch.equal(whole, parts)
        assert "average" in keys or options.get("delay") == 2


def fed_back(rank, world):
    """Where the common model is after some outer steps, and where it were if all had been sent."""
    model, _ = params({"weight": (32, 32)}, torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    hook = lc.DiLoCo(
        period=2, delay=2, mixing=0, outer_lr=1, outer_momentum=0, nesterov=False, pseudo_gradient=SMALL_INT8, **ALONE
    )
    moved = torch.zeros(32, 32)
    with local(model, hook, [optimizer], exact_state=True) as (ddp, attachment):
        for step in range(12):
            generator = torch.Generator().manual_seed(100 * step + rank)
            move = torch.randn(32, 32, generator=generator)
            one_step(ddp, optimizer, {"weight": move})
            moved += move
        state = attachment.state_dict()["hook"]["state"]
        entry = state["entries"]["weight"]
        residual = state["pseudo_gradient"]["state"]["entries"]["weight"]["residual"]
        return entry["anchor"] - entry["average"], residual.mean(dim=0).view(-1), moved.view(-1)


def test_error_feedback_loses_nothing(run):
    results = run(fed_back)
    common, residual, _ = results[0]
    moved = sum(own for *_, own in results) / 2
    assert residual.norm() > 1e-3 * moved.norm()
    torch.testing.assert_close(common - residual, -moved, rtol=0, atol=1e-4)
