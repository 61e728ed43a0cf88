"""Codecs: numbers as bytes, block by block. The base class of codecs, and the functions that run a codec in a group.

Legend: b blocks of s elements each; k payloads of the same elements, from as many ranks.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
import types
import warnings
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_commhooks.basics.announce import announce
from lightning_commhooks.basics.ranges import named

_logger = logging.getLogger("lightning_commhooks")

# Elements that are encoded and sent together on CPU: enough to make the overhead of calls and latency negligible, and
# few enough to overlap the encoding of one chunk with the sending of another.
CHUNK_NUMEL = 2**20
# On a GPU, which encodes them in less time than the host takes to start it: more than a bucket of the usual 25 MB.
_CHUNK_NUMEL_OF_GPU = 2**24
# Smaller ones are not worth the call of a compiled function.
_FEW_ELEMENTS = 2**12
# Elements for which a function is compiled on a GPU: Triton divides and schedules its work by their number.
_EXAMPLE_NUMEL_OF_GPU = 2**22
# Seconds; a shorter pause needs no explanation.
LONG = 2.0


@dataclass
class Chunk:
    """Numbers that are encoded and sent together; see `Group.average_encoded_`.

    Attributes:
        numbers: shape `(b, s)`, float32 or float64, this rank's; b is a multiple of `Group.num_owners`.
        residual: residual of the numbers, in their shape: added to them before they are encoded, and then replaced by
            the encoding error of this rank's payloads. `None`: no error feedback.
        seed: seed of random rounding, unique to this rank, step and chunk; below 2^30.
    """

    numbers: Tensor
    residual: Tensor | None
    seed: int


def chunk_numel(device: torch.device) -> int:
    """Return about how many elements are encoded and sent together."""
    return CHUNK_NUMEL if device.type == "cpu" else _CHUNK_NUMEL_OF_GPU


class Codec(ABC):
    """Turns blocks of floating-point numbers into bytes and back: a frozen dataclass, validated when it is made.

    A block with inf or NaN, or with a magnitude above 2^126, is NaN after decoding, all of it, so that every rank sees
    that the step is bad. Decoding multiplies integers by a scale: the same bytes give the same numbers everywhere,
    whether compiled or not.

    Attributes:
        block_size: elements with common scales; `None`: each row of the input is a block.
        num_scales: float32 numbers that a block carries in addition to its codes.
        code_dtype: dtype of one byte in which codes are computed.
    """

    num_scales: ClassVar[int] = 1
    code_dtype: ClassVar[torch.dtype] = torch.uint8
    block_size: int | None

    @property
    def rounds_at_random(self) -> bool:
        """Whether `quantize` makes use of its seed: unless the codec has a `rounding`, which is `"nearest"`."""
        return getattr(self, "rounding", "stochastic") != "nearest"

    @abstractmethod
    def quantize(self, blocks: Tensor, seed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Encode blocks. Plain torch functions that `torch.compile` can fuse; no state.

        Args:
            blocks: shape `(b, s)`, float32 or float64.
            seed: int32, one element, for random rounding; 0 unless `rounds_at_random`.

        Returns:
            codes, shape `(b, bytes of codes)`, of `code_dtype`; scales, shape `(b, num_scales)`, float32; and what
            `dequantize` makes of them, shape and dtype of `blocks`. Where a scale is NaN, codes are arbitrary.
        """

    @abstractmethod
    def dequantize(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Decode codes, shape `(..., bytes of codes)`, and scales, `(..., num_scales)`.

        Returns:
            shape `(..., s)`, or more dimensions instead of the last; dtype of `scales`.
        """


def pack(codes: Tensor, scales: Tensor) -> Tensor:
    """Return scales, then codes, of each block: shape `(b, 4 * num_scales + bytes of codes)`, uint8."""
    head = 4 * scales.shape[1]
    payload = codes.new_empty((codes.shape[0], head + codes.shape[1]), dtype=torch.uint8)
    if payload.numel():
        payload[:, :head] = scales.contiguous().view(torch.uint8)
        payload[:, head:] = codes.view(torch.uint8)
    return payload


def unpack(codec: Codec, payload: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes, a view of a payload, shape `(..., bytes)`, and a copy of its scales."""
    head = 4 * codec.num_scales
    scales = payload[..., :head].clone(memory_format=torch.contiguous_format)
    return payload[..., head:].view(codec.code_dtype), scales.view(torch.float32)


def seed_tensor(seed: int, device: torch.device) -> Tensor:
    """Return a seed as a tensor, so that compiled functions do not depend on its value."""
    tensor = torch.tensor(seed % 2**31, dtype=torch.int32, device="cpu")
    # Pinned, a copy does not wait for the device.
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _encode(codec: Codec, blocks: Tensor, seed: Tensor) -> tuple[Tensor, Tensor]:
    codes, scales, _ = codec.quantize(blocks, seed)
    return codes, scales


def _encode_with_residual(
    codec: Codec, residual: Tensor, gradient: Tensor, factor: Tensor, seed: Tensor
) -> tuple[Tensor, Tensor]:
    total = residual + gradient * factor
    codes, scales, sent = codec.quantize(total, seed)
    residual.copy_(total - sent)
    return codes, scales


def _encode_mean(codec: Codec, residual: Tensor, mean: Tensor, factor: Tensor, seed: Tensor) -> tuple[Tensor, Tensor]:
    codes, scales, sent = codec.quantize(mean, seed)
    residual.copy_(residual + (mean - sent) * factor)
    return codes, scales


def _decode_mean(codec: Codec, codes: Tensor, scales: Tensor, factor: Tensor, out: Tensor) -> None:
    # Divided before the sum, which could overflow.
    mean = (codec.dequantize(codes, scales.to(out.dtype)) * factor).sum(dim=0)
    out.view(mean.shape).copy_(mean)


class Kernels:
    """The functions of one codec: in one pass over memory each where they could be compiled.

    `compiled` says whether to compile them; they are, when they are called for the first time.
    """

    def __init__(self, codec: Codec, compiled: bool = False) -> None:
        self.codec = codec
        self._name = type(codec).__name__.removesuffix("Codec").lower()
        self._functions: dict[Callable[..., Any], Callable[..., Any]] = {}
        self._no_seed: dict[torch.device, Tensor] = {}
        if compiled:
            for function in (_encode, _encode_with_residual, _encode_mean, _decode_mean):
                # A code object of its own: PyTorch compiles each for a few kinds of arguments only, and treats a size
                # as dynamic if it has varied among code objects of the same name.
                name = f"{function.__name__}_{zlib.crc32(repr(codec).encode())}"
                own = types.FunctionType(function.__code__.replace(co_name=name), function.__globals__)
                self._functions[function] = torch.compile(own, fullgraph=True)

    def fills_block(self, tensor: Tensor) -> bool:
        """Whether a tensor has the elements of a block, which is sent as a whole."""
        return tensor.numel() >= (self.codec.block_size or 1)

    def _run(self, function: Callable[..., Any], size: Tensor, *args: Tensor) -> Any:
        is_compiled = size.dtype == torch.float32 and size.numel() >= _FEW_ELEMENTS and function in self._functions
        # PyTorch would recompile for a single block.
        if is_compiled and (size.shape[0] > 1 or self.codec.block_size is None):
            function = self._functions[function]
        with torch.no_grad():  # or PyTorch would recompile for calls with gradients enabled
            return function(self.codec, *args)

    def _encoded(self, function: Callable[..., Any], numbers: Tensor, seed: int, *args: Tensor) -> Tensor:
        # Codecs that do not round at random get a 0 that is already on the device.
        at_random, device = self.codec.rounds_at_random, numbers.device
        if not at_random and device not in self._no_seed:
            self._no_seed[device] = torch.zeros((), dtype=torch.int32, device=device)
        with named(self._name, "encode"):
            seeded = seed_tensor(seed, device) if at_random else self._no_seed[device]
            return pack(*self._run(function, numbers, *args, seeded))

    def encode(self, numbers: Tensor, residual: Tensor | None, factor: Tensor, seed: int) -> Tensor:
        """Return the payload of blocks, shape `(b, bytes of a block)`, uint8.

        Args:
            numbers: shape `(b, s)`, float32 or float64.
            residual: with error feedback, the residual, shape `(b, s)`: it is added to `numbers * factor` and then
                replaced by the encoding error of the payload.
            factor: one element.
            seed: seed of random rounding.
        """
        if residual is None:
            return self._encoded(_encode, numbers, seed, numbers)
        return self._encoded(_encode_with_residual, numbers, seed, residual, numbers, factor)

    def encode_mean(self, mean: Tensor, residual: Tensor | None, factor: Tensor, seed: int) -> Tensor:
        """Return the payload of a mean, as `encode`; its encoding error, times `factor`, is added to `residual`."""
        if residual is None:
            return self._encoded(_encode, mean, seed, mean)
        return self._encoded(_encode_mean, mean, seed, residual, mean, factor)

    def decode_mean(self, payloads: Tensor, factor: Tensor, out: Tensor) -> Tensor:
        """Write the sum of k payloads, shape `(k, b, bytes)`, times `factor / k` to `out`, shape `(b, s)`.

        Returns:
            whether it is finite, boolean, one element, from the scales alone.
        """
        with named(self._name, "decode"):
            codes, scales = unpack(self.codec, payloads)
            self._run(_decode_mean, out, codes, scales, factor / payloads.shape[0], out)
            return (scales.abs() < torch.inf).all()

    def compile(self, device: torch.device, num_payloads: set[int], feedback: bool, num_rows: int) -> None:
        """Call the functions once, as they will be called later.

        Args:
            device: of the tensors.
            num_payloads: how many payloads are decoded together.
            feedback: whether `encode` and `encode_mean` get a residual.
            num_rows: blocks at a time, where each row is one.
        """
        codec, size = self.codec, self.codec.block_size
        numel = _FEW_ELEMENTS if device.type == "cpu" else _EXAMPLE_NUMEL_OF_GPU

        def shape_of(num: int) -> tuple[int, int]:
            num = max(_FEW_ELEMENTS, num)
            return (-(-num // size) + 2, size) if size else (num_rows, num)

        # Not more for more ranks, which would take memory.
        shape = shape_of(numel if size else numel // (num_rows * max(num_payloads)))
        blocks = torch.ones(shape, dtype=torch.float32, device=device)
        residual, out = torch.zeros_like(blocks), torch.empty_like(blocks)
        one, seed = blocks.new_ones(()), seed_tensor(0, device)
        payload = pack(*_encode(codec, blocks, seed))
        calls: list[tuple[Callable[..., Any], tuple[Tensor, ...]]] = [
            (_encode_with_residual, (residual, blocks, one, seed)) if feedback else (_encode, (blocks, seed))
        ]
        if feedback and 1 in num_payloads:
            calls.append((_encode_mean, (residual, blocks, one, seed)))
        for k in num_payloads:
            b = shape_of(numel // k)[0]
            codes, scales = unpack(codec, payload[:b].repeat(k, 1, 1))
            calls.append((_decode_mean, (codes, scales, one, out[:b])))
        for function, args in calls:
            for tensor in args:
                # Blocks vary in number, or, where each row is one, in size.
                if tensor.dim() > 1 and (size or tensor.shape[-1] >= _FEW_ELEMENTS):
                    dim = -2 % tensor.dim() if size else tensor.dim() - 1
                    torch._dynamo.mark_static(tensor, [other for other in range(tensor.dim()) if other != dim])
                    torch._dynamo.mark_dynamic(tensor, dim)
            self._functions[function](codec, *args)


# Arguments of earlier calls of `compiled`.
_compiled: set[Hashable] = set()


@functools.cache
def _kernels(codec: Codec) -> Kernels:
    return Kernels(codec, compiled=True)


def compiled(
    codec: Codec,
    device: torch.device,
    num_payloads: set[int],
    feedback: bool,
    num_rows: int = 1,
    is_told: bool = True,
) -> Kernels | None:
    """Compile the functions of a codec; return `None`, with a warning, where that fails.

    Also `None` where compiling is disabled, as by TORCH_COMPILE_DISABLE=1. For the arguments, see `Kernels.compile`.
    With `is_told`, users are told about the first call with these arguments.
    """
    if torch._dynamo.config.disable:
        return None
    try:
        kernels = _kernels(codec)
        # The comm thread has no gradients and no autocast either; PyTorch would recompile for another mode.
        with torch.no_grad(), torch.autocast(device.type, enabled=False), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch uses deprecated parts of itself
            what = codec, device, frozenset(num_payloads), feedback, num_rows
            with _announced(f"{codec!r} for {device}") if is_told and what not in _compiled else nullcontext():
                kernels.compile(device, num_payloads, feedback, num_rows)
            _compiled.add(what)
    except Exception as error:
        _warn(f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}")
        return None
    return kernels


@contextmanager
def _announced(what: str) -> Iterator[None]:
    """Announce that something is compiled or loaded from PyTorch's cache, and afterwards which, and how long it took.

    A log message at level INFO; printed, see `announce`, only if it takes long.
    """
    before, is_logged = f"preparing {what}", _logger.isEnabledFor(logging.INFO)
    _logger.info(before)
    at_length = (
        f"{before}: PyTorch compiles it, for up to a minute, or loads it from its cache, which takes some seconds too"
    )
    timer = threading.Timer(LONG, announce, [at_length])
    timer.daemon = True
    begin, missing = time.perf_counter(), _num_missing()
    if not is_logged:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if not is_logged:
            timer.join()
    seconds = time.perf_counter() - begin
    done = f"compiled {what}" if _num_missing() > missing else f"loaded {what} from PyTorch's cache"
    text = f"{done} in {seconds:.1f} s"
    if seconds < LONG:
        _logger.info(text)
    else:
        announce(text)


def _num_missing() -> int:
    """Return how many graphs PyTorch has not found in its cache so far."""
    from torch._dynamo.utils import counters  # takes a second, which `torch.compile` takes anyway

    return int(counters["inductor"]["fxgraph_cache_miss"])


@functools.cache
def _warn(reason: str) -> None:
    warnings.warn(
        f"torch.compile cannot build the codecs of the communication hook here, so they run uncompiled and take about "
        f"ten times as long: {reason}. They need a C++ compiler on CPU, Triton on CUDA; TORCH_COMPILE_DISABLE=1 "
        "silences this",
        stacklevel=2,
    )
