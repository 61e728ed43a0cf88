"""Plain PyTorch DDP with a communication hook: needs torch only.

    torchrun --nproc-per-node 2 examples/pytorch/digits.py --hook powersgd

Trains on scikit-learn's digits where it is installed, else on synthetic data.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_commhooks import DiLoCo, PostLocalSGD, PowerSGD, attach, available_hooks


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
    parser.add_argument("--hook", default="powersgd", choices=available_hooks())
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()

    # Start early in this short run. Each rank takes local steps; by default, the GPUs of a node average gradients.
    alone = {"start_localSGD_iter": 50, "post_local_gradient_allreduce": False}
    configured = {
        "powersgd": PowerSGD(matrix_approximation_rank=2, start_powerSGD_iter=10),
        "post_localsgd": PostLocalSGD(**alone),
        "diloco": DiLoCo(period=25, **alone),
    }

    on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    model = DistributedDataParallel(model.to(device))

    x, y = (tensor.to(device) for tensor in load_data())
    x_test, y_test, x, y = x[:360], y[:360], x[360 + rank :: world_size], y[360 + rank :: world_size]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    # Only this line is new. Any name works: attach(model, "bf16"). Local SGD averages models after optimizer steps, so
    # it needs the optimizers.
    hook = configured.get(args.hook, args.hook)
    attachment = attach(model, hook, optimizers=[optimizer])

    for step in range(args.steps):
        batch = torch.arange(32 * step, 32 * (step + 1), device=device) % len(x)
        loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    attachment.average_weights()  # does nothing but with local SGD
    if rank == 0:
        with torch.no_grad():
            accuracy = (model.module(x_test).argmax(dim=1) == y_test).float().mean()
        metrics = attachment.metrics()
        print(
            f"{args.hook}: test accuracy {accuracy:.1%}, {metrics['bytes_sent'] / metrics['steps']:,.0f} bytes sent "
            f"per step, {metrics['compression_ratio']:.1f}x less than dense"
        )
    attachment.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
