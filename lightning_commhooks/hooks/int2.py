"""Gradients in 2 bit, with error feedback."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lightning_commhooks.codecs.int2 import Int2Codec
from lightning_commhooks.hooks.int8 import CodecConfig
from lightning_commhooks.interface.registry import register


@register
@dataclass(frozen=True, kw_only=True)
class Int2(CodecConfig):
    """Average gradients as signs and one of two magnitudes, with error feedback.

    A two-shot all-reduce (`Group.average_encoded_`): sends a fourteenth of what float32 does, at every number of ranks.
    Gradients are encoded once and their mean once more, unless there are two ranks. Levels and errors: see
    `Int2Codec`. Meant for the moves of models in [`DiLoCo`][], which are sent seldom.

    Args:
        block_size: elements with common magnitudes, a multiple of 8. Sends `1/4 + 8 / block_size` bytes for a number.
        use_error_feedback: add what encoding left out to the next step's gradient, and mean. Needs memory of the size
            of the gradients, at least float32.
        compress_1d: also encode biases and the like. They are few, and what norms have in them is sensitive. Gradients
            of fewer elements than a block are never encoded.
        min_bytes: buckets with fewer bytes of gradients to encode are averaged in full, which is faster.
        random_seed: has no effect, nothing is random.
        hierarchy: `"node"`: average gradients in full within each node and compress between nodes, so that a node sends
            what one rank would. Each node needs the same number of ranks. `None`: among all ranks.

    Raises:
        ValueError: a value is out of range.
    """

    name: ClassVar[str] = "int2"

    block_size: int = 256

    @property
    def codec(self) -> Int2Codec:
        return Int2Codec(block_size=self.block_size)
