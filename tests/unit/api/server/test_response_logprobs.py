"""Which tokens' log-probabilities belong to the text of a message, whatever came in one output."""

from __future__ import annotations

import msgspec
import pytest

from ratoon.api.answer_parts.parts import ContentDelta, ReasoningDelta, ToolCallArguments, ToolCallBegin
from ratoon.api.server.logprobs import MessageLogprobs, TokenTexts
from ratoon.core.outputs import CompletionOutput, Logprob
from tests.unit.engine.fakes import byte_tokenizer

REASONING, CALL = ReasoningDelta("hm"), ToolCallBegin(0, "c", "f")


def output_of(text: str) -> CompletionOutput:
    token_ids = list(text.encode())
    logprobs = [{token: Logprob(-1.0, 1, chr(token))} for token in token_ids]
    return CompletionOutput(index=0, text=text, token_ids=token_ids, logprobs=logprobs)


@pytest.mark.parametrize(
    ("outputs", "expected"),
    [
        ([("ab", [ContentDelta("ab")])], ["ab"]),
        ([("a", []), ("b", [ContentDelta("ab")])], ["ab"]),  # held back
        ([("hm", [REASONING]), ("ab", [ContentDelta("ab")])], ["ab"]),
        ([("hm</think>ab", [REASONING, ContentDelta("ab")])], ["ab"]),
        ([("ab<call>", [ContentDelta("ab"), CALL])], ["ab"]),
        (
            [("ab<call>{}</call>cd", [ContentDelta("ab"), CALL, ToolCallArguments(0, "{}"), ContentDelta("cd")])],
            ["abcd"],
        ),
        ([("<", []), ("call>", [CALL]), ("x", [ContentDelta("x")])], ["x"]),
        ([("é", [ContentDelta("é")])], ["é"]),
    ],
)
def test_tokens_go_to_their_text(outputs, expected):
    logprobs = MessageLogprobs(TokenTexts(byte_tokenizer()), 0)
    claimed = b""
    for text, parts in outputs:
        logprobs.add(output_of(text))
        of_parts = logprobs.claim(parts)
        assert len(of_parts) == len(parts)
        for part, entries in zip(parts, of_parts):
            assert isinstance(part, ContentDelta) or not entries
            claimed += b"".join(bytes(msgspec.json.decode(entry)["bytes"]) for entry in entries)
    assert [claimed.decode()] == expected
