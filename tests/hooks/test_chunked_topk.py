"""`chunked_topk` and `int2`, on gradients and on the moves of DiLoCo, against plain Python that follows the papers."""

import pytest
import torch
from driver import attached, backward, closing_texts
from local_sgd_driver import ALONE, local

import lightning_commhooks as lc

SHAPES = {"weight": (10, 30), "small": (3, 5), "bias": (70,)}
K, CHUNK, DECAY = 8, 64, 0.9
HOOK = lc.ChunkedTopK(k=K, chunk_size=CHUNK, decay=DECAY, compress_1d=True)


def two_bits(numbers):
    """A list of numbers as signs and one of two magnitudes, which travel in float32."""
    sizes = [abs(number) for number in numbers]
    border = sum(sizes) / len(sizes)
    levels = {}
    for is_large in (False, True):
        own = [size for size in sizes if (size > border) == is_large]
        mean = torch.tensor(sum(own) / len(own) if own else 0.0, dtype=torch.float64)
        levels[is_large] = mean.float().item()
    return [(-1 if number < 0 else 1) * levels[abs(number) > border] for number in numbers]


def sparse(flat, chunk=CHUNK, k=K):
    """What of a flat tensor is sent: the k largest of each chunk, filled up with zeros, in 2 bit."""
    numbers, sent = flat.tolist(), [0.0] * flat.numel()
    for first in range(0, len(numbers), chunk):
        own = numbers[first : first + chunk] + [0.0] * max(0, first + chunk - len(numbers))
        places = sorted(range(chunk), key=lambda i: -abs(own[i]))[:k]
        for place, value in zip(places, two_bits([own[i] for i in places]), strict=True):
            if first + place < len(sent):
                sent[first + place] = value
    return torch.tensor(sent, dtype=flat.dtype)


def gradient(rank, step, shapes=SHAPES):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


def averaged(rank, world, hook, steps):
    with attached(hook, SHAPES, dtype=torch.float64) as (ddp, attachment):
        means = [backward(ddp, gradient(rank, step)) for step in range(steps)]
        residuals = {name: p.get("residual") for name, p in entries(attachment).items()}
        return means, residuals


def entries(attachment):
    return attachment.state_dict()["hook"]["state"]["entries"]


def test_gradients_are_those_of_the_reference(run, world):
    """A residual that decays, what is sent taken from it, and the mean of what was sent."""
    zeros = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    residuals = [dict(zeros) for _ in range(world)]
    expected = []
    for step in range(4):
        sums = {name: zero.clone() for name, zero in zeros.items()}
        for rank in range(world):
            for name, own in gradient(rank, step).items():
                total = DECAY * residuals[rank][name] + own
                sent = sparse(total.flatten()).view(total.shape) if total.numel() >= CHUNK else total
                residuals[rank][name] = total - sent
                sums[name] += sent
        expected.append({name: total / world for name, total in sums.items()})
    for means, saved in run(averaged, HOOK, 4, world=world):
        for step, mean in enumerate(means):
            torch.testing.assert_close(mean, expected[step], rtol=0, atol=1e-12, msg=f"step {step}")
        for name in ("weight", "bias"):
            mean = sum(own[name] for own in residuals) / world
            torch.testing.assert_close(saved[name].view(SHAPES[name]), mean, rtol=0, atol=1e-12)


def test_two_bits_are_those_of_the_reference(run):
    hook = lc.Int2(block_size=16, min_bytes=0, compress_1d=True, use_error_feedback=False)
    for means, _ in run(averaged, hook, 1):
        for name, mean in means[0].items():
            total = 0
            for rank in range(2):
                flat = gradient(rank, 0)[name].flatten()
                sent = flat if flat.numel() < 16 else torch.tensor([], dtype=torch.float64)
                for first in range(0, flat.numel() if not sent.numel() else 0, 16):
                    own = flat[first : first + 16].tolist()
                    block = two_bits(own + [0.0] * (16 - len(own)))[: len(own)]
                    sent = torch.cat([sent, torch.tensor(block, dtype=torch.float64)])
                total = total + sent.view(mean.shape) / 2
            torch.testing.assert_close(mean, total, rtol=0, atol=1e-12, msg=name)


STEPS, PERIOD = 12, 3


def trained(rank, world, delay):
    """Parameters after each step of SGD."""
    model = torch.nn.ParameterDict(
        {name: torch.nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for name, shape in SHAPES.items()}
    )
    optimizer, after = torch.optim.SGD(model.parameters(), lr=0.1), []
    sparseloco = {"pseudo_gradient": HOOK, "outer_momentum": 0, "outer_lr": 1, "delay": delay, "mixing": 0}
    with local(Sum(model), lc.DiLoCo(period=PERIOD, **sparseloco, **ALONE), [optimizer]) as (ddp, _):
        for step in range(STEPS):
            optimizer.zero_grad()
            ddp(gradient(rank, step)).backward()
            optimizer.step()
            after.append({name: p.detach().clone() for name, p in model.items()})
    return after


class Sum(torch.nn.Module):
    """Its gradients are what it is given."""

    def __init__(self, parameters):
        super().__init__()
        self.parameters_ = parameters

    def forward(self, gradients):
        return sum((p * gradients[name]).sum() for name, p in self.parameters_.items())


def sparseloco(world, delay):
    """Sarfi et al. 2025, algorithm 1, with plain SGD inside; with a delay, what is sent is applied so much later."""
    zeros = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    common = {name: zero.clone() for name, zero in zeros.items()}
    own = [{name: zero.clone() for name, zero in zeros.items()} for _ in range(world)]
    feedback = [{name: zero.clone() for name, zero in zeros.items()} for _ in range(world)]
    under_way, trajectory = None, []
    for step in range(STEPS):
        for rank in range(world):
            for name, grad in gradient(rank, step).items():
                own[rank][name] = own[rank][name] - 0.1 * grad
        if (step + 1 + delay) % PERIOD == 0:
            under_way = {name: zero.clone() for name, zero in zeros.items()}
            for rank in range(world):
                for name, p in own[rank].items():
                    # In place of outer momentum the move is added to what decays and was not sent.
                    total = DECAY * feedback[rank][name] + common[name] - p
                    sent = sparse(total.flatten()).view(total.shape) if total.numel() >= CHUNK else total
                    feedback[rank][name] = total - sent
                    under_way[name] += sent / world
        if (step + 1) % PERIOD == 0 and under_way is not None:
            for name in common:
                common[name] = common[name] - under_way[name]
            for rank in range(world):
                own[rank] = {name: p.clone() for name, p in common.items()}
        trajectory.append([dict(parameters) for parameters in own])
    return trajectory


@pytest.mark.parametrize(("delay", "world"), [(0, 4), (1, 2)])
def test_moves_are_those_of_sparseloco(run, world, delay):
    expected = sparseloco(world, delay)
    for rank, after in enumerate(run(trained, delay, world=world)):
        for step, parameters in enumerate(after):
            where = f"step {step}, rank {rank}"
            torch.testing.assert_close(parameters, expected[step][rank], rtol=0, atol=1e-12, msg=where)


def test_names_of_diloco_stand_for_these_hooks():
    from lightning_commhooks.hooks._pseudo_gradients import pseudo_gradient_hook

    assert pseudo_gradient_hook("topk", False) == pseudo_gradient_hook("topk", True) == lc.ChunkedTopK(compress_1d=True)
    int2 = lc.Int2(compress_1d=True, min_bytes=0)
    assert pseudo_gradient_hook("int2", True) == int2


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"k": 12}, "k must be a multiple of 8 up to chunk_size=4096, got 12"),
        ({"k": 128, "chunk_size": 64}, "k must be a multiple of 8 up to chunk_size=64, got 128"),
        ({"chunk_size": 8192}, "chunk_size must be at most 4096, got 8192"),
        ({"decay": 0}, "decay must be above 0 and up to 1, got 0"),
        ({"compress_1d": 1}, "compress_1d must be True or False, got 1"),
    ],
)
def test_options_are_validated(options, text):
    with pytest.raises(ValueError, match=text):
        lc.ChunkedTopK(**options)


def said(rank, world, hook):
    """What is said at the end, and how many steps were not compressed."""
    with attached(hook, SHAPES) as (ddp, attachment):
        backward(ddp, {name: own.float() for name, own in gradient(rank, 0).items()})
        return closing_texts(attachment), attachment.steps_not_compressed()


def test_a_model_without_a_chunk_says_so(run):
    (texts, steps), _ = run(said, lc.ChunkedTopK())
    assert list(steps.values()) == [1]
    assert "compresses nothing, no gradient has chunk_size=4096 elements" in texts[0]


def test_a_model_with_chunks_says_nothing(run):
    assert run(said, HOOK) == [([], {})] * 2
