"""Every family computes the logits that transformers computes, at every position, in float32."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ratoon.models.hf_config import parse_hf_config
from tests.golden.dense_step import dense_logits
from tests.golden.tiny_decoder_models import (
    tiny_falcon,
    tiny_gemma2,
    tiny_glm,
    tiny_gpt_neox,
    tiny_granite,
    tiny_ministral3,
    tiny_mistral3,
    tiny_olmo2,
    tiny_phi3,
    tiny_smollm3,
    tiny_starcoder2,
)
from tests.golden.tiny_models import (
    TinyModel,
    random_token_ids,
    tiny_gemma3,
    tiny_gpt2,
    tiny_llama,
    tiny_mistral,
    tiny_qwen2,
    tiny_qwen3,
)

LENGTHS = (1, 2, 17, 40)
TOLERANCE = 2e-5  # of logits that reach about 3

ROPE_SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
}

FAMILIES: dict[str, Callable[[], TinyModel]] = {
    "llama with grouped heads": tiny_llama,
    "llama with as many key heads as heads": lambda: tiny_llama(num_kv_heads=4),
    "llama with one key head": lambda: tiny_llama(num_kv_heads=1),
    "llama with tied head": lambda: tiny_llama(tied=True),
    "llama with attention bias": lambda: tiny_llama(attention_bias=True),
    "llama with mlp bias": lambda: tiny_llama(mlp_bias=True),
    **{f"llama with {kind} rope": lambda rope=rope: tiny_llama(rope=rope) for kind, rope in ROPE_SCALINGS.items()},
    "mistral with a window shorter than the sequence": lambda: tiny_mistral(window=5),
    "mistral without a window": lambda: tiny_mistral(window=None),
    "qwen2": tiny_qwen2,
    "qwen2 with tied head": lambda: tiny_qwen2(tied=True),
    "qwen2 with windows in its later layers": lambda: tiny_qwen2(window=6, first_window_layer=1),
    "qwen2 with windows by layer type": lambda: tiny_qwen2(
        window=4, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
    ),
    "qwen3 with heads wider than hidden size / heads": tiny_qwen3,
    "qwen3 untied with attention bias": lambda: tiny_qwen3(tied=False, attention_bias=True),
    "gpt2": tiny_gpt2,
    "gemma3": tiny_gemma3,
    "gemma3 with plain rope and heads of 256": lambda: tiny_gemma3(factor=None, head_dim=256),
    "mistral with heads wider than hidden size / heads": lambda: tiny_mistral(window=None, head_dim=32),
    "ministral3 beyond its original length": tiny_ministral3,
    "mistral3": tiny_mistral3,
    "gemma2": tiny_gemma2,
    "gemma2 without soft caps": lambda: tiny_gemma2(attention_cap=None, final_cap=None),
    "phi3": lambda: tiny_phi3(share=1.0, window=6),
    "phi3 with longrope over a part of each head": lambda: tiny_phi3(longrope=True),
    "olmo2": tiny_olmo2,
    "granite": tiny_granite,
    "starcoder2": tiny_starcoder2,
    "smollm3": tiny_smollm3,
    "glm": lambda: tiny_glm(is_later=False),
    "glm4": lambda: tiny_glm(is_later=True),
    "gpt_neox": tiny_gpt_neox,
    "gpt_neox with one half after the other": lambda: tiny_gpt_neox(parallel=False),
    "falcon with one key head": lambda: tiny_falcon("multi-query"),
    "falcon with grouped heads and two norms": lambda: tiny_falcon("new"),
    "falcon with grouped heads and one norm": lambda: tiny_falcon("one norm"),
    "falcon with one half after the other": lambda: tiny_falcon("one after the other"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_transformers(family: str) -> None:
    tiny = FAMILIES[family]()
    model = tiny.build()
    for length in LENGTHS:
        token_ids = random_token_ids(length, seed=length)
        logits = dense_logits(model, token_ids)
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits, tiny.oracle_logits(token_ids), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", ["llama with yarn rope", "qwen2 with windows in its later layers", "gpt2"])
def test_a_sequence_in_chunks_has_the_logits_of_the_sequence_in_one_pass(family: str) -> None:
    tiny = FAMILIES[family]()
    token_ids = random_token_ids(23)
    in_chunks = dense_logits(tiny.build(), token_ids, chunks=[9, 1, 1, 12])
    torch.testing.assert_close(in_chunks, tiny.oracle_logits(token_ids), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.one_in(3)
def test_the_parsed_config_of_transformers_builds_the_same_model_as_the_one_written_by_hand(family: str) -> None:
    tiny = FAMILIES[family]()
    parsed = tiny._replace(config=parse_hf_config(tiny.oracle.config.to_dict(), "config"))
    token_ids = random_token_ids(30)
    assert torch.equal(dense_logits(parsed.build(), token_ids), dense_logits(tiny.build(), token_ids))


def test_dynamic_rope_beyond_its_original_length_follows_cached_decoding_of_transformers() -> None:
    tiny = tiny_llama(rope={"rope_type": "dynamic", "factor": 2.0}, max_position=16)
    model = tiny.build(max_position=32)
    token_ids = random_token_ids(28)
    expected, cache = [], None
    with torch.inference_mode():
        for token_id in token_ids:
            output = tiny.oracle(torch.tensor([[token_id]]), past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            expected.append(output.logits[0, -1])
    torch.testing.assert_close(dense_logits(model, token_ids), torch.stack(expected), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    "family", ["llama with grouped heads", "qwen3 with heads wider than hidden size / heads", "gpt2", "gemma3"]
)
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bfloat16 falls back to another product
def test_bfloat16_models_stay_close_to_transformers_in_bfloat16(family: str) -> None:
    tiny = FAMILIES[family]()
    token_ids = random_token_ids(17)
    exact = tiny.oracle_logits(token_ids)
    logits = dense_logits(tiny.build(dtype=torch.bfloat16), token_ids)
    assert logits.dtype == torch.bfloat16  # as the head computes them; what reads them converts
    tiny.oracle.to(torch.bfloat16)
    their_error = (tiny.oracle_logits(token_ids) - exact).abs().mean()
    our_error = (logits - exact).abs().mean()
    assert 0 < our_error < 1.5 * their_error
