"""Cost of a step above `noop` on GPUs: our hooks against PyTorch's, side by side in one run.

A rank for each GPU over NCCL. With one, nothing is sent: what is measured is what a hook computes, and what it costs
the host. PyTorch's hooks then have one rank; ours have two, of which one is emulated: a copy of what it would send. The
variants take turns; reported are medians over rounds. `ms` is the device's time from the first kernel of a step to the
last, `host` what the host needs to launch them, `kernels` how many there are; `waits` is yes where the host waits for
the device within a step, by PyTorch's `set_sync_debug_mode`.

    python benchmarks/cuda_step.py
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings

import cuda_ranks
import torch
import torch.distributed as dist
from cuda_ranks import step
from cuda_trace import device_work
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import lightning_commhooks as lc


def low_rank(rank: int, num_iters: int = 2) -> lc.PowerSGD:
    """PowerSGD from the third step on, as PyTorch's at the earliest."""
    return lc.PowerSGD(start_powerSGD_iter=2, matrix_approximation_rank=rank, num_iters_per_step=num_iters)


# By name: a hook, and the one of PyTorch's that it is compared with.
VARIANTS: dict[str, tuple[lc.CommHook | str | None, str]] = {
    "DDP": (None, ""),
    "noop": ("noop", ""),
    "allreduce": ("allreduce", ""),
    "stock fp16": ("stock fp16", ""),
    "fp16": ("fp16", "stock fp16"),
    "stock bf16": ("stock bf16", ""),
    "bf16": ("bf16", "stock bf16"),
    "bf16, float32 sums": (lc.BF16(accumulate_dtype="float32"), "stock bf16"),
    "int8": ("int8", "stock fp16"),
    "int4": ("int4", "stock fp16"),
    "int4 hadamard": (lc.Int4(rotation="hadamard"), "stock fp16"),
    "fp8": ("fp8", "stock fp16"),
    "stock powersgd-1": ("stock powersgd-1", ""),
    "powersgd-1": (low_rank(1), "stock powersgd-1"),
    "powersgd-1, half": (low_rank(1, num_iters=1), "stock powersgd-1"),
    "stock powersgd-4": ("stock powersgd-4", ""),
    "powersgd-4": (low_rank(4), "stock powersgd-4"),
    "powersgd-4, half": (low_rank(4, num_iters=1), "stock powersgd-4"),
}


def milliseconds(model: DistributedDataParallel, data: torch.Tensor, steps: int) -> tuple[float, float]:
    """Time of a step on the device, and on the host."""
    dist.barrier(device_ids=[data.device.index])
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    start = time.perf_counter()
    for _ in range(steps):
        step(model, data)
    host = time.perf_counter() - start
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / steps, host / steps * 1e3


def num_kernels(model: DistributedDataParallel, data: torch.Tensor) -> int:
    """Kernels and copies of one step."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step(model, data)
        torch.cuda.synchronize()
    return len(device_work(profiler))


def waits(model: DistributedDataParallel, data: torch.Tensor) -> str:
    """Whether the host waits for the device within a step."""
    # Not "error": a rank that raises leaves its peers in a collective.
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step(model, data)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return "yes" if any("synchronizing" in str(warning.message) for warning in caught) else "no"


def measure(rank: int, world: int, args: argparse.Namespace) -> None:
    """Time the variants in turn; rank 0 prints."""
    device = torch.device("cuda", rank)
    data = torch.randn(args.batch, args.size, device=device)
    models = {name: cuda_ranks.make(hook, args.size, args.layers, device) for name, (hook, _) in VARIANTS.items()}
    for model in models.values():
        for _ in range(6):
            step(model, data)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    for _ in range(args.rounds):
        for name, model in models.items():
            times[name].append(milliseconds(model, data, args.steps))
    others = {name: (num_kernels(model, data), waits(model, data)) for name, model in models.items()}
    if rank == 0:
        numel = args.layers * args.size * (args.size + 1)
        what = f"{args.layers} x Linear({args.size}, {args.size}), {numel / 1e6:.0f} M parameters, batch {args.batch}"
        print(cuda_ranks.head(world, what))
        report(
            {name: [statistics.median(part) for part in zip(*of, strict=True)] for name, of in times.items()}, others
        )


def report(medians: dict[str, list[float]], others: dict[str, tuple[int, str]]) -> None:
    """Print the table; `medians` are milliseconds on the device and on the host."""
    print(f"{'hook':<20}{'ms':>8}{'above noop':>12}{'of stock':>10}{'host ms':>9}{'kernels':>9}{'waits':>7}")
    above = {name: ms - medians["noop"][0] for name, (ms, _) in medians.items()}
    for name, (ms, host) in medians.items():
        peer = VARIANTS[name][1]
        # Less than noop's own noise has no ratio.
        ratio = f"{above[name] / above[peer]:.2f}" if peer and above[peer] > 0.02 * medians["noop"][0] else ""
        kernels, waiting = others[name]
        print(f"{name:<20}{ms:>8.3f}{above[name]:>12.3f}{ratio:>10}{host:>9.3f}{kernels:>9}{waiting:>7}")
    print("of stock: of the time above noop of PyTorch's hook; int8, int4 and fp8 against its fp16")


def main() -> None:
    """Parse arguments and start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, help="rows and columns of each matrix")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=10, help="steps per variant and round")
    args = parser.parse_args()
    args.size = args.size or cuda_ranks.size()
    cuda_ranks.run(measure, args)


if __name__ == "__main__":
    main()
