"""A long run of every hook: memory stays constant, and all ranks have the same parameters at the end.

    python benchmarks/soak.py --ranks 4 --steps 5000

Each hook trains a model of several buckets for that many steps, with a `GradScaler` that overflows now and then and
a `state_dict()` every 1,000 steps. Memory is the resident set size of each process; its slope is the least squares
line through the samples of the second half, when allocators and caches have what they need.
"""

import argparse
import os
import sys
import tempfile
import time
import warnings

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector

import lightning_commhooks as lc

LIMIT_MB = 1.0  # per 1,000 steps
EVERY = 50  # steps between samples
POWERSGD = lc.PowerSGD(start_powerSGD_iter=10, matrix_approximation_rank=2)


def hooks() -> dict[str, lc.CommHook]:
    """Every hook name, and the wrappers."""
    named = {name: lc.get_hook(name) for name in lc.available_hooks()}
    named["powersgd"] = POWERSGD
    named["batched_powersgd"] = lc.BatchedPowerSGD(start_powerSGD_iter=10)
    named |= {name: lc.get_hook(name, min_bytes=0) for name in ("int8", "int4", "fp8")}
    named["per_parameter"] = lc.PerParameter({"0.*": "bf16", "2.*": POWERSGD, "*": lc.Int8(min_bytes=0)})
    alone = {"start_localSGD_iter": 100, "post_local_gradient_allreduce": False}
    named["post_localsgd"] = lc.PostLocalSGD(period=8, **alone)
    named["hierarchical_localsgd"] = lc.HierarchicalLocalSGD(period_group_size_dict={4: 2, 16: None}, **alone)
    named["diloco"] = lc.DiLoCo(period=20, fragments=4, **alone)
    named["cast"] = lc.Cast(POWERSGD, "bf16")
    named["schedule"] = lc.Schedule({0: "bf16", 100: POWERSGD, 3000: "fp16"})
    return named


def resident_mb() -> float:
    """Resident set size of this process."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def train(hook: lc.CommHook, steps: int) -> tuple[list[float], torch.Tensor]:
    """Samples of the memory, and the parameters at the end."""
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (torch.nn.Linear(64, 64), torch.nn.Tanh())]
    ddp = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.02)
    scaler = torch.amp.GradScaler("cpu", growth_interval=200)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    attachment = lc.attach(ddp, hook, grad_scaler=scaler, optimizers=[optimizer])
    generator = torch.Generator().manual_seed(dist.get_rank())
    samples = []
    for step in range(steps):
        x = torch.randn(4, 64, generator=generator)
        loss = F.mse_loss(ddp(x), x) * (float("inf") if step % 500 == 499 and dist.get_rank() == 0 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if step % 1000 == 999:
            attachment.state_dict()
        if step % EVERY == 0:
            samples.append(resident_mb())
    attachment.average_weights()
    attachment.close()
    return samples, parameters_to_vector(ddp.parameters()).detach()


def slope(samples: list[float]) -> float:
    """MB per 1,000 steps, of the second half."""
    late = samples[len(samples) // 2 :]
    return float(np.polyfit(np.arange(len(late)) * EVERY / 1000, late, 1)[0])


def worker(rank: int, world: int, store: str, steps: int, names: list[str]) -> None:
    """Train with one hook after another; rank 0 prints."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="hook='noop' does not average")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    ok = True
    train(lc.AllReduce(), min(steps, 1000))  # what the process itself needs, libraries and allocator
    for name, hook in hooks().items():
        if names and name not in names:
            continue
        start = time.perf_counter()
        samples, mine = train(hook, steps)
        slopes = torch.tensor([slope(samples)])
        dist.all_reduce(slopes, op=dist.ReduceOp.MAX)
        everyone = [torch.empty_like(mine) for _ in range(world)]
        dist.all_gather(everyone, mine)
        same = all(torch.equal(mine, other) for other in everyone) and bool(mine.isfinite().all())
        ok &= slopes.item() < LIMIT_MB and (same or name == "noop")
        if rank == 0:
            minutes = (time.perf_counter() - start) / 60
            agree = "identical" if same else "differ"
            print(f"{name:<18}{slopes.item():>12.3f}{samples[-1]:>10.0f}  {agree:<12}{minutes:>6.1f}", flush=True)
    dist.destroy_process_group()
    sys.exit(0 if ok else 1)


def main() -> None:
    """Parse arguments and start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--hooks", nargs="*", default=[], help="all by default")
    args = parser.parse_args()
    print(f"torch {torch.__version__}, {args.ranks} ranks, {args.steps} steps, limit {LIMIT_MB} MB per 1,000 steps")
    print(f"{'hook':<18}{'MB/1000 steps':>12}{'MB':>9}  {'parameters':<12}{'minutes':>6}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (args.ranks, f"{folder}/store", args.steps, args.hooks), nprocs=args.ranks)


if __name__ == "__main__":
    main()
