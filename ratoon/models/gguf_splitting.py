"""How byte-level tokenizers of GGUF files split text before they merge.

A file has only the name of a way to split (`tokenizer.ggml.pre`); the ways themselves are those of the models'
tokenizer.json files. Names are llama.cpp's. A name that is not here is refused: tokens of another way would be wrong
without a sign of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tokenizers.pre_tokenizers import PreTokenizer

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
# That of Llama 3, GLM-4, OLMo 2 and Qwen2, which differ in how many digits stay together
WORDS = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# That of o200k, which gpt-oss has: a word begins at a capital letter, and its contraction belongs to it. Tekken, of
# Mistral Nemo and Small, has the same without contractions and with each digit alone.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CAPITALS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+SUFFIX|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*SUFFIX"
    r"|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SEED_CODER = WORDS.replace("DIGITS", "").replace(r"]+[\r\n]*", r"\r\n]+")
NO_PUNCTUATION = r" ?[^(\s|.,!?…。，、।۔،)]+"

_HAN, _HAN_AND_KANA = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
# Letters that have a case, as DeepSeek's files list them
_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_CASED}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _HAN,
)
DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN)
DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    _HAN_AND_KANA,
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)


class Splitting(NamedTuple):
    build: Callable[[bool], PreTokenizer]  # of: a text gets a space before it
    is_composed: bool = False  # texts are brought into Unicode's form NFC before
    whole_words: bool = False  # a word of the vocabulary is used whole, even if merges would not make it
    has_bos: bool = False  # texts begin with that token, unless the file says otherwise


def _by_bytes(add_prefix_space: bool) -> PreTokenizer:
    """Splits as GPT-2 does."""
    from tokenizers.pre_tokenizers import ByteLevel

    return ByteLevel(add_prefix_space=add_prefix_space, use_regex=True)


def _by_digits(add_prefix_space: bool) -> PreTokenizer:
    """Splits as GPT-2 does, with each digit alone."""
    from tokenizers.pre_tokenizers import Digits, Sequence

    return Sequence([Digits(individual_digits=True), _by_bytes(add_prefix_space)])


def _like_falcon(add_prefix_space: bool) -> PreTokenizer:
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import Digits, Punctuation, Sequence, Split

    digits = [Digits(individual_digits=False), Split(Regex("[0-9][0-9][0-9]"), "isolated")]
    return Sequence([Punctuation("contiguous"), _by_bytes(add_prefix_space), *digits])


def _by_patterns(*patterns: str, digits_alone: bool = False) -> Callable[[bool], PreTokenizer]:
    """By one pattern after the other."""

    def build(add_prefix_space: bool) -> PreTokenizer:
        from tokenizers import Regex
        from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

        steps: list[PreTokenizer] = [Split(Regex(pattern), "isolated") for pattern in patterns]
        steps += [Digits(individual_digits=True)] if digits_alone else []
        return Sequence([*steps, ByteLevel(add_prefix_space=add_prefix_space, use_regex=False)])

    return build


def _named(splitting: Splitting, *names: str) -> dict[str, Splitting]:
    return dict.fromkeys(names, splitting)


_WORDS_3 = _by_patterns(WORDS.replace("DIGITS", "{1,3}"))
_WORDS_1 = _by_patterns(WORDS.replace("DIGITS", ""))
_CAPITALS_3 = _by_patterns(CAPITALS.replace("DIGITS", "{1,3}").replace("SUFFIX", f"{CONTRACTIONS}?"))
_TEKKEN = _by_patterns(CAPITALS.replace("DIGITS", "").replace("SUFFIX", ""))

SPLITTINGS: dict[str, Splitting] = {
    # "default": files from before the names existed
    **_named(Splitting(_by_bytes), "default", "gpt-2", "phi-2", "trillion", "granite-docling", "a.x-4.0", "mellum"),
    **_named(Splitting(_by_bytes), "roberta-bpe", "jina-v1-en", "jina-v2-code", "jina-v2-de", "jina-v2-es"),
    **_named(Splitting(_by_bytes, is_composed=True), "mpt", "olmo", "modern-bert"),
    **_named(Splitting(_by_digits), "smollm", "starcoder", "refact", "minerva-7b"),
    **_named(
        Splitting(_WORDS_3, whole_words=True, has_bos=True),
        "llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0",
    ),
    **_named(Splitting(_WORDS_3, whole_words=True), "glm4"),
    **_named(Splitting(_WORDS_3), "chatglm-bpe", "dbrx", "smaug-bpe"),
    **_named(Splitting(_WORDS_1, is_composed=True), "qwen2", "deepseek-r1-qwen"),
    **_named(Splitting(_WORDS_1), "megrez"),
    **_named(Splitting(_CAPITALS_3), "gpt-4o", "llama4", "kanana2"),
    **_named(Splitting(_TEKKEN, whole_words=True, has_bos=True), "tekken"),
    **_named(Splitting(_by_patterns(SEED_CODER)), "seed-coder"),
    **_named(Splitting(_like_falcon), "falcon"),
    **_named(Splitting(_by_patterns(*DEEPSEEK_LLM, digits_alone=True)), "deepseek-llm"),
    **_named(Splitting(_by_patterns(*DEEPSEEK_CODER, digits_alone=True)), "deepseek-coder"),
    **_named(Splitting(_by_patterns(*DEEPSEEK_V3)), "deepseek-v3"),
    **_named(Splitting(_by_patterns(NO_PUNCTUATION)), "poro-chat"),
    **_named(Splitting(_by_patterns(NO_PUNCTUATION, digits_alone=True)), "viking"),
}  # fmt: skip
