"""Gradients in 4-bit integers: a seventh of the bytes of float32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from lightning_commhooks.codecs import Int4Codec
from lightning_commhooks.codecs._rounding import Rounding
from lightning_commhooks.hooks._codec_feedback import CodecConfig
from lightning_commhooks.interface.registry import register


@register
@dataclass(frozen=True, kw_only=True)
class Int4(CodecConfig):
    """Average gradients as blocks of 4-bit integers with a scale each, with error feedback.

    A two-shot all-reduce (`Group.average_encoded_`): sends a seventh of what float32 does, at every number of ranks.
    Gradients are encoded once and their mean once more, unless there are two ranks. Levels and errors: see
    `Int4Codec`.

    Args:
        block_size: elements with a common scale, a multiple of 8. Sends `1/2 + 4 / block_size` bytes for a number.
        rounding: `"nearest"`, or `"stochastic"`, whose error is 0 on average; of use without error feedback.
        rotation: `"hadamard"`: rotate blocks first, which spreads outliers; then `block_size` is a power of 2.
        use_error_feedback: add what encoding left out to the next step's gradient, and mean. Needs memory of the size
            of the gradients, at least float32.
        compress_1d: also encode biases and the like. They are few, and what norms have in them is sensitive. Gradients
            of fewer elements than a block are never encoded.
        min_bytes: buckets with fewer bytes of gradients to encode are averaged as they are, which is faster.
        random_seed: of stochastic rounding. The global random state is not touched.
        hierarchy: `"node"`: gradients are averaged within each node as they are, and compressed between nodes, so that
            what leaves a node is what one of its ranks would send, not all of them. Needs as many ranks on each node.
            `None`: among all ranks.

    Raises:
        ValueError: a value is out of range.
    """

    name: ClassVar[str] = "int4"

    block_size: int = 64
    rounding: Rounding = "nearest"
    rotation: Literal["hadamard"] | None = None

    @property
    def codec(self) -> Int4Codec:
        return Int4Codec(block_size=self.block_size, rounding=self.rounding, rotation=self.rotation)
