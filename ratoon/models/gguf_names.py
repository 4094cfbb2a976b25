"""Names of architectures and tensors in GGUF files, and those of Hugging Face that they stand for."""

from __future__ import annotations

import re
from collections.abc import Mapping

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral3": "Ministral3ForCausalLM",  # and Mistral Small
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "granite": "GraniteForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "gptneox": "GPTNeoXForCausalLM",
    "falcon": "FalconForCausalLM",
    "qwen2moe": "Qwen2MoeForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "glm4moe": "Glm4MoeForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
    "deepseek2": "DeepseekV2ForCausalLM",  # or V3's, by the gates of its experts
    "mamba2": "Mamba2ForCausalLM",
    "granitehybrid": "GraniteMoeHybridForCausalLM",
    "bert": "BertModel",  # or RoBERTa's and XLM-RoBERTa's, by the tokenizer
    "modern-bert": "ModernBertModel",
    "t5": "T5ForConditionalGeneration",
}
# Text models of others that read images, and the files with their encoders ("mmproj")
WITH_IMAGES = ("clip", "qwen2vl", "qwen3vl")

LLAMA_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "model.layers.{}.input_layernorm",
    "attn_q": "model.layers.{}.self_attn.q_proj",
    "attn_k": "model.layers.{}.self_attn.k_proj",
    "attn_v": "model.layers.{}.self_attn.v_proj",
    "attn_output": "model.layers.{}.self_attn.o_proj",
    "attn_q_norm": "model.layers.{}.self_attn.q_norm",
    "attn_k_norm": "model.layers.{}.self_attn.k_norm",
    "ffn_norm": "model.layers.{}.post_attention_layernorm",
    "ffn_gate": "model.layers.{}.mlp.gate_proj",
    "ffn_up": "model.layers.{}.mlp.up_proj",
    "ffn_down": "model.layers.{}.mlp.down_proj",
    # Of mixtures; the experts of a layer are one tensor, which expert_source.py takes apart
    "ffn_gate_inp": "model.layers.{}.mlp.gate",
    "ffn_gate_exps": "model.layers.{}.mlp.experts.gate_proj",
    "ffn_up_exps": "model.layers.{}.mlp.experts.up_proj",
    "ffn_down_exps": "model.layers.{}.mlp.experts.down_proj",
    "ffn_gate_inp_shexp": "model.layers.{}.mlp.shared_expert_gate",
    "ffn_gate_shexp": "model.layers.{}.mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "model.layers.{}.mlp.shared_expert.up_proj",
    "ffn_down_shexp": "model.layers.{}.mlp.shared_expert.down_proj",
}
GEMMA3_NAMES = {
    **LLAMA_NAMES,
    "post_attention_norm": "model.layers.{}.post_attention_layernorm",
    "ffn_norm": "model.layers.{}.pre_feedforward_layernorm",
    "post_ffw_norm": "model.layers.{}.post_feedforward_layernorm",
}
PHI3_NAMES = {
    **LLAMA_NAMES,
    "attn_qkv": "model.layers.{}.self_attn.qkv_proj",
    "ffn_up": "model.layers.{}.mlp.gate_up_proj",
}
OLMO2_NAMES = {
    **LLAMA_NAMES,
    "post_attention_norm": "model.layers.{}.post_attention_layernorm",
    "post_ffw_norm": "model.layers.{}.post_feedforward_layernorm",
}
STARCODER2_NAMES = {
    **LLAMA_NAMES,
    "ffn_up": "model.layers.{}.mlp.c_fc",
    "ffn_down": "model.layers.{}.mlp.c_proj",
}
GLM4_NAMES = {
    **LLAMA_NAMES,
    "post_attention_norm": "model.layers.{}.post_self_attn_layernorm",
    "post_ffw_norm": "model.layers.{}.post_mlp_layernorm",
    "ffn_up": "model.layers.{}.mlp.gate_up_proj",
}
GLM4_MOE_NAMES = {
    **LLAMA_NAMES,
    "post_attention_norm": "model.layers.{}.post_attention_layernorm",
    "ffn_gate_shexp": "model.layers.{}.mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "model.layers.{}.mlp.shared_experts.up_proj",
    "ffn_down_shexp": "model.layers.{}.mlp.shared_experts.down_proj",
    "exp_probs_b": "model.layers.{}.mlp.gate.e_score_correction",
}
GPT_OSS_NAMES = {
    **LLAMA_NAMES,
    "post_attention_norm": "model.layers.{}.post_attention_layernorm",
    "ffn_gate_inp": "model.layers.{}.mlp.router",
    "attn_sinks": "model.layers.{}.self_attn.sinks",
}
# Of layers with states, below the layer
STATE_NAMES = {
    "ssm_in": "in_proj",
    "ssm_conv1d": "conv1d",
    "ssm_dt": "dt",
    "ssm_a": "A_log",  # without a suffix, in files too
    "ssm_d": "D",
    "ssm_norm": "norm",
    "ssm_out": "out_proj",
}
MAMBA2_NAMES = {
    "token_embd": "backbone.embeddings",
    "output_norm": "backbone.norm_f",
    "output": "lm_head",
    "attn_norm": "backbone.layers.{}.norm",
    **{name: f"backbone.layers.{{}}.mixer.{part}" for name, part in STATE_NAMES.items()},
}
GRANITE_HYBRID_NAMES = {
    **LLAMA_NAMES,
    **{name: f"model.layers.{{}}.mamba.{part}" for name, part in STATE_NAMES.items()},
    # The shared half, which is the only one of models without experts
    "ffn_gate": "model.layers.{}.shared_mlp.gate_proj",
    "ffn_up": "model.layers.{}.shared_mlp.up_proj",
    "ffn_down": "model.layers.{}.shared_mlp.down_proj",
    "ffn_gate_shexp": "model.layers.{}.shared_mlp.gate_proj",
    "ffn_up_shexp": "model.layers.{}.shared_mlp.up_proj",
    "ffn_down_shexp": "model.layers.{}.shared_mlp.down_proj",
    "ffn_gate_inp": "model.layers.{}.block_sparse_moe.router.layer",
    "ffn_gate_exps": "model.layers.{}.block_sparse_moe.experts.gate_proj",
    "ffn_up_exps": "model.layers.{}.block_sparse_moe.experts.up_proj",
    "ffn_down_exps": "model.layers.{}.block_sparse_moe.experts.down_proj",
}
# The head of RoBERTa's kind; that of ModernBERT
CLASSIFIER_NAMES = {"cls": "classifier.dense", "cls.output": "classifier.out_proj"}
MODERN_CLASSIFIER_NAMES = {"cls": "head.dense", "cls.norm": "head.norm", "cls.output": "classifier"}
BERT_NAMES = {
    **CLASSIFIER_NAMES,
    "token_embd": "embeddings.word_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "position_embd": "embeddings.position_embeddings",
    "token_embd_norm": "embeddings.LayerNorm",
    "attn_q": "encoder.layer.{}.attention.self.query",
    "attn_k": "encoder.layer.{}.attention.self.key",
    "attn_v": "encoder.layer.{}.attention.self.value",
    "attn_output": "encoder.layer.{}.attention.output.dense",
    "attn_output_norm": "encoder.layer.{}.attention.output.LayerNorm",
    "ffn_up": "encoder.layer.{}.intermediate.dense",
    "ffn_down": "encoder.layer.{}.output.dense",
    "layer_output_norm": "encoder.layer.{}.output.LayerNorm",
}
MODERN_BERT_NAMES = {
    **MODERN_CLASSIFIER_NAMES,
    "token_embd": "embeddings.tok_embeddings",
    "token_embd_norm": "embeddings.norm",
    "output_norm": "final_norm",
    "attn_norm": "layers.{}.attn_norm",
    "attn_qkv": "layers.{}.attn.Wqkv",
    "attn_output": "layers.{}.attn.Wo",
    "ffn_norm": "layers.{}.mlp_norm",
    "ffn_up": "layers.{}.mlp.Wi",
    "ffn_down": "layers.{}.mlp.Wo",
}


def _t5_stack(stack: str, place: int) -> dict[str, str]:
    """`place` of the feed-forward half in a layer of the encoder or the decoder."""
    block, name = f"{stack}.block.{{}}.layer", stack[:3]
    attention = {"q": "q", "k": "k", "v": "v", "o": "o", "rel_b": "relative_attention_bias"}
    return {
        **{f"{name}.attn_{gguf}": f"{block}.0.SelfAttention.{part}" for gguf, part in attention.items()},
        f"{name}.attn_norm": f"{block}.0.layer_norm",
        f"{name}.ffn_norm": f"{block}.{place}.layer_norm",
        f"{name}.ffn_gate": f"{block}.{place}.DenseReluDense.wi_0",
        f"{name}.ffn_up": f"{block}.{place}.DenseReluDense.wi_1",  # wi, where there is no gate
        f"{name}.ffn_down": f"{block}.{place}.DenseReluDense.wo",
        f"{name}.output_norm": f"{stack}.final_layer_norm",
    }


_CROSS = "decoder.block.{}.layer.1"
T5_NAMES = {
    "token_embd": "shared",
    "output": "lm_head",
    **_t5_stack("encoder", 1),
    **_t5_stack("decoder", 2),
    **{f"dec.cross_attn_{part}": f"{_CROSS}.EncDecAttention.{part}" for part in "qkvo"},
    "dec.cross_attn_rel_b": f"{_CROSS}.EncDecAttention.relative_attention_bias",
    "dec.cross_attn_norm": f"{_CROSS}.layer_norm",
}
T5_PLAIN_UP = {key: name.replace("wi_1", "wi") for key, name in T5_NAMES.items() if key.endswith(".ffn_up")}
WITHOUT_SUFFIX = ("ssm_a", "ssm_d")
# Parameters of checkpoints that have no suffix of their own
PLAIN_ENDS = {
    ".dt.bias": ".dt_bias",
    ".e_score_correction.bias": ".e_score_correction_bias",
    ".e_score_correction.weight": ".e_score_correction_bias",
    ".sinks.weight": ".sinks",
}
GPT_NEOX_NAMES = {
    "token_embd": "gpt_neox.embed_in",
    "output_norm": "gpt_neox.final_layer_norm",
    "output": "lm_head",
    "attn_norm": "gpt_neox.layers.{}.input_layernorm",
    "attn_qkv": "gpt_neox.layers.{}.attention.query_key_value",
    "attn_output": "gpt_neox.layers.{}.attention.dense",
    "ffn_norm": "gpt_neox.layers.{}.post_attention_layernorm",
    "ffn_up": "gpt_neox.layers.{}.mlp.dense_h_to_4h",
    "ffn_down": "gpt_neox.layers.{}.mlp.dense_4h_to_h",
}
FALCON_NAMES = {
    "token_embd": "transformer.word_embeddings",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
    "attn_norm": "transformer.h.{}.input_layernorm",
    "attn_qkv": "transformer.h.{}.self_attention.query_key_value",
    "attn_output": "transformer.h.{}.self_attention.dense",
    "ffn_up": "transformer.h.{}.mlp.dense_h_to_4h",
    "ffn_down": "transformer.h.{}.mlp.dense_4h_to_h",
}
# Of models with two norms side by side
FALCON_TWO_NORMS = {"attn_norm": "transformer.h.{}.ln_mlp", "attn_norm_2": "transformer.h.{}.ln_attn"}
DEEPSEEK_NAMES = {
    **LLAMA_NAMES,
    "attn_q_a": "model.layers.{}.self_attn.q_a_proj",
    "attn_q_a_norm": "model.layers.{}.self_attn.q_a_layernorm",
    "attn_q_b": "model.layers.{}.self_attn.q_b_proj",
    "attn_kv_a_mqa": "model.layers.{}.self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "model.layers.{}.self_attn.kv_a_layernorm",
    "attn_kv_b": "model.layers.{}.self_attn.kv_b_proj",
    "attn_k_b": "model.layers.{}.self_attn.kv_b_proj",  # together with attn_v_b
    "exp_probs_b": "model.layers.{}.mlp.gate.e_score_correction",
    "ffn_gate_shexp": "model.layers.{}.mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "model.layers.{}.mlp.shared_experts.up_proj",
    "ffn_down_shexp": "model.layers.{}.mlp.shared_experts.down_proj",
}
GPT2_NAMES = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
    "attn_norm": "transformer.h.{}.ln_1",
    "attn_qkv": "transformer.h.{}.attn.c_attn",
    "attn_output": "transformer.h.{}.attn.c_proj",
    "ffn_norm": "transformer.h.{}.ln_2",
    "ffn_up": "transformer.h.{}.mlp.c_fc",
    "ffn_down": "transformer.h.{}.mlp.c_proj",
}
NAMES = {
    "gpt2": GPT2_NAMES,
    "gemma2": GEMMA3_NAMES,
    "gemma3": GEMMA3_NAMES,
    "phi3": PHI3_NAMES,
    "olmo2": OLMO2_NAMES,
    "starcoder2": STARCODER2_NAMES,
    "glm4": GLM4_NAMES,
    "gptneox": GPT_NEOX_NAMES,
    "falcon": FALCON_NAMES,
    "glm4moe": GLM4_MOE_NAMES,
    "gpt-oss": GPT_OSS_NAMES,
    "deepseek2": DEEPSEEK_NAMES,
    "mamba2": MAMBA2_NAMES,
    "granitehybrid": GRANITE_HYBRID_NAMES,
    "bert": BERT_NAMES,
    "modern-bert": MODERN_BERT_NAMES,
    "t5": T5_NAMES,
}  # of other architectures: LLAMA_NAMES


def hugging_face_name(names: Mapping[str, str], gguf_name: str) -> str | None:
    """None: the name is unknown. Parameters have a suffix, but for a few of layers with states."""
    if further := re.fullmatch(r"blk\.(\d+)\.(nextn\..+)", gguf_name):  # of a layer that predicts further tokens
        return f"model.layers.{further[1]}.{further[2]}"
    match = re.fullmatch(r"(enc\.|dec\.)?(?:blk\.(\d+)\.)?([\w.]+?)(?:\.(weight|bias))?", gguf_name)
    if match is None:
        return None
    stack, layer, part, suffix = match.groups()
    key = f"{stack or ''}{part}"
    if key not in names or ("{}" in names[key]) != (layer is not None) or (suffix is None) != (key in WITHOUT_SUFFIX):
        return None
    name = names[key].format(layer)
    if suffix is None:
        return name
    name = f"{name}.{suffix}"
    end = next((end for end in PLAIN_ENDS if name.endswith(end)), "")
    return name.removesuffix(end) + PLAIN_ENDS.get(end, "")
