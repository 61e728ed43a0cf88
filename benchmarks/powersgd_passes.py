"""Where the time of a PowerSGD step goes: what each of PyTorch's operators takes, in one process that sends nothing.

8 x Linear(1024, 1024), 33.6 MB of gradients, on one core. Milliseconds per step by PyTorch's profiler, and what the
operator does to the gradients and the memory. Profiling itself makes small operators slower.

    python benchmarks/powersgd_passes.py > benchmarks/results/powersgd_passes.txt
"""

from __future__ import annotations

import statistics
import time

import torch
from netns import pin
from records import command
from torch.profiler import profile

import lightning_commhooks as lc
from lightning_commhooks.collectives.group import Group

WARM_UP, STEPS = 6, 20
# By the operator: what it does.
PASSES = {
    "aten::add": "reads memory and gradient, writes the next memory",
    "aten::addmm_": "in the cache: takes off what was sent last; Q = M^T P in a step that begins with P",
    "aten::mm": "in the cache: P = M Q in a step that begins with Q; above rank 1, writes P Q^T to the gradient",
    "aten::mul": "rank 1: writes P Q^T to the gradient",
    "aten::bmm": "reads the next memory for Q, in a step of two iterations",
    "aten::linalg_qr": "orthonormal rows",
}


def run(bound: lc.BoundHook, flat: torch.Tensor, slots: tuple[lc.Slot, ...], steps: range) -> float:
    """Seconds of a step, median."""
    seconds = []
    for step in steps:
        start = time.perf_counter()
        finite = bound.reduce(flat, lc.Bucket(index=0, is_last=True, step=step, slots=slots))
        assert finite is not None
        bound.end_step(finite)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def main() -> None:
    """Profile ranks 1 and 4, two iterations a step and one."""
    pin(0)
    torch.set_num_threads(1)
    slots = tuple(lc.Slot(f"{i}.weight", (1024, 1024), i * 2**20) for i in range(8))
    flat = torch.randn(8 * 2**20)
    print(f"$ {command()}\n# torch {torch.__version__}")
    for rank in (1, 4):
        for num_iters in (2, 1):
            hook = lc.PowerSGD(matrix_approximation_rank=rank, start_powerSGD_iter=0, num_iters_per_step=num_iters)
            with torch.no_grad():
                bound = hook.bind(Group(None))
                run(bound, flat, slots, range(WARM_UP))
                ms = 1e3 * run(bound, flat, slots, range(WARM_UP, WARM_UP + STEPS))
                with profile() as profiled:
                    run(bound, flat, slots, range(WARM_UP + STEPS, WARM_UP + 2 * STEPS))
            print(f"\nrank {rank}, num_iters_per_step={num_iters}: {ms:.1f} ms a step without the profiler")
            taken = {row.key: row.self_cpu_time_total / 1e3 / STEPS for row in profiled.key_averages()}
            for key, what in PASSES.items():
                if taken.get(key, 0) >= 0.05:
                    print(f"{taken[key]:>8.1f} ms  {key:<16}{what}")
            print(f"{sum(ms for key, ms in taken.items() if key not in PASSES):>8.1f} ms  all others")


if __name__ == "__main__":
    main()
