"""The models of `ratoon chat`: one in this process, or one of a server, with the same interface.

An answerer writes into a PrintedAnswer piece by piece. If it is interrupted or fails, that keeps the text so far.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from ratoon.api.answer_parts.parser import AUTO, choose_answer_format
from ratoon.api.answer_parts.parts import ContentDelta, Part, ReasoningDelta
from ratoon.api.answer_parts.plan import answer_plan
from ratoon.api.terminal import DIM, PLAIN, WordWriter, is_coloured
from ratoon.core.params import SamplingParams
from ratoon.core.prepared import prepared

if TYPE_CHECKING:
    from ratoon.api.llm import LLM
    from ratoon.api.remote.client import RemoteClient
    from ratoon.core.params import GenerationParams

Message = dict[str, Any]  # its content may be a list of parts


VARIED_TEMPERATURE = 0.8  # of further answers to a message, where no temperature is given
ONLY_REASONING = "ended while reasoning; --max-tokens allows more"


class PrintedAnswer:
    """An answer while it is generated: printed immediately, and kept. `on_first` is called before its first text.

    Reasoning is printed dimmed, on a terminal only, and not kept.
    """

    def __init__(self, on_first: Callable[[], None] = lambda: None) -> None:
        self._on_first = on_first
        self._is_terminal = sys.stdout.isatty()
        self._pieces: list[str] = []
        self._has_reasoning = False
        self.num_tokens = 0
        self.num_prompt_tokens: int | None = None  # None: unknown, as is what was cached
        self.num_cached_tokens: int | None = None
        self.note = ""  # a note for the user, such as why it ended early

    def add(self, text: str) -> None:
        if not text:
            return
        if not self._pieces:
            if self._has_reasoning and self._is_terminal:
                self._words.write("\n\n")
            self._on_first()
        self._pieces.append(text)
        if self._is_terminal:
            self._words.write(text)
        else:
            sys.stdout.write(text)
            sys.stdout.flush()

    def add_reasoning(self, text: str) -> None:
        if not text:
            return
        self._has_reasoning = True
        if self._is_terminal:
            self._on_first()
            colour = (DIM, PLAIN) if is_coloured(sys.stdout) else ("", "")
            self._words.write(text, *colour)

    @cached_property
    def _words(self) -> WordWriter:
        """Made when the first text is written: until `on_first` was called, standard output may be that of a spinner,
        which begins a line with every piece."""
        return WordWriter(sys.stdout)

    def finish(self) -> None:
        """The answer has ended by itself."""
        if self._has_reasoning and not self._pieces and not self.note:
            self.note = ONLY_REASONING

    @property
    def text(self) -> str:
        return "".join(self._pieces)


def goes_on(messages: Sequence[Message]) -> bool:
    return messages[-1]["role"] == "assistant"


class Answerer(Protocol):
    @property
    def name(self) -> str: ...

    def answer(self, messages: Sequence[Message], answer: PrintedAnswer, varies: bool = False) -> None:
        """Answer the last message, or continue it if it is the assistant's. `varies`: the answer should differ from
        others to the same message, so it is sampled without a seed. Raises RequestError or RemoteError if the
        answer is missing or incomplete."""

    def describe_state(self) -> str:
        """A line for /stats."""


class LocalAnswerer:
    def __init__(
        self,
        llm: LLM,
        params: GenerationParams,
        reasoning_parser: str = AUTO,
        variables: dict[str, Any] | None = None,
        adapter: str | None = None,
    ) -> None:
        """`variables` are the template's."""
        self._adapter = adapter
        self._llm = llm
        self._params = params
        self._variables = variables or {}
        tokenizer = llm.get_tokenizer()
        self._format = choose_answer_format(tokenizer.template_text(), reasoning_parser=reasoning_parser)

    @property
    def name(self) -> str:
        return self._llm.source.name

    def answer(self, messages: Sequence[Message], answer: PrintedAnswer, varies: bool = False) -> None:
        continued = messages[-1]["content"] if goes_on(messages) else None
        prompt = self._llm.chat_prompt(messages, continue_final_message=goes_on(messages), **self._variables)
        plan = answer_plan(self._format, self._llm.get_tokenizer(), continued=continued)
        parser, params = plan.parser(prompt["prompt"]), plan.params(self._params, prompt["prompt"])
        if varies and isinstance(params, SamplingParams):
            params = msgspec.structs.replace(
                params, temperature=params.temperature or VARIED_TEMPERATURE, seed=secrets.randbits(32)
            )
        with closing(self._llm.stream(prompt, params, adapter=self._adapter)) as stream:
            for output in stream:
                choice = output.outputs[0]
                self._print(parser.push(choice.text) + (parser.finish() if choice.finished else []), answer)
                answer.num_tokens += len(choice.token_ids)
                answer.num_prompt_tokens = len(output.prompt_token_ids or ())
                answer.num_cached_tokens = output.num_cached_tokens or 0
                answer.note = output.error or ""

    @staticmethod
    def _print(parts: list[Part], answer: PrintedAnswer) -> None:
        for part in parts:
            if isinstance(part, ReasoningDelta):
                answer.add_reasoning(part.text)
            elif isinstance(part, ContentDelta):
                answer.add(part.text)

    def describe_state(self) -> str:
        stats = self._llm.stats()
        return f"cache          {stats.kv_usage:.1%} in use, hit rate {stats.prefix_cache.hit_rate:.1%}"


class RemoteAnswerer:
    """Opens a connection for each answer: Ctrl-C closes it, and the server stops.

    A Ratoon server continues its own answers, so it gets the new messages alone, with their images. It gets the whole
    conversation if it has forgotten the answer, and after an answer whose text is not all that was generated.
    """

    def __init__(self, client: RemoteClient, model: str | None, fields: dict[str, Any]) -> None:
        from ratoon.api.remote.options import choose_model

        async def find_model() -> str:
            async with client:
                return await choose_model(client, model)

        self._client = client
        self._model = asyncio.run(find_model())
        self._fields = fields
        self._continues: bool | None = None  # whether the server continues answers; None: it was not asked yet
        self._answered: tuple[str, list[Message]] | None = None  # the last answer's id, and the conversation with it

    @property
    def name(self) -> str:
        return f"{self._model} at {self._client.url}"

    def answer(self, messages: Sequence[Message], answer: PrintedAnswer, varies: bool = False) -> None:
        asyncio.run(self._answer(messages, answer, varies))

    async def _answer(self, messages: Sequence[Message], answer: PrintedAnswer, varies: bool) -> None:
        from ratoon.api.remote.client import CONTINUE, RefusedError

        varied: dict[str, Any] = {}
        if varies:
            varied = {
                "temperature": self._fields.get("temperature") or VARIED_TEMPERATURE,
                "seed": secrets.randbits(32),
            }
        async with self._client as client:
            answered, self._answered = self._answered, None
            if answered is not None and messages[:-1] == answered[1] and await self._server_continues(client):
                body = {"messages": messages[-1:], "continuation_of": answered[0], **varied}
                with suppress(RefusedError):  # what is wrong with the conversation is said of all of it
                    await self._stream(client, body, messages, answer)
                    return
            whole = {"messages": messages, **(CONTINUE if goes_on(messages) else {}), **varied}
            await self._stream(client, whole, messages, answer)

    async def _stream(
        self, client: RemoteClient, asked: dict[str, Any], messages: Sequence[Message], answer: PrintedAnswer
    ) -> None:
        from ratoon.api.remote.client import CHAT, Chunk

        class NamedChunk(Chunk):
            id: str | None = None

        answer_id, is_plain = None, not goes_on(messages) and "stop" not in self._fields

        def receive(chunks: list[Chunk]) -> None:
            nonlocal answer_id, is_plain
            for chunk in chunks:
                answer_id = chunk.id if isinstance(chunk, NamedChunk) else None
                for choice in chunk.choices:
                    is_plain = is_plain and not choice.new_reasoning
                    answer.add_reasoning(choice.new_reasoning)
                    answer.add(choice.new_text)
                    answer.num_tokens += choice.has_text  # an estimate, until the server sends the count
                if chunk.usage is not None:
                    answer.num_tokens = chunk.usage.completion_tokens
                    answer.num_prompt_tokens = chunk.usage.prompt_tokens
                    answer.num_cached_tokens = chunk.usage.cached_tokens

        options = {"model": self._model, "stream": True, "stream_options": {"include_usage": True}, **self._fields}
        await client.stream(CHAT, {**options, **asked}, receive, msgspec.json.Decoder(prepared(NamedChunk)).decode)
        if answer_id is not None and is_plain:
            self._answered = answer_id, [*messages, {"role": "assistant", "content": answer.text}]

    async def _server_continues(self, client: RemoteClient) -> bool:
        """Other servers ignore the field that names an earlier answer, or refuse it."""
        from ratoon.api.remote.client import RemoteError

        if self._continues is None:
            self._continues = False
            with suppress(RemoteError, AttributeError):  # the latter: its answer is no object
                listed = (await client.get("/v1/models")).get("data") or []
                self._continues = any(model.get("owned_by") == "ratoon" for model in listed)
        return self._continues

    def describe_state(self) -> str:
        return f"server         {self.name}"
