"""A text's least number of tokens: never above the true one, for any kind of tokenizer, and large for long texts."""

from __future__ import annotations

import random
import time

import pytest
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from ratoon.models.token_bound import byte_level_alphabet, find_bound
from ratoon.models.tokenizer import Tokenizer

MEBIBYTE = 2**20
NO_LIMIT = 2**62


def byte_level(*merged: str, **bpe) -> Backend:
    """`merged` are longer tokens, in the alphabet of bytes; each needs its parts to be there before it."""
    vocabulary = dict(byte_level_alphabet())
    merges = []
    for token in merged:
        merges.append((token[: len(token) // 2], token[len(token) // 2 :]))
        vocabulary[token] = len(vocabulary)
    backend = Backend(models.BPE(vocab=vocabulary, merges=merges, **bpe))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return backend


def usual() -> Backend:
    return byte_level("ab", "abab", "ĠĠ", "ĠĠĠĠ", "ĠĠĠĠĠĠĠĠ", "12", "ä¸", "--", "----")


def with_normalizer(*steps) -> Backend:
    backend = usual()
    backend.normalizer = normalizers.Sequence(list(steps))
    return backend


def with_added_tokens() -> Backend:
    backend = usual()
    backend.add_special_tokens(
        [AddedToken("<mask>", lstrip=True, rstrip=True), AddedToken("<|a very long one|>"), AddedToken("中文")]
    )
    return backend


def sentencepiece(byte_fallback: bool = True, **options) -> Backend:
    pieces = [f"<0x{byte:02X}>" for byte in range(256)] if byte_fallback else []
    pieces += ["<unk>", "▁", "a", "b", "ab", "▁▁", "▁▁▁▁", "1", "中"]
    merges = [("a", "b"), ("▁", "▁"), ("▁▁", "▁▁")]
    options = {"unk_token": "<unk>", "fuse_unk": True, **options}
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    backend = Backend(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=byte_fallback, **options))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return backend


def bert(**options) -> Backend:
    words = ["[UNK]", "a", "b", "ab", "##a", "##b", "1", "##1", "中"]
    vocabulary = {word: index for index, word in enumerate(words)}
    backend = Backend(models.WordPiece(vocab=vocabulary, unk_token="[UNK]", max_input_chars_per_word=10))
    backend.normalizer = normalizers.BertNormalizer(**options)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.add_special_tokens([AddedToken("[MASK]", lstrip=True)])
    return backend


def unigram() -> Backend:
    backend = Backend(models.Unigram([("<unk>", 0.0), ("▁", -2.0), ("▁a", -3.0), ("ab", -3.0), ("b", -4.0)], 0, False))
    backend.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    return backend


def removing() -> Backend:
    backend = usual()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("a", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return backend


def without_some_bytes() -> Backend:
    vocabulary = {character: index for index, character in enumerate("bcde ")}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return backend


BOUNDED = {
    "byte level": usual,
    "composed": lambda: with_normalizer(normalizers.NFC()),
    "compatible": lambda: with_normalizer(normalizers.NFKC(), normalizers.Lowercase()),
    "decomposed": lambda: with_normalizer(normalizers.NFD()),
    "stripped": lambda: with_normalizer(normalizers.Strip()),
    "added tokens": with_added_tokens,
    "sentencepiece": sentencepiece,
    "unknown ones apart": lambda: sentencepiece(byte_fallback=False, fuse_unk=False),
    "bert": bert,
    "bert without han": lambda: bert(handle_chinese_chars=False, clean_text=False),
    "unigram": unigram,
    "unknown ones together": lambda: sentencepiece(byte_fallback=False),
    "unknown ones dropped": without_some_bytes,
}
UNBOUNDED = {
    "accents dropped": lambda: with_normalizer(normalizers.NFD(), normalizers.StripAccents()),
    "signs dropped": lambda: with_normalizer(normalizers.Replace("a", "")),
    "letters dropped": removing,
}
TEXTS = (
    "", "a", "ab", "abababab" * 9, "a b", "a " * 30, " " * 100, "    <mask>    ", "<mask>" * 5,
    "<|a very long one|>" * 4, "x" * 50, "a" * 50 + " b", "12" * 30, "----" * 20, "中文" * 20, "中a文b" * 9,
    "\n\t\r\x0b\x1c a\x1cb", "[MASK]  [MASK]", "e\u0301" * 20, "\u03b1\u0313\u0300\u0345" * 20, "ﬃ" * 20,
    "K" * 20, "İ" * 20, "\u1112\u1161\u11ab" * 20, "한" * 20, "🙂" * 9, "a\u0301\u0301\u0301\u0301" * 9,
    "\u200b\u00ad" * 9, "\u3000\u00a0" * 20, "Ω" * 20, "ａｂ" * 20, "a-b_c" * 9, "\x00\x01a" * 9,
)  # fmt: skip
CHARACTERS = "aAb1 \n\t\r-.é中文\u0301\u0345🙂▁Ġ\x00\x1c\u00a0\u3000KİΩ<>"


def random_texts(count: int) -> list[str]:
    dice = random.Random(7)
    pieces = (*CHARACTERS, "abab", "    ", "<mask>", "<|a very long one|>", "[MASK]", "----", "12")
    return ["".join(dice.choices(pieces, k=dice.randrange(60))) for _ in range(count)]


@pytest.mark.parametrize("kind", [*BOUNDED, *UNBOUNDED])
def test_no_text_has_fewer_tokens_than_the_bound_says(kind: str) -> None:
    backend = {**BOUNDED, **UNBOUNDED}[kind]()
    bound = find_bound(backend)
    for text in (*TEXTS, *random_texts(300)):
        num_tokens = len(backend.encode(text, add_special_tokens=False).ids)
        assert bound(text, NO_LIMIT) <= num_tokens, repr(text)


@pytest.mark.parametrize("kind", BOUNDED)
def test_a_long_text_is_known_to_be_long_without_being_tokenised(kind: str) -> None:
    tokenizer = Tokenizer(BOUNDED[kind](), {})
    text = "Hello ab, 12 times. " * (MEBIBYTE // 20)
    start = time.thread_time()
    assert tokenizer.min_tokens(text, 1000) > 1000
    assert time.thread_time() - start < 1.0, "about 10 ms"


@pytest.mark.parametrize("kind", UNBOUNDED)
def test_where_a_token_can_be_of_any_length_nothing_is_known(kind: str) -> None:
    assert Tokenizer(UNBOUNDED[kind](), {}).min_tokens("ab " * 10_000, 10) == 0


def test_rows_of_one_sign_do_not_hide_how_long_a_text_is() -> None:
    """Tokens of many spaces or dashes are the longest of most vocabularies. No text of words is made of them."""
    backend = byte_level("ab", "--", "----", "--------", "----------------", "--------------------------------")
    bound = find_bound(backend)
    assert bound("ab" * 1000, NO_LIMIT) == 1000
    assert bound("-" * 3200, NO_LIMIT) == 100
    assert bound("中" * 1000, NO_LIMIT) == 1000


def test_a_text_of_no_more_characters_than_tokens_are_allowed_is_not_looked_at() -> None:
    tokenizer = Tokenizer(usual(), {})
    assert tokenizer.min_tokens("ab" * 10, 20) == 0
    assert tokenizer.min_tokens("ab" * 10, 4) >= 5


def test_halves_of_characters_are_refused_later() -> None:
    assert Tokenizer(usual(), {}).min_tokens("\ud800" * 100, 10) > 10
