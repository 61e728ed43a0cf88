"""Digits with a sharded model: two replicas, each sharded over two ranks, PowerSGD between them.

    torchrun --nproc_per_node=4 examples/fsdp/digits.py
    torchrun --nproc_per_node=4 examples/fsdp/digits.py int8 bf16

The arguments are the hook between replicas and the hook of the reduce-scatter within a replica. On GPUs, use NCCL and
`"cuda"`.
"""

import sys

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from lightning_commhooks import PowerSGD, attach


def main() -> None:
    """Train, and print the bytes sent between replicas."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # equal weights on all ranks
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicas", "shards"))
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    for layer in (*model[::2], model):
        fully_shard(layer, mesh=mesh)

    hook = sys.argv[1] if len(sys.argv) > 1 else PowerSGD(matrix_approximation_rank=4, start_powerSGD_iter=10)
    attachment = attach(model, hook, shard_hook=sys.argv[2] if len(sys.argv) > 2 else None)

    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
    batches = DataLoader(data, batch_size=16, sampler=DistributedSampler(data))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(4):
        for inputs, targets in batches:
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    metrics = attachment.metrics()
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.3f}; {metrics['compression_ratio']:.1f}x fewer bytes between replicas")
    attachment.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
