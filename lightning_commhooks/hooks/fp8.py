"""Gradients in 8-bit floating-point numbers: a quarter of the bytes of float32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from lightning_commhooks.codecs import FP8Codec
from lightning_commhooks.codecs._rounding import Rounding
from lightning_commhooks.hooks._codec_feedback import CodecConfig
from lightning_commhooks.interface.registry import register


@register
@dataclass(frozen=True, kw_only=True)
class FP8(CodecConfig):
    """Average gradients as blocks of 8-bit floating-point numbers with a scale each, with error feedback.

    As `Int8`, at the same size; small gradients beside large ones are more precise and large ones less. See `FP8Codec`.

    Args:
        format: `"e4m3"`, 4 significant bits, or `"e5m2"`, 3 of them and a wider range.
        block_size: elements with a common scale, a multiple of 8. Sends `1 + 4 / block_size` bytes for a number.
        rounding: `"nearest"`, or `"stochastic"`, whose error is 0 on average; of use without error feedback.
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

    name: ClassVar[str] = "fp8"

    format: Literal["e4m3", "e5m2"] = "e4m3"
    block_size: int = 512
    rounding: Rounding = "nearest"

    @property
    def codec(self) -> FP8Codec:
        return FP8Codec(format=self.format, block_size=self.block_size, rounding=self.rounding)
