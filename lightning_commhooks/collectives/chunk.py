"""What is encoded and sent together in an average over ranks."""

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
        owed: of the part whose numbers this rank sends (`Group.parts`), one of c: what it owed before, and where to
            write what it owes then, both of shape `(b / c, s)`. `None`: no error feedback.
        carried: the same of the part whose mean this rank sends; `None` unless there are two shots.
        seed: for random rounding; of this rank, step and chunk alone. Below 2^30.
    """

    numbers: Tensor
    owed: tuple[Tensor, Tensor] | None
    carried: tuple[Tensor, Tensor] | None
    seed: int
