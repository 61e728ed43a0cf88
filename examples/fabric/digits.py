"""Train on scikit-learn's digits with Fabric and a communication hook.

In two processes:

    python examples/fabric/digits.py --hook powersgd --devices 2
"""

from __future__ import annotations

import argparse

import torch
from lightning.fabric import Fabric
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from lightning_commhooks import CompressedDDPFabricStrategy, PostLocalSGD, PowerSGD, available_hooks


def main() -> None:
    """Train, test, and print the bytes sent."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hook", default="powersgd", choices=available_hooks())
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=20)
    args = parser.parse_args()

    # Start early in this short run; otherwise a name is enough.
    configured = {
        "powersgd": PowerSGD(matrix_approximation_rank=2, start_powerSGD_iter=10),
        "post_localsgd": PostLocalSGD(start_localSGD_iter=50, post_local_gradient_allreduce=False),
    }
    strategy = CompressedDDPFabricStrategy(hook=configured.get(args.hook, args.hook))
    on_gpu = torch.cuda.device_count() >= args.devices
    fabric = Fabric(accelerator="gpu" if on_gpu else "cpu", devices=args.devices, strategy=strategy)
    fabric.launch()
    fabric.seed_everything(0)

    x, y = map(torch.as_tensor, load_digits(return_X_y=True))
    train_set, test_set = random_split(TensorDataset(x.float() / 16, y), [1437, 360])
    network = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    model, optimizer = fabric.setup(network, torch.optim.Adam(network.parameters(), lr=1e-3))
    train, test = fabric.setup_dataloaders(
        DataLoader(train_set, batch_size=32, shuffle=True, drop_last=True), DataLoader(test_set, batch_size=60)
    )
    for _ in range(args.epochs):
        for images, labels in train:
            optimizer.zero_grad()
            fabric.backward(nn.functional.cross_entropy(model(images), labels))
            optimizer.step()

    fabric.barrier()  # with local SGD, the average of all processes is in place from here on
    model.eval()
    with torch.no_grad():
        right = sum(((model(images).argmax(dim=1) == labels).sum() for images, labels in test), torch.tensor(0))
    accuracy = fabric.all_reduce(right, reduce_op="sum") / 360
    metrics = strategy.attachments[0].metrics()
    fabric.print(
        f"{args.hook}: test accuracy {accuracy:.1%}, {metrics['bytes_sent'] / metrics['steps']:,.0f} bytes sent per "
        f"step, {metrics['compression_ratio']:.1f}x less than dense"
    )


if __name__ == "__main__":
    main()
