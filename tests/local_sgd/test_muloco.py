"""MuLoCo: DiLoCo over Muon for matrices and AdamW for the rest. What DiLoCo does with moves is in test_local_sgd.py."""

import torch
from local_sgd_driver import ALONE, copied, local, same, through_a_file
from torch import nn

import lightning_commhooks as lc

PERIOD, STEPS, SAVED_AT = 3, 12, 7


def make():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
    matrices = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]
    return model, [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01)]


def resumed(rank, world):
    """Parameters and momentum at the end of a run, whole, and saved and continued after a step within a period."""
    ends = []
    hook = lc.DiLoCo(period=PERIOD, pseudo_gradient="int2", error_feedback=True, **ALONE)
    for parts in ([range(STEPS)], [range(SAVED_AT), range(SAVED_AT, STEPS)]):
        saved = None
        for numbers in parts:
            model, optimizers = make()
            if saved is not None:
                model.load_state_dict(saved[0])
                for optimizer, state in zip(optimizers, saved[1], strict=True):
                    optimizer.load_state_dict(state)
            with local(model, hook, optimizers, exact_state=True) as (ddp, attachment):
                if saved is not None:
                    attachment.load_state_dict(saved[2])
                for step in numbers:
                    ddp.zero_grad()
                    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * step + rank))
                    (ddp(x) - x.sin()).square().mean().backward()
                    for optimizer in optimizers:
                        optimizer.step()
                saved = (
                    copied(model.state_dict().items()),
                    [optimizer.state_dict() for optimizer in optimizers],
                    through_a_file(attachment.state_dict()),
                )
                averagings = attachment.metrics()["averagings"]
        momentum = {str(i): own["momentum_buffer"] for i, own in saved[1][0]["state"].items()}
        ends.append(({**saved[0], **momentum}, averagings))
    return ends


def test_muon_resumes_within_a_period(run):
    for (whole, averagings), (parts, _) in run(resumed):
        assert averagings == STEPS // PERIOD, "of the model, not of each optimizer"
        assert same(whole, parts)
