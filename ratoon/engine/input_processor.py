"""A caller's prompt and params to an EngineCoreRequest: tokenised, checked against the model, every default filled in.

What it refuses, it refuses with the field's name and what would be right, before the engine hears of it. Whether there
is memory for a request is the scheduler's question, not this module's.
"""

from __future__ import annotations

import math
import operator
import random
import secrets
import string
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from ratoon.core.config import CacheConfig, ModelConfig
from ratoon.core.errors import RequestError
from ratoon.core.params import MAX_LOGPROBS, PoolingParams, RequestOutputKind, SamplingParams
from ratoon.core.request import EngineCoreRequest
from ratoon.engine.roots import Root
from ratoon.observe.logging import get_logger

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]
Suffix: TypeAlias = str | Sequence[int]

PROMPT_FORMS = 'text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}'
ID_CHARACTERS = string.ascii_lowercase + string.digits
ID_LENGTH = 8  # random characters behind the caller's id: nobody can guess another's request
SEED_BITS = 63
# Generation defaults that are sampling parameters under the same name; `max_new_tokens` is not.
SAMPLING_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")

logger = get_logger(__name__)


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
        max_lease_seconds: float = CacheConfig().max_lease_seconds,
    ) -> None:
        self._max_lease_seconds = max_lease_seconds
        self._kv_capacity = sys.maxsize if kv_capacity is None else kv_capacity
        self._tokenizer = tokenizer
        self._vocab_size = model_config.vocab_size
        self._hidden_size = model_config.hidden_size
        self._max_model_len = model_config.max_position if max_model_len is None else max_model_len
        self._max_logprobs = max_logprobs
        self._random = random.Random(seed)  # for the seeds of requests that bring none
        self._clock = clock
        self.eos_token_ids = _collect_eos_ids(model_config, tokenizer, generation_defaults or {})

    def process(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
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
        return EngineCoreRequest(
            request_id=f"{request_id}-{_random_suffix()}",
            prompt_token_ids=token_ids,
            sampling_params=self._complete_params(params, len(token_ids)),
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
        params: SamplingParams,
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
        return EngineCoreRequest(
            request_id=f"{request_id}-{_random_suffix()}",
            prompt_token_ids=inherited + suffix_ids,
            sampling_params=self._complete_params(params, len(inherited) + len(suffix_ids)),
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
            pooling_params=pooling_params,
        )

    def verify_params(self, params: SamplingParams) -> None:
        """Checks that need the model; those that do not are the params' own."""
        if not isinstance(params, SamplingParams):
            raise RequestError("sampling_params", f"{type(params).__name__} is not SamplingParams", "a SamplingParams")
        params.verify(self._max_logprobs)
        if not isinstance(params.output_kind, RequestOutputKind):
            raise RequestError("output_kind", f"{params.output_kind!r} is unknown", "a RequestOutputKind")
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(params, name)
            if count is not None and count > self._vocab_size:
                raise RequestError(name, f"{count} is more than the vocabulary has", f"{self._vocab_size} at most")
        self._verify_vocabulary("stop_token_ids", params.stop_token_ids)
        self._verify_vocabulary("allowed_token_ids", params.allowed_token_ids)
        self._verify_vocabulary("logit_bias", params.logit_bias)
        if self._tokenizer is None:
            if params.stop:
                raise RequestError("stop", "stop strings need a tokenizer, and none is loaded", "use stop_token_ids")
            if params.bad_words:
                raise RequestError("bad_words", "words need a tokenizer, and none is loaded", "use logit_bias")

    def verify_pooling_params(self, params: PoolingParams) -> None:
        if not isinstance(params, PoolingParams):
            raise RequestError("pooling_params", f"{type(params).__name__} is not PoolingParams", "a PoolingParams")
        params.verify()
        if params.dimensions is not None and params.dimensions > self._hidden_size:
            raise RequestError(
                "dimensions",
                f"{params.dimensions} is more than the model's vectors have",
                f"a whole number from 1 to {self._hidden_size}",
            )

    def _verify_vocabulary(self, field: str, token_ids: Iterable[int] | None) -> None:
        for token in token_ids or ():
            if not 0 <= token < self._vocab_size:
                raise RequestError(
                    field, f"token id {token} is not in the vocabulary", f"ids from 0 to {self._vocab_size - 1}"
                )

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

    def _complete_params(self, params: SamplingParams, num_prompt_tokens: int) -> SamplingParams:
        params = params.clone()
        room = self._max_model_len - num_prompt_tokens
        if params.max_tokens is None:  # as much as there is room for, in the KV cache too
            params.max_tokens = max(1, min(room, self._kv_capacity - num_prompt_tokens))
        params.max_tokens = min(params.max_tokens, room)
        if params.min_tokens > params.max_tokens:
            raise RequestError(
                "min_tokens",
                f"{params.min_tokens} is more than the {params.max_tokens} tokens that fit behind this prompt",
                f"lower it or shorten the prompt (max_model_len is {self._max_model_len})",
            )
        # Always set: a request that is preempted, or replayed from a record, draws the same numbers again.
        if params.seed is None:
            params.seed = self._random.getrandbits(SEED_BITS)
        params.eos_token_ids = list(self.eos_token_ids)
        ends = [*(params.stop_token_ids or ()), *(() if params.ignore_eos else self.eos_token_ids)]
        params.all_stop_token_ids = list(dict.fromkeys(ends))
        if params.bad_words:
            params.bad_words_token_ids = self._bad_words_token_ids(params.bad_words)
        return params

    def _bad_words_token_ids(self, words: Sequence[str]) -> list[list[int]]:
        """Each word as it is written at the start of a text and in the middle of one."""
        assert self._tokenizer is not None
        sequences: dict[tuple[int, ...], None] = {}
        for index, word in enumerate(words):
            stripped = word.lstrip()
            if not stripped:
                raise RequestError(f"bad_words[{index}]", "is empty", "at least one character that is not a space")
            for written in (stripped, " " + stripped):
                token_ids = tuple(self._tokenizer.encode(written, add_special_tokens=False))
                if token_ids:
                    sequences[token_ids] = None
        return [list(token_ids) for token_ids in sequences]


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


def default_sampling_params(generation_defaults: Mapping[str, Any] | None) -> SamplingParams:
    """What a caller gets who passes no params: the model's own generation defaults over ours."""
    defaults = dict(generation_defaults or {})
    values: dict[str, Any] = {name: defaults[name] for name in SAMPLING_DEFAULTS if defaults.get(name) is not None}
    if defaults.get("max_new_tokens") is not None:
        values["max_tokens"] = defaults["max_new_tokens"]
    params = SamplingParams()
    for name, value in values.items():
        candidate = msgspec.structs.replace(params, **{name: value})
        try:
            candidate.verify()
        except RequestError as error:  # a model's file must not make every request fail
            logger.warning("generation default ignored: %s", error)
            continue
        params = candidate
    return params


def _collect_eos_ids(
    model_config: ModelConfig, tokenizer: Any | None, generation_defaults: Mapping[str, Any]
) -> tuple[int, ...]:
    """All tokens that end an answer. Files disagree about them; a chat model's real one is often in just one place."""
    from_defaults = generation_defaults.get("eos_token_ids") or ()
    from_tokenizer = None if tokenizer is None else tokenizer.eos_token_id
    candidates = [*model_config.eos_token_ids, *from_defaults, from_tokenizer]
    known = (token for token in candidates if isinstance(token, int) and 0 <= token < model_config.vocab_size)
    return tuple(dict.fromkeys(known))


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))


def _random_suffix() -> str:
    return "".join(secrets.choice(ID_CHARACTERS) for _ in range(ID_LENGTH))
