"""Codecs on flat tensors, without a group: what they send, what comes out, and the largest error that they may make."""

import torch

from lightning_commhooks.codecs import AffineCodec, FP8Codec, Int2Codec, Int4Codec, Int8Codec
from lightning_commhooks.codecs.codec import pack, seed_tensor, unpack
from lightning_commhooks.codecs.formats import hadamard

# Below 2^-100 a scale is 0, and the block becomes zeros. The rounding of float32 comes on top of each bound.
SMALLEST_SCALE, FLOAT32 = 2.0**-100, 1 + 1e-4


def blocks_of(codec, flat):
    """A flat tensor as the codec's blocks, filled up with zeros."""
    size = codec.block_size or max(flat.numel(), 1)
    padded = flat.new_zeros(-(-flat.numel() // size) * size)
    padded[: flat.numel()] = flat
    return padded.view(-1, size)


def block_bytes(codec, size):
    return 4 * codec.num_scales + size // {Int4Codec: 2, Int2Codec: 4}.get(type(codec), 1)


def encoded_bytes(codec, numel):
    """Of a flat tensor."""
    size = codec.block_size or max(numel, 1)
    return -(-numel // size) * block_bytes(codec, size)


def encode(codec, flat, seed=0):
    """Bytes of a flat tensor, shape `(encoded_bytes(n),)`."""
    codes, scales, _ = codec.quantize(blocks_of(codec, flat), seed_tensor(seed, flat.device))
    return pack(codes, scales).view(-1)


def decode(codec, payload, numel):
    size = codec.block_size or max(numel, 1)
    codes, scales = unpack(codec, payload.view(-1, block_bytes(codec, size)))
    return codec.dequantize(codes, scales).reshape(-1)[:numel]


def there_and_back(codec, flat, seed=0):
    return decode(codec, encode(codec, flat, seed), flat.numel())


def error_bound(codec, blocks):
    """Largest magnitude of an error after decoding, shape `(b, 1)`, for finite blocks of shape `(b, s)`."""
    largest = blocks.abs().amax(dim=1, keepdim=True)
    if isinstance(codec, AffineCodec):
        extent = blocks.amax(dim=1, keepdim=True).clamp_min(0) - blocks.amin(dim=1, keepdim=True).clamp_max(0)
        return torch.where(extent / 255 < SMALLEST_SCALE, largest, extent / 255 * FLOAT32)
    if isinstance(codec, Int2Codec):
        return largest * FLOAT32
    random = 2 if codec.rounding == "stochastic" else 1
    if isinstance(codec, FP8Codec):
        limit, relative = (448, 1 / 28) if codec.format == "e4m3" else (57344, 1 / 14)
        return torch.where(largest / limit < SMALLEST_SCALE, largest, largest * relative * random * FLOAT32)
    levels = 127 if isinstance(codec, Int8Codec) else 7
    is_rotated = levels == 7 and codec.rotation is not None
    if is_rotated:
        largest = (blocks @ (hadamard(codec.block_size, blocks) / codec.block_size)).abs().amax(dim=1, keepdim=True)
    level = torch.where(largest / levels < SMALLEST_SCALE, largest, largest / levels * random / 2 * FLOAT32)
    return level * codec.block_size if is_rotated else level
