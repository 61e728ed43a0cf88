"""Cost of the codecs against the memory they have to move, on one core or a GPU.

8.4 M float32 numbers, on a GPU eight times as many. `floor` is the time in which a copy moves as many bytes as the
codec has to read and write: numbers in, payload out (encode); numbers and residual in, payload and residual out (with
feedback); two payloads in, numbers out (decode). `share` is the part of that bandwidth that is used: the goal is
0.8 on a GPU. `eager` is without `torch.compile`.

    python benchmarks/codecs.py
"""

from __future__ import annotations

import argparse
import datetime
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import pairwise

import torch
from netns import pin
from records import command

from lightning_commhooks.codecs import AffineCodec, FP8Codec, Int4Codec, Int8Codec
from lightning_commhooks.codecs.codec import Codec, Kernels, compiled

NUMEL = {"cpu": 2**23, "cuda": 2**26}
# Of the bandwidth of a copy, on a GPU.
GOAL = 0.8
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
    for _ in range(2):
        function()
    if device.type == "cuda":
        return _on_device(function, times)
    measured = []
    for _ in range(times):
        start = time.perf_counter()
        function()
        measured.append(time.perf_counter() - start)
    return statistics.median(measured) * 1e3


def _on_device(function: Callable[[], object], times: int) -> float:
    """By the device's clock; the host runs ahead."""
    torch.cuda.synchronize()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
    events[0].record()
    for event in events[1:]:
        function()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in pairwise(events))


def calls(
    codec: Codec, kernels: Kernels, device: torch.device, numel: int
) -> dict[str, tuple[Callable[[], object], float]]:
    """What is measured, with the bytes that it has to move."""
    numbers, old, new = (torch.randn(numel, device=device).view(-1, codec.block_size or numel) for _ in range(3))
    one, seed = torch.ones((), device=device), 0
    payload = kernels.encode(numbers, None, one, seed)
    both = torch.stack([payload, payload])
    size, full = payload.numel(), 4 * numel
    return {
        "encode": (lambda: kernels.encode(numbers, None, one, seed), full + size),
        "with feedback": (lambda: kernels.encode(numbers, old, one, seed), 3 * full + size),
        "decode 2": (lambda: kernels.decode_mean(both, one, new), 2 * size + full),
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--times", type=int, default=25)
    parser.add_argument("--numel", type=int, help="numbers to encode")
    args = parser.parse_args()
    device = torch.device(args.device)
    numel = args.numel or NUMEL[device.type]
    if device.type == "cpu":
        pin(0)
        torch.set_num_threads(1)
    source, target = torch.randn(numel, device=device), torch.empty(numel, device=device)
    per_byte = milliseconds(lambda: target.copy_(source), device, args.times) / (8 * numel)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()}, one core"
    print(f"$ {command()}")
    print(f"# torch {torch.__version__}, {datetime.date.today()}, {name}; a copy moves {1e-6 / per_byte:.1f} GB/s\n")
    columns = f"{'ms':>8}{'floor ms':>10}{'of floor':>10}{'share':>8}{'eager ms':>10}"
    print(f"{'codec':<17}{'bytes each':>11}  {'call':<15}{columns}")
    shares = {}
    for label, codec in CODECS.items():
        for call, share in measure(label, codec, device, numel, per_byte, args.times):
            shares[f"{label}, {call}"] = share
    if device.type == "cuda":
        missed = [call for call, share in shares.items() if share < GOAL]
        print(f"{len(shares) - len(missed)} of {len(shares)} reach {GOAL} of a copy's bandwidth" + ":" * bool(missed))
        print(*(f"  below: {call} {shares[call]:.2f}" for call in missed), sep="\n")


def measure(
    label: str, codec: Codec, device: torch.device, numel: int, per_byte: float, times: int
) -> Iterator[tuple[str, float]]:
    """Print the lines of a codec; each call and its share of the bandwidth."""
    kernels = compiled(codec, device, {2}, feedback=True)
    compiled(codec, device, {2}, feedback=False)
    assert kernels is not None
    eager = calls(codec, Kernels(codec), device, numel)
    head = f"{label:<17}{eager['encode'][1] / numel - 4:>11.4f}"  # without the numbers that are read
    for call, (function, num_bytes) in calls(codec, kernels, device, numel).items():
        ms, floor = milliseconds(function, device, times), num_bytes * per_byte
        slow = milliseconds(eager[call][0], device, 2)
        measured = f"{ms:>8.3f}{floor:>10.3f}{ms / floor:>10.2f}{floor / ms:>8.2f}{slow:>10.1f}"
        print(f"{head:<28}  {call:<15}{measured}", flush=True)
        head = ""
        yield call, floor / ms


if __name__ == "__main__":
    main()
