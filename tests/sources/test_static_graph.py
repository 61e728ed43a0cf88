"""Static graphs: in the first backward DDP hands over all buckets at its end, each with index 0, none as the last."""

import pytest
import torch
from pool import ignoring
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lightning_commhooks as lc

STEPS = 5
HOOKS = {
    "allreduce": lc.AllReduce(),
    "int8": lc.Int8(min_bytes=0, block_size=16),
    "powersgd": lc.PowerSGD(start_powerSGD_iter=2, matrix_approximation_rank=1, min_compression_rate=1),
}


class TwoDtypes(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(24, 24)
        self.second = nn.Linear(24, 24, dtype=torch.float64)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)).double())


def train(rank, hook):
    torch.manual_seed(0)
    ddp = DistributedDataParallel(TwoDtypes(), static_graph=True)
    attachment = lc.attach(ddp, hook) if hook is not None else None
    gradients, owed, compressed = [], [], []
    for step in range(STEPS):
        x = torch.randn(8, 24, generator=torch.Generator().manual_seed(10 * step + rank))
        ddp(x).square().mean().backward()
        gradients.append([p.grad.clone() for p in ddp.parameters()])
        ddp.zero_grad()
        if attachment is not None:
            owed.append(attachment.residual_norm())
            compressed.append(attachment.metrics()["numel_compressed"])
    metrics = {} if attachment is None else attachment.metrics()
    if attachment is not None:
        with ignoring("training ended"):
            attachment.close()
    return gradients, owed, compressed, metrics


def trained(rank, world, name):
    return train(rank, None)[0], *train(rank, HOOKS[name])


@pytest.mark.parametrize("name", HOOKS)
def test_all_buckets_of_the_first_backward_are_one_step(run, name):
    for plain, gradients, owed, compressed, metrics in run(trained, name):
        assert metrics["steps"] == STEPS
        assert metrics["nonfinite_steps"] == 0
        if name == "allreduce":
            for step, own in zip(plain, gradients, strict=True):
                for expected, found in zip(step, own, strict=True):
                    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
        elif name == "int8":
            assert all(norm > 0 for norm in owed), "what the first step rounds away is kept"
        else:
            assert compressed[:2] == [0, 0]
            assert compressed[2] > 0, "start_powerSGD_iter=2 is the third backward"
