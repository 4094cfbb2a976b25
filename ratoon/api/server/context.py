"""What all routes share: the engine, the settings, the model's names, and what belongs to the service (state.py)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from starlette.requests import Request

from ratoon.api.answer_parts.parser import choose_answer_format
from ratoon.api.answer_parts.plan import AnswerPlan, answer_plan
from ratoon.api.answer_parts.tool_use import NO_TOOLS, ToolUse
from ratoon.api.server.body_budget import BodyBudget
from ratoon.api.server.engine_watch import EngineWatch
from ratoon.api.server.errors import model_not_found, queue_full
from ratoon.api.server.logprobs import TokenTexts
from ratoon.api.server.media_fetcher import MediaFetcher
from ratoon.api.server.middleware import AllowedHosts, KeyRing
from ratoon.api.server.preparation import Preparation
from ratoon.api.server.protocol.base import RequestModel
from ratoon.api.server.response_store import StoredResponse
from ratoon.api.server.settings import ServerSettings
from ratoon.api.server.state import OwnState, ServiceState, forget_root
from ratoon.api.server.unknown_fields import IgnoredFieldsLog
from ratoon.core.adapters import Adapter, BaseModel
from ratoon.core.json_extent import ExtentLimit, extent_limit

if TYPE_CHECKING:
    from ratoon.engine.async_llm import AsyncLLM


@dataclass
class ServerContext:
    llm: AsyncLLM
    settings: ServerSettings
    created: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False  # set at shutdown: new requests are refused
    allowed_hosts: AllowedHosts | None = None  # None: any Host header is accepted
    ignored_fields: IgnoredFieldsLog = field(default_factory=IgnoredFieldsLog)
    bodies: BodyBudget = field(init=False)  # of all requests
    media_fetcher: MediaFetcher = field(init=False)
    preparation: Preparation = field(default_factory=Preparation)  # of large ones
    given_state: ServiceState | None = None  # None: all of the service is in this process
    num_unfinished: int = field(default=0, init=False)  # unfinished prompts of this front end
    _forgetting: set[asyncio.Task[None]] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        settings = self.settings
        self.bodies = BodyBudget(settings.max_total_body)
        self.media_fetcher = MediaFetcher(settings.media_hosts, settings.max_media, settings.media_timeout)

    @cached_property
    def shared(self) -> ServiceState:
        return OwnState(self.llm, self.settings) if self.given_state is None else self.given_state

    @cached_property
    def watch(self) -> EngineWatch:
        labels = KeyRing(self.settings.api_keys).labels()
        models, model_of = (lambda: self.model_names), (lambda index: self.served_names[0])
        return EngineWatch(self.llm, models, model_of, labels, lambda: self.draining)

    @property
    def awake(self) -> list[ServerContext]:
        """The models whose engines may have requests and leases, of a server with one model or several."""
        return [self]

    @cached_property
    def served_names(self) -> tuple[str, ...]:
        return self.settings.served_names or (self.llm.source.name,)

    @property
    def model_names(self) -> tuple[str, ...]:
        """What requests may name as their model: its own names, and those of adapters."""
        return (*self.served_names, *self.llm.list_adapters())

    @cached_property
    def max_model_len(self) -> int:
        length = self.llm.config.max_model_len
        assert length is not None, "the engine has started"
        return length

    @cached_property
    def extent_limit(self) -> ExtentLimit:
        """The limits on the contents of a body."""
        config = self.llm.source.config
        longest = max(self.max_model_len, 0 if config.encoder is None else config.encoder.max_position)
        return extent_limit(self.settings.batch_limit, longest, config.vocab_size)

    @cached_property
    def token_texts(self) -> TokenTexts:
        return TokenTexts(self.llm.get_tokenizer())

    def answer_plan(
        self, tools: ToolUse = NO_TOOLS, template: str | None = None, continued: str | None = None
    ) -> AnswerPlan:
        """Returns how answers to a conversation are read. `template` is the request's own, `continued` the text of the
        assistant's that it continues."""
        tokenizer, settings = self.llm.get_tokenizer(), self.settings
        text = tokenizer.template_text(template or settings.chat_template, bool(tools.tools))
        chosen = choose_answer_format(text, settings.tool_parser, settings.reasoning_parser)
        return answer_plan(chosen, tokenizer, tools, continued)

    def check_model(self, name: str) -> Adapter | None:
        """Returns the adapter that has this name; None: it is a name of the model itself. ApiError: there is none."""
        if name in self.served_names:
            return None
        adapters = self.llm.list_adapters()
        if name not in adapters:
            raise model_not_found(name, self.model_names)
        return adapters[name]

    def adapter_for(self, name: str, asked: RequestModel) -> Adapter | BaseModel | None:
        """The adapter of a request, by the model that it names. None: it names no model, so that it has the adapter of
        the request that it goes on from, if any."""
        return self.check_model(name) or (None if asked.leaves_model_out else BaseModel.BASE)

    @asynccontextmanager
    async def admit(self, count: int, tenant: str | None) -> AsyncIterator[None]:
        """Reserves places for this many prompts during the block, or raise a 429. When the queue is full, only a tenant
        that has its share of it already is refused."""
        why_full = await self.shared.take_places(tenant, count)
        if why_full is not None:
            raise queue_full(why_full)
        self.num_unfinished += count
        try:
            yield
        finally:
            self.num_unfinished -= count
            self.shared.give_places_back(tenant, count)

    def forget_soon(self, response: StoredResponse) -> None:
        """Frees the memory of a response that is not stored."""
        task = asyncio.create_task(forget_root(self.llm, response))
        self._forgetting.add(task)  # the event loop itself keeps no reference
        task.add_done_callback(self._forgetting.discard)


def context_of(request: Request) -> ServerContext:
    context: ServerContext = request.app.state.context
    return context
