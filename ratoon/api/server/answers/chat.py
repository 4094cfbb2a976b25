"""Answers of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ratoon.api.server.answers.beams import figures
from ratoon.api.server.answers.logprobs import chat_logprobs, prompt_logprobs
from ratoon.api.server.answers.renderer import Renderer
from ratoon.api.server.context import ServerContext
from ratoon.api.server.generation import Batch
from ratoon.api.server.protocol.chat import ChatCompletionRequest
from ratoon.core.outputs import CompletionOutput, RequestOutput

ROLE = "assistant"


class ChatRenderer(Renderer):
    WHOLE = "chat.completion"
    CHUNK = "chat.completion.chunk"

    def __init__(self, context: ServerContext, asked: ChatCompletionRequest, batch: Batch) -> None:
        super().__init__(context, asked, batch)
        self._logprobs = bool(asked.logprobs)
        self._num_top = asked.top_logprobs or 0
        self._begun = False

    def whole_body(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        (output,) = outputs
        choices = [self._choice(choice, "message", {"role": ROLE, "content": choice.text}) for choice in output.outputs]
        return {"choices": choices, **self._about_prompt(output)}

    def chunk_bodies(self, index: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        if not self._begun:
            self._begun = True
            yield from self._role_chunks(output)
        for choice in output.outputs:
            if self.is_worth_sending(choice):
                yield {"choices": [self._choice(choice, "delta", {"content": choice.text})]}

    def _role_chunks(self, output: RequestOutput) -> Iterator[dict[str, Any]]:
        """Before anything else, each choice says whose words these are. The first chunk tells about the prompt, too."""
        about_prompt = self._about_prompt(output)
        for place in range(self.num_choices):
            choice: dict[str, Any] = {"index": place, "delta": {"role": ROLE, "content": ""}}
            yield {"choices": [{**choice, "logprobs": None, "finish_reason": None}], **about_prompt}
            about_prompt = {}

    def empty_choice(self, place: int) -> dict[str, Any]:
        return {"index": place, "delta": {"content": ""}, "logprobs": None, "finish_reason": None, "stop_reason": None}

    def _choice(self, choice: CompletionOutput, name: str, words: dict[str, str]) -> dict[str, Any]:
        """`words` are a message, or what is new of one; `name` says which."""
        body: dict[str, Any] = {
            "index": choice.index,
            name: words,
            "logprobs": None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            **figures(choice),
        }
        if self._logprobs and choice.logprobs is not None:
            body["logprobs"] = chat_logprobs(self.context.token_texts, choice.token_ids, choice.logprobs, self._num_top)
        if self.return_token_ids:
            body["token_ids"] = choice.token_ids
        return body

    def _about_prompt(self, output: RequestOutput) -> dict[str, Any]:
        about: dict[str, Any] = {}
        if output.prompt_logprobs is not None:
            about["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        if self.return_token_ids:
            about["prompt_token_ids"] = output.prompt_token_ids
        return about
