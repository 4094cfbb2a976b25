"""Pairs of texts, such as a query and a document, as prompts of a model that scores them.

The tokenizer joins the two, as it does for the encoder that was trained so, or a template makes one text of them.
Texts that are too long are refused, or cut: tokens of the longer one first, as sentence-transformers does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ratoon.core.config import ModelConfig
from ratoon.core.errors import RequestError

DEFAULT_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_FIELDS = re.compile(r"\{(instruction|query|document)\}")
TO_MODEL_LENGTH = -1  # as a number of tokens to cut to: as many as the model takes
TOGETHER = 64  # texts that are tokenised by one call, on all cores


class PairEncoder:
    def __init__(self, config: ModelConfig, tokenizer: Any, max_model_len: int) -> None:
        if tokenizer is None:
            raise RequestError("model", "no tokenizer is loaded, and pairs of texts need one", "skip_tokenizer=False")
        self._template = None if config.classifier is None else config.classifier.template
        self._vocab_size, self._num_types = config.vocab_size, config.num_token_types
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len

    def encode(
        self,
        pairs: Sequence[tuple[str, str]],
        fields: Sequence[str],
        instruction: str | None = None,
        truncate: int | None = None,
        max_document_tokens: int | None = None,
    ) -> list[dict[str, Any]]:
        """A prompt for each pair. `fields` are what errors call the pairs. `truncate`: pairs are cut to so many tokens,
        or TO_MODEL_LENGTH; None: longer ones than the model takes are refused. Documents are cut to
        `max_document_tokens` before that."""
        if instruction is not None and self._template is None:
            raise RequestError("instruction", "the model reads none: it has no template for pairs", "None")
        longest = find_limit(truncate, self._max_model_len)
        if truncate is None and max_document_tokens is None:
            for (query, document), field in zip(pairs, fields, strict=True):
                self._refuse_early(query, document, longest, field)
        found = []
        queries: dict[str, Any] = {}  # by their text: they are often the same
        documents = self._encodings([document for _, document in pairs])
        for (query, document), field in zip(pairs, fields, strict=True):
            if self._template is not None:
                cut = self._cut_text(document, max_document_tokens)
                ids = self._render(query, cut, instruction or DEFAULT_INSTRUCTION, longest, truncate is not None)
                type_ids = None
            else:
                if query not in queries:
                    queries[query] = self._tokenizer.encoding(query)
                second = next(documents)
                if max_document_tokens is not None:
                    second.truncate(max_document_tokens)
                ids, type_ids = self._join(query, queries[query], second, longest, truncate is not None)
            if len(ids) > longest:
                raise self._too_long(field, str(len(ids)))
            if ids and max(ids) >= self._vocab_size:
                problem = f"is tokenised to id {max(ids)}, and the vocabulary ends at {self._vocab_size - 1}"
                raise RequestError(field, problem, "the tokenizer that belongs to the model")
            prompt: dict[str, Any] = {"prompt_token_ids": ids}
            if type_ids is not None and self._num_types > 1:
                prompt["token_type_ids"] = type_ids
            found.append(prompt)
        return found

    def _refuse_early(self, query: str, document: str, longest: int, field: str) -> None:
        """Refuses texts that have surely too many tokens, before they are tokenised."""
        for text in (query, document):
            if (num_tokens := self._tokenizer.refuse_early(text, longest)) is not None:
                raise self._too_long(field, f"at least {num_tokens}")

    def _too_long(self, field: str, num_tokens: str) -> RequestError:
        problem = f"makes {num_tokens} tokens of a pair, and at most {self._max_model_len} fit"
        return RequestError(field, problem, f"shorter texts, or truncate_prompt_tokens: {TO_MODEL_LENGTH}")

    # ---- pairs that the tokenizer joins ----

    def _encodings(self, texts: Sequence[str]) -> Iterator[Any]:
        """Yields the tokens of each text, which are the caller's to cut. Several texts are tokenised at a time."""
        for start in range(0, len(texts), TOGETHER):
            yield from self._tokenizer.encodings(texts[start : start + TOGETHER])

    def _join(self, query: str, first: Any, second: Any, longest: int, truncates: bool) -> tuple[list[int], list[int]]:
        """Joins the encoding of a query with that of a document, which is cut in place."""
        backend = self._tokenizer.backend
        room = longest - backend.num_special_tokens_to_add(True)
        if truncates and len(first) + len(second) > room:
            if room < 1:
                raise RequestError(
                    "truncate_prompt_tokens", f"{longest} leaves no room for texts", f"{longest - room}+"
                )
            counts = cut_longest_first(len(first), len(second), room)
            if counts[0] < len(first):
                first = self._tokenizer.encoding(query)  # cut in place, and others have the same query
                first.truncate(counts[0])
            second.truncate(counts[1])
        joined = backend.post_process(first, second, True)
        return joined.ids, joined.type_ids

    # ---- pairs of which a template makes one text ----

    def _render(self, query: str, document: str, instruction: str, longest: int, truncates: bool) -> list[int]:
        assert self._template is not None
        values = {"instruction": instruction, "query": query, "document": document}
        ids: list[int] = self._tokenizer.encode(fill(self._template, values), add_special_tokens=False)
        if not truncates or len(ids) <= longest:
            return ids
        num_document = len(self._tokenizer.encode(document, add_special_tokens=False))
        while len(ids) > longest and num_document > 0:
            num_document -= min(num_document, len(ids) - longest)
            values["document"] = self._cut_text(document, num_document)
            ids = self._tokenizer.encode(fill(self._template, values), add_special_tokens=False)
        return ids

    def _cut_text(self, text: str, num_tokens: int | None) -> str:
        """The beginning of a text, of so many tokens."""
        if num_tokens is None:
            return text
        offsets = self._tokenizer.encoding(text).offsets
        return text if len(offsets) <= num_tokens else text[: offsets[num_tokens][0]]


def find_limit(truncate: int | None, max_model_len: int) -> int:
    """The most tokens that a prompt may have."""
    if truncate is None or truncate == TO_MODEL_LENGTH:
        return max_model_len
    if isinstance(truncate, bool) or not isinstance(truncate, int) or not 0 < truncate <= max_model_len:
        expected = f"1 to {max_model_len}, or {TO_MODEL_LENGTH} for as many as the model takes"
        raise RequestError("truncate_prompt_tokens", f"{truncate!r} is out of range", expected)
    return truncate


def fill(template: str, values: Mapping[str, str]) -> str:
    """The template with these values, in which braces have no meaning."""
    return _FIELDS.sub(lambda found: values[found[1]], template)


def cut_longest_first(first: int, second: int, room: int) -> tuple[int, int]:
    """How many tokens of two texts are left where both together have more than `room`: the longer one is cut first, to
    no fewer than the other has. An odd token is the longer one's."""
    if first <= room // 2:
        return first, room - first
    if second <= room // 2:
        return room - second, second
    return (room - room // 2, room // 2) if first > second else (room // 2, room - room // 2)
