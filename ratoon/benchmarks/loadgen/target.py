"""What a server supports, detected before anything is measured: token ids, token counts, answers of full length.

Servers differ in their extensions of OpenAI's protocol, and some refuse unknown fields: each extension is tried, and
dropped when it is refused.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec

from ratoon.api.remote.client import CHAT, COMPLETIONS, Chunk, RefusedError, RemoteClient, RemoteError, Usage
from ratoon.benchmarks.loadgen.datasets import VOCABULARY, WORDS, Prompt, PromptMaker, TextPrompts, TokenPrompts, Turn
from ratoon.core.prepared import prepared

PROBE_WORDS = 32
WRONG_FIELD = (400, 422)  # the answers to a field that a server does not know

# Extensions that are tried, in the order in which they are dropped, and the note for the report.
TOKEN_COUNTS = "continuous_usage_stats"
IGNORE_EOS = "ignore_eos"
TOKEN_IDS = "token ids"
WITHOUT = {
    TOKEN_COUNTS: "",  # a chunk then counts as one token until the final usage
    IGNORE_EOS: "the server refuses ignore_eos: answers may be shorter than asked for",
    TOKEN_IDS: "the server accepts no token ids: prompts have approximately the requested length",
}


class Target(msgspec.Struct):
    """The server, and the fields of requests that it supports."""

    path: str
    model: str
    maker: PromptMaker
    options: dict[str, Any]  # fields that every request has
    notes: list[str]  # notes for the report

    @property
    def is_chat(self) -> bool:
        return self.path == CHAT

    def body(self, turn: Turn, history: list[dict[str, Any]]) -> dict[str, Any]:
        """A request for a turn, and the messages before it in the conversation."""
        fields = {"model": self.model, "max_tokens": turn.output_len, **self.options}
        if not self.is_chat:
            return {**fields, "prompt": turn.prompt}
        return {**fields, "messages": history + messages_of(turn)}


def messages_of(turn: Turn) -> list[dict[str, Any]]:
    return turn.messages if turn.messages is not None else [{"role": "user", "content": turn.prompt}]


async def examine(
    client: RemoteClient, model: str, chat: bool, ignore_eos: bool, fields: dict[str, Any], token_ids: bool
) -> Target:
    """Send small requests until one is taken. RemoteError if none is; `fields` are the user's and are not given up."""
    vocabulary = await tokenize(client, model, VOCABULARY)
    tried = {TOKEN_COUNTS}
    if ignore_eos:
        tried.add(IGNORE_EOS)
    if token_ids and not chat and vocabulary is not None:
        tried.add(TOKEN_IDS)
    notes = [WITHOUT[TOKEN_IDS]] if token_ids and not chat and vocabulary is None else []
    while True:
        maker: PromptMaker = TokenPrompts(vocabulary) if TOKEN_IDS in tried and vocabulary else TextPrompts(1.0)
        target = Target(CHAT if chat else COMPLETIONS, model, maker, {**_options(tried), **fields}, [])
        try:
            usage = await _probe(client, target, maker.make(PROBE_WORDS, random.Random(0)))
            break
        except RefusedError as error:
            given_up = _to_give_up(tried, error)
            if given_up is None:
                raise
            tried.remove(given_up)
            notes.append(WITHOUT[given_up])
    if usage is None:
        notes.append("the server does not count tokens: each chunk of an answer counts as one")
    if isinstance(target.maker, TextPrompts):
        target.maker = TextPrompts(_tokens_per_word(vocabulary, usage))
    target.notes = [note for note in notes if note]
    return target


def _options(tried: set[str]) -> dict[str, Any]:
    stream_options = {"include_usage": True}
    if TOKEN_COUNTS in tried:
        stream_options[TOKEN_COUNTS] = True
    options: dict[str, Any] = {"stream": True, "stream_options": stream_options}
    if IGNORE_EOS in tried:
        options[IGNORE_EOS] = True
    return options


def _to_give_up(tried: set[str], error: RefusedError) -> str | None:
    """The extension that the server names in its refusal, else the next one. None: another reason."""
    if error.status not in WRONG_FIELD:
        return None
    named = (name for name in WITHOUT if name in tried and name in str(error))
    return next(named, next((name for name in WITHOUT if name in tried), None))


async def _probe(client: RemoteClient, target: Target, prompt: Prompt) -> Usage | None:
    """The token counts of a short answer, if the server reports them."""
    counts: list[Usage] = []

    def receive(chunks: list[Chunk]) -> None:
        counts.extend(chunk.usage for chunk in chunks if chunk.usage is not None)

    await client.stream(target.path, target.body(Turn(output_len=2, prompt=prompt), []), receive)
    return counts[-1] if counts else None


async def tokenize(client: RemoteClient, model: str, text: str) -> list[int] | None:
    """Token ids of a text by /tokenize, as in Ratoon and vLLM; None if this server has no such endpoint."""
    try:
        answer = await client.post("/tokenize", {"model": model, "prompt": text, "add_special_tokens": False})
        return msgspec.convert(answer.get("tokens"), prepared(list[int])) or None
    except msgspec.ValidationError:
        return None
    except RemoteError as error:
        if error.status is None and error.kind != "bad answer":
            raise  # no server there
        return None


def _tokens_per_word(vocabulary: list[int] | None, usage: Usage | None) -> float:
    if vocabulary is not None:
        return len(vocabulary) / len(WORDS)
    if usage is not None and usage.prompt_tokens:
        return max(1.0, usage.prompt_tokens / PROBE_WORDS)  # with a chat template's own tokens: a little too high
    return 1.3  # of common tokenizers and plain English
