"""Builds a tokenizer from GGUF metadata: byte-level BPE ("gpt2"), SentencePiece-style BPE ("llama"), WordPiece ("bert")
and Unigram ("t5").

GGUF has the vocabulary but only the name of the pre-tokenizer, which is one of gguf_splitting.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from ratoon.core.errors import ModelError
from ratoon.models.damage import is_panic, shorten, show, without_panic_messages
from ratoon.models.gguf_splitting import SPLITTINGS
from ratoon.models.tokenizer import DEFAULT_TEMPLATE, Tokenizer, try_out

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

Item = TypeVar("Item")

ENCODERS = ("bert", "modern-bert")  # architectures

# The values of tokenizer.ggml.token_type that are used; 1 is a normal token, 5 an unused one.
UNKNOWN, CONTROL, USER_DEFINED, BYTE = 2, 3, 4, 6

CONVERT_AGAIN = "convert the model again"
NAMES = {str: "texts", int: "whole numbers", float: "numbers"}
MAX_TOKEN_CHARACTERS = 65536

SPACE_MARK = "▁"  # SentencePiece's visible space


def load_tokenizer_from_gguf(metadata: Mapping[str, Any], source: str) -> Tokenizer:
    """`source` is for messages."""
    kind = metadata.get("tokenizer.ggml.model")
    builders = {
        "gpt2": _build_byte_level,
        "llama": _build_sentencepiece,
        "bert": _build_word_pieces,
        "t5": _build_unigram,
    }
    if kind is None or not metadata.get("tokenizer.ggml.tokens"):
        missing = "tokenizer.ggml.model" if kind is None else "tokenizer.ggml.tokens"
        raise ModelError(source, f"has no tokenizer: the metadata key {missing} is missing", CONVERT_AGAIN)
    if not isinstance(kind, str) or kind not in builders:
        raise ModelError(source, f"has a tokenizer of the unknown kind {show(kind)}", f"known: {', '.join(builders)}")
    tokens = _listed(metadata, "tokens", str, source)
    types = _listed(metadata, "token_type", int, source) or [1] * len(tokens)
    if len(types) != len(tokens):
        raise ModelError(source, f"is damaged: {len(tokens)} tokens, but {len(types)} token types", CONVERT_AGAIN)
    longest = max(map(len, tokens))
    if longest > MAX_TOKEN_CHARACTERS:
        raise ModelError(source, f"is damaged: a token of {longest:,} characters", CONVERT_AGAIN)
    chat_templates = chat_templates_from_gguf(metadata, source)
    try:
        with without_panic_messages():
            backend = builders[kind](metadata, tokens, types, source)
            _add_tokens(backend, tokens, types)
            special_tokens = _special_tokens(metadata, tokens)
            _add_template_around(backend, metadata, special_tokens)
            tokenizer = Tokenizer(backend, special_tokens, chat_templates)
            try_out(tokenizer)
    except ModelError:
        raise
    except (
        BaseException
    ) as error:  # the library raises bare Exception (such as for a merge of unknown tokens), or panics
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise ModelError(source, f"its tokenizer is damaged: {shorten(str(error))}", CONVERT_AGAIN) from error
    return tokenizer


def _listed(metadata: Mapping[str, Any], key: str, kind: type[Item], source: str) -> list[Item]:
    """A list of the tokenizer's metadata; empty where there is none."""
    found = metadata.get(f"tokenizer.ggml.{key}")
    if found is None:
        return []
    if not isinstance(found, list) or not all(type(item) is kind for item in found):
        raise ModelError(source, f"tokenizer.ggml.{key} is {show(found)}", f"a list of {NAMES[kind]}; {CONVERT_AGAIN}")
    return found


def chat_templates_from_gguf(metadata: Mapping[str, Any], source: str) -> dict[str, str]:
    names = metadata.get("tokenizer.chat_templates", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelError(source, f"tokenizer.chat_templates is {show(names)}", "a list of names")
    keys = {DEFAULT_TEMPLATE: "tokenizer.chat_template", **{name: f"tokenizer.chat_template.{name}" for name in names}}
    templates = {}
    for name, key in keys.items():
        template = metadata.get(key)
        if template is not None and not isinstance(template, str):
            raise ModelError(source, f"{key} is {show(template)}", "a Jinja template")
        if template:
            templates[name] = template
    return templates


def _build_byte_level(metadata: Mapping[str, Any], tokens: list[str], types: list[int], source: str) -> Backend:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers

    splitting = metadata.get("tokenizer.ggml.pre", "default")
    if not isinstance(splitting, str) or splitting not in SPLITTINGS:
        known = ", ".join(sorted(SPLITTINGS))
        problem = f"has a tokenizer that splits text in the unknown way {show(splitting)}"
        raise ModelError(source, problem, f"known: {known}")
    if "tokenizer.ggml.merges" not in metadata:
        raise ModelError(source, "has no tokenizer.ggml.merges", CONVERT_AGAIN)
    merges = [_split_merge(merge, source) for merge in _listed(metadata, "merges", str, source)]
    vocabulary = {token: id for id, token in enumerate(tokens)}
    rules = SPLITTINGS[splitting]
    backend = Backend(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=rules.whole_words))
    backend.pre_tokenizer = rules.build(bool(metadata.get("tokenizer.ggml.add_space_prefix", False)))
    backend.decoder = decoders.ByteLevel()
    if rules.is_composed:
        backend.normalizer = normalizers.NFC()
    return backend


def _split_merge(merge: str, source: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not space:
        raise ModelError(source, f"is damaged: the merge {show(merge)} has no two parts", CONVERT_AGAIN)
    return left, right


def _build_sentencepiece(metadata: Mapping[str, Any], tokens: list[str], types: list[int], source: str) -> Backend:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers

    scores = _listed(metadata, "scores", float, source)
    if len(scores) != len(tokens):
        raise ModelError(source, "has no tokenizer.ggml.scores for all of its tokens", CONVERT_AGAIN)
    unknown = next((token for token, type in zip(tokens, types) if type == UNKNOWN), None)
    model = models.BPE(
        vocab={token: id for id, token in enumerate(tokens)},
        merges=merges_from_scores(tokens, scores, types),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = Backend(model)
    visible_spaces = normalizers.Replace(" ", SPACE_MARK)
    steps: list[Any] = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE_MARK), visible_spaces])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = visible_spaces
    backend.decoder = decoders.Sequence(steps)
    return backend


def _build_word_pieces(metadata: Mapping[str, Any], tokens: list[str], types: list[int], source: str) -> Backend:
    """Files have the beginnings of words with a visible space before them, and what continues a word without `##`."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    def original(token: str, type: int) -> str:
        if token.startswith(SPACE_MARK):
            return token[1:]
        return token if type in (UNKNOWN, CONTROL) else f"##{token}"

    tokens[:] = [original(token, type) for token, type in zip(tokens, types)]
    unknown = _token_of(metadata, tokens, "unknown_token_id") or "[UNK]"
    is_lower = bool(metadata.get("tokenizer.ggml.normalizer.lowercase", True))
    backend = Backend(models.WordPiece({token: id for id, token in enumerate(tokens)}, unk_token=unknown))
    backend.normalizer = normalizers.BertNormalizer(lowercase=is_lower)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return backend


def _build_unigram(metadata: Mapping[str, Any], tokens: list[str], types: list[int], source: str) -> Backend:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    scores = _listed(metadata, "scores", float, source)
    if len(scores) != len(tokens):
        raise ModelError(source, "has no tokenizer.ggml.scores for all of its tokens", CONVERT_AGAIN)
    unknown = next((id for id, type in enumerate(types) if type == UNKNOWN), None)
    backend = Backend(models.Unigram(list(zip(tokens, scores)), unknown, byte_fallback=BYTE in types))
    characters = bytes(number & 255 for number in _listed(metadata, "precompiled_charsmap", int, source))
    if characters:
        backend.normalizer = normalizers.Precompiled(characters)
    prefix = "always" if metadata.get("tokenizer.ggml.add_space_prefix", True) else "never"
    steps: list[Any] = [pre_tokenizers.Metaspace(prepend_scheme=prefix)]
    if metadata.get("tokenizer.ggml.remove_extra_whitespaces", True):
        steps.insert(0, pre_tokenizers.WhitespaceSplit())
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.Metaspace(prepend_scheme=prefix)
    return backend


def merges_from_scores(tokens: Sequence[str], scores: Sequence[float], types: Sequence[int]) -> list[tuple[str, str]]:
    """SentencePiece joins the two neighbours whose union has the best score; BPE wants that as an ordered list.

    Every way to cut a token into two tokens is a merge with the score of the whole. Ties are put in the order that
    Hugging Face's conversion has: longer left parts first, then as they are numbered.
    """
    plain = {token: id for id, (token, type) in enumerate(zip(tokens, types)) if type not in (UNKNOWN, CONTROL, BYTE)}
    ranked: list[tuple[float, int, int, int, int, str, str]] = []
    lengths = sorted({len(token) for token in plain})
    for whole, id in plain.items():
        for cut in lengths:  # of existing left parts: tokens of damaged files may be long
            if cut >= len(whole):
                break
            left_id, right_id = plain.get(whole[:cut]), plain.get(whole[cut:])
            if left_id is not None and right_id is not None:
                left, right = whole[:cut], whole[cut:]
                ranked.append((-scores[id], -len(left), -len(right), id, left_id, left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _add_tokens(backend: Backend, tokens: list[str], types: list[int]) -> None:
    """Adds control tokens and tokens of users. Both kinds are matched before pre-tokenization; control tokens are also
    skipped in decoded text."""
    from tokenizers import AddedToken

    control = [token for token, type in zip(tokens, types) if type in (CONTROL, UNKNOWN) and token]
    defined = [token for token, type in zip(tokens, types) if type == USER_DEFINED and token]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in defined])


def _special_tokens(metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, str]:
    keys = {
        "bos_token": "bos_token_id",
        "eos_token": "eos_token_id",
        "unk_token": "unknown_token_id",
        "pad_token": "padding_token_id",
        "cls_token": "cls_token_id",
        "sep_token": "seperator_token_id",  # the key is spelt so
        "mask_token": "mask_token_id",
    }
    found = {name: _token_of(metadata, tokens, key) for name, key in keys.items()}
    return {name: token for name, token in found.items() if token is not None}


def _token_of(metadata: Mapping[str, Any], tokens: list[str], key: str) -> str | None:
    id = metadata.get(f"tokenizer.ggml.{key}")
    return tokens[id] if isinstance(id, int) and 0 <= id < len(tokens) else None


def _add_template_around(backend: Backend, metadata: Mapping[str, Any], special_tokens: Mapping[str, str]) -> None:
    """Put bos and eos around a text, where the file says so or where llama.cpp does it for this kind of file; around
    texts and pairs of texts of encoders always."""
    from tokenizers.processors import TemplateProcessing

    kind, splitting = metadata["tokenizer.ggml.model"], metadata.get("tokenizer.ggml.pre", "default")
    is_encoder = metadata.get("general.architecture") in ENCODERS
    usual = kind == "llama" or is_encoder or (splitting in SPLITTINGS and SPLITTINGS[splitting].has_bos)
    bos, eos = special_tokens.get("bos_token"), special_tokens.get("eos_token")
    if is_encoder:
        bos, eos = special_tokens.get("cls_token", bos), special_tokens.get("sep_token", eos)
    before = [bos] if bos and (is_encoder or metadata.get("tokenizer.ggml.add_bos_token", usual)) else []
    after = [eos] if eos and (is_encoder or metadata.get("tokenizer.ggml.add_eos_token", kind == "t5")) else []
    if not before and not after:
        return
    around = [(token, backend.token_to_id(token)) for token in dict.fromkeys(before + after)]
    pair = None
    if is_encoder:
        has_types = kind == "bert" or splitting == "modern-bert"  # RoBERTa has two marks between texts instead
        second = ["$B:1", *(f"{token}:1" for token in after)] if has_types else [*after, "$B", *after]
        pair = [*before, "$A", *after, *second]
    backend.post_processor = TemplateProcessing(single=[*before, "$A", *after], pair=pair, special_tokens=around)
