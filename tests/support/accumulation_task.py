"""What is accumulated on each host, other data on each rank, and the same in one process; nothing but torch."""

import torch

import lightning_commhooks as lc

NUM_BATCHES, WINDOW, LR, EPOCHS = 10, 4, 0.1, 2
# Of an epoch: the last one is short.
WINDOWS = ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9))
HOOKS = {
    "allreduce": "allreduce",
    "fp16": "fp16",
    # As many ranks as the matrices have.
    "powersgd": lc.PowerSGD(matrix_approximation_rank=8, start_powerSGD_iter=0, min_compression_rate=0.01),
}

# Accumulation, hook and precision of what each host runs.
RUNS = [
    ("mean", "powersgd", "32"),
    ("mean", "allreduce", "64"),
    ("mean", "allreduce", "bf16"),
    ("framework", "allreduce", "64"),
]


def make_model(dtype=torch.float32, seed=3):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    return model.to(dtype)


def batch(rank, i, dtype=torch.float32):
    """Micro-batch `i` of a rank; those of the short window are larger."""
    generator = torch.Generator().manual_seed(1000 * i + rank)
    return (torch.randn(4, 6, generator=generator) * (1.5 if i >= 8 else 1.0)).to(dtype)


def loss(model, x):
    return _of_rows(model, x).mean()


def num_tokens(rank, i):
    return 1 + (5 * rank + 3 * i) % 4


def sum_over_tokens(model, rank, i, dtype=torch.float32):
    """A sum, where `loss` is a mean, over another number of rows in each micro-batch."""
    return _of_rows(model, batch(rank, i, dtype)[: num_tokens(rank, i)]).sum()


def _of_rows(model, x):
    return (model(x) - x[:, :3].sin() * 2).square().mean(1)


def difference(model, before):
    """How far parameters have come from those of a model."""
    pairs = zip(model.parameters(), before.parameters(), strict=True)
    return torch.cat([(p.detach().double() - old.detach().double()).flatten() for p, old in pairs])


def reference(divisor=len, windows=WINDOWS * EPOCHS, world=2, tokens=False, seed=3):
    """What training changes, in float64 in one process: the mean over ranks, each sum divided by `divisor(window)`.

    With `tokens`, the mean over the tokens of all ranks instead.
    """
    model = make_model(seed=seed).double()
    for window in windows:
        micro_batches = [(rank, i) for rank in range(world) for i in window]
        total = sum(num_tokens(*each) for each in micro_batches) if tokens else divisor(window) * world
        for rank, i in micro_batches:
            if tokens:
                value = sum_over_tokens(model, rank, i, torch.float64)
            else:
                value = loss(model, batch(rank, i, torch.float64))
            (value / total).backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= LR * p.grad
                p.grad = None
    return difference(model, make_model(seed=seed).double())


def error(found, expected):
    return float((found - expected).norm() / expected.norm())


def refusal(function, *args, **kwargs):
    """What a call raises, in words."""
    try:
        function(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
