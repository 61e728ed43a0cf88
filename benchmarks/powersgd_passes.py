"""Where the time of a PowerSGD step goes: what each of PyTorch's operators takes, in one process that sends nothing.

8 x Linear(1024, 1024), 33.6 MB of gradients, on one core; on a GPU 8 x Linear(4096, 4096). Milliseconds per step by
PyTorch's profiler, and what the operator does to the gradients and the memory. Profiling itself makes small operators
slower.

    python benchmarks/powersgd_passes.py > benchmarks/results/powersgd_passes.txt
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from netns import pin
from records import command
from torch.profiler import profile

import lightning_commhooks as lc
from lightning_commhooks.collectives.group import Group
from lightning_commhooks.interface.precision import all_finite

WARM_UP, STEPS = 6, 20
# No device is waited for to know.
FINITE = torch.tensor(True)
# The work of each operator.
PASSES = {
    "aten::add_": "adds the gradient to the residual; in the cache: subtracts the result from the residual",
    "aten::addmm_": "in the cache: Q = M^T P in a step that begins with P",
    "aten::mm": "in the cache: P = M Q; reads the residual for Q; above rank 1, writes P Q^T to the gradient",
    "aten::mul": "rank 1: writes P Q^T to the gradient",
    "aten::linalg_qr": "orthonormal rows",
}
# There all matrices of a shape are multiplied at once.
PASSES_ON_A_GPU = {
    "aten::add_": "adds the gradient to the residual; subtracts the result from the residual",
    "aten::bmm": "reads the residual, for P and for Q, or for one of them",
    "aten::mm": "above rank 1: writes P Q^T to the gradient",
    "aten::mul": "rank 1: writes P Q^T to the gradient",
    "aten::linalg_qr": "orthonormal rows",
}
SIZES = {"cpu": 1024, "cuda": 4096}


def run(bound: lc.BoundHook, flat: torch.Tensor, slots: tuple[lc.Slot, ...], steps: range) -> float:
    """Seconds of a step, median; on a GPU the mean, without waiting for each."""
    seconds = []
    begin = time.perf_counter()
    for step in steps:
        start = time.perf_counter()
        bucket = lc.Bucket(flat=flat, index=0, is_last=True, step=step, slots=slots)
        if bound.group.finish(bound.reduce(bucket, bound.group)) is None:
            all_finite(flat)  # by the runtime
        bound.end_step(FINITE)
        seconds.append(time.perf_counter() - start)
    if not flat.is_cuda:
        return statistics.median(seconds)
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / len(steps)


def copy_ms(flat: torch.Tensor) -> float:
    """Milliseconds in which the device copies the gradients."""
    target = torch.empty_like(flat)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    target.copy_(flat)
    begin.record()
    for _ in range(STEPS):
        target.copy_(flat)
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / STEPS


def report(rank: int, num_iters: int, flat: torch.Tensor, slots: tuple[lc.Slot, ...]) -> None:
    """Profile a configuration, print what each operator takes."""
    hook = lc.PowerSGD(matrix_approximation_rank=rank, start_powerSGD_iter=0, num_iters_per_step=num_iters)
    with torch.no_grad():
        bound = hook.bind(Group(None, device=flat.device))
        run(bound, flat, slots, range(WARM_UP))
        ms = 1e3 * run(bound, flat, slots, range(WARM_UP, WARM_UP + STEPS))
        with profile() as profiled:
            run(bound, flat, slots, range(WARM_UP + STEPS, WARM_UP + 2 * STEPS))
    print(f"\nrank {rank}, num_iters_per_step={num_iters}: {ms:.3g} ms a step without the profiler")
    passes = PASSES_ON_A_GPU if flat.is_cuda else PASSES
    rows = profiled.key_averages()
    if flat.is_cuda:  # of operators only: kernels have rows of their own
        taken = {row.key: row.self_device_time_total / 1e3 / STEPS for row in rows if row.key.startswith("aten::")}
    else:
        taken = {row.key: row.self_cpu_time_total / 1e3 / STEPS for row in rows}
    for key, what in passes.items():
        if taken.get(key, 0) >= 0.01 * ms:
            print(f"{taken[key]:>8.3f} ms  {key:<16}{what}")
    print(f"{sum(ms for key, ms in taken.items() if key not in passes):>8.3f} ms  all others")


def main() -> None:
    """Profile ranks 1 and 4, two iterations a step and one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=SIZES)
    device = torch.device(parser.parse_args().device)
    size = SIZES[device.type]
    slots = tuple(lc.Slot(f"{i}.weight", (size, size), i * size**2) for i in range(8))
    flat = torch.randn(8 * size**2, device=device)
    print(f"$ {command()}\n# torch {torch.__version__}", end="")
    if device.type == "cuda":
        print(f", {torch.cuda.get_device_name()}; a copy of the gradients takes {copy_ms(flat):.3f} ms", end="")
    else:
        pin(0)
        torch.set_num_threads(1)
    print()
    for rank in (1, 4):
        for num_iters in (2, 1):
            report(rank, num_iters, flat, slots)


if __name__ == "__main__":
    main()
