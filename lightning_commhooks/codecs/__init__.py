"""How numbers travel as bytes. Hooks, `Cast` and `DiLoCo` use them."""

from lightning_commhooks.codecs.formats import AffineCodec, FP8Codec, Int2Codec, Int4Codec, Int8Codec

__all__ = ["AffineCodec", "FP8Codec", "Int2Codec", "Int4Codec", "Int8Codec"]
