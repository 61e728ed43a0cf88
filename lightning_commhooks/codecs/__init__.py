"""How numbers travel as bytes: one codec per file. Hooks, `Cast` and `DiLoCo` use them."""

from lightning_commhooks.codecs.affine import AffineCodec
from lightning_commhooks.codecs.fp8 import FP8Codec
from lightning_commhooks.codecs.int2 import Int2Codec
from lightning_commhooks.codecs.int4 import Int4Codec
from lightning_commhooks.codecs.int8 import Int8Codec

__all__ = ["AffineCodec", "FP8Codec", "Int2Codec", "Int4Codec", "Int8Codec"]
