"""A tokenizer for random JSON: every byte, and pieces of several characters that cross the parts of JSON."""

from __future__ import annotations

from functools import cache

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from ratoon.models.token_bound import byte_level_alphabet
from ratoon.models.tokenizer import Tokenizer

PIECES = (
    '{"', '":', '": ', '",', '", ', '","', '"}', '"},', '"]', "},", "}]", '["', "],", "[]", "{}", "tr", "true", "fa",
    "false", "nu", "null", "-1", "12", "0.5", "e+", "ab", "abc", 'a"', 'b":', "\\n", '\\"', "  ", ", ", ": ",
)  # fmt: skip


@cache
def json_tokenizer() -> Tokenizer:
    alphabet = byte_level_alphabet()
    of_byte = dict(zip(range(256), _byte_level_texts(), strict=True))
    vocabulary = dict(alphabet)
    merges = []
    for piece in PIECES:
        text = "".join(of_byte[byte] for byte in piece.encode())
        for end in range(2, len(text) + 1):
            if text[:end] not in vocabulary:
                vocabulary[text[:end]] = len(vocabulary)
                merges.append((text[: end - 1], text[end - 1]))
    backend = Backend(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    return Tokenizer(backend, {"eos_token": "<|end|>"}, {})


def _byte_level_texts() -> list[str]:
    """The character that stands for each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return [chr(byte) if byte in plain else chr(256 + others.index(byte)) for byte in range(256)]
