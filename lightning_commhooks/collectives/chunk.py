"""The unit of encoding and sending in an average over ranks."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

# Elements that are encoded and sent together: enough to make the overhead of calls and latency negligible, and few
# enough to overlap the encoding of one chunk with the sending of another on CPU.
CHUNK_NUMEL = 2**20


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
