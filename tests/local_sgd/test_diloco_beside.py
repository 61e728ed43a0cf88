"""DiLoCo that averages beside training, against a simulation in one process, and against torchft's own numbers."""

import copy

import pytest
import torch
import torch.distributed as dist
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


@pytest.mark.parametrize(
    ("delay", "mixing", "eager", "world"),
    [(2, 0.5, False, 2), (3, 0.0, False, 4), (4, 0.0, False, 2), (4, 0.0, True, 4)],
)
def test_trajectory_is_that_of_the_simulation(run, world, delay, mixing, eager):
    options = {"eager": True} if eager else {"delay": delay, "mixing": mixing}
    expected = simulate(world, delay, mixing, eager)
    for rank, after in enumerate(run(train, options, world=world)):
        for step, own in enumerate(after):
            torch.testing.assert_close(own, expected[step][rank], rtol=0, atol=1e-12, msg=f"step {step}, rank {rank}")


def wrapped(rank, world):
    """Parameters at the end, of a hook by itself and within wrappers."""
    hook = lc.DiLoCo(period=PERIOD, delay=3, fragments=2, **ALONE)
    # Of both linear layers, one after the other, as fragments are.
    halves = {"0.*": lc.DiLoCo(period=PERIOD, delay=2, **ALONE), "*": lc.DiLoCo(period=PERIOD, delay=2, **ALONE)}
    hooks = [hook, lc.Schedule({0: hook}), halves["*"], lc.PerParameter(halves)]
    ends = []
    for one in hooks:
        model, optimizer = make_model()
        with local(model, one, [optimizer]) as (ddp, _):
            steps(ddp, optimizer, rank, range(STEPS))
        ends.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    return ends


def test_wrappers_change_nothing(run):
    for plain, scheduled, whole, halves in run(wrapped):
        assert torch.equal(plain, scheduled)
        torch.testing.assert_close(whole, halves, rtol=0, atol=1e-14)


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


def rewound(rank, world):
    """Where a run ends, and one that goes back to a state while an average is under way."""
    ends = []
    for goes_back in (False, True):
        model, optimizer = make_model()
        with local(model, lc.DiLoCo(period=PERIOD, delay=3, **ALONE), [optimizer], exact_state=True) as (
            ddp,
            attachment,
        ):
            steps(ddp, optimizer, rank, range(7))
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            state = through_a_file(attachment.state_dict())
            if goes_back:
                steps(ddp, optimizer, rank, range(7, 9))
                model.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
                attachment.load_state_dict(state)
            steps(ddp, optimizer, rank, range(7, STEPS))
            ends.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    return ends


def steps(ddp, optimizer, rank, numbers):
    for step in numbers:
        ddp.zero_grad()
        loss(ddp, batch(rank, step)).backward()
        optimizer.step()


def test_going_back_forgets_what_is_under_way(run):
    for whole, again in run(rewound):
        assert torch.equal(whole, again)


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


# Failures ----------------------------------------------------------------------------------------------------


def failing(rank, world, failing, where):
    """The error of a rank, where one of them cannot average what others wait for."""
    model, optimizer = make_model()

    def until_it_fails():
        for step in range(9):
            if rank == failing and where == "closed" and step == 3:
                attachment.close()
            optimizer.zero_grad()
            loss(ddp, batch(rank, step)).backward()
            optimizer.step()

    with local(model, lc.DiLoCo(period=4, delay=2, **ALONE), [optimizer]) as (ddp, attachment):
        if rank == failing and where == "beside":
            attachment.bound._pseudo_gradients.inner.reduce = out_of_numbers
        return error_of(until_it_fails)


def error_of(steps):
    with pytest.raises(lc.HookError) as error:
        steps()
    dist.barrier()  # whoever failed stays until all have
    return str(error.value)


def out_of_numbers(*_):
    raise ArithmeticError("out of numbers")


@pytest.mark.parametrize("where", ["beside", "closed"])
@pytest.mark.parametrize("rank", [0, 1])
def test_failure_beside_training_ends_all_ranks(run, rank, where):
    texts = run(failing, rank, where, timeout=60)
    if where == "beside":
        assert all(f"failed on rank {other}" in text for other, text in enumerate(texts))
    assert ("out of numbers" if where == "beside" else "the communication hook was closed") in texts[rank]


def other_order(rank, world):
    """The error where ranks step their optimizers in different orders."""
    model, gradients = params({"first": (3,), "second": (3,)}, torch.float32)
    optimizers = [torch.optim.SGD([p], lr=1.0) for p in model.parameters()]

    def steps():
        for _ in range(8):
            ddp(gradients).backward()
            for optimizer in optimizers if rank else optimizers[::-1]:
                optimizer.step()

    # Not before the second forward, in which a rank would wait for DDP's own broadcast of the one that has failed.
    with local(model, lc.DiLoCo(period=4, delay=1, **ALONE), optimizers) as (ddp, _):
        return error_of(steps)


def test_ranks_that_average_something_else_are_told(run):
    assert any("ranks called different averaging operations" in text for text in run(other_order, timeout=60))
