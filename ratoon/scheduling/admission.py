"""Whether a request can ever be served. What passes here ends some day; the rest is refused, with the numbers."""

from __future__ import annotations

from array import array

from ratoon.core.config import SchedulerConfig
from ratoon.core.errors import RequestError
from ratoon.core.params import BeamSearchParams
from ratoon.core.request import EngineCoreRequest
from ratoon.memory.hashing import TOKEN_TYPECODE
from ratoon.memory.kv_cache_manager import KVCacheManager
from ratoon.memory.tails import tail_blocks
from ratoon.scheduling.branch import longest_total, max_new_tokens


def max_step_tokens(config: SchedulerConfig) -> int:
    """The most tokens of one branch in one step."""
    if config.enable_chunked_prefill and config.max_prefill_chunk is not None:
        return min(config.max_prefill_chunk, config.max_num_batched_tokens)
    return config.max_num_batched_tokens


def verify_request(
    request: EngineCoreRequest, config: SchedulerConfig, kv_cache: KVCacheManager, max_model_len: int
) -> None:
    """Raise RequestError for a request that could never run to its end."""
    _verify_prompt(request, config, max_model_len)
    _verify_encoder_input(request, kv_cache)
    _verify_pooling(request)
    _verify_beams(request, config)
    _verify_extraction(request, config.whole_prompts)
    _verify_resumed(request, max_model_len)
    _verify_continuation(request)
    _verify_memory(request, config, kv_cache, max_model_len)


def _verify_prompt(request: EngineCoreRequest, config: SchedulerConfig, max_model_len: int) -> None:
    num_prompt_tokens = len(request.prompt_token_ids)
    if num_prompt_tokens == 0:
        raise RequestError("prompt", "is empty", "at least one token")
    try:
        array(TOKEN_TYPECODE, request.prompt_token_ids)
    except (OverflowError, TypeError) as error:
        raise RequestError(
            "prompt", f"holds something that is no token id ({error})", "whole numbers of 32 bits"
        ) from None
    longest, reason = max_model_len - 1, ", which leaves one to generate"
    if request.pooling_params is not None or request.extraction is not None:
        longest, reason = max_model_len, ""
    if num_prompt_tokens > longest:
        raise RequestError(
            "prompt",
            f"has {num_prompt_tokens} tokens, sequences are limited to {max_model_len} (max_model_len)",
            f"at most {longest} tokens{reason}",
        )
    if not config.enable_chunked_prefill and num_prompt_tokens > config.max_num_batched_tokens:
        raise RequestError(
            "prompt",
            f"has {num_prompt_tokens} tokens and must run in one step, which holds {config.max_num_batched_tokens} "
            "(max_num_batched_tokens; chunked prefill is off)",
            f"at most {config.max_num_batched_tokens} tokens",
        )


def _verify_encoder_input(request: EngineCoreRequest, kv_cache: KVCacheManager) -> None:
    encoder_input = request.encoder_input
    if (encoder_input is not None) != kv_cache.has_cross_group:
        problem, expected = ("is missing", "one") if encoder_input is None else ("has nobody to read it", "None")
        raise RequestError(
            "encoder_input", f"{problem}: the model has {'an' if encoder_input is None else 'no'} encoder", expected
        )
    if encoder_input is None:
        return
    if encoder_input.num_positions < 1 or (encoder_input.token_ids is None) == (encoder_input.features is None):
        raise RequestError("encoder_input", "is empty, or is tokens and features at once", "one of both")


def _verify_pooling(request: EngineCoreRequest) -> None:
    """A prompt has one vector: what belongs to generated tokens has no meaning beside it."""
    if request.pooling_params is None:
        return
    request.pooling_params.verify()
    params = request.sampling_params
    if params.n != 1:
        raise RequestError("n", f"is {params.n}, and a prompt has one vector", "1")
    if params.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs", "are not computed while a prompt is pooled", "None")
    if request.resumed is not None:
        raise RequestError("resumed", "has no meaning for a vector", "None: it is computed anew")


def _verify_beams(request: EngineCoreRequest, config: SchedulerConfig) -> None:
    params = request.beam_params
    if params is None:
        return
    params.verify()
    if params.n != request.sampling_params.n:
        raise RequestError(
            "n", f"is {params.n} of beam_params, {request.sampling_params.n} of sampling_params", "one n"
        )
    if request.pooling_params is not None:
        raise RequestError("beam_params", "have no meaning for a vector", "None")
    if request.sampling_params.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs", "are not computed for a beam search", "None")
    if request.resumed is not None:
        raise RequestError("resumed", "has no meaning for a beam search", "None: it starts again")
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        limit = getattr(config, name)
        if params.beam_width > limit:
            raise RequestError(
                "beam_width",
                f"is {params.beam_width}, and all beams run in one step, which holds {limit} ({name})",
                f"at most {limit}, or an engine with a greater {name}",
            )


def _verify_extraction(request: EngineCoreRequest, whole_prompts: bool) -> None:
    extraction = request.extraction
    if extraction is None:
        return
    positions = extraction.positions
    if not positions or positions != sorted(set(positions)) or positions[0] < 0:
        raise RequestError("positions", "are not rising numbers from 0 on", "at least one position, each once")
    if extraction.of_encoder:
        if request.encoder_input is None or positions[-1] >= request.encoder_input.num_positions:
            raise RequestError("positions", f"end with {positions[-1]}", "positions of the encoder input")
    elif positions[-1] >= len(request.prompt_token_ids) or (
        positions[-1] != len(request.prompt_token_ids) - 1 and not whole_prompts
    ):
        raise RequestError("positions", f"end with {positions[-1]}", "the prompt's last token, and no prompt behind it")
    if not extraction.layers:
        raise RequestError("layers", "is empty", "at least one layer")
    others = (request.pooling_params, request.beam_params, request.resumed)
    if any(other is not None for other in others) or request.sampling_params.n != 1:
        raise RequestError("extraction", "has no meaning beside generation, beams or a vector", "a request of its own")


def _verify_resumed(request: EngineCoreRequest, max_model_len: int) -> None:
    if request.resumed is None:
        return
    num_choices = request.sampling_params.n
    if len(request.resumed) != num_choices:
        raise RequestError("resumed", f"has {len(request.resumed)} entries for {num_choices} choices", "one for each")
    if all(choice.finished for choice in request.resumed):
        raise RequestError("resumed", "all choices are finished", "at least one that is not")
    num_prompt_tokens = len(request.prompt_token_ids)
    room = longest_total(num_prompt_tokens, request.sampling_params.max_tokens, max_model_len) - num_prompt_tokens
    for index, choice in enumerate(request.resumed):
        if not choice.token_ids and not choice.finished:
            raise RequestError(f"resumed[{index}]", "has no token", "choices that have begun, or no `resumed` at all")
        if not choice.finished and len(choice.token_ids) >= room:
            raise RequestError(
                f"resumed[{index}]", f"has {len(choice.token_ids)} tokens and is not finished", f"fewer than {room}"
            )


def _verify_continuation(request: EngineCoreRequest) -> None:
    suffix = request.continuation_token_ids
    if suffix is not None and suffix != request.prompt_token_ids[len(request.prompt_token_ids) - len(suffix) :]:
        raise RequestError("continuation_token_ids", "are not how the prompt ends", "the tokens behind the parent's")
    if request.retain_kv is not None and not request.retain_kv > 0:
        raise RequestError("retain_kv", f"{request.retain_kv!r} is out of range", "seconds, more than 0")


def _verify_memory(
    request: EngineCoreRequest, config: SchedulerConfig, kv_cache: KVCacheManager, max_model_len: int
) -> None:
    """One branch at its full length must fit into the empty pool. Then the first in the order always gets on: everyone
    else can be preempted for it. More branches than fit at a time take turns."""
    step = max_step_tokens(config)
    num_prompt_tokens = len(request.prompt_token_ids)
    max_total = longest_total(num_prompt_tokens, max_new_tokens(request), max_model_len)
    num_usable = kv_cache.num_usable_blocks - _verify_cross_memory(request, kv_cache)
    if request.beam_params is not None:
        _verify_beam_memory(request.beam_params, kv_cache, num_usable, num_prompt_tokens, max_total, step)
        return
    if kv_cache.required_blocks(max_total, step) <= num_usable:
        return
    longest = _longest_that_fits(kv_cache, num_usable, step, max_total)
    room = longest - num_prompt_tokens
    numbers = (
        f"needs {kv_cache.required_blocks(max_total, step)} blocks of {kv_cache.block_size} tokens "
        f"({num_prompt_tokens} of prompt, {max_total - num_prompt_tokens} to generate), "
        f"the pool has {num_usable}{' beside its encoder input' if request.encoder_input is not None else ''}"
    )
    if room >= 1:
        raise RequestError("max_tokens", numbers, f"max_tokens of at most {room} for this prompt, or a larger KV cache")
    longest_prompt = longest if max_new_tokens(request) == 0 else max(longest - 1, 0)
    raise RequestError("prompt", numbers, f"a prompt of at most {longest_prompt} tokens, or a larger KV cache")


def _verify_beam_memory(
    params: BeamSearchParams,
    kv_cache: KVCacheManager,
    num_usable: int,
    num_prompt_tokens: int,
    max_total: int,
    step: int,
) -> None:
    """The prompt once, and behind it all beams at their full length."""
    prompt = kv_cache.required_blocks(num_prompt_tokens, step)
    num_new_tokens = max_total - num_prompt_tokens
    tail = tail_blocks(kv_cache.block_size, kv_cache.num_groups, num_prompt_tokens, num_new_tokens)
    if prompt + params.beam_width * tail <= num_usable:
        return
    widest = (num_usable - prompt) // max(tail, 1)
    numbers = (
        f"needs {prompt + params.beam_width * tail} blocks of {kv_cache.block_size} tokens ({prompt} for the prompt, "
        f"{tail} for each of {params.beam_width} beams of {num_new_tokens} tokens), the pool has {num_usable}"
    )
    if widest >= 1:
        expected = f"beam_width of at most {widest} here, a smaller max_tokens, or a larger KV cache"
    else:
        expected = "a shorter prompt, a smaller max_tokens, or a larger KV cache"
    raise RequestError("beam_width", numbers, expected)


def _verify_cross_memory(request: EngineCoreRequest, kv_cache: KVCacheManager) -> int:
    """The blocks that its encoder input takes, which others may hold as well, but not for its sake."""
    if request.encoder_input is None:
        return 0
    num_blocks = kv_cache.num_cross_blocks(request.encoder_input.num_positions)
    if num_blocks + kv_cache.num_groups > kv_cache.num_usable_blocks:
        raise RequestError(
            "encoder_prompt",
            f"needs {num_blocks} blocks of {kv_cache.block_size} positions, the pool has {kv_cache.num_usable_blocks}, "
            f"and a decoder takes at least {kv_cache.num_groups}",
            "a shorter one, or a larger KV cache",
        )
    return num_blocks


def _longest_that_fits(kv_cache: KVCacheManager, num_usable: int, step: int, too_long: int) -> int:
    low, high = 0, too_long  # low fits, high does not
    while high - low > 1:
        middle = (low + high) // 2
        if kv_cache.required_blocks(middle, step) <= num_usable:
            low = middle
        else:
            high = middle
    return low
