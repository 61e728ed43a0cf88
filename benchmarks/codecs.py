"""Cost of the codecs against the memory they have to move, on one core or a GPU.

8.4 M float32 numbers. `floor` is the time in which a copy moves as many bytes as the codec has to read and write:
numbers in, payload out (encode); numbers and what is owed in, payload and what is owed out (with feedback); two
payloads in, numbers out (decode). `eager` is without `torch.compile`.

    python benchmarks/codecs.py
"""

from __future__ import annotations

import argparse
import datetime
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable

import torch
from netns import pin

from lightning_commhooks.codecs import AffineCodec, FP8Codec, Int4Codec, Int8Codec
from lightning_commhooks.codecs.codec import Codec, Kernels, compiled, seed_tensor

NUMEL = 8 * 2**20
CODECS: dict[str, Codec] = {
    "int8": Int8Codec(),
    "int8 stochastic": Int8Codec(rounding="stochastic"),
    "int4": Int4Codec(),
    "int4 stochastic": Int4Codec(rounding="stochastic"),
    "int4 hadamard": Int4Codec(rotation="hadamard"),
    "fp8 e4m3": FP8Codec(),
    "fp8 e5m2": FP8Codec(format="e5m2"),
    "affine, 512": AffineCodec(),
    "affine, all": AffineCodec(block_size=None),
}


def milliseconds(function: Callable[[], object], device: torch.device, times: int) -> float:
    """Median time of a call."""
    measured = []
    for _ in range(times + 2):
        _wait(device)
        start = time.perf_counter()
        function()
        _wait(device)
        measured.append(time.perf_counter() - start)
    return statistics.median(measured[2:]) * 1e3


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def calls(codec: Codec, kernels: Kernels, device: torch.device) -> dict[str, tuple[Callable[[], object], float]]:
    """What is measured, with the bytes that it has to move."""
    numbers, old, new = (torch.randn(NUMEL, device=device).view(-1, codec.block_size or NUMEL) for _ in range(3))
    one, seed = torch.ones((), device=device), seed_tensor(0, device)
    payload = kernels.encode(numbers, None, one, seed)
    both = torch.stack([payload, payload])
    size, full = payload.numel(), 4 * NUMEL
    return {
        "encode": (lambda: kernels.encode(numbers, None, one, seed), full + size),
        "with feedback": (lambda: kernels.encode(numbers, (old, new), one, seed), 3 * full + size),
        "decode 2": (lambda: kernels.decode_mean(both, one, new), 2 * size + full),
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--times", type=int, default=25)
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type == "cpu":
        pin(0)
        torch.set_num_threads(1)
    source, target = torch.randn(NUMEL, device=device), torch.empty(NUMEL, device=device)
    per_byte = milliseconds(lambda: target.copy_(source), device, args.times) / (8 * NUMEL)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()}, one core"
    print(f"$ python {shlex.join(sys.argv)}")
    print(f"# torch {torch.__version__}, {datetime.date.today()}, {name}; a copy moves {1e-6 / per_byte:.1f} GB/s\n")
    print(f"{'codec':<17}{'bytes each':>11}  {'call':<15}{'ms':>8}{'floor ms':>10}{'of floor':>10}{'eager ms':>10}")
    for label, codec in CODECS.items():
        kernels = compiled(codec, device, {2}, feedback=True)
        compiled(codec, device, {2}, feedback=False)
        assert kernels is not None
        eager = calls(codec, Kernels(codec), device)
        each = eager["encode"][1] / NUMEL - 4  # without the numbers that are read
        for call, (function, num_bytes) in calls(codec, kernels, device).items():
            ms, floor = milliseconds(function, device, args.times), num_bytes * per_byte
            slow = milliseconds(eager[call][0], device, 2)
            print(
                f"{label:<17}{each:>11.4f}  {call:<15}{ms:>8.2f}{floor:>10.2f}{ms / floor:>10.2f}{slow:>10.1f}",
                flush=True,
            )
            label, each = "", float("nan")


if __name__ == "__main__":
    main()
