"""Tokenizers rebuilt from GGUF metadata against the originals, and against transformers' own conversion.

The originals are trained here with the `tokenizers` library, with the splitting rules of the model families as their
tokenizer.json files have them.
"""

from __future__ import annotations

import json
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE, Unigram, WordPiece
from tokenizers.trainers import UnigramTrainer, WordPieceTrainer
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode, generate_merges

from ratoon.models.gguf_splitting import SPLITTINGS
from ratoon.models.gguf_tokenizer import load_tokenizer_from_gguf, merges_from_scores
from ratoon.models.source import resolve_model
from ratoon.models.tokenizer import Tokenizer as OurTokenizer
from ratoon.models.tokenizer import load_tokenizer_from_folder
from tests.real_models import needs_embedded_model
from tests.unit.models.model_files import (
    CORPUS,
    NASTY_TEXTS,
    byte_level_metadata,
    sentencepiece_vocabulary,
    train_byte_level,
)

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
# o200k, as gpt-oss has it
CAPITALS, SMALL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
GPT4O = "|".join(
    [
        r"[^\r\n\p{L}\p{N}]?" + f"{CAPITALS}*{SMALL}+{ENDING}",
        r"[^\r\n\p{L}\p{N}]?" + f"{CAPITALS}+{SMALL}*{ENDING}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)


def by_pattern(pattern: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


@cache
def original(pre: str) -> Tokenizer:
    """As the family's tokenizer.json has it."""
    if pre == "smollm":
        return train_byte_level(
            pre_tokenizers.Sequence(
                [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
            )
        )
    if pre == "llama-bpe":
        tokenizer = train_byte_level(by_pattern(LLAMA3))
        tokenizer.model.ignore_merges = True
        return tokenizer
    if pre == "qwen2":
        tokenizer = train_byte_level(by_pattern(QWEN2))
        tokenizer.normalizer = normalizers.NFC()
        return tokenizer
    if pre == "gpt-4o":
        return train_byte_level(by_pattern(GPT4O))
    if pre == "glm4":
        tokenizer = train_byte_level(by_pattern(LLAMA3))
        tokenizer.model.ignore_merges = True
        return tokenizer
    return train_byte_level()


@cache
def rebuilt(pre: str) -> OurTokenizer:
    return load_tokenizer_from_gguf(byte_level_metadata(original(pre), pre, add_bos_token=False), "test")


PRES = ["gpt-2", "default", "smollm", "llama-bpe", "qwen2", "gpt-4o", "glm4"]
ALIKE = 2  # "default" splits as "gpt-2" does, and "glm4" as "llama-bpe"


@pytest.mark.parametrize("pre", PRES)
@pytest.mark.parametrize("text", NASTY_TEXTS)
@pytest.mark.one_in(5)
def test_byte_level_from_gguf_encodes_like_the_original(pre: str, text: str) -> None:
    ids = rebuilt(pre).encode(text)
    assert ids == original(pre).encode(text).ids
    for skip in (True, False):
        assert rebuilt(pre).decode(ids, skip) == original(pre).decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("pre", PRES)
@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=40))
def test_byte_level_from_gguf_encodes_any_text_like_the_original(pre: str, text: str) -> None:
    ids = rebuilt(pre).encode(text)
    assert ids == original(pre).encode(text).ids
    if pre != "qwen2":  # which normalises
        assert rebuilt(pre).decode(ids, skip_special_tokens=False) == text


def test_the_splitting_rules_differ() -> None:
    """Otherwise the tests above would pass with any of them."""
    assert (
        len({tuple(rebuilt(pre).encode("in 2024, 1234567 THEY'VE said\n\n  it's")) for pre in PRES})
        == len(PRES) - ALIKE
    )


def test_words_of_gpt_oss_begin_at_capital_letters() -> None:
    """Spelt out: the pattern is long, and a slip in it would change only rare texts."""
    found = by_gguf_name("gpt-4o").pre_tokenizer.pre_tokenize_str("They'VE camelCase HTTPServer 12345 x//\n\n  end")
    texts = [text.replace("Ġ", " ").replace("Ċ", "\n") for text, _ in found]
    assert texts == [
        "They'VE", " camel", "Case", " HTTPServer", " ", "123", "45", " x", "//\n\n", " ", " end",
    ]  # fmt: skip


LETTERS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+"
OF_LLAMA3 = LETTERS + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
OF_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
# The expressions by which llama.cpp splits one after the other, for names whose rules are put together otherwise here
OF_LLAMA_CPP = {
    "gpt-2": [OF_GPT2],
    "olmo": [OF_GPT2],
    "starcoder": [r"\p{N}", OF_GPT2],
    "refact": [r"\p{N}", OF_GPT2],
    "dbrx": [OF_LLAMA3],
    "chatglm-bpe": [OF_LLAMA3],
    "megrez": [OF_LLAMA3.replace("{1,3}", "")],
    "deepseek-coder": ["[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"],
    "deepseek-v3": [
        r"\p{N}{1,3}",
        "[一-龥\u3040-ゟ゠-ヿ]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
        r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+""",
    ],
    "viking": [r" ?[^(\s|.,!?…。，、।۔،)]+", r"\p{N}"],
    "seed-coder": [LETTERS + r"|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"],
}
# For ASCII alone: it has no classes of capital and small letters; and Falcon's own file takes some bytes for digits
OF_LLAMA_CPP_IN_ASCII = {
    "falcon": [r"[\p{P}\$\+<=>\^~\|`]+", OF_GPT2, "[0-9][0-9][0-9]"],
    "tekken": [
        r"[^\r\n\p{L}\p{N}]?((?=[\p{L}])([^a-z]))*((?=[\p{L}])([^A-Z]))+"
        r"|[^\r\n\p{L}\p{N}]?((?=[\p{L}])([^a-z]))+((?=[\p{L}])([^A-Z]))*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "deepseek-llm": [r"[\r\n]", r"\s?[A-Za-z]+", r"\s?[!-/:-~]+", r"\s+$", r"\p{N}"],
}
ASCII = st.text(st.characters(max_codepoint=126), max_size=40)
# Libraries know different versions of Unicode: only what was assigned long ago has the same class in all of them
ASSIGNED = st.text(st.characters(max_codepoint=0x9FFF, exclude_categories=["Cn", "Co", "Cs"]), max_size=40)


def pieces_of_llama_cpp(expressions: list[str], text: str) -> list[str]:
    """Returns the matches of the last expression within those of the one before, and so on, and what lies between."""
    pieces = [text]
    for expression in expressions:
        found = []
        for piece in pieces:
            end = 0
            for match in regex.finditer(expression, piece):
                found += [piece[end : match.start()], match.group()]
                end = match.end()
            found.append(piece[end:])
        pieces = [piece for piece in found if piece]
    return pieces


def pieces_of(pre: str, text: str) -> list[str]:
    tokenizer = SPLITTINGS[pre].build(False)
    spelled = {letter: byte for byte, letter in bytes_to_unicode().items()}
    return [
        bytes(spelled[letter] for letter in piece).decode(errors="surrogateescape")
        for piece, _ in tokenizer.pre_tokenize_str(text)
    ]


@pytest.mark.parametrize("pre", OF_LLAMA_CPP)
@settings(max_examples=100, deadline=None)
@given(text=ASSIGNED | ASCII)
@example(text="They'VE camelCase HTTPServer 1234567 x//\n\n  end\t\r\n don't!? 東京タワー 한국어 naïve Ω½ a.b,c")
def test_texts_are_split_as_llama_cpp_splits_them(pre: str, text: str) -> None:
    assert pieces_of(pre, text) == pieces_of_llama_cpp(OF_LLAMA_CPP[pre], text)


@pytest.mark.parametrize("pre", OF_LLAMA_CPP_IN_ASCII)
@settings(max_examples=100, deadline=None)
@given(text=ASCII)
@example(text="They'VE camelCase HTTPServer 1234567 x//\n\n  end\t\r\n don't!?  a.b,c  ")
def test_ascii_is_split_as_llama_cpp_splits_it(pre: str, text: str) -> None:
    assert pieces_of(pre, text) == pieces_of_llama_cpp(OF_LLAMA_CPP_IN_ASCII[pre], text)


def test_letters_of_deepseek_have_a_case() -> None:
    """And letters of ASCII are apart from others: they count as punctuation, too."""
    text = "Привет мир, Ελλάδα naïve 東京 12"
    pieces = ["Привет", " мир", ",", " Ελλάδα", " na", "ï", "ve", " ", "東京", " ", "1", "2"]
    assert pieces_of("deepseek-llm", text) == pieces


def by_gguf_name(pre: str) -> Tokenizer:
    return rebuilt(pre).backend


def test_llama3_takes_known_words_whole() -> None:
    """A word in the vocabulary that no merge leads to: found with Llama 3's rule only."""
    backend = train_byte_level(by_pattern(LLAMA3))
    metadata = byte_level_metadata(backend, "llama-bpe", add_bos_token=False)
    merges = metadata["tokenizer.ggml.merges"]
    word = max((token for token in metadata["tokenizer.ggml.tokens"] if token.isalpha() and token.isascii()), key=len)
    metadata["tokenizer.ggml.merges"] = [merge for merge in merges if merge.replace(" ", "") != word]
    assert len(load_tokenizer_from_gguf(metadata, "test").encode(word)) == 1
    metadata["tokenizer.ggml.pre"] = "qwen2"
    assert len(load_tokenizer_from_gguf(metadata, "test").encode(word)) > 1


WORDS = [
    "▁the",
    "▁then",
    "▁hello",
    "▁world",
    "▁worldly",
    "lo",
    "or",
    "▁▁",
    "▁▁▁▁",
    "ein",
    "▁eine",
    "12",
    "23",
    "nn",
    "nnn",
]


def sentencepiece_metadata() -> dict[str, Any]:
    tokens, scores, types = sentencepiece_vocabulary(WORDS)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


@cache
def sentencepiece_pair() -> tuple[OurTokenizer, Tokenizer]:
    """Ours, and Llama's original form with the merges that transformers derives from the scores."""
    metadata = sentencepiece_metadata()
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    vocabulary = {token: id for id, token in enumerate(tokens)}
    merges = generate_merges(vocabulary, dict(zip(tokens, scores)))
    backend = Tokenizer(BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return load_tokenizer_from_gguf(metadata, "test"), backend


def test_merges_from_scores_are_those_of_transformers() -> None:
    tokens, scores, types = sentencepiece_vocabulary(WORDS)
    theirs = generate_merges({token: id for id, token in enumerate(tokens)}, dict(zip(tokens, scores)))
    assert merges_from_scores(tokens, scores, types) == theirs
    tied = [-(id // 7) for id in range(len(tokens))]  # sevens of equal scores
    ours = merges_from_scores(tokens, tied, types)
    ranks = {token: tied[id] for id, token in enumerate(tokens)}
    order = [ranks[left + right] for left, right in ours]
    assert order == sorted(order, reverse=True)


@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet="thenworldylo ein123é🙂\n", max_size=30) | st.text(max_size=20))
def test_sentencepiece_from_gguf_encodes_like_llamas_own(text: str) -> None:
    ours, theirs = sentencepiece_pair()
    assert ours.encode(text) == [1, *theirs.encode(text).ids]
    assert ours.decode(ours.encode(text)) == text


@pytest.mark.parametrize("text", ["hello</s> world", "<s>the", "a  b   c", " hello"])
def test_special_tokens_split_sentencepiece_text(text: str) -> None:
    ours, theirs = sentencepiece_pair()
    assert ours.encode(text, add_special_tokens=False) == theirs.encode(text).ids


def test_sentencepiece_joins_the_best_pair_first() -> None:
    """Against the definition: join the neighbours with the best score until none can be joined."""
    ours, _ = sentencepiece_pair()
    metadata = sentencepiece_metadata()
    scores = dict(zip(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]))
    for text in ("then hello worldly eine 123 nnnnn", "worlworldly lolo", "    hello     the"):
        pieces = list("▁" + text.replace(" ", "▁"))
        while True:
            pairs = [(scores[a + b], -n) for n, (a, b) in enumerate(pairwise(pieces)) if a + b in scores]
            if not pairs:
                break
            place = -max(pairs)[1]
            pieces[place : place + 2] = [pieces[place] + pieces[place + 1]]
        assert [ours.id_to_token(id) for id in ours.encode(text, add_special_tokens=False)] == pieces


def test_a_folder_tokenizer_is_that_of_transformers(tmp_path: Path) -> None:
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=original("llama-bpe"), bos_token="<|special|>", eos_token="<|end|>"
    )
    theirs.chat_template = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    theirs.save_pretrained(tmp_path)
    ours = load_tokenizer_from_folder(tmp_path)
    assert (ours.bos_token_id, ours.eos_token_id, ours.vocab_size) == (0, 1, len(theirs))
    assert ours.special_token_ids == set(theirs.all_special_ids)
    for text in NASTY_TEXTS:
        assert ours.encode(text) == theirs(text)["input_ids"]
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs(text)["input_ids"], skip_special_tokens=True)
    messages = [{"role": "user", "content": "the fox"}]
    text = ours.apply_chat_template(messages)
    assert ours.encode(text, add_special_tokens=False) == theirs.apply_chat_template(messages, return_dict=False)


@pytest.fixture(scope="module")
def smollm() -> OurTokenizer:
    return resolve_model("smollm2-135m").load_tokenizer()


@pytest.fixture(scope="module")
def smollm_oracle() -> Tokenizer:
    """transformers' reading of the same file, with the splitting rule of SmolLM2's own tokenizer.json.

    AutoTokenizer does the same and reads the file several times, which takes it 17 s.
    """
    try:
        from transformers.integrations.gguf import gguf_tokenizer_mapping as gguf

        convert, read = gguf.convert_gguf_tokenizer, gguf.get_gguf_tokenizer
    except (ImportError, AttributeError):  # a part of transformers that moves with its versions
        pytest.skip("this transformers reads GGUF tokenizers in another place")
    architecture, description, _ = read(str(resolve_model("smollm2-135m").path))
    backend, _ = convert(architecture, description)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    return backend


@needs_embedded_model
def test_smollm2_reads_like_in_transformers(smollm: OurTokenizer, smollm_oracle: Tokenizer) -> None:
    texts = [*NASTY_TEXTS, "<|im_start|>user\nHi<|im_end|>\n", "<|endoftext|> x <|im_end|>", Path(__file__).read_text()]
    for text in texts:
        ids = smollm.encode(text)
        assert ids == smollm_oracle.encode(text, add_special_tokens=False).ids
        assert smollm.decode(ids, skip_special_tokens=False) == without_missing_bytes(smollm, text)
    assert (smollm.vocab_size, smollm.bos_token_id, smollm.eos_token_id) == (49152, 1, 2)
    assert (smollm.bos_token, smollm.eos_token) == ("<|im_start|>", "<|im_end|>")


@needs_embedded_model
def test_smollm2_keeps_its_ids(smollm: OurTokenizer) -> None:
    """Written down, so that a change which the oracle follows would show."""
    assert smollm.encode("<|im_start|>user\nHello<|im_end|>\n") == [1, 4093, 198, 19556, 2, 198]
    assert len(smollm.encode("2024")) == 4


@needs_embedded_model
def test_smollm2_knows_that_a_text_is_too_long_without_tokenising_it(smollm: OurTokenizer) -> None:
    texts = ["The quick brown fox. " * 100, "    x = 1\n" * 100, "中文" * 300, " " * 1000, "é\x00\x01" * 99, "=" * 1000]
    for text in texts:
        assert smollm.min_tokens(text, 0) <= len(smollm.encode(text))
    assert smollm.min_tokens("The quick brown fox. " * 50_000, 8192) > 8192


def without_missing_bytes(tokenizer: OurTokenizer, text: str) -> str:
    """SmolLM2's vocabulary lacks some bytes (a few control characters, rare planes): they vanish, here as elsewhere."""
    spelling, to_id = bytes_to_unicode(), tokenizer.backend.token_to_id
    missing = {byte for byte, character in spelling.items() if to_id(character) is None}
    kept = bytes(byte for byte in text.encode() if byte not in missing)
    return kept.decode(errors="replace")


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=60))
@needs_embedded_model
def test_smollm2_loses_no_text_that_its_vocabulary_can_spell(smollm: OurTokenizer, text: str) -> None:
    assert smollm.decode(smollm.encode(text), skip_special_tokens=False) == without_missing_bytes(smollm, text)


# ---- tokenizers of encoders ----

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def encoder_metadata(original: Tokenizer, kind: str, architecture: str, **values: Any) -> dict[str, Any]:
    """Returns metadata as llama.cpp's converter writes them. `values` are below tokenizer.ggml."""
    tokens = [original.id_to_token(id) or "" for id in range(original.get_vocab_size())]
    special = {token.content for token in original.get_added_tokens_decoder().values() if token.special}
    ids = {name: tokens.index(values.pop(name)) for name in [key for key in values if key.endswith("_id")]}
    values = {
        "model": kind,
        "token_type": [2 if token in ("[UNK]", "<unk>") else 3 if token in special else 1 for token in tokens],
        "tokens": tokens,
        **ids,
        **values,
    }
    return {"general.architecture": architecture} | {f"tokenizer.ggml.{key}": value for key, value in values.items()}


@cache
def word_pieces(lowercase: bool) -> tuple[Tokenizer, OurTokenizer]:
    original = Tokenizer(WordPiece(unk_token="[UNK]"))
    original.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    original.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    original.train_from_iterator(CORPUS, WordPieceTrainer(vocab_size=400, special_tokens=SPECIAL, show_progress=False))
    original.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    original.decoder = decoders.WordPiece()
    named = {"unknown_token_id": "[UNK]", "cls_token_id": "[CLS]", "seperator_token_id": "[SEP]"}
    metadata = encoder_metadata(original, "bert", "bert", pre="default", **named)
    metadata["tokenizer.ggml.tokens"] = [
        token if token in SPECIAL else token[2:] if token.startswith("##") else f"▁{token}"
        for token in metadata["tokenizer.ggml.tokens"]
    ]
    metadata |= {} if lowercase else {"tokenizer.ggml.normalizer.lowercase": False}
    return original, load_tokenizer_from_gguf(metadata, "test")


@cache
def unigram(architecture: str) -> tuple[Tokenizer, OurTokenizer]:
    """Returns a tokenizer like XLM-RoBERTa's (for "bert") or T5's, and the one that is rebuilt from its metadata."""
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    original = Tokenizer(Unigram())
    original.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    trainer = UnigramTrainer(vocab_size=300, special_tokens=special, unk_token="<unk>", show_progress=False)
    original.train_from_iterator(CORPUS, trainer)
    ends = [("<s>", 0), ("</s>", 2)]
    original.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>" if architecture == "bert" else "$A </s>",
        pair="<s> $A </s> </s> $B </s>" if architecture == "bert" else "$A </s> $B </s>",
        special_tokens=ends,
    )
    original.decoder = decoders.Metaspace()
    scores = [float(score) for _, score in json.loads(original.to_str())["model"]["vocab"]]
    named = {"unknown_token_id": "<unk>", "bos_token_id": "<s>", "eos_token_id": "</s>"}
    metadata = encoder_metadata(original, "t5", architecture, pre="default", scores=scores, **named)
    return original, load_tokenizer_from_gguf(metadata, "test")


ENCODERS = {
    "BERT": lambda: word_pieces(True),
    "BERT with capitals": lambda: word_pieces(False),
    "XLM-RoBERTa": lambda: unigram("bert"),
    "T5": lambda: unigram("t5"),
}


@pytest.mark.parametrize("kind", ENCODERS)
@pytest.mark.parametrize("text", NASTY_TEXTS)
def test_encoders_from_gguf_encode_like_the_original(kind: str, text: str) -> None:
    original, rebuilt = ENCODERS[kind]()
    assert rebuilt.encode(text) == original.encode(text).ids
    assert rebuilt.decode(original.encode(text).ids) == original.decode(original.encode(text).ids)


@pytest.mark.parametrize("kind", ["BERT", "XLM-RoBERTa"])
def test_encoders_from_gguf_mark_pairs_like_the_original(kind: str) -> None:
    original, rebuilt = ENCODERS[kind]()
    expected, found = original.encode("The fox", "a dog"), rebuilt.backend.encode("The fox", "a dog")
    assert (found.ids, found.type_ids) == (expected.ids, expected.type_ids)


@pytest.mark.parametrize(
    ("architecture", "pre", "between", "types"),
    [("bert", "roberta-bpe", 2, False), ("modern-bert", "modern-bert", 1, True)],
)
def test_byte_level_encoders_mark_texts_and_pairs(architecture: str, pre: str, between: int, types: bool) -> None:
    metadata = byte_level_metadata(original("gpt-2"), pre) | {"general.architecture": architecture}
    tokenizer = load_tokenizer_from_gguf(metadata, "test")
    first, second = (tokenizer.encode(text, add_special_tokens=False) for text in ("the fox", "a dog"))
    assert tokenizer.encode("the fox") == [0, *first, 1]
    pair = tokenizer.backend.encode("the fox", "a dog")
    assert pair.ids == [0, *first, *[1] * between, *second, 1]
    assert any(pair.type_ids) == types
