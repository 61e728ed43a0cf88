"""Numbers that are encoded and sent together in an average over ranks."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

# Elements that are encoded and sent together: so many that calls and latencies do not count, and few enough that on CPU
# encoding some hides sending others.
CHUNK_NUMEL = 2**20


@dataclass
class Chunk:
    """Numbers that are encoded and sent together; see `Group.average_encoded_`.

    Attributes:
        numbers: shape `(b, s)`, float32 or float64, this rank's; b is a multiple of `Group.num_owners`.
        residual: of the numbers, of their shape, changed in place: added to them before they are encoded; what this
            rank's payloads leave out afterwards. `None`: no error feedback.
        seed: for random rounding; of this rank, step and chunk alone. Below 2^30.
    """

    numbers: Tensor
    residual: Tensor | None
    seed: int
