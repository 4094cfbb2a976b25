"""The metadata of a GGUF file as a Hugging Face config. What files leave out is as llama.cpp has it."""

from __future__ import annotations

import math
from typing import Any

from ratoon.core.errors import ModelError
from ratoon.models.config_fields import MOST_LAYERS
from ratoon.models.damage import show
from ratoon.models.gguf_file import GGUFFile
from ratoon.models.gguf_names import ARCHITECTURES
from ratoon.models.gguf_quants import BF16, F16

MIXTURES = ("llama", "qwen2moe", "qwen3moe", "olmoe", "glm4moe", "gpt-oss", "deepseek2", "granitehybrid")
LAYER_NORMED = ("gpt2", "starcoder2", "gptneox", "falcon")
SIGMOID = 2  # llama.cpp's number of that way to score experts
NO_LENGTH = 2**20  # what files have as the length of models that have none
GRANITE_HYBRID_LENGTH = 2**17  # of the published ones

LONGROPE_FACTORS = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}
ROPE_FACTORS = "rope_freqs.weight"  # Llama 3's frequency factors, spelled out by the converter
LLAMA3_LOW_FREQ_FACTOR, LLAMA3_HIGH_FREQ_FACTOR = 1.0, 4.0
LLAMA3_ORIGINAL_LENGTHS = (8192, 4096, 2048, 16384, 32768)

GEMMA2_LARGEST_LAYERS = 46  # of the 27B model
GEMMA3_LARGEST_LAYERS = 62  # of the 27B model
GEMMA3_PATTERN = 6  # one layer of so many sees everything
GEMMA3_LOCAL_THETA = 10000.0  # of the others

KEY_VALUE_HEADS = "attention.head_count_kv"

# Encoders, by the kind of their tokenizer
ENCODERS = {"bert": "Bert", "gpt2": "Roberta", "t5": "XLMRoberta", "llama": "XLMRoberta"}
UNUSED_POSITIONS = 2  # of RoBERTa, which its files leave out
POOLINGS = {1: "mean", 2: "first", 3: "last"}
MODERN_BERT_PATTERN = 3  # one layer of so many sees everything
MODERN_BERT_LOCAL_THETA = 10000.0  # of the others


class GGUFConfig:
    """Reads values of one file's architecture, and makes the config."""

    def __init__(self, file: GGUFFile, name: str, architecture: str) -> None:
        self.file = file
        self.metadata = file.metadata
        self.name = name
        self.architecture = architecture
        self.kind_of_encoder = ENCODERS.get(str(file.metadata.get("tokenizer.ggml.model")), "Bert")
        is_roberta = architecture == "bert" and self.kind_of_encoder != "Bert"
        self.num_unused_positions = UNUSED_POSITIONS if is_roberta else 0

    def get(self, key: str) -> Any:
        """A value of this architecture. Some files have a list with one entry per layer; all must be equal, but for
        layers that do not attend, which have no key-value heads."""
        value = self.metadata.get(f"{self.architecture}.{key}")
        if isinstance(value, list):
            if key == KEY_VALUE_HEADS:
                value = [entry for entry in value if entry != 0] or value
            if not value or any(entry != value[0] for entry in value):
                raise ModelError(self.name, f"{self.architecture}.{key} differs between layers", "one value for all")
            return value[0]
        return value

    def get_list(self, key: str) -> list[str]:
        """Texts; empty where there are none."""
        found = self.metadata.get(f"{self.architecture}.{key}")
        return found if isinstance(found, list) and all(isinstance(item, str) for item in found) else []

    def whole(self, key: str, default: int | None = None) -> int:
        """A whole number, required unless there is a default."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            problem = "lacks the metadata key" if value is None else f"has {show(value)} as the metadata key"
            raise ModelError(
                self.name, f"{problem} {self.architecture}.{key}", "a whole number; convert the model again"
            )
        return value

    def real(self, key: str, default: float) -> float:
        value = self.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ModelError(self.name, f"has {show(value)} as the metadata key {self.architecture}.{key}", "a number")
        return float(value)

    def build(self) -> dict[str, Any]:
        embedding = self.file.tensors.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            raise ModelError(self.name, "lacks the tensor token_embd.weight", "convert the model again")
        config: dict[str, Any] = {
            "architectures": [ARCHITECTURES[self.architecture]],
            "model_type": self.architecture,
            "vocab_size": embedding.shape[0],
            "tie_word_embeddings": "output.weight" not in self.file.tensors,
            "dtype": self._dtype(embedding.type_id),
            "bos_token_id": self.metadata.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self._eos_token_ids(),
        }
        builders = {
            "gpt2": self._gpt2_config,
            "gemma2": self._gemma2_config,
            "gemma3": self._gemma3_config,
            "mistral3": self._mistral3_config,
            "phi3": self._phi3_config,
            "granite": self._granite_config,
            "gptneox": self._gpt_neox_config,
            "falcon": self._falcon_config,
            "glm4moe": self._glm4_moe_config,
            "gpt-oss": self._gpt_oss_config,
            "deepseek2": self._deepseek_config,
            "mamba2": self._mamba2_config,
            "granitehybrid": self._granite_hybrid_config,
            "bert": self._bert_config,
            "modern-bert": self._modern_bert_config,
            "t5": self._t5_config,
        }
        config.update(builders.get(self.architecture, self._llama_config)())
        if self.architecture in ("glm4moe", "gpt-oss"):
            return config
        return config | self._expert_config() if self.whole("expert_count", 0) else config

    def _expert_config(self) -> dict[str, Any]:
        """What files leave out is as llama.cpp has it."""
        if self.architecture not in MIXTURES:
            known = ", ".join(MIXTURES)
            raise ModelError(self.name, f"is a mixture of experts of {self.architecture}", f"known mixtures: {known}")
        if self.architecture == "deepseek2":
            return self._deepseek_experts()
        if self.architecture == "granitehybrid":
            return {
                "num_local_experts": self.whole("expert_count"),
                "num_experts_per_tok": self.whole("expert_used_count"),
            }
        num_layers = self.num_layers
        layers = [layer for layer in range(num_layers) if f"blk.{layer}.ffn_gate_inp.weight" in self.file.tensors]
        inner = self.whole("expert_feed_forward_length", self.whole("feed_forward_length"))
        config: dict[str, Any] = {
            "num_experts": self.whole("expert_count"),
            "num_experts_per_tok": self.whole("expert_used_count"),
            "norm_topk_prob": self.architecture == "qwen3moe",
            "mlp_only_layers": [layer for layer in range(num_layers) if layer not in layers],
        }
        if self.architecture == "llama":
            if "blk.0.ffn_gate_exps.weight" not in self.file.tensors:
                raise ModelError(self.name, "has the experts of a layer apart", "convert the model again")
            return config | {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
        if self.architecture == "qwen2moe":
            config["shared_expert_intermediate_size"] = self._shared_size()
        return config | ({} if self.architecture == "olmoe" else {"moe_intermediate_size": inner})

    def _glm4_moe_config(self) -> dict[str, Any]:
        """Layers that predict further tokens are counted in files, and are behind the others."""
        config = self._llama_config()
        num_extra = self.whole("nextn_predict_layers", 0)
        if (scoring := self.whole("expert_gating_func", SIGMOID)) != SIGMOID:
            raise ModelError(self.name, f"has {scoring} as expert_gating_func", f"{SIGMOID}, a sigmoid")
        renormalised = self.get("expert_weights_norm")
        return config | {
            "num_hidden_layers": config["num_hidden_layers"] - num_extra,
            "num_nextn_predict_layers": num_extra,
            "use_qk_norm": "blk.0.attn_q_norm.weight" in self.file.tensors,
            "n_routed_experts": self.whole("expert_count"),
            "num_experts_per_tok": self.whole("expert_used_count"),
            "moe_intermediate_size": self.whole("expert_feed_forward_length"),
            "n_shared_experts": self.whole("expert_shared_count", 1),
            "first_k_dense_replace": self.whole("leading_dense_block_count", 0),
            "routed_scaling_factor": self.real("expert_weights_scale", 1.0) or 1.0,
            "norm_topk_prob": True if renormalised is None else bool(renormalised),
            "n_group": self.whole("expert_group_count", 1),
            "topk_group": self.whole("expert_group_used_count", 1),
        }

    def _gpt_oss_config(self) -> dict[str, Any]:
        """What files leave out is as the published models have it: every other layer has the window, and the borders of
        YaRN's ramp are no whole numbers."""
        inner = self.whole("expert_feed_forward_length", self.whole("feed_forward_length", 0))
        config = self._llama_config(inner)
        if config["rope_parameters"]["rope_type"] == "yarn":
            config["rope_parameters"]["truncate"] = False
        return config | {
            "model_type": "gpt_oss",
            "num_local_experts": self.whole("expert_count"),
            "num_experts_per_tok": self.whole("expert_used_count"),
            "sliding_window": self.whole("attention.sliding_window"),
        }

    def _shared_size(self) -> int:
        """Returns the size of the shared expert, by the shape of its tensors in older files, which do not say it."""
        tensors = (self.file.tensors.get(f"blk.{n}.ffn_up_shexp.weight") for n in range(self.num_layers))
        shapes = [tensor.shape for tensor in tensors if tensor is not None]
        return self.whole("expert_shared_feed_forward_length", shapes[0][0] if shapes else 0)

    def _gpt2_config(self) -> dict[str, Any]:
        return {
            "n_embd": self.whole("embedding_length"),
            "n_layer": self.num_layers,
            "n_head": self.whole("attention.head_count"),
            "n_inner": self.whole("feed_forward_length"),
            "n_positions": self.whole("context_length"),
            "layer_norm_epsilon": self.real("attention.layer_norm_epsilon", 1e-5),
            "activation_function": "gelu_new",
        }

    def _llama_config(self, inner_size: int | None = None) -> dict[str, Any]:
        num_heads = self.whole("attention.head_count")
        hidden_size = self.whole("embedding_length")
        head_dim = self.whole("attention.key_length", hidden_size // max(num_heads, 1))
        config: dict[str, Any] = {
            "hidden_size": hidden_size,
            "intermediate_size": inner_size or self.whole("feed_forward_length"),
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": num_heads,
            "num_key_value_heads": self.whole(KEY_VALUE_HEADS, num_heads),
            "head_dim": head_dim,
            "max_position_embeddings": self.whole("context_length"),
            "rms_norm_eps": self.real("attention.layer_norm_rms_epsilon", 1e-6),
            "hidden_act": "gelu_pytorch_tanh" if self.architecture == "starcoder2" else "silu",
            "attention_bias": "blk.0.attn_q.bias" in self.file.tensors,
            "rope_parameters": self._rope_parameters(head_dim),
        }
        if self.architecture in LAYER_NORMED:
            config["norm_epsilon"] = self.real("attention.layer_norm_epsilon", 1e-5)
            config["use_bias"] = "blk.0.attn_output.bias" in self.file.tensors
        window = self.whole("attention.sliding_window", 0)
        if self.architecture in ("phi3", "starcoder2") and window:
            config["sliding_window"] = window
        if self.architecture == "llama" and window:
            config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
        return config

    def _mistral3_config(self) -> dict[str, Any]:
        """The multiplier of yarn is that of the cosines and of the scores alike, which leaves the cosines as they are.
        Queries grow behind the original length."""
        config = self._llama_config() | {"model_type": "ministral3"}
        rope = config["rope_parameters"]
        if rope["rope_type"] == "yarn" and (multiplier := self.real("rope.scaling.yarn_log_multiplier", 0.0)):
            rope |= {"mscale": multiplier, "mscale_all_dim": multiplier}
        if beta := self.real("attention.temperature_scale", 0.0):
            original = rope.get("original_max_position_embeddings")
            if (length := self.whole("attention.temperature_length", original or 0)) != original:
                problem = f"has {length} as the metadata key mistral3.attention.temperature_length"
                raise ModelError(self.name, problem, f"the original length of its rope scaling, {original}")
            rope["llama_4_scaling_beta"] = beta
        config["sliding_window"] = self.whole("attention.sliding_window", 0) or None
        return config

    def _gemma2_config(self) -> dict[str, Any]:
        """The scale of scores follows from the hidden size in the largest model, as llama.cpp has it."""
        config = self._llama_config()
        is_largest = config["num_hidden_layers"] == GEMMA2_LARGEST_LAYERS
        width = config["hidden_size"] // max(config["num_attention_heads"], 1)
        return config | {
            "hidden_activation": "gelu_pytorch_tanh",
            "sliding_window": self.whole("attention.sliding_window", 4096),
            "query_pre_attn_scalar": width if is_largest else config["head_dim"],
            "attn_logit_softcapping": self.real("attn_logit_softcapping", 0.0) or None,
            "final_logit_softcapping": self.real("final_logit_softcapping", 0.0) or None,
        }

    def _phi3_config(self) -> dict[str, Any]:
        config = self._llama_config()
        original = self.whole("rope.scaling.original_context_length", config["max_position_embeddings"])
        config["original_max_position_embeddings"] = original
        if all(tensor in self.file.tensors for tensor in LONGROPE_FACTORS.values()):
            factors = {
                key: self.file.read(name).floats().reshape(-1).tolist() for key, name in LONGROPE_FACTORS.items()
            }
            rope = config["rope_parameters"] | factors
            if attention_factor := self.real("rope.scaling.attn_factor", 0.0):
                rope["attention_factor"] = attention_factor
            config["rope_parameters"] = rope | {"rope_type": "longrope"}
        return config

    def _granite_config(self) -> dict[str, Any]:
        config = self._llama_config()
        scale = config["head_dim"] ** -0.5  # where the file has none, as llama.cpp has it
        return config | {
            "attention_multiplier": self.real("attention.scale", 0.0) or scale,
            "embedding_multiplier": self.real("embedding_scale", 0.0) or 1.0,
            "residual_multiplier": self.real("residual_scale", 0.0) or 1.0,
            "logits_scaling": self.real("logit_scale", 0.0) or 1.0,
        }

    def _granite_hybrid_config(self) -> dict[str, Any]:
        config, states = self._granite_config(), self._state_sizes()
        hidden_size, num_layers = config["hidden_size"], config["num_hidden_layers"]
        if states["inner"] % max(hidden_size, 1):
            problem = f"has {states['inner']} as the metadata key granitehybrid.ssm.inner_size"
            raise ModelError(self.name, problem, f"a multiple of its embedding_length, {hidden_size}")
        with_states = [f"blk.{layer}.ssm_in.weight" in self.file.tensors for layer in range(num_layers)]
        shared = self.file.tensors.get("blk.0.ffn_up.weight")
        is_rotary = self.get("rope.scaling.finetuned")
        if config["max_position_embeddings"] == NO_LENGTH:
            config["max_position_embeddings"] = GRANITE_HYBRID_LENGTH
        return config | {
            "model_type": "granitemoehybrid",
            "layer_types": ["mamba" if has_state else "attention" for has_state in with_states],
            "position_embedding_type": "nope" if is_rotary is False else "rope",
            "shared_intermediate_size": self._shared_size() if shared is None else shared.shape[0],
            "num_local_experts": 0,
            "mamba_expand": states["inner"] // max(hidden_size, 1),
            "mamba_n_heads": states["heads"],
            "mamba_d_state": states["state"],
            "mamba_n_groups": states["groups"],
            "mamba_d_conv": states["width"],
            "mamba_conv_bias": states["conv_bias"],
            "mamba_proj_bias": states["proj_bias"],
        }

    def _mamba2_config(self) -> dict[str, Any]:
        states, hidden_size = self._state_sizes(), self.whole("embedding_length")
        config = {
            "hidden_size": hidden_size,
            "num_hidden_layers": self.num_layers,
            "expand": states["inner"] / max(hidden_size, 1),
            "num_heads": states["heads"],
            "head_dim": states["inner"] // max(states["heads"], 1),
            "state_size": states["state"],
            "n_groups": states["groups"],
            "conv_kernel": states["width"],
            "use_conv_bias": states["conv_bias"],
            "use_bias": states["proj_bias"],
            "layer_norm_epsilon": self.real("attention.layer_norm_rms_epsilon", 1e-5),
        }
        if (length := self.whole("context_length", NO_LENGTH)) != NO_LENGTH:
            config["max_position_embeddings"] = length
        return config

    def _state_sizes(self) -> dict[str, int]:
        tensors = self.file.tensors
        return {
            "inner": self.whole("ssm.inner_size"),
            "heads": self.whole("ssm.time_step_rank"),
            "state": self.whole("ssm.state_size"),
            "groups": self.whole("ssm.group_count"),
            "width": self.whole("ssm.conv_kernel"),
            "conv_bias": any(name.endswith(".ssm_conv1d.bias") for name in tensors),
            "proj_bias": any(name.endswith(".ssm_in.bias") for name in tensors),
        }

    @property
    def num_layers(self) -> int:
        found = self.whole("block_count")
        if not 0 < found <= MOST_LAYERS:
            problem = f"has {found} as the metadata key {self.architecture}.block_count"
            raise ModelError(self.name, problem, f"a number from 1 to {MOST_LAYERS}")
        return found

    def pooling(self) -> str | None:
        """The pooling that the model was trained with, as in PoolingParams; None: the file does not say."""
        kind = self.get("pooling_type")
        return POOLINGS.get(kind) if isinstance(kind, int) else None

    def _bert_config(self) -> dict[str, Any]:
        """BERT, RoBERTa and XLM-RoBERTa, which differ in their tokenizers and heads, and in where positions begin."""
        kind = self.kind_of_encoder
        classifies = "cls.output.weight" in self.file.tensors
        if classifies and kind == "Bert":
            raise ModelError(
                self.name, "has a head that classifies without the layer before it", "the Hugging Face folder"
            )
        types = self.file.tensors.get("token_types.weight")
        config: dict[str, Any] = {
            "architectures": [f"{kind}ForSequenceClassification" if classifies else f"{kind}Model"],
            "hidden_size": self.whole("embedding_length"),
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.whole("attention.head_count"),
            "intermediate_size": self.whole("feed_forward_length"),
            "max_position_embeddings": self.whole("context_length") + self.num_unused_positions,
            "layer_norm_eps": self.real("attention.layer_norm_epsilon", 1e-12),
            "hidden_act": "gelu",
            "pad_token_id": UNUSED_POSITIONS - 1,
        }
        if types is not None:
            config["type_vocab_size"] = types.shape[0]
        return config | (self._labels() if classifies else {})

    def _modern_bert_config(self) -> dict[str, Any]:
        num_layers, window = self.num_layers, self.whole("attention.sliding_window", 0)
        classifies = "cls.output.weight" in self.file.tensors
        every = self.whole("attention.sliding_window_pattern", MODERN_BERT_PATTERN) if window else 1
        kinds = ["full_attention" if layer % max(every, 1) == 0 else "sliding_attention" for layer in range(num_layers)]
        config = {
            "architectures": ["ModernBertForSequenceClassification" if classifies else "ModernBertModel"],
            "model_type": "modernbert",
            "hidden_size": self.whole("embedding_length"),
            "num_hidden_layers": num_layers,
            "num_attention_heads": self.whole("attention.head_count"),
            "intermediate_size": self.whole("feed_forward_length"),
            "max_position_embeddings": self.whole("context_length"),
            "norm_eps": self.real("attention.layer_norm_epsilon", 1e-5),
            "hidden_activation": self.get("hidden_activation") or "gelu",
            "local_attention": window or 128,
            "layer_types": kinds,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": self.real("rope.freq_base", 160_000.0)},
                "sliding_attention": {
                    "rope_type": "default",
                    "rope_theta": self.real("rope.freq_base_swa", MODERN_BERT_LOCAL_THETA),
                },
            },
            "classifier_pooling": "mean" if self.pooling() in (None, "mean") else "cls",
        }
        return config | (self._labels() if classifies else {})

    def _t5_config(self) -> dict[str, Any]:
        is_gated = "enc.blk.0.ffn_gate.weight" in self.file.tensors
        num_layers = self.num_layers
        return {
            "d_model": self.whole("embedding_length"),
            "d_kv": self.whole("attention.key_length"),
            "d_ff": self.whole("feed_forward_length"),
            "num_layers": num_layers,
            "num_decoder_layers": self.whole("decoder_block_count", num_layers),
            "num_heads": self.whole("attention.head_count"),
            "relative_attention_num_buckets": self.whole("attention.relative_buckets_count"),
            "layer_norm_epsilon": self.real("attention.layer_norm_rms_epsilon", 1e-6),
            "feed_forward_proj": "gated-gelu" if is_gated else "relu",
            "n_positions": self.whole("context_length"),
            "pad_token_id": self.metadata.get("tokenizer.ggml.padding_token_id", 0),
            "decoder_start_token_id": self.whole("decoder_start_token_id", 0),
        }

    def _labels(self) -> dict[str, Any]:
        """Returns the fields of a config that say what a classifier's head tells apart: names, if the file has one for
        each output of the head, and otherwise their number."""
        names, shape = self.get_list("classifier.output_labels"), self.file.tensors["cls.output.weight"].shape
        if [len(names)] != list(shape[:1]):
            return {"num_labels": shape[0] if shape else 0}
        return {"id2label": {str(index): name for index, name in enumerate(names)}}

    def _gpt_neox_config(self) -> dict[str, Any]:
        config = self._llama_config()
        is_parallel = self.get("use_parallel_residual")
        return config | {
            "model_type": "gpt_neox",
            "hidden_act": "gelu",
            "layer_norm_eps": config["norm_epsilon"],
            "attention_bias": "blk.0.attn_qkv.bias" in self.file.tensors,
            "use_parallel_residual": True if is_parallel is None else bool(is_parallel),
        }

    def _falcon_config(self) -> dict[str, Any]:
        config = self._llama_config()
        return config | {
            "layer_norm_epsilon": config["norm_epsilon"],
            "ffn_hidden_size": config["intermediate_size"],
            "num_kv_heads": config["num_key_value_heads"],
            "new_decoder_architecture": True,  # which has any number of KV heads
            "bias": "blk.0.attn_qkv.bias" in self.file.tensors,
        }

    def _deepseek_config(self) -> dict[str, Any]:
        """Newer files have the sizes of what is kept as those of a key and a value, and those of heads beside them. The
        scale of scores is in the multiplier of yarn, as llama.cpp has it."""
        config, rank = self._llama_config(), self.whole("attention.kv_lora_rank")
        rope_dim = self.whole("rope.dimension_count")
        key_dim = self.whole("attention.key_length_mla", 0) or self.whole("attention.key_length")
        value_dim = self.whole("attention.value_length_mla", 0) or self.whole("attention.value_length")
        rope = {name: value for name, value in config["rope_parameters"].items() if name != "rotary_dim"}
        if rope["rope_type"] == "yarn" and (multiplier := self.real("rope.scaling.yarn_log_multiplier", 0.0)):
            rope |= {"mscale": 10 * multiplier, "mscale_all_dim": 10 * multiplier}
        return config | {
            "kv_lora_rank": rank,
            "q_lora_rank": self.whole("attention.q_lora_rank", 0) or None,
            "qk_rope_head_dim": rope_dim,
            "qk_nope_head_dim": key_dim - rope_dim,
            "v_head_dim": value_dim,
            "attention_bias": "blk.0.attn_kv_a_mqa.bias" in self.file.tensors,
            "rope_parameters": rope,
            "n_routed_experts": None,
        }

    def _deepseek_experts(self) -> dict[str, Any]:
        is_v3 = self.whole("expert_gating_func", 1) == SIGMOID
        groups = self.whole("expert_group_count", 1)
        return {
            "architectures": [f"DeepseekV{3 if is_v3 else 2}ForCausalLM"],
            "model_type": "deepseek_v3" if is_v3 else "deepseek_v2",
            "n_routed_experts": self.whole("expert_count"),
            "num_experts_per_tok": self.whole("expert_used_count"),
            "moe_intermediate_size": self.whole("expert_feed_forward_length"),
            "n_shared_experts": self.whole("expert_shared_count", 0),
            "first_k_dense_replace": self.whole("leading_dense_block_count", 0),
            "routed_scaling_factor": self.real("expert_weights_scale", 0.0) or 1.0,
            "norm_topk_prob": bool(self.get("expert_weights_norm")),
            "topk_method": "noaux_tc" if is_v3 else "group_limited_greedy" if groups > 1 else "greedy",
            "n_group": groups,
            "topk_group": self.whole("expert_group_used_count", 1),
        }

    def _gemma3_config(self) -> dict[str, Any]:
        """What files leave out is as llama.cpp has it: the layers that see everything, and the scale of scores, which
        follows from the hidden size in the largest model."""
        config = self._llama_config()
        num_layers, head_dim, num_heads = (
            config[name] for name in ("num_hidden_layers", "head_dim", "num_attention_heads")
        )
        is_largest = num_layers == GEMMA3_LARGEST_LAYERS
        local_theta = self.real("rope.freq_base_swa", GEMMA3_LOCAL_THETA)
        return config | {
            "model_type": "gemma3_text",
            "hidden_activation": "gelu_pytorch_tanh",
            "sliding_window": self.whole("attention.sliding_window"),
            "sliding_window_pattern": GEMMA3_PATTERN,
            "query_pre_attn_scalar": config["hidden_size"] // max(num_heads, 1) if is_largest else head_dim,
            "rope_parameters": {
                "full_attention": config["rope_parameters"],
                "sliding_attention": {"rope_type": "default", "rope_theta": local_theta},
            },
        }

    def _rope_parameters(self, head_dim: int) -> dict[str, Any]:
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": self.real("rope.freq_base", 10000.0)}
        rotary_dim = self.whole("rope.dimension_count", head_dim)
        if rotary_dim != head_dim and head_dim > 0:
            rope["rotary_dim"] = rotary_dim
        kind = self.get("rope.scaling.type") or "none"
        factor = self.real("rope.scaling.factor", 0.0) or self.real("rope.scale_linear", 0.0) or 1.0
        if ROPE_FACTORS in self.file.tensors:
            rope |= self._llama3_scaling(rope["rope_theta"], rotary_dim)
        elif kind == "yarn":
            rope |= self._yarn_scaling(factor)
        elif kind == "linear" or (kind == "none" and factor != 1.0):
            rope |= {"rope_type": "linear", "factor": factor}
        elif kind != "none":
            raise ModelError(
                self.name, f"has the unknown rope scaling {show(kind)}", "none, linear or yarn, or rope_freqs"
            )
        return rope

    def _yarn_scaling(self, factor: float) -> dict[str, Any]:
        rope: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
        original = self.whole("rope.scaling.original_context_length", 0)
        if original:
            rope["original_max_position_embeddings"] = original
        attention_factor = self.real("rope.scaling.attn_factor", 0.0)
        if attention_factor:  # llama.cpp multiplies it with the usual factor, Hugging Face has it instead
            rope["attention_factor"] = attention_factor * (0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0)
        for key, name in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
            if value := self.real(f"rope.scaling.{key}", 0.0):
                rope[name] = value
        return rope

    def _llama3_scaling(self, theta: float, rotary_dim: int) -> dict[str, Any]:
        """The file has only the factors; the parameters they were made from are found by trying the usual ones."""
        stored = self.file.read(ROPE_FACTORS).floats().reshape(-1).tolist()
        factor = max(stored, default=0.0)
        fits = len(stored) == rotary_dim // 2 and factor > 0 and theta > 0
        for original in LLAMA3_ORIGINAL_LENGTHS if fits else ():
            wanted = llama3_frequency_factors(theta, rotary_dim, factor, original)
            if all(abs(a - b) <= 1e-3 * b for a, b in zip(stored, wanted)):
                return {
                    "rope_type": "llama3",
                    "factor": factor,
                    "low_freq_factor": LLAMA3_LOW_FREQ_FACTOR,
                    "high_freq_factor": LLAMA3_HIGH_FREQ_FACTOR,
                    "original_max_position_embeddings": original,
                }
        raise ModelError(self.name, f"the factors in {ROPE_FACTORS} are not Llama 3's", "use the model's safetensors")

    def _eos_token_ids(self) -> list[int]:
        """All tokens that end a turn: llama.cpp stops on each of them."""
        keys = ("eos_token_id", "eot_token_id", "eom_token_id")
        found = [self.metadata.get(f"tokenizer.ggml.{key}") for key in keys]
        for key, token in zip(keys, found):
            if token is not None and type(token) is not int:
                raise ModelError(self.name, f"has {show(token)} as the metadata key tokenizer.ggml.{key}", "a token id")
        tokens = self.metadata.get("tokenizer.ggml.tokens")
        if self.architecture == "gpt-oss" and isinstance(tokens, list):
            # Files name the end of a message too, behind which the answer goes on, and leave out the end of a call.
            found = [token for token in found if token is None or tokens[token : token + 1] != ["<|end|>"]]
            found += [index for index, token in enumerate(tokens) if token in ("<|return|>", "<|call|>")]
        return list(dict.fromkeys(token for token in found if token is not None))

    def _dtype(self, embedding_type: int) -> str:
        """The dtype of the original checkpoint; quantised tensors are dequantised to float32."""
        return {F16: "float16", BF16: "bfloat16"}.get(embedding_type, "float32")


def llama3_frequency_factors(theta: float, rotary_dim: int, factor: float, original_length: int) -> list[float]:
    """The divisor of each rotary frequency: 1 for the fast ones, `factor` for the slow ones, a blend between."""
    low, high = LLAMA3_LOW_FREQ_FACTOR, LLAMA3_HIGH_FREQ_FACTOR
    factors = []
    for index in range(rotary_dim // 2):
        turns = original_length / (2 * math.pi * theta ** (2 * index / rotary_dim))  # within the original length
        blend = min(max((turns - low) / (high - low), 0.0), 1.0)
        factors.append(1.0 / ((1.0 - blend) / factor + blend))
    return factors
