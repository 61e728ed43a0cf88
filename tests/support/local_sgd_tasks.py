"""What both Lightning's ranks and a simulation in one process train; for local_sgd_lightning_runner.py and its test."""

import torch
from torch import nn

BATCH = 4


def rows(num_batches, seed=5):
    """Data for so many batches on all ranks together."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(BATCH * num_batches, 6, generator=generator, dtype=torch.float64)


def batch_of(data, rank, world, k):
    """The k-th batch of a rank, as `DistributedSampler` deals them out without shuffling."""
    return data[rank::world][BATCH * k : BATCH * (k + 1)]


class Regression(nn.Module):
    def __init__(self, norm=False):
        super().__init__()
        torch.manual_seed(7)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8) if norm else nn.Tanh(), nn.Linear(8, 3)).double()

    def loss(self, x, weight=1.0):
        return weight * (self.net(x) - 2 * x[:, :3].sin()).square().mean()


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.generator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 6)).double()
        self.discriminator = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()

    def loss(self, x, part):
        bce = nn.functional.binary_cross_entropy_with_logits
        ones, zeros = torch.ones(len(x), 1, dtype=x.dtype), torch.zeros(len(x), 1, dtype=x.dtype)
        fake = self.generator(x[:, :3])
        if part == "generator":
            return bce(self.discriminator(fake), ones)
        return bce(self.discriminator(x), ones) + bce(self.discriminator(fake.detach()), zeros)


def make_optimizer(module, kind="momentum"):
    if kind == "adamw":
        return torch.optim.AdamW(module.parameters(), lr=0.02)
    return torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)


def make_optimizers(pair):
    return [make_optimizer(pair.discriminator), make_optimizer(pair.generator, "adamw")]


def schedule(num_steps):
    """`(batch, part, optimizer)` of each step: the generator takes two for three of the discriminator."""
    for k in range(num_steps):
        yield k, "discriminator", 0
        if k % 3 != 1:
            yield k, "generator", 1


def flat(module):
    """Parameters and statistics of BatchNorm."""
    buffers = [b for b in module.buffers() if b.is_floating_point()]
    return torch.cat([t.detach().reshape(-1) for t in [*module.parameters(), *buffers]]).tolist()


def flat_state(states):
    """What SGD with momentum remembers."""
    return torch.cat([state["momentum_buffer"].reshape(-1) for state in states.values()]).tolist()
