"""Generation params, checked against the model and completed with its defaults.

Checks that need no model are the params' own (core/params.py). Prompts and ids of requests are the InputProcessor's.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cached_property
from itertools import chain
from typing import Any

from ratoon.core.config import CacheConfig, ModelConfig
from ratoon.core.encoder import EncoderInput
from ratoon.core.errors import RequestError
from ratoon.core.params import (
    MAX_BEAM_STOP_TOKENS,
    MAX_LOGPROBS,
    BeamSearchParams,
    GenerationParams,
    PoolingParams,
    RequestOutputKind,
    SamplingParams,
)
from ratoon.core.structured import StructuredOutput
from ratoon.engine.grammars.checks import GrammarChecks
from ratoon.engine.input.default_params import SUPPRESSED, OwnRules
from ratoon.engine.input.hidden_states import HiddenStatesSelector

SEED_BITS = 63
TOKEN_LISTS = (
    "stop_token_ids", "suppressed_token_ids", "suppressed_first_token_ids", "forced_eos_token_id", "allowed_token_ids",
    "logit_bias",
)  # fmt: skip
SWITCHES = ("ignore_eos", "detokenize", "skip_special_tokens", "spaces_between_special_tokens")


class ParamsProcessor:
    def __init__(
        self,
        model_config: ModelConfig,
        tokenizer: Any | None,
        generation_defaults: Mapping[str, Any],
        max_model_len: int,
        max_logprobs: int = MAX_LOGPROBS,
        seed: int | None = None,
        kv_capacity: int | None = None,  # tokens of the longest sequence that the KV cache can hold
        block_size: int = CacheConfig().block_size,
        selector: HiddenStatesSelector | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._selector = HiddenStatesSelector(model_config) if selector is None else selector
        self._vocab_size = model_config.vocab_size
        self._hidden_size = model_config.hidden_size
        self._max_model_len = max_model_len
        self._max_logprobs = max_logprobs
        self._kv_capacity = sys.maxsize if kv_capacity is None else kv_capacity
        self._block_size = block_size
        self._random = random.Random(seed)  # for the seeds of requests that set none
        self.eos_token_ids = _collect_eos_ids(model_config, tokenizer, generation_defaults)
        self._own_rules = OwnRules.of(model_config, generation_defaults)
        self._reads_audio = model_config.encoder is not None and model_config.encoder.num_mel_bins is not None

    # ---- checks ----

    def verify(self, params: GenerationParams, owner: str | None = None) -> None:
        """RequestError for what is wrong with them whatever the prompt is. Waits for the check of a grammar that is
        new (`check_grammar` begins one)."""
        if isinstance(params, SamplingParams):
            params.verify(self._max_logprobs)
        elif isinstance(params, BeamSearchParams):
            params.verify()
        else:
            kind = type(params).__name__
            raise RequestError(
                "sampling_params", f"{kind} is not SamplingParams", "a SamplingParams or a BeamSearchParams"
            )
        if not isinstance(params.output_kind, RequestOutputKind):
            raise RequestError("output_kind", f"{params.output_kind!r} is unknown", "a RequestOutputKind")
        for name in SWITCHES:
            if not isinstance(getattr(params, name), bool):
                raise RequestError(name, f"{getattr(params, name)!r} is neither true nor false", "true or false")
        for name in TOKEN_LISTS:
            self._verify_vocabulary(name, getattr(params, name))
        for index, word in enumerate(params.bad_words_ids or ()):
            self._verify_vocabulary(f"bad_words_ids[{index}]", word)
        if self._tokenizer is None and params.bad_words:
            raise RequestError("bad_words", "words need a tokenizer, and none is loaded", "use bad_words_ids")
        if params.encoder_no_repeat_ngram_size and self._reads_audio:
            raise RequestError("encoder_no_repeat_ngram_size", "the model's encoder reads audio, not tokens", "0")
        if params.timestamps is not None:
            with _inside("timestamps"):
                # The other ids that they name are below this one.
                self._verify_vocabulary("first_token_id", [params.timestamps.first_token_id])
        if isinstance(params, SamplingParams):
            self._verify_sampling(params)
        else:
            self._verify_beams(params)
        if params.return_hidden_states is not None:
            with _inside("return_hidden_states"):
                self._selector.verify(params.return_hidden_states)
        if params.structured_output is not None:
            self._verify_structured_output(params.structured_output, owner)

    def check_grammar(self, params: Any, owner: str | None) -> Future[Any] | None:
        """Begin to check the grammar of such params, without waiting. None: there is none, or `verify` finds what is
        wrong without it. QueueFullError: too many of this owner wait."""
        asked = getattr(params, "structured_output", None)
        if self._tokenizer is None or not isinstance(asked, StructuredOutput) or asked.kind is None:
            return None
        try:
            asked.verify()
        except RequestError:
            return None
        return self.grammars.check(asked, owner)

    def _verify_structured_output(self, asked: StructuredOutput, owner: str | None) -> None:
        if self._tokenizer is None:
            raise RequestError("structured_output", "needs a tokenizer, and none is loaded", "leave it out")
        if asked.kind is not None:  # otherwise the parent's is continued, which was checked
            self.grammars.verify(asked, owner)

    @cached_property
    def grammars(self) -> GrammarChecks:
        return GrammarChecks(self._tokenizer, self._vocab_size, self.eos_token_ids)

    def start_grammars(self) -> None:
        """Start the process that checks grammars, ahead of the first one."""
        if self._tokenizer is not None:
            self.grammars.start()

    def close(self) -> None:
        if "grammars" in self.__dict__:
            self.grammars.close()

    def _verify_sampling(self, params: SamplingParams) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(params, name)
            if count is not None and count > self._vocab_size:
                raise RequestError(name, f"{count} is more than the vocabulary has", f"{self._vocab_size} at most")
        if self._tokenizer is None and params.stop:
            raise RequestError("stop", "stop strings need a tokenizer, and none is loaded", "use stop_token_ids")
        if isinstance(params.prediction, str):
            if self._tokenizer is None:
                raise RequestError("prediction", "text needs a tokenizer, and none is loaded", "token ids")
        else:
            self._verify_vocabulary("prediction", params.prediction)

    def _verify_beams(self, params: BeamSearchParams) -> None:
        stop_tokens = self._stop_token_ids(params)
        num_stop_tokens = len(stop_tokens)
        if params.structured_output is not None and not stop_tokens:
            problem = "a beam search with structured output needs a token that ends a text"
            raise RequestError("ignore_eos", problem, "false, or stop_token_ids")
        if num_stop_tokens > MAX_BEAM_STOP_TOKENS:
            raise RequestError(
                "stop_token_ids",
                f"makes {num_stop_tokens} tokens that end a text, the model's own included",
                f"{MAX_BEAM_STOP_TOKENS} at most in a beam search",
            )
        # The first step begins a text with each token that may be the first and ends none: so many there surely are.
        held_back = {*stop_tokens, *chain(*(self._own_rules.value(params, name) or () for name in SUPPRESSED))}
        if params.allowed_token_ids is None:  # counted without a set of the whole vocabulary, which takes milliseconds
            num_texts = self._vocab_size - sum(0 <= token < self._vocab_size for token in held_back)
        else:
            num_texts = len({*params.allowed_token_ids} - held_back)
        if params.n > num_texts:
            raise RequestError("n", f"{params.n} is more texts than the vocabulary can begin", f"{num_texts} at most")

    def verify_pooling(self, params: PoolingParams) -> None:
        if not isinstance(params, PoolingParams):
            raise RequestError("pooling_params", f"{type(params).__name__} is not PoolingParams", "a PoolingParams")
        params.verify()
        if params.classify and params.pooling is not None:
            raise RequestError("pooling", "the model's head has its own", "None with classify")
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

    # ---- defaults ----

    def complete(
        self,
        params: GenerationParams,
        num_prompt_tokens: int,
        encoder_input: EncoderInput | None = None,
        num_forced_tokens: int = 0,  # at the prompt's end, that the model's files put there
        num_skipped: int = 0,  # positions of the model's length that no token of the prompt stands for
    ) -> GenerationParams:
        """Params that were verified, with every default filled in, as a request carries them."""
        params = params.clone()
        self._complete_lengths(params, num_prompt_tokens, encoder_input, num_skipped)
        assert params.max_tokens is not None
        if params.return_hidden_states is not None:
            with _inside("return_hidden_states"):
                self._selector.verify_longest(
                    params.return_hidden_states, num_prompt_tokens, params.max_tokens, params.n
                )
            params.return_hidden_states = self._selector.in_plain_lists(params.return_hidden_states)
        if params.structured_output is not None:
            params.structured_output = self.grammars.complete(params.structured_output)
        params.all_stop_token_ids = self._stop_token_ids(params)
        self._own_rules.complete(params)
        if params.bad_words:
            params.bad_words_token_ids = self._bad_words_token_ids(params.bad_words)
        if isinstance(params, BeamSearchParams):
            params.num_forced_tokens = num_forced_tokens
        else:
            params.eos_token_ids = list(self.eos_token_ids)
            if params.prediction is not None:
                params.prediction_token_ids, params.prediction = self._expected_tokens(params.prediction), None
            # Always set: a request that is preempted, or replayed from a record, draws the same numbers again.
            params.seed = self._random.getrandbits(SEED_BITS) if params.seed is None else params.seed
        return params

    def _complete_lengths(
        self, params: GenerationParams, num_prompt_tokens: int, encoder_input: EncoderInput | None, num_skipped: int
    ) -> None:
        """Sets `max_tokens` to as many tokens as were asked for and fit. If none were asked for, it is as many as there
        is room for, in the KV cache too. Lengths of the whole text become numbers of new tokens."""
        room = self._max_model_len - num_prompt_tokens - num_skipped
        asked = params.max_tokens
        if asked is None and params.max_length is not None:
            asked = params.max_length - num_prompt_tokens
            if asked < 1:
                raise RequestError(
                    "max_length",
                    f"{params.max_length} leaves nothing after a prompt of {num_prompt_tokens} tokens",
                    "a greater one, or max_tokens, which counts new tokens alone",
                )
        if asked is None:
            asked = max(1, self._room_in_cache(params, num_prompt_tokens, encoder_input))
        params.max_tokens = min(asked, room)
        if params.min_tokens > params.max_tokens:
            raise RequestError(
                "min_tokens",
                f"{params.min_tokens} is more than the {params.max_tokens} tokens that fit after this prompt",
                f"lower it or shorten the prompt (max_model_len is {self._max_model_len})",
            )
        if params.min_length and not params.min_tokens:
            params.min_tokens = min(max(params.min_length - num_prompt_tokens, 0), params.max_tokens)
        params.max_length, params.min_length = None, 0

    def _room_in_cache(
        self, params: GenerationParams, num_prompt_tokens: int, encoder_input: EncoderInput | None
    ) -> int:
        size = self._block_size
        capacity = self._kv_capacity
        if encoder_input is not None:
            capacity -= -(-encoder_input.num_positions // size) * size
        if isinstance(params, SamplingParams):
            return capacity - num_prompt_tokens
        # The beams share the prompt, and each has blocks of its own from the one on that the prompt ends in.
        num_left = capacity // size - -(-num_prompt_tokens // size)
        return (num_left // params.beam_width + num_prompt_tokens // size) * size - num_prompt_tokens

    def _stop_token_ids(self, params: GenerationParams) -> list[int]:
        """Returns all tokens that end a text."""
        ends = [*(params.stop_token_ids or ()), *(() if params.ignore_eos else self.eos_token_ids)]
        return list(dict.fromkeys(ends))

    def _expected_tokens(self, prediction: str | list[int]) -> list[int]:
        """Returns the tokens of a prediction, as many as an answer can have."""
        if isinstance(prediction, str):
            assert self._tokenizer is not None
            tokens: list[int] = self._tokenizer.encode(prediction, add_special_tokens=False)
        else:
            tokens = prediction
        return list(tokens[: self._max_model_len])

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


@contextmanager
def _inside(field: str) -> Iterator[None]:
    """What is wrong in here is wrong in a part of that field."""
    try:
        yield
    except RequestError as error:
        raise error.inside(field) from None


def _collect_eos_ids(
    model_config: ModelConfig, tokenizer: Any | None, generation_defaults: Mapping[str, Any]
) -> tuple[int, ...]:
    """All tokens that end an answer. Files disagree about them; a chat model's real one is often in just one place."""
    from_defaults = generation_defaults.get("eos_token_ids") or ()
    from_tokenizer = None if tokenizer is None else tokenizer.eos_token_id
    candidates = [*model_config.eos_token_ids, *from_defaults, from_tokenizer]
    known = (token for token in candidates if isinstance(token, int) and 0 <= token < model_config.vocab_size)
    return tuple(dict.fromkeys(known))
