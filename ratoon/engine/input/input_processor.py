"""A caller's prompt and params to an EngineCoreRequest: checked against the model, every default filled in.

Errors name the field and the expected value, and are raised before the engine gets the request. Whether
there is memory for a request is checked by the scheduler.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from ratoon.core.config import CacheConfig, MediaSettings, ModelConfig
from ratoon.core.errors import RequestError
from ratoon.core.kv import RETENTIONS
from ratoon.core.kv_transfer import parse_transfer
from ratoon.core.media import EMBEDS, count_media, cut_rope, joined_rope, moved_features
from ratoon.core.params import (
    MAX_HIDDEN_STATES_BYTES,
    MAX_LOGPROBS,
    GenerationParams,
    HiddenStatesParams,
    PoolingParams,
)
from ratoon.core.request import EngineCoreRequest
from ratoon.engine.input.extraction_requests import extract_from_prompt, extract_from_root
from ratoon.engine.input.hidden_states import HiddenStatesSelector, Selection
from ratoon.engine.input.params_processor import ParamsProcessor
from ratoon.engine.input.prompt_media import num_skipped, verify_rope
from ratoon.engine.input.prompt_processor import ModelInput, PromptProcessor
from ratoon.engine.input.prompts import Prompt, Suffix
from ratoon.engine.output.roots import Root
from ratoon.engine.output.vectors import own_pooling, verify_pooling, with_pooling

MAX_SESSION = 512  # characters
MAX_CACHE_SALT = 1024  # characters; it is hashed with every block
ID_BYTES = 6  # random ones, as 8 characters after the caller's id, so that ids can't be guessed


class InputProcessor:
    def __init__(
        self,
        model_config: ModelConfig,
        tokenizer: Any | None,
        generation_defaults: Mapping[str, Any] | None = None,
        max_model_len: int | None = None,
        max_logprobs: int = MAX_LOGPROBS,
        seed: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        kv_capacity: int | None = None,  # tokens of the longest sequence that the KV cache can hold
        block_size: int = CacheConfig().block_size,
        max_lease_seconds: float = CacheConfig().max_lease_seconds,
        max_hidden_states_bytes: int = MAX_HIDDEN_STATES_BYTES,
        num_stages: int = 1,  # of a pipeline
        pooling: str | None = None,  # the pooling that the model's files define, if any
        media: MediaSettings | None = None,
    ) -> None:
        self.selector = HiddenStatesSelector(model_config, max_hidden_states_bytes, num_stages)
        self._model_config = model_config
        self._max_model_len = model_config.max_position if max_model_len is None else max_model_len
        self._max_lease_seconds = max_lease_seconds
        self._pooling = own_pooling(model_config, pooling)
        self._clock = clock
        self._prompts = PromptProcessor(model_config, tokenizer, self._max_model_len, media)
        self._params = ParamsProcessor(
            model_config,
            tokenizer,
            generation_defaults or {},
            self._max_model_len,
            max_logprobs,
            seed,
            kv_capacity,
            block_size,
            self.selector,
        )

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer."""
        return self._params.eos_token_ids

    def verify_params(self, params: GenerationParams, owner: str | None = None) -> None:
        """RequestError for what is wrong with them whatever the prompt is. Waits for the check of a new grammar."""
        self.verify_generates()
        self._params.verify(params, owner)

    def check_grammar(self, params: Any, owner: str | None = None) -> Future[Any] | None:
        """Begin to check the grammar of params, so that `process` need not wait for it. None: there is nothing to wait
        for."""
        return self._params.check_grammar(params, owner)

    def start_grammars(self) -> None:
        """Start the process that checks grammars, ahead of the first one."""
        self._params.start_grammars()

    def close(self) -> None:
        """End the process that checks grammars. It is started again by the next one."""
        self._params.close()

    def verify_generates(self) -> None:
        """RequestError: the model generates nothing."""
        config = self._model_config
        if not config.generates:
            lacks = "decoder" if not config.causal else "head over its vocabulary"
            serves, calls = "embeddings", "embed"
            if config.classifier is not None:
                serves, calls = "embeddings, labels and scores", "embed, classify or score"
            raise RequestError(
                "model", f"has no {lacks}: it serves {serves}, and generates nothing", f"{calls}, or another model"
            )

    def verify_pooling_params(self, params: PoolingParams) -> None:
        if self._model_config.encoder is not None:
            raise RequestError(
                "model", "has an encoder and a decoder: it serves no embeddings", 'hidden states, with side="encoder"'
            )
        self._params.verify_pooling(params)
        verify_pooling(params, self._pooling, self._model_config)

    def process(
        self,
        request_id: str,
        prompt: Prompt,
        params: GenerationParams,
        *,
        priority: int = 0,
        arrival_time: float | None = None,
        cache_salt: str | None = None,
        retain_kv: float | None = None,
        session: str | None = None,
        retention: str | None = None,
        kv_transfer_params: Mapping[str, Any] | None = None,
        owner: str | None = None,
        in_place_of: str | None = None,  # the id of an unknown parent; the prompt contains its text
    ) -> EngineCoreRequest:
        envelope = self._envelope(request_id, arrival_time, priority, cache_salt, owner, retain_kv, kv_transfer_params)
        _verify_session(session, retention)
        self.verify_params(params, owner)
        if params.structured_output is not None and params.structured_output.continue_grammar:
            problem = "this request continues no other" if in_place_of is None else "the parent is forgotten"
            raise RequestError("structured_output.continue_grammar", problem, "a schema or grammar of its own")
        model_input = self._prompts.process(prompt, num_places=1)  # for the first new token
        token_ids, encoder_input, num_forced, mm_features, rope = model_input
        _verify_readable(params, model_input)
        return EngineCoreRequest(
            prompt_token_ids=token_ids,
            encoder_input=encoder_input,
            mm_features=list(mm_features),
            rope=rope,
            params=self._params.complete(params, len(token_ids), encoder_input, num_forced, num_skipped(rope)),
            eos_token_id=self._eos_token_id,
            parent_id=in_place_of,
            session=session,
            retention=retention,
            **envelope,
        )

    def count_tokens(self, prompt: Prompt) -> int:
        """The number of tokens of a prompt that is not run, with those in the place of images. Images are decoded."""
        return len(self._prompts.process(prompt, num_places=0).token_ids)

    def process_continuation(
        self,
        request_id: str,
        parent: Root,
        suffix: Suffix,
        params: GenerationParams,
        *,
        choice: int = 0,
        at: int | None = None,
        priority: int = 0,
        arrival_time: float | None = None,
        retain_kv: float | None = None,
        session: str | None = None,  # None: the parent's
        retention: str | None = None,  # likewise
        kv_transfer_params: Mapping[str, Any] | None = None,
    ) -> EngineCoreRequest:
        """A request that goes on after a parent's tokens. Only the suffix is tokenised, and only its media are read; an
        empty one is fine."""
        envelope = self._envelope(
            request_id, arrival_time, priority, parent.cache_salt, parent.owner, retain_kv, kv_transfer_params
        )
        _verify_session(session, retention)
        self.verify_params(params, parent.owner)
        inherited = parent.tokens(choice, at)
        mm_features = parent.media_at(len(inherited), self._has_whole_images)
        suffix_ids, new_features, new_rope = self._prompts.process_suffix(suffix, count_media(mm_features))
        mm_features += moved_features(new_features, len(inherited))
        if params.structured_output is not None and params.structured_output.continue_grammar:
            params = params.clone()
            params.structured_output = parent.structured_output_at(len(inherited))
        num_axes = self._model_config.rope_axes
        rope = joined_rope(cut_rope(parent.rope, num_axes, len(inherited)), num_axes, len(inherited), new_rope)
        if new_rope is not None:
            verify_rope("continuation_suffix", rope, self._max_model_len - 1)
        num_prompt_tokens, longest = len(inherited) + len(suffix_ids), self._max_model_len - 1 - num_skipped(rope)
        if num_prompt_tokens > longest:
            raise RequestError(
                "continuation_suffix",
                f"makes {num_prompt_tokens} tokens with the {len(inherited)} before it, and at most {longest} leave "
                f"room (max_model_len is {self._max_model_len})",
                "a shorter suffix, or an earlier place in the parent (`at`)",
            )
        return EngineCoreRequest(
            prompt_token_ids=inherited + suffix_ids,
            encoder_input=parent.encoder_input,
            mm_features=mm_features,
            rope=rope,
            params=self._params.complete(
                params, num_prompt_tokens, parent.encoder_input, num_skipped=num_skipped(rope)
            ),
            eos_token_id=self._eos_token_id,
            continuation_of=parent.branch_id(choice),
            continuation_token_ids=suffix_ids,
            parent_id=parent.request_id,
            preferred_rank=parent.engine,
            session=parent.session_of_continuations if session is None else session,
            # From the middle of the parent; a chat template may leave out the token that ended its turn.
            is_branch=session is None and len(inherited) < len(parent.tokens(choice)) - 1,
            retention=parent.retention if retention is None else retention,
            **envelope,
        )

    def process_pooling(
        self,
        request_id: str,
        prompt: Prompt,
        pooling_params: PoolingParams,
        *,
        priority: int = 0,
        arrival_time: float | None = None,
        cache_salt: str | None = None,
        owner: str | None = None,
    ) -> EngineCoreRequest:
        """A request for the prompt's vector. Nothing is generated, so the prompt may fill the model's whole length."""
        envelope = self._envelope(request_id, arrival_time, priority, cache_salt, owner)
        self.verify_pooling_params(pooling_params)
        model_input = self._prompts.process(prompt, num_places=0)
        return EngineCoreRequest(
            prompt_token_ids=model_input.token_ids,
            mm_features=list(model_input.mm_features),
            rope=model_input.rope,
            params=with_pooling(pooling_params, self._pooling, self._model_config),
            **envelope,
        )

    def process_extraction(
        self,
        request_id: str,
        source: Prompt | Root,
        params: HiddenStatesParams,
        *,
        choice: int = 0,  # of a root
        arrival_time: float | None = None,
        cache_salt: str | None = None,  # of a prompt; a root has its own
        owner: str | None = None,
    ) -> tuple[EngineCoreRequest, Selection]:
        """A request for hidden states of a prompt, or of an earlier request, and what it was made from."""
        envelope = self._envelope(request_id, arrival_time, 0, cache_salt, owner)
        self.selector.verify(params)
        if isinstance(source, Root):
            if cache_salt is not None:
                raise RequestError("cache_salt", "is the original request's own", "None")
            request, selection = extract_from_root(self.selector, envelope["request_id"], source, choice, params)
        else:
            model_input = self._prompts.process(source, num_places=0)
            request, selection = extract_from_prompt(self.selector, envelope["request_id"], model_input, params)
            request.cache_salt, request.owner = cache_salt, owner
        request.external_id, request.arrival_time = request_id, envelope["arrival_time"]
        return request, selection

    @property
    def _has_whole_images(self) -> bool:
        media = self._model_config.media
        return media is not None and media.attends_both_ways

    @property
    def _eos_token_id(self) -> int | None:
        return self.eos_token_ids[0] if self.eos_token_ids else None

    def _envelope(
        self,
        request_id: str,
        arrival_time: float | None,
        priority: int,
        cache_salt: str | None,
        owner: str | None,
        retain_kv: float | None = None,
        kv_transfer_params: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """What every kind of request has beside its prompt and params: checked, as fields of EngineCoreRequest."""
        _verify_envelope(request_id, priority, cache_salt)
        self._verify_retention(retain_kv)
        internal_id = f"{request_id}-{secrets.token_urlsafe(ID_BYTES)}"
        return {
            "request_id": internal_id,
            "external_id": request_id,
            "arrival_time": self._clock() if arrival_time is None else arrival_time,
            "priority": priority,
            "cache_salt": cache_salt,
            "owner": owner,
            "retain_kv": retain_kv,
            "kv_transfer": parse_transfer(kv_transfer_params, internal_id),
        }

    def _verify_retention(self, seconds: float | None) -> None:
        if seconds is None:
            return
        expected = f"seconds, above 0 and at most {self._max_lease_seconds:g}"
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not math.isfinite(seconds):
            raise RequestError("retain_kv", f"{seconds!r} is not a number of seconds", expected)
        if not 0 < seconds <= self._max_lease_seconds:
            raise RequestError("retain_kv", f"{seconds} is out of range", expected)


def _verify_readable(params: GenerationParams, model_input: ModelInput) -> None:
    """Embeddings stand for no tokens of which there could be log-probabilities."""
    asks = getattr(params, "prompt_logprobs", None) is not None
    if asks and any(one.data.modality == EMBEDS for one in model_input.mm_features):
        raise RequestError("prompt_logprobs", "a prompt of embeddings has no tokens", "None, or a prompt of tokens")


def _verify_session(session: str | None, retention: str | None) -> None:
    if session is not None and not (isinstance(session, str) and 0 < len(session) <= MAX_SESSION):
        problem = f"{session!r} is not a name" if not session or not isinstance(session, str) else "is too long"
        raise RequestError("session", problem, f"text of 1 to {MAX_SESSION} characters, or None")
    if retention is not None and retention not in RETENTIONS:
        raise RequestError("retention", f"{retention!r} is unknown", f"one of {', '.join(RETENTIONS)}, or None")


def _verify_envelope(request_id: str, priority: int, cache_salt: str | None) -> None:
    if not isinstance(request_id, str) or not request_id:
        raise RequestError("request_id", f"{request_id!r} is not an id", "text of at least one character")
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise RequestError("priority", f"{priority!r} is not a whole number", "lower goes first; default 0")
    if cache_salt is not None and (not isinstance(cache_salt, str) or not cache_salt):
        raise RequestError("cache_salt", f"{cache_salt!r} is not a salt", "text of at least one character, or None")
    if cache_salt is not None and len(cache_salt) > MAX_CACHE_SALT:
        raise RequestError("cache_salt", f"has {len(cache_salt)} characters", f"{MAX_CACHE_SALT} at most")
