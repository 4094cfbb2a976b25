"""Whether a request of any kind can ever be served: the checks that all kinds share. A request that passes them and
those of its kind (kinds/) is guaranteed to finish; others are refused, with the numbers.
"""

from __future__ import annotations

import struct

from ratoon.core.config import SchedulerConfig
from ratoon.core.errors import RequestError
from ratoon.core.media import EMBEDS
from ratoon.core.request import EngineCoreRequest
from ratoon.memory.hashing import pack_tokens
from ratoon.memory.kv_cache_manager import KVCacheManager


def max_step_tokens(config: SchedulerConfig) -> int:
    """The most tokens of one branch in one step."""
    if config.enable_chunked_prefill and config.max_prefill_chunk is not None:
        return min(config.max_prefill_chunk, config.token_budget)
    return config.token_budget


def verify_prompt(request: EngineCoreRequest, config: SchedulerConfig, max_model_len: int, generates: bool) -> bytes:
    """Returns the prompt, packed."""
    num_prompt_tokens = len(request.prompt_token_ids)
    if num_prompt_tokens == 0:
        raise RequestError("prompt", "is empty", "at least one token")
    try:
        packed = pack_tokens(request.prompt_token_ids)
    except struct.error as error:
        raise RequestError(
            "prompt", f"holds something that is no token id ({error})", "whole numbers of 32 bits"
        ) from None
    longest, reason = (max_model_len - 1, ", which leaves one to generate") if generates else (max_model_len, "")
    if num_prompt_tokens > longest:
        raise RequestError(
            "prompt",
            f"has {num_prompt_tokens} tokens, sequences are limited to {max_model_len} (max_model_len)",
            f"at most {longest} tokens{reason}",
        )
    if not config.enable_chunked_prefill and num_prompt_tokens > config.token_budget:
        raise RequestError(
            "prompt",
            f"has {num_prompt_tokens} tokens and must run in one step, which holds {config.token_budget} "
            "(max_num_batched_tokens; chunked prefill is off)",
            f"at most {config.token_budget} tokens",
        )
    return packed


def verify_encoder_input(request: EngineCoreRequest, kv_cache: KVCacheManager) -> None:
    encoder_input = request.encoder_input
    if (encoder_input is not None) != kv_cache.has_cross_group:
        problem, expected = ("is missing", "one") if encoder_input is None else ("cannot be used", "None")
        raise RequestError(
            "encoder_input", f"{problem}: the model has {'an' if encoder_input is None else 'no'} encoder", expected
        )
    if encoder_input is None:
        return
    if encoder_input.num_positions < 1 or (encoder_input.token_ids is None) == (encoder_input.features is None):
        raise RequestError("encoder_input", "is empty, or is tokens and features at once", "one of both")


def verify_media(request: EngineCoreRequest, config: SchedulerConfig, max_step_tokens: int, cache_size: int) -> None:
    """Every input must fit into the encoder cache, which holds `cache_size` rows, and an image that is computed in one
    step into a step of one branch."""
    end = 0
    for index, feature in enumerate(request.mm_features):
        num_rows, name = feature.data.num_rows, f"mm_features[{index}]"
        if feature.offset < end or not 1 <= feature.length <= num_rows:
            problem = f"has {feature.length} tokens from {feature.offset} on, for {num_rows} rows, behind token {end}"
            raise RequestError(name, problem, "rising places that do not overlap, with no more tokens than rows")
        end = feature.offset + feature.length
        if end > len(request.prompt_token_ids):
            raise RequestError(
                name, f"ends at {end}", f"a place in the prompt of {len(request.prompt_token_ids)} tokens"
            )
        if num_rows > cache_size:
            problem = f"part {index + 1} makes {num_rows} rows of embeddings, and {cache_size} are kept"
            expected = f"at most {cache_size} rows: a smaller {feature.data.modality}, or a greater encoder_cache_size"
            raise RequestError("multi_modal_data", problem, expected)
        if not config.whole_images or feature.data.modality == EMBEDS:
            continue
        if feature.length < num_rows:
            problem = f"ends within the {feature.data.modality}, whose rows see each other in both directions"
            raise RequestError(name, problem, "all of its rows")
        if feature.length > max_step_tokens:
            problem = f"part {index + 1} takes {feature.length} tokens of one step, which holds {max_step_tokens}"
            setting = "max_num_batched_tokens" if max_step_tokens == config.token_budget else "max_prefill_chunk"
            raise RequestError("multi_modal_data", problem, f"an engine with a greater {setting}")
    if not config.enable_chunked_prefill:
        inputs = {feature.content_hash: feature.data.num_rows for feature in request.mm_features}
        if sum(inputs.values()) > cache_size:
            problem = f"{sum(inputs.values())} rows of embeddings are read in one step, and {cache_size} are kept"
            expected = "fewer or smaller inputs, a greater encoder_cache_size, or chunked prefill"
            raise RequestError("multi_modal_data", problem, expected)


def verify_continuation(request: EngineCoreRequest) -> None:
    suffix = request.continuation_token_ids
    if suffix is not None and suffix != request.prompt_token_ids[len(request.prompt_token_ids) - len(suffix) :]:
        raise RequestError("continuation_token_ids", "are not how the prompt ends", "the tokens after the parent's")
    if request.retain_kv is not None and not request.retain_kv > 0:
        raise RequestError("retain_kv", f"{request.retain_kv!r} is out of range", "seconds, more than 0")


def longest_total(num_prompt_tokens: int, max_tokens: int | None, max_model_len: int) -> int:
    """The most tokens of prompt and output together."""
    return max_model_len if max_tokens is None else min(num_prompt_tokens + max_tokens, max_model_len)


def verify_memory(request: EngineCoreRequest, kv_cache: KVCacheManager, step: int, max_new_tokens: int | None) -> None:
    """One branch at its full length must fit into the empty pool, in steps of at most `step` tokens. Then the first in
    the order always makes progress, because all others can be preempted for it. Others take turns."""
    num_prompt_tokens = len(request.prompt_token_ids)
    max_total = longest_total(num_prompt_tokens, max_new_tokens, kv_cache.max_model_len)
    num_usable = kv_cache.num_usable_blocks - verify_cross_memory(request, kv_cache)
    if kv_cache.required_blocks(max_total, step) <= num_usable:
        return
    longest = _longest_that_fits(kv_cache, num_usable, step, max_total)
    room = longest - num_prompt_tokens
    numbers = (
        f"needs {kv_cache.required_blocks(max_total, step)} blocks of {kv_cache.sizes_of_blocks} tokens "
        f"({num_prompt_tokens} of prompt, {max_total - num_prompt_tokens} to generate), "
        f"the pool has {num_usable}{' beside its encoder input' if request.encoder_input is not None else ''}"
    )
    if room >= 1:
        raise RequestError("max_tokens", numbers, f"max_tokens of at most {room} for this prompt, or a larger KV cache")
    longest_prompt = longest if max_new_tokens == 0 else max(longest - 1, 0)
    raise RequestError("prompt", numbers, f"a prompt of at most {longest_prompt} tokens, or a larger KV cache")


def verify_cross_memory(request: EngineCoreRequest, kv_cache: KVCacheManager) -> int:
    """The blocks of its encoder input, counted in full although other requests may share them."""
    if request.encoder_input is None:
        return 0
    num_blocks = kv_cache.num_cross_blocks(request.encoder_input.num_positions)
    if num_blocks + kv_cache.num_groups > kv_cache.num_usable_blocks:
        raise RequestError(
            "encoder_prompt",
            f"needs {num_blocks} blocks for {request.encoder_input.num_positions} positions, the pool has "
            f"{kv_cache.num_usable_blocks}, "
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
