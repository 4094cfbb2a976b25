"""A caller's prompt and params to an EngineCoreRequest: tokenised, checked against the model, every default filled in.

What it refuses, it refuses with the field's name and what would be right, before the engine hears of it. Whether there
is memory for a request is the scheduler's question, not this module's.
"""

from __future__ import annotations

import math
import operator
import secrets
import string
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from ratoon.core.config import CacheConfig, ModelConfig
from ratoon.core.errors import RequestError
from ratoon.core.params import (
    MAX_HIDDEN_STATES_BYTES,
    MAX_LOGPROBS,
    GenerationParams,
    HiddenStatesParams,
    PoolingParams,
    SamplingParams,
)
from ratoon.core.request import EngineCoreRequest
from ratoon.engine.extraction_requests import extract_from_prompt, extract_from_root
from ratoon.engine.hidden_states import HiddenStatesSelector, Selection
from ratoon.engine.params_processor import ParamsProcessor
from ratoon.engine.roots import Root

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]
Suffix: TypeAlias = str | Sequence[int]

PROMPT_FORMS = 'text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}'
ID_CHARACTERS = string.ascii_lowercase + string.digits
ID_LENGTH = 8  # random characters behind the caller's id: nobody can guess another's request


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
    ) -> None:
        self.selector = HiddenStatesSelector(model_config, max_hidden_states_bytes)
        self._tokenizer = tokenizer
        self._vocab_size = model_config.vocab_size
        self._max_model_len = model_config.max_position if max_model_len is None else max_model_len
        self._max_lease_seconds = max_lease_seconds
        self._clock = clock
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

    def verify_params(self, params: GenerationParams) -> None:
        """RequestError for what is wrong with them whatever the prompt is."""
        self._params.verify(params)

    def verify_pooling_params(self, params: PoolingParams) -> None:
        self._params.verify_pooling(params)

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
        owner: str | None = None,
    ) -> EngineCoreRequest:
        if arrival_time is None:
            arrival_time = self._clock()
        _verify_envelope(request_id, priority, cache_salt)
        self._verify_retention(retain_kv)
        self.verify_params(params)
        token_ids = self._tokenize(prompt, num_places=1)  # for the first new token
        sampling_params, beam_params = self._params.complete(params, len(token_ids))
        return EngineCoreRequest(
            request_id=f"{request_id}-{_random_suffix()}",
            prompt_token_ids=token_ids,
            sampling_params=sampling_params,
            beam_params=beam_params,
            eos_token_id=self.eos_token_ids[0] if self.eos_token_ids else None,
            arrival_time=arrival_time,
            priority=priority,
            cache_salt=cache_salt,
            external_id=request_id,
            retain_kv=retain_kv,
            owner=owner,
        )

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
    ) -> EngineCoreRequest:
        """A request that goes on behind a parent's tokens. Only the suffix is tokenised; an empty one is fine."""
        if arrival_time is None:
            arrival_time = self._clock()
        _verify_envelope(request_id, priority, parent.cache_salt)
        self._verify_retention(retain_kv)
        self.verify_params(params)
        inherited, suffix_ids = parent.tokens(choice, at), self._tokenize_suffix(suffix)
        longest = self._max_model_len - 1
        if len(inherited) + len(suffix_ids) > longest:
            raise RequestError(
                "continuation_suffix",
                f"makes {len(inherited) + len(suffix_ids)} tokens with the {len(inherited)} before it, and at most "
                f"{longest} leave room (max_model_len is {self._max_model_len})",
                "a shorter suffix, or an earlier place in the parent (`at`)",
            )
        sampling_params, beam_params = self._params.complete(params, len(inherited) + len(suffix_ids))
        return EngineCoreRequest(
            request_id=f"{request_id}-{_random_suffix()}",
            prompt_token_ids=inherited + suffix_ids,
            sampling_params=sampling_params,
            beam_params=beam_params,
            eos_token_id=self.eos_token_ids[0] if self.eos_token_ids else None,
            arrival_time=arrival_time,
            priority=priority,
            cache_salt=parent.cache_salt,
            adapter=parent.adapter,
            external_id=request_id,
            continuation_of=parent.branch_id(choice),
            continuation_token_ids=suffix_ids,
            parent_id=parent.request_id,
            preferred_rank=parent.engine,
            retain_kv=retain_kv,
            owner=parent.owner,
        )

    def _tokenize_suffix(self, suffix: Suffix) -> list[int]:
        if isinstance(suffix, str):
            return self._encode(suffix, "continuation_suffix", add_special_tokens=False) if suffix else []
        if not _is_list(suffix):
            raise RequestError(
                "continuation_suffix", f"{type(suffix).__name__} is not a suffix", "text or a list of token ids"
            )
        return self._verify_token_ids(suffix, "continuation_suffix")

    def _verify_retention(self, seconds: float | None) -> None:
        if seconds is None:
            return
        expected = f"seconds, above 0 and at most {self._max_lease_seconds:g}"
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not math.isfinite(seconds):
            raise RequestError("retain_kv", f"{seconds!r} is not a number of seconds", expected)
        if not 0 < seconds <= self._max_lease_seconds:
            raise RequestError("retain_kv", f"{seconds} is out of range", expected)

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
        if arrival_time is None:
            arrival_time = self._clock()
        _verify_envelope(request_id, priority, cache_salt)
        self.verify_pooling_params(pooling_params)
        return EngineCoreRequest(
            request_id=f"{request_id}-{_random_suffix()}",
            prompt_token_ids=self._tokenize(prompt, num_places=0),
            sampling_params=SamplingParams(max_tokens=1, detokenize=False),  # the field is not optional
            arrival_time=arrival_time,
            priority=priority,
            cache_salt=cache_salt,
            external_id=request_id,
            owner=owner,
            pooling_params=pooling_params,
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
        if arrival_time is None:
            arrival_time = self._clock()
        _verify_envelope(request_id, 0, cache_salt)
        self.selector.verify(params)
        internal_id = f"{request_id}-{_random_suffix()}"
        if isinstance(source, Root):
            if cache_salt is not None:
                raise RequestError("cache_salt", "is the original request's own", "None")
            request, selection = extract_from_root(self.selector, internal_id, source, choice, params)
        else:
            token_ids = self._tokenize(source, num_places=0)
            request, selection = extract_from_prompt(self.selector, internal_id, token_ids, params)
            request.cache_salt, request.owner = cache_salt, owner
        request.external_id = request_id
        request.arrival_time = arrival_time
        return request, selection

    def _tokenize(self, prompt: Prompt, num_places: int) -> list[int]:
        """The prompt's tokens, which must leave this many places of the model's length free."""
        text, token_ids = split_prompt(prompt)
        if token_ids is not None:
            field, checked = "prompt_token_ids", self._verify_token_ids(token_ids)
        else:
            assert text is not None
            field, checked = "prompt", self._encode(text)
        if not checked:
            raise RequestError(field, "is empty", "at least one token")
        longest = self._max_model_len - num_places
        if len(checked) > longest:
            raise RequestError(
                field,
                f"has {len(checked)} tokens, and at most {longest} {'leave room' if num_places else 'fit'} "
                f"(max_model_len is {self._max_model_len})",
                "shorten it, or start the engine with a greater max_model_len if the model can do it",
            )
        return checked

    def _encode(self, text: str, field: str = "prompt", add_special_tokens: bool = True) -> list[int]:
        if not text:
            raise RequestError(field, "is empty", "at least one character")
        if self._tokenizer is None:
            raise RequestError(field, "text needs a tokenizer, and none is loaded", "give prompt_token_ids")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(
                field, f"is not valid Unicode at character {error.start}", "text without surrogates"
            ) from None
        token_ids: list[int] = list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))
        if token_ids and max(token_ids) >= self._vocab_size:
            raise RequestError(
                field,
                f"is tokenised to id {max(token_ids)}, and the model's vocabulary ends at {self._vocab_size - 1}",
                "the tokenizer that belongs to the model",
            )
        return token_ids

    def _verify_token_ids(self, token_ids: Sequence[int], field: str = "prompt_token_ids") -> list[int]:
        # Most prompts are fine, so the whole list is judged at C speed; only a bad one is searched for its bad entry.
        if set(map(type, token_ids)) <= {int} and (
            not token_ids or (min(token_ids) >= 0 and max(token_ids) < self._vocab_size)
        ):
            return list(token_ids)
        checked = []
        for index, token in enumerate(token_ids):
            try:
                value = None if isinstance(token, bool) else operator.index(token)
            except TypeError:
                value = None
            if value is None:
                raise RequestError(f"{field}[{index}]", f"{token!r} is not a token id", "a list of whole numbers")
            if not 0 <= value < self._vocab_size:
                raise RequestError(
                    f"{field}[{index}]",
                    f"{value} is not in the vocabulary",
                    f"ids from 0 to {self._vocab_size - 1}",
                )
            checked.append(value)
        return checked


def _verify_envelope(request_id: str, priority: int, cache_salt: str | None) -> None:
    """What every kind of request brings beside its prompt."""
    if not isinstance(request_id, str) or not request_id:
        raise RequestError("request_id", f"{request_id!r} is not an id", "text of at least one character")
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise RequestError("priority", f"{priority!r} is not a whole number", "lower goes first; 0 is usual")
    if cache_salt is not None and (not isinstance(cache_salt, str) or not cache_salt):
        raise RequestError("cache_salt", f"{cache_salt!r} is not a salt", "text of at least one character, or None")


def split_prompt(prompt: Prompt) -> tuple[str | None, Sequence[int] | None]:
    """A prompt's text and its token ids. With both (a rendered chat, say) the ids count; the text is for reading."""
    if isinstance(prompt, str):
        return prompt, None
    if isinstance(prompt, Mapping):
        unknown = sorted(str(key) for key in prompt if key not in ("prompt", "prompt_token_ids"))
        if unknown:
            raise RequestError("prompt", f"a mapping with {unknown[0]!r}", PROMPT_FORMS)
        text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        if text is not None and not isinstance(text, str):
            raise RequestError("prompt", f"{type(text).__name__} is not text", PROMPT_FORMS)
        if token_ids is not None and not _is_list(token_ids):
            raise RequestError("prompt_token_ids", f"{type(token_ids).__name__} is not a list", "a list of token ids")
        if text is None and token_ids is None:
            raise RequestError("prompt", "is missing", PROMPT_FORMS)
        return text, token_ids
    if _is_list(prompt):
        return None, prompt
    raise RequestError("prompt", f"{type(prompt).__name__} is not a prompt", PROMPT_FORMS)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))


def _random_suffix() -> str:
    return "".join(secrets.choice(ID_CHARACTERS) for _ in range(ID_LENGTH))
