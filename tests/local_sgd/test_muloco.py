"""MuLoCo: DiLoCo over Muon for matrices and AdamW for the rest, against a float64 simulation in one process."""

import pytest
import torch
from local_sgd_driver import ALONE, OUTER, copied, local, same, through_a_file
from local_sgd_reference import Simulation
from torch import nn

import lightning_commhooks as lc

PERIOD, STEPS = 3, 12


class Muon64(torch.optim.Optimizer):
    """Muon, Jordan et al. 2024, in the precision of its parameters; `torch.optim.Muon` iterates in bfloat16."""

    def __init__(self, params, lr=0.02, momentum=0.95):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                buffer.lerp_(p.grad, 1 - group["momentum"])
                x = p.grad.lerp(buffer, group["momentum"])
                x = x / x.norm().clamp(min=1e-7)
                for _ in range(5):
                    gram = x @ x.T
                    x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
                p.add_(x, alpha=-0.2 * group["lr"] * max(p.shape) ** 0.5)


def make_model():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)).double()


def make_optimizers(model, muon=Muon64):
    matrices = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]
    return [muon(matrices), torch.optim.AdamW(rest, lr=0.01)]


def batch(rank, step):
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)


def loss(model, x, part=None):
    return (model(x) - x.sin()).square().mean()


def steps(ddp, optimizers, rank, numbers):
    for step in numbers:
        ddp.zero_grad()
        loss(ddp, batch(rank, step)).backward()
        for optimizer in optimizers:
            optimizer.step()


def train(rank, world, pseudo_gradient):
    """Parameters after each outer step, and the number of averages."""
    model = make_model()
    optimizers, after = make_optimizers(model), []
    hook = lc.DiLoCo(period=PERIOD, pseudo_gradient=pseudo_gradient, error_feedback=pseudo_gradient != "fp32", **ALONE)
    with local(model, hook, optimizers) as (ddp, attachment):
        for start in range(0, STEPS, PERIOD):
            steps(ddp, optimizers, rank, range(start, start + PERIOD))
            after.append(copied(model.named_parameters()))
        return after, attachment.metrics()["averagings"]


def in_2_bits(flat):
    """A sign and one of two magnitudes for each block of 256 numbers; the last, smaller block is sent as it is."""
    whole = flat.numel() // 256 * 256
    blocks = flat[:whole].view(-1, 256)
    magnitude = blocks.abs()
    is_large = magnitude > magnitude.mean(dim=1, keepdim=True)
    large = (magnitude * is_large).sum(dim=1, keepdim=True) / is_large.sum(dim=1, keepdim=True)
    small = (magnitude * ~is_large).sum(dim=1, keepdim=True) / (~is_large).sum(dim=1, keepdim=True)
    sent = torch.where(is_large, large, small) * blocks.sign()
    return torch.cat([sent.reshape(-1), flat[whole:]])


class Compressed(Simulation):
    """MuLoCo, algorithm 1, of two ranks: `E_k += move`, send `Q(E_k)`, keep `E_k - Q(E_k)`."""

    def _outer_step(self, name):
        anchor = self.anchor.get_parameter(name)
        self.residuals = getattr(self, "residuals", {})
        sent = []
        for rank, model in enumerate(self.models):
            move = (anchor.detach() - model.get_parameter(name).detach()).reshape(-1)
            owed = move + self.residuals.get((rank, name), 0)
            sent.append(in_2_bits(owed))
            self.residuals[rank, name] = owed - sent[-1]
        self.moves[name] = (sum(sent) / len(sent)).view_as(anchor)
        super()._outer_step(name)


def simulate(kind, world):
    simulation = kind(make_model(), world, make_optimizers, loss, periods={PERIOD: world}, outer=OUTER)
    after = []
    for step in range(STEPS):
        simulation.backward([[batch(rank, step)] for rank in range(world)], None)
        for k in (0, 1):
            simulation.step(k)
        if (step + 1) % PERIOD == 0:
            after.append(copied(simulation.models[0].named_parameters()))
    return after


@pytest.mark.parametrize(
    ("world", "pseudo_gradient", "kind"), [(2, "fp32", Simulation), (4, "fp32", Simulation), (2, "int2", Compressed)]
)
def test_trajectory_is_that_of_the_simulation(run, world, pseudo_gradient, kind):
    expected = simulate(kind, world)
    for after, averagings in run(train, pseudo_gradient, world=world):
        assert averagings == STEPS // PERIOD  # of the model, not of each optimizer
        for own, theirs in zip(after, expected, strict=True):
            for name, value in own.items():
                torch.testing.assert_close(value, theirs[name], rtol=0, atol=1e-6, msg=name)


def resumed(rank, world):
    """Parameters and momentum at the end of a run, whole, and saved and continued after a step within a period."""
    ends, saved_at = [], 7
    hook = lc.DiLoCo(period=PERIOD, pseudo_gradient="int2", error_feedback=True, **ALONE)
    for parts in ([range(STEPS)], [range(saved_at), range(saved_at, STEPS)]):
        saved = None
        for numbers in parts:
            model = make_model().float()
            optimizers = make_optimizers(model, torch.optim.Muon)
            if saved is not None:
                model.load_state_dict(saved[0])
                for optimizer, state in zip(optimizers, saved[1], strict=True):
                    optimizer.load_state_dict(state)
            with local(model, hook, optimizers, exact_state=True) as (ddp, attachment):
                if saved is not None:
                    attachment.load_state_dict(saved[2])
                for step in numbers:
                    ddp.zero_grad()
                    loss(ddp, batch(rank, step).float()).backward()
                    for optimizer in optimizers:
                        optimizer.step()
                saved = (
                    copied(model.state_dict().items()),
                    [optimizer.state_dict() for optimizer in optimizers],
                    through_a_file(attachment.state_dict()),
                )
        momentum = {str(i): own["momentum_buffer"] for i, own in saved[1][0]["state"].items()}
        ends.append({**saved[0], **momentum})
    return ends


def test_muon_resumes_within_a_period(run):
    for whole, parts in run(resumed):
        assert same(whole, parts)
