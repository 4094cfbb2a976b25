"""Answers of /v1/completions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ratoon.api.server.answers.beams import figures
from ratoon.api.server.answers.logprobs import CompletionLogprobsBuilder, prompt_logprobs
from ratoon.api.server.answers.renderer import Renderer
from ratoon.api.server.context import ServerContext
from ratoon.api.server.generation import Batch
from ratoon.api.server.protocol.completions import CompletionRequest
from ratoon.core.outputs import CompletionOutput, RequestOutput


class CompletionRenderer(Renderer):
    WHOLE = CHUNK = "text_completion"

    def __init__(self, context: ServerContext, asked: CompletionRequest, batch: Batch) -> None:
        super().__init__(context, asked, batch)
        self._echo = bool(asked.echo)
        self._logprobs = asked.logprobs is not None
        self._prompt_logprobs = asked.prompt_logprobs is not None
        self._skip_special_tokens = batch.params.skip_special_tokens
        self._builders: dict[int, CompletionLogprobsBuilder] = {}  # by the choice's index in the answer
        self._begun: set[int] = set()

    def whole_body(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        choices = [
            self._choice(index, output, choice) for index, output in enumerate(outputs) for choice in output.outputs
        ]
        return {"choices": choices}

    def chunk_bodies(self, index: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        for choice in output.outputs:
            if self.is_worth_sending(choice) or (self._echo and self._place(index, choice) not in self._begun):
                yield {"choices": [self._choice(index, output, choice)]}

    def empty_choice(self, place: int) -> dict[str, Any]:
        return {"index": place, "text": "", "logprobs": None, "finish_reason": None, "stop_reason": None}

    def _place(self, index: int, choice: CompletionOutput) -> int:
        """OpenAI numbers all choices of the first prompt, then those of the second, and so on."""
        return index * self.num_choices + choice.index

    def _choice(self, index: int, output: RequestOutput, choice: CompletionOutput) -> dict[str, Any]:
        place = self._place(index, choice)
        first = place not in self._begun
        self._begun.add(place)
        echoed = self._prompt_text(output) if first and self._echo else ""
        body: dict[str, Any] = {
            "index": place,
            "text": echoed + choice.text,
            "logprobs": self._choice_logprobs(place, output, choice, first) if self._logprobs else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            **figures(choice),
        }
        if self._prompt_logprobs and first and output.prompt_logprobs is not None:
            body["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        if self.return_token_ids:
            body["token_ids"] = choice.token_ids
            if first:
                body["prompt_token_ids"] = output.prompt_token_ids
                if output.encoder_prompt_token_ids is not None:
                    body["encoder_prompt_token_ids"] = output.encoder_prompt_token_ids
        return body

    def _choice_logprobs(
        self, place: int, output: RequestOutput, choice: CompletionOutput, first: bool
    ) -> dict[str, list[Any]]:
        builder = self._builders.get(place)
        if builder is None:
            builder = CompletionLogprobsBuilder(self.context.token_texts, self._skip_special_tokens)
            self._builders[place] = builder
        answer = (choice.token_ids, choice.logprobs or [])
        if not (first and self._echo):
            return builder.build(*answer)
        prompt = builder.build(output.prompt_token_ids or [], output.prompt_logprobs or [])
        builder.end_prompt(self._prompt_text(output))
        generated = builder.build(*answer)
        return {name: prompt[name] + generated[name] for name in prompt}

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None:
            return output.prompt
        return self.context.llm.get_tokenizer().decode(output.prompt_token_ids or [], self._skip_special_tokens)
