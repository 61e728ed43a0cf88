"""MuLoCo in plain PyTorch: DiLoCo with Muon as the inner optimizer, sent in 2 bits. Needs torch only.

    torchrun --nproc-per-node 2 examples/pytorch/muloco.py

Trains on scikit-learn's digits where it is installed, else on synthetic data.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_commhooks import DiLoCo, attach


def load_data() -> tuple[Tensor, Tensor]:
    """Images, shape `(num_images, 64)`, and labels from 0 to 9, in random order."""
    generator = torch.Generator().manual_seed(0)
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        x = torch.randn(1797, 64, generator=generator)
        y = (x @ torch.randn(64, 10, generator=generator)).argmax(dim=1)
    else:
        x, y = map(torch.as_tensor, load_digits(return_X_y=True))
        x = x.float() / 16
    order = torch.randperm(len(x), generator=generator)
    return x[order], y[order]


def main() -> None:
    """Train, test, and print the bytes sent."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()

    on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    model = DistributedDataParallel(model.to(device))

    x, y = (tensor.to(device) for tensor in load_data())
    x_test, y_test, x, y = x[:360], y[:360], x[360 + rank :: world_size], y[360 + rank :: world_size]

    # Muon is for the matrices inside a model; the first layer, the last one and the biases have AdamW.
    inner = [model.module[2].weight]
    others = [p for p in model.parameters() if p is not inner[0]]
    muon = torch.optim.Muon(inner, lr=1e-3, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(others, lr=1e-3)

    # Each rank takes local steps here; by default, the ranks of a node average their gradients.
    hook = DiLoCo(
        period=25,
        pseudo_gradient="int2",
        error_feedback=True,
        outer_lr=1,
        outer_momentum=0,
        start_localSGD_iter=50,
        post_local_gradient_allreduce=False,
    )
    attachment = attach(model, hook, optimizers=[muon, adamw])

    for step in range(args.steps):
        batch = torch.arange(32 * step, 32 * (step + 1), device=device) % len(x)
        loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
        for optimizer in (muon, adamw):
            optimizer.zero_grad()
        loss.backward()
        for optimizer in (muon, adamw):
            optimizer.step()

    attachment.average_weights()
    if rank == 0:
        with torch.no_grad():
            accuracy = (model.module(x_test).argmax(dim=1) == y_test).float().mean()
        metrics = attachment.metrics()
        print(
            f"diloco: test accuracy {accuracy:.1%}, {metrics['averagings']} averages of the model, "
            f"{metrics['compression_ratio']:.1f}x less than dense"
        )
    attachment.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
