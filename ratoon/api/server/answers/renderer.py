"""What completions and chat have in common: the head of an answer, its chunks, its usage."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, ClassVar

from ratoon.api.server.answers.beams import SearchProgress, figures
from ratoon.api.server.answers.hidden_states import content_or_error
from ratoon.api.server.answers.usage import UsageCounter
from ratoon.api.server.context import ServerContext
from ratoon.api.server.generation import Batch
from ratoon.api.server.protocol.sampling import SamplingFields
from ratoon.core.outputs import CompletionOutput, RequestOutput
from ratoon.core.params import BeamSearchParams


class Renderer(ABC):
    """Makes one request's answer. Either `whole` is called, once, or `chunks` for every output, in order."""

    WHOLE: ClassVar[str]  # the `object` of an answer, and of a chunk
    CHUNK: ClassVar[str]

    def __init__(self, context: ServerContext, asked: SamplingFields, batch: Batch) -> None:
        self.context = context
        self.batch = batch
        self.usage = UsageCounter(batch.prompts)
        self.num_choices = asked.num_choices()
        self.return_token_ids = bool(asked.return_token_ids)
        options = asked.stream_options
        self.include_usage = options is not None and bool(options.include_usage)
        self._usage_in_chunks = options is not None and bool(options.continuous_usage_stats)
        self._continuation_told = False
        self._search = SearchProgress() if isinstance(batch.params, BeamSearchParams) else None
        self._head = {"id": batch.id, "created": int(time.time()), "model": asked.model}

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        for index, output in enumerate(outputs):
            self.usage.add(index, output)
        content = self.whole_body(outputs)
        for index, output in enumerate(outputs):
            self._put_in(content, self._hidden_states(index, output))
        body = {**content, "usage": self.usage.as_dict(), **self._about_continuation(outputs[0])}
        return {**self._head, "object": self.WHOLE, **body}

    def chunks(self, index: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        """Chunks for what is new in prompt `index`, a choice each."""
        best = None if self._search is None else self._search.take(index, output)
        self.usage.add(index, output)
        states = self._hidden_states(index, output)
        for body in self.chunk_bodies(index, output):
            self._put_in(body, states)
            yield self._chunk({**body, **self._about_continuation(output)})
        for place, entry in states.items():  # of choices that ended before the last one
            yield self._chunk({"choices": [{**self.empty_choice(place), "hidden_states": entry}]})
        if best is not None:
            choice = {**self.empty_choice(index * self.num_choices), **figures(best), "best_so_far": best.text}
            yield self._chunk({"choices": [choice], **self._about_continuation(output)})

    def usage_chunk(self) -> dict[str, Any]:
        return {**self._head, "object": self.CHUNK, "choices": [], "usage": self.usage.as_dict()}

    def _chunk(self, body: dict[str, Any]) -> dict[str, Any]:
        chunk = {**self._head, "object": self.CHUNK, **body}
        if self._usage_in_chunks:
            chunk["usage"] = self.usage.as_dict()
        elif self.include_usage:
            chunk["usage"] = None
        return chunk

    def _hidden_states(self, index: int, output: RequestOutput) -> dict[int, dict[str, Any]]:
        """By the choices' places. They come with a prompt's last output, for all of its choices."""
        first = index * self.num_choices
        return {first + choice: content_or_error(states) for choice, states in enumerate(output.hidden_states or ())}

    @staticmethod
    def _put_in(body: dict[str, Any], states: dict[int, dict[str, Any]]) -> None:
        """Move to the choices that end in this body what belongs to them."""
        for choice in body["choices"]:
            if choice["finish_reason"] is not None and choice["index"] in states:
                choice["hidden_states"] = states.pop(choice["index"])

    def _about_continuation(self, output: RequestOutput) -> dict[str, Any]:
        """How a continuation began: in its whole answer, or in the first chunk."""
        if output.continuation is None or self._continuation_told:
            return {}
        self._continuation_told = True
        return {"continuation": asdict(output.continuation)}

    def is_worth_sending(self, choice: CompletionOutput) -> bool:
        """Text is held back while it may become a stop string or is part of a character: then there is no chunk."""
        return bool(choice.text) or choice.finished or self.return_token_ids or choice.logprobs is not None

    @abstractmethod
    def whole_body(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """`choices`, and what else this kind of answer has."""

    @abstractmethod
    def chunk_bodies(self, index: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        """The same for each chunk."""

    @abstractmethod
    def empty_choice(self, place: int) -> dict[str, Any]:
        """The choice at this place, in a chunk that adds nothing to its text."""
