"""What an encoder reads: tokens, or the features of a stretch of audio. A wire type."""

from __future__ import annotations

from hashlib import blake2b

import msgspec

from ratoon.core.wire import WireTensor

LOWEST_RATE, HIGHEST_RATE = 1_000, 768_000  # samples a second of recordings that are resampled

CONTENT_HASH_BYTES = 32


class EncoderInput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Either `token_ids` or `features`. The encoder runs it whole, and once for all requests with equal content."""

    num_positions: int  # encoder states, whose keys and values cross-attention caches
    content_hash: bytes  # equal for equal inputs, across requests
    token_ids: list[int] | None = None
    features: WireTensor | None = None  # float32 [channels, frames]


def tokens_for_encoder(token_ids: list[int]) -> EncoderInput:
    digest = blake2b(b"tokens", digest_size=CONTENT_HASH_BYTES)
    for token in token_ids:
        digest.update(token.to_bytes(4, "little"))
    return EncoderInput(len(token_ids), digest.digest(), token_ids=token_ids)


def features_for_encoder(features: WireTensor, num_positions: int) -> EncoderInput:
    digest = blake2b(b"features", digest_size=CONTENT_HASH_BYTES)
    digest.update(repr((features.dtype, features.shape)).encode())
    digest.update(features.data)
    return EncoderInput(num_positions, digest.digest(), features=features)
