"""A small regression in float64, other data on each rank; nothing but torch."""

import torch


def make_model(seed=3):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).double()


def batch(rank, number):
    generator = torch.Generator().manual_seed(1000 * number + rank)
    return torch.randn(4, 6, generator=generator, dtype=torch.float64)


def loss(model, x):
    return (model(x) - x[:, :3].sin() * 2).square().mean()
