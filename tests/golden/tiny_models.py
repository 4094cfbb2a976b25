"""Small random models of every family: the transformers model, our config for it, and its weights as a TensorSource.

The configs are written out by hand and not parsed, so that a fault of the parser does not hide here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import transformers

from ratoon.core.config import ModelConfig, PositionKind, RopeScaling
from ratoon.layers.stored import StoredTensor, TensorSlice
from ratoon.layers.torch_ops import TorchOps
from ratoon.layers.weights import Destination
from ratoon.models.base import LanguageModel
from ratoon.models.build import build_model

Tensor = torch.Tensor

VOCAB_SIZE = 97
MAX_POSITION = 128


class DictSource:
    """Tensors held in memory. Counts what is read, so that a test can say that nothing was."""

    def __init__(self, tensors: Mapping[str, Tensor], name: str = "memory") -> None:
        self.name = name
        self.tensors = dict(tensors)
        self.num_reads = 0

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    def read(self, name: str, part: TensorSlice | None = None, destination: Destination | None = None) -> StoredTensor:
        self.num_reads += 1
        return StoredTensor.of_floats(self.tensors[name], part)


class TinyModel(NamedTuple):
    oracle: transformers.PreTrainedModel
    config: ModelConfig
    source: DictSource

    def build(self, dtype: torch.dtype = torch.float32, max_position: int | None = None) -> LanguageModel:
        return build_model(self.config, self.source, TorchOps(), torch.device("cpu"), dtype, max_position)

    @torch.inference_mode()
    def oracle_logits(self, token_ids: list[int]) -> Tensor:
        logits: Tensor = self.oracle(torch.tensor([token_ids]), use_cache=False).logits
        return logits[0].float()


def tiny_llama(
    num_heads: int = 4,
    num_kv_heads: int = 2,
    tied: bool = False,
    attention_bias: bool = False,
    mlp_bias: bool = False,
    rope: dict[str, Any] | None = None,
    max_position: int = MAX_POSITION,
    seed: int = 0,
) -> TinyModel:
    """`rope` is the rope_parameters of transformers, without theta."""
    config = plain_config("LlamaForCausalLM", num_heads, num_kv_heads, max_position=max_position)
    config = replace(
        config,
        tie_word_embeddings=tied,
        attention_bias=attention_bias,
        attention_output_bias=attention_bias,
        mlp_bias=mlp_bias,
        rope_scaling=_rope_scaling(rope),
    )
    oracle_config = transformers.LlamaConfig(
        **shared_arguments(config, rope), head_dim=config.head_dim, attention_bias=attention_bias, mlp_bias=mlp_bias
    )
    return make_tiny(transformers.LlamaForCausalLM, oracle_config, config, seed)


def tiny_mistral(window: int | None = 5, head_dim: int = 16, seed: int = 0) -> TinyModel:
    config = replace(plain_config("MistralForCausalLM", 4, 2, head_dim=head_dim), sliding_window=window)
    oracle_config = transformers.MistralConfig(
        **shared_arguments(config), head_dim=config.head_dim, sliding_window=window
    )
    return make_tiny(transformers.MistralForCausalLM, oracle_config, config, seed)


def tiny_qwen2(
    window: int | None = None,
    first_window_layer: int = 1,
    layer_types: list[str] | None = None,
    tied: bool = False,
    seed: int = 0,
) -> TinyModel:
    """With a window, layers from `first_window_layer` on have it, or those that `layer_types` names."""
    config = replace(plain_config("Qwen2ForCausalLM", 4, 2), tie_word_embeddings=tied, attention_bias=True)
    oracle_config = transformers.Qwen2Config(
        **shared_arguments(config),
        use_sliding_window=window is not None,
        sliding_window=window,
        max_window_layers=first_window_layer,
        layer_types=layer_types,
    )
    if window is not None:
        sliding = tuple(kind == "sliding_attention" for kind in oracle_config.layer_types)
        config = replace(config, sliding_window=window, sliding_layers=sliding)
    return make_tiny(transformers.Qwen2ForCausalLM, oracle_config, config, seed)


def tiny_qwen3(tied: bool = True, attention_bias: bool = False, head_dim: int = 24, seed: int = 0) -> TinyModel:
    """Its heads are wider than hidden size / number of heads."""
    config = plain_config("Qwen3ForCausalLM", 4, 2, head_dim=head_dim)
    config = replace(
        config, tie_word_embeddings=tied, attention_bias=attention_bias, attention_output_bias=attention_bias
    )
    oracle_config = transformers.Qwen3Config(
        **shared_arguments(config), head_dim=config.head_dim, attention_bias=attention_bias
    )
    return make_tiny(transformers.Qwen3ForCausalLM, oracle_config, config, seed)


def tiny_gemma3(
    window: int = 6,
    head_dim: int = 16,
    pattern: int = 3,
    factor: float | None = 2.0,
    num_layers: int = 4,
    seed: int = 0,
) -> TinyModel:
    """One layer of `pattern` sees everything, with a rotation that is stretched by `factor`; the others have a window.
    Scores are scaled by another number than the size of heads."""
    config = plain_config("Gemma3ForCausalLM", 4, 2, head_dim=head_dim)
    config = replace(
        config,
        num_layers=num_layers,
        activation="gelu_pytorch_tanh",
        rope_theta=50000.0,
        rope_scaling=RopeScaling() if factor is None else RopeScaling(kind="linear", factor=factor),
        local_rope_theta=700.0,
        attention_scale=20.0**-0.5,
        tie_word_embeddings=True,
        sliding_window=window,
        sliding_layers=tuple((layer + 1) % pattern != 0 for layer in range(num_layers)),
        scale_embedding=True,
    )
    return make_tiny(transformers.Gemma3ForCausalLM, gemma3_text_config(config), config, seed)


def gemma3_text_config(config: ModelConfig) -> transformers.Gemma3TextConfig:
    arguments = shared_arguments(config)
    scaling = config.rope_scaling
    whole = {"rope_type": "default"} if scaling.kind == "default" else {"rope_type": "linear", "factor": scaling.factor}
    assert config.attention_scale is not None and config.sliding_layers is not None
    arguments["rope_parameters"] = {
        "full_attention": {"rope_theta": config.rope_theta, **whole},
        "sliding_attention": {"rope_theta": config.local_rope_theta, "rope_type": "default"},
    }
    return transformers.Gemma3TextConfig(
        **arguments,
        head_dim=config.head_dim,
        query_pre_attn_scalar=round(config.attention_scale**-2),
        sliding_window=config.sliding_window,
        layer_types=["sliding_attention" if sliding else "full_attention" for sliding in config.sliding_layers],
    )


def tiny_gpt2(seed: int = 0) -> TinyModel:
    config = replace(
        plain_config("GPT2LMHeadModel", 4, 4),
        position_kind=PositionKind.TABLE,
        intermediate_size=256,
        norm_eps=1e-5,
        activation="gelu_new",
        tie_word_embeddings=True,
        attention_bias=True,
        attention_output_bias=True,
        mlp_bias=True,
    )
    oracle_config = transformers.GPT2Config(
        vocab_size=config.vocab_size,
        n_positions=config.max_position,
        n_embd=config.hidden_size,
        n_layer=config.num_layers,
        n_head=config.num_heads,
        bos_token_id=1,
        eos_token_id=2,
    )
    return make_tiny(transformers.GPT2LMHeadModel, oracle_config, config, seed)


def random_token_ids(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist()


def plain_config(
    architecture: str, num_heads: int, num_kv_heads: int, head_dim: int = 16, max_position: int = MAX_POSITION
) -> ModelConfig:
    return ModelConfig(
        architecture=architecture,
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=112,
        num_layers=3,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=max_position,
        bos_token_id=1,
        eos_token_ids=(2,),
    )


def shared_arguments(
    config: ModelConfig, rope: dict[str, Any] | None = None, eps_name: str = "rms_norm_eps"
) -> dict[str, Any]:
    """What most config classes of decoders call alike."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "max_position_embeddings": config.max_position,
        eps_name: config.norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_ids[0],
        "rope_parameters": {"rope_theta": config.rope_theta, **(rope or {"rope_type": "default"})},
    }


def _rope_scaling(rope: dict[str, Any] | None) -> RopeScaling:
    if rope is None:
        return RopeScaling()
    ours = {"rope_type": "kind", "original_max_position_embeddings": "original_max_position"}
    return RopeScaling(**{ours.get(name, name): value for name, value in rope.items()})


def make_tiny(
    oracle_class: type[transformers.PreTrainedModel],
    oracle_config: transformers.PretrainedConfig,
    config: ModelConfig,
    seed: int,
    gain: float = 4.0,
) -> TinyModel:
    oracle_config._attn_implementation = "eager"
    torch.manual_seed(seed)
    oracle = oracle_class(oracle_config).eval()
    # A fresh model has unit norms, zero biases and tiny weights: an error in any of them would not be seen.
    with torch.no_grad():
        for parameter in oracle.parameters():
            if not parameter.requires_grad:  # a table of positions that is made and not learned
                continue
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                parameter.mul_(gain)
        if hasattr(oracle, "final_logits_bias"):
            oracle.final_logits_bias.normal_()
    tensors = {name: tensor for name, tensor in oracle.state_dict().items() if not _is_tied_copy(name, config)}
    return TinyModel(oracle, config, DictSource(tensors, name=f"tiny {config.architecture}"))


def _is_tied_copy(name: str, config: ModelConfig) -> bool:
    return config.tie_word_embeddings and name == "lm_head.weight"
