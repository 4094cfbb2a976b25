"""What all routes share: the engine, the settings, the model's names, and the count of what is under way."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from starlette.requests import Request

from ratoon.api.server.errors import model_not_found, queue_full
from ratoon.api.server.settings import ServerSettings
from ratoon.api.server.token_texts import TokenTexts

if TYPE_CHECKING:
    from ratoon.engine.async_llm import AsyncLLM


@dataclass
class ServerContext:
    llm: AsyncLLM
    settings: ServerSettings
    created: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False  # set at shutdown: nothing new is taken
    num_unfinished: int = 0  # prompts of all requests

    @cached_property
    def served_names(self) -> tuple[str, ...]:
        return self.settings.served_names or (self.llm.source.name,)

    @cached_property
    def max_model_len(self) -> int:
        length = self.llm.config.max_model_len
        assert length is not None, "the engine has started"
        return length

    @cached_property
    def token_texts(self) -> TokenTexts:
        return TokenTexts(self.llm.get_tokenizer())

    def check_model(self, name: str) -> None:
        if name not in self.served_names:
            raise model_not_found(name, self.served_names)

    @contextmanager
    def admit(self, count: int) -> Iterator[None]:
        """Room for so many prompts while the block lasts, or a 429."""
        if self.num_unfinished + count > self.settings.max_queue:
            raise queue_full(
                f"{self.num_unfinished} prompts are unfinished, and {self.settings.max_queue} is the limit; "
                "try again in a moment"
            )
        self.num_unfinished += count
        try:
            yield
        finally:
            self.num_unfinished -= count


def context_of(request: Request) -> ServerContext:
    context: ServerContext = request.app.state.context
    return context
