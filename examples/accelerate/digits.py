"""Train on scikit-learn's digits with Accelerate and a communication hook.

In two processes:

    accelerate launch --num_processes 2 --multi_gpu examples/accelerate/digits.py --hook powersgd
    python -m torch.distributed.run --nproc-per-node 2 examples/accelerate/digits.py --cpu --hook powersgd

The first one needs two GPUs.

Without `--hook` the environment variables COMMHOOKS_HOOK and COMMHOOKS_OPTIONS choose it.
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from accelerate_integration import CommHookKwargs
from lightning_commhooks import PostLocalSGD, PowerSGD, available_hooks


def main() -> None:
    """Train, test, and print the bytes sent."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hook", choices=available_hooks())
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()

    # Start early in this short run; otherwise a name is enough.
    configured = {
        "powersgd": PowerSGD(matrix_approximation_rank=2, start_powerSGD_iter=10),
        "post_localsgd": PostLocalSGD(start_localSGD_iter=50, post_local_gradient_allreduce=False),
    }
    # Only these two lines are new.
    handler = CommHookKwargs(hook=configured.get(args.hook, args.hook))
    accelerator = Accelerator(cpu=args.cpu, kwargs_handlers=[handler])

    torch.manual_seed(0)
    x, y = map(torch.as_tensor, load_digits(return_X_y=True))
    train_set, test_set = random_split(TensorDataset(x.float() / 16, y), [1437, 360])
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    model, optimizer, train, test = accelerator.prepare(
        model,
        torch.optim.Adam(model.parameters(), lr=1e-3),
        DataLoader(train_set, batch_size=32, shuffle=True, drop_last=True),
        DataLoader(test_set, batch_size=60),
    )
    for _ in range(args.epochs):
        for images, labels in train:
            optimizer.zero_grad()
            accelerator.backward(nn.functional.cross_entropy(model(images), labels))
            optimizer.step()

    accelerator.wait_for_everyone()  # with local SGD, the average of all processes is in place from here on
    model.eval()
    right = 0
    with torch.no_grad():
        for images, labels in test:
            predicted, labels = accelerator.gather_for_metrics((model(images).argmax(dim=1), labels))
            right += (predicted == labels).sum().item()
    metrics = handler.attachments[0].metrics()
    accelerator.print(
        f"{handler.attachments[0].name}: test accuracy {right / 360:.1%}, "
        f"{metrics['bytes_sent'] / metrics['steps']:,.0f} bytes sent per step, "
        f"{metrics['compression_ratio']:.1f}x less than dense"
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
