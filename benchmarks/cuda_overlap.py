"""What of a hook's time is hidden behind the backward on GPUs: kernels by stream, from a trace of PyTorch's profiler.

A rank for each GPU over NCCL. `others` is the time in which streams beside the model's own are busy: the hook's, and
NCCL's; `beside` the part of it in which the model's is busy, too. The rest is what a step waits for. With one GPU
nothing is sent, plain DDP does nothing there, and the second rank of our hooks is emulated.

    python benchmarks/cuda_overlap.py
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import cuda_ranks
import torch
from cuda_ranks import step
from cuda_step import low_rank
from cuda_trace import beside, device_work
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import lightning_commhooks as lc

HOOKS: dict[str, lc.CommHook | str | None] = {
    "DDP": None,
    "stock bf16": "stock bf16",
    "allreduce": "allreduce",
    "bf16": "bf16",
    "int8": "int8",
    "int4": "int4",
    "stock powersgd-4": "stock powersgd-4",
    "powersgd-4": low_rank(4),
    "powersgd-4, half": low_rank(4, num_iters=1),
}


def profiled(model: DistributedDataParallel, data: torch.Tensor, trace: Path | None) -> tuple[float, float, float]:
    """Milliseconds of a step, of its other streams, and of those beside the model's."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step(model, data)
        torch.cuda.synchronize()
    if trace is not None:
        profiler.export_chrome_trace(str(trace))
    work = device_work(profiler)
    return (max(one.end for one in work) - work[0].begin) / 1e3, *beside(work)


def measure(rank: int, world: int, args: argparse.Namespace) -> None:
    """Profile a step with each hook, and again; rank 0 prints."""
    device = torch.device("cuda", rank)
    data = torch.randn(args.batch, args.size, device=device)
    rows = []
    for name, hook in HOOKS.items():
        model = cuda_ranks.make(hook, args.size, args.layers, device)
        for _ in range(8):
            step(model, data)
        trace = Path(args.traces) / f"{name.replace(' ', '_')}_{rank}.json" if args.traces else None
        found = [profiled(model, data, trace) for _ in range(args.rounds)]
        rows.append((name, [statistics.median(part) for part in zip(*found, strict=True)]))
        del model
    if rank == 0:
        what = f"{args.layers} x Linear({args.size}, {args.size}), batch {args.batch}, medians of {args.rounds} steps"
        print(cuda_ranks.head(world, what))
        print(f"{'hook':<20}{'step ms':>9}{'others ms':>11}{'beside ms':>11}{'hidden':>9}")
        for name, (whole, others, both) in rows:
            hidden = f"{both / others:.2f}" if others else ""
            print(f"{name:<20}{whole:>9.2f}{others:>11.2f}{both:>11.2f}{hidden:>9}")


def main() -> None:
    """Parse arguments and start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, help="rows and columns of each matrix")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--traces", help="a folder for the traces, to look at in a browser (ui.perfetto.dev)")
    args = parser.parse_args()
    args.size = args.size or cuda_ranks.size()
    if args.traces:
        Path(args.traces).mkdir(parents=True, exist_ok=True)
    cuda_ranks.run(measure, args)


if __name__ == "__main__":
    main()
