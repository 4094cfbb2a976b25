"""Building a model is strict and costs nothing until the checkpoint is known to fit; families are short files."""

from __future__ import annotations

import importlib
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ratoon.core.config import (
    ClassifierConfig,
    EncoderConfig,
    LatentConfig,
    ModelConfig,
    RelativePositions,
    RopeScaling,
    StateSpaceConfig,
)
from ratoon.core.errors import ModelError
from ratoon.core.kv import FullAttentionSpec, SlidingWindowSpec
from ratoon.core.media import MediaConfig, VisionConfig
from ratoon.layers.ops import WeightUse
from ratoon.layers.stored import StoredTensor, TensorSlice
from ratoon.layers.torch_ops import TorchOps
from ratoon.layers.weights import Destination
from ratoon.models.base import LanguageModel
from ratoon.models.build import build_model, collect_shapes
from ratoon.models.registry import MODEL_CLASSES, find_model_class

LLAMA = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=11,
    hidden_size=8,
    intermediate_size=12,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    max_position=32,
)
GPT2 = replace(LLAMA, architecture="GPT2LMHeadModel", num_kv_heads=2, activation="gelu_new", tie_word_embeddings=True)
ENCODER_DECODER = replace(
    GPT2,
    encoder=EncoderConfig(num_layers=1, num_heads=2, head_dim=4, intermediate_size=10, max_position=16),
    activation="gelu",
)
WITH_IMAGES = replace(
    LLAMA,
    media=MediaConfig(
        "any", VisionConfig(8, 12, 1, 2, patch_size=2, image_size=8, temporal_patch_size=2, merge_size=2), 1
    ),
)
QWEN2_VL = replace(WITH_IMAGES, rope_scaling=RopeScaling(sections=(1, 1)))
STATES = StateSpaceConfig(2, 8, 5, 1, 4)
BASES = {
    "Mamba2ForCausalLM": replace(LLAMA, state_space=STATES),
    "GraniteMoeHybridForCausalLM": replace(
        LLAMA, state_space=replace(STATES, layers=tuple(layer > 0 for layer in range(LLAMA.num_layers)))
    ),
    "GPT2LMHeadModel": GPT2,
    "BartForConditionalGeneration": ENCODER_DECODER,
    "MBartForConditionalGeneration": ENCODER_DECODER,
    "MarianMTModel": ENCODER_DECODER,
    "M2M100ForConditionalGeneration": ENCODER_DECODER,
    "PegasusForConditionalGeneration": ENCODER_DECODER,
    "T5ForConditionalGeneration": replace(ENCODER_DECODER, relative_positions=RelativePositions(8, 20)),
    "MT5ForConditionalGeneration": replace(ENCODER_DECODER, relative_positions=RelativePositions(8, 20)),
    "WhisperForConditionalGeneration": replace(
        ENCODER_DECODER, encoder=EncoderConfig(1, 2, 4, 10, max_position=16, num_mel_bins=5)
    ),
    "MoonshineForConditionalGeneration": replace(
        ENCODER_DECODER,
        encoder=EncoderConfig(1, 2, 4, 10, max_position=16, num_mel_bins=1, reads_waveform=True),
        interleaved_rotary=True,
    ),
    "Qwen2VLForConditionalGeneration": QWEN2_VL,
    "Qwen2_5_VLForConditionalGeneration": replace(
        QWEN2_VL, media=replace(WITH_IMAGES.media, vision=replace(WITH_IMAGES.media.vision, activation="silu"))
    ),
    "Idefics3ForConditionalGeneration": WITH_IMAGES,
    "SmolVLMForConditionalGeneration": WITH_IMAGES,
    "Gemma3ForConditionalGeneration": replace(WITH_IMAGES, media=replace(WITH_IMAGES.media, num_rows=4)),
    "BertModel": replace(GPT2, causal=False, num_token_types=2),
    **dict.fromkeys(
        ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"),
        replace(LLAMA, num_kv_heads=1, head_dim=10, rotary_dim=4, latent=LatentConfig(6, 4, 4, 4)),
    ),
}
for base in ("Bert", "Roberta", "XLMRoberta", "DistilBert", "ModernBert", "Llama", "Mistral", "Qwen2", "Qwen3"):
    is_encoder = base.lower().endswith(("bert", "berta"))
    sizes = replace(GPT2, causal=False, num_token_types=2) if is_encoder else replace(LLAMA, has_lm_head=False)
    BASES[f"{base}Model"] = sizes
    BASES[f"{base}ForSequenceClassification"] = replace(sizes, classifier=ClassifierConfig(("a", "b"), "first"))


class ShapeSource:
    """Random tensors of these shapes; counts the reads."""

    name = "checkpoint"

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self._shapes = dict(shapes)
        self.num_reads = 0

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._shapes

    def read(self, name: str, part: TensorSlice | None = None, destination: Destination | None = None) -> StoredTensor:
        self.num_reads += 1
        generator = torch.Generator().manual_seed(len(name))
        return StoredTensor.of_floats(torch.randn(self._shapes[name], generator=generator), part)


def build(config: ModelConfig, source: ShapeSource) -> LanguageModel:
    return build_model(config, source, TorchOps(), torch.device("cpu"), torch.float32)


def assert_refused(config: ModelConfig, source: ShapeSource, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        build(config, source)
    assert source.num_reads == 0, "the checkpoint was read before it was known to fit"


@pytest.mark.parametrize("architecture", MODEL_CLASSES)
def test_a_checkpoint_of_the_collected_shapes_builds_every_family(architecture: str) -> None:
    config = replace(BASES.get(architecture, LLAMA), architecture=architecture)
    source = ShapeSource(collect_shapes(config))
    model = build(config, source)
    assert source.num_reads == len(source.shapes())
    assert len(model.attention_layers) == len(model.layers) == config.num_layers


def test_the_collected_shapes_of_llama_are_those_of_its_checkpoints() -> None:
    shapes = collect_shapes(replace(LLAMA, num_layers=1, attention_bias=True, tie_word_embeddings=True))
    layer = "model.layers.0."
    assert shapes == {
        "model.embed_tokens.weight": (11, 8),
        f"{layer}input_layernorm.weight": (8,),
        f"{layer}self_attn.q_proj.weight": (8, 8),
        f"{layer}self_attn.q_proj.bias": (8,),
        f"{layer}self_attn.k_proj.weight": (4, 8),
        f"{layer}self_attn.k_proj.bias": (4,),
        f"{layer}self_attn.v_proj.weight": (4, 8),
        f"{layer}self_attn.v_proj.bias": (4,),
        f"{layer}self_attn.o_proj.weight": (8, 8),
        f"{layer}post_attention_layernorm.weight": (8,),
        f"{layer}mlp.gate_proj.weight": (12, 8),
        f"{layer}mlp.up_proj.weight": (12, 8),
        f"{layer}mlp.down_proj.weight": (8, 12),
        "model.norm.weight": (8,),
    }


def test_a_missing_tensor_is_named_before_anything_is_read() -> None:
    shapes = collect_shapes(LLAMA)
    del shapes["model.layers.1.mlp.up_proj.weight"]
    assert_refused(LLAMA, ShapeSource(shapes), r"'model\.layers\.1\.mlp\.up_proj\.weight' is missing")


def test_a_tensor_without_a_place_is_named_before_anything_is_read() -> None:
    shapes = collect_shapes(LLAMA) | {"model.layers.2.mlp.up_proj.weight": (12, 8)}
    assert_refused(LLAMA, ShapeSource(shapes), r"no place for: model\.layers\.2\.mlp\.up_proj\.weight")


def test_a_wrong_shape_is_named_before_anything_is_read() -> None:
    shapes = collect_shapes(LLAMA) | {"model.norm.weight": (9,)}
    assert_refused(LLAMA, ShapeSource(shapes), r"'model\.norm\.weight' has shape \(9,\).*\(8,\)")


def test_an_untied_head_must_be_there_and_a_tied_one_may_be() -> None:
    shapes = collect_shapes(LLAMA)
    tied = replace(LLAMA, tie_word_embeddings=True)
    build(tied, ShapeSource(shapes))
    del shapes["lm_head.weight"]
    build(tied, ShapeSource(shapes))
    assert_refused(LLAMA, ShapeSource(shapes), r"'lm_head\.weight' is missing")


def test_stored_rotary_tables_are_ignored() -> None:
    stored = {f"model.layers.{index}.self_attn.rotary_emb.inv_freq": (2,) for index in range(2)}
    build(LLAMA, ShapeSource(collect_shapes(LLAMA) | stored | {"model.rotary_emb.inv_freq": (2,)}))


def test_gpt2_files_without_prefix_and_with_stored_masks_give_the_same_model() -> None:
    with_prefix = collect_shapes(GPT2)
    assert "transformer.h.0.attn.c_attn.weight" in with_prefix
    bare = {name.removeprefix("transformer."): shape for name, shape in with_prefix.items()}
    masks = {"h.0.attn.bias": (1, 1, 32, 32), "h.1.attn.bias": (1, 1, 32, 32), "h.0.attn.masked_bias": ()}
    model = build(GPT2, ShapeSource(bare | masks))
    assert model.final_norm.weight.shape == (8,)
    assert_refused(GPT2, ShapeSource(bare | {"h.0.attn.mask": (1,)}), r"h\.0\.attn\.mask")


def test_an_unknown_architecture_is_answered_with_the_known_ones() -> None:
    config = replace(LLAMA, architecture="ParrotForCausalLM")
    with pytest.raises(ModelError, match=r"ParrotForCausalLM.*ForCausalLM of .*Llama.*Qwen3.*; GPT2LMHeadModel"):
        collect_shapes(config)


def test_weights_are_held_in_the_asked_dtype_and_the_rotary_table_is_as_long_as_asked() -> None:
    source = ShapeSource(collect_shapes(LLAMA))
    model = build_model(LLAMA, source, TorchOps(), torch.device("cpu"), torch.bfloat16, max_position=20)
    assert model.embed.weight.data.dtype == model.final_norm.weight.dtype == torch.bfloat16
    tables = {id(layer.attention.rotary.cos_sin): layer.attention.rotary.cos_sin.shape for layer in model.layers}
    assert list(tables.values()) == [(20, 4)]  # one table, shared by all layers


def test_attention_layers_declare_their_memory_and_windows() -> None:
    config = replace(
        LLAMA, architecture="Qwen2ForCausalLM", sliding_window=6, sliding_layers=(False, True), attention_bias=True
    )
    model = build(config, ShapeSource(collect_shapes(config)))
    assert [layer.kv_spec(block_size=16, dtype="float16") for layer in model.attention_layers] == [
        FullAttentionSpec(16, 1, 4, "float16"),
        SlidingWindowSpec(16, 1, 4, "float16", window=6),
    ]
    assert [layer.index for layer in model.attention_layers] == [0, 1]
    assert all(layer.scale == 0.5 for layer in model.attention_layers)


@pytest.mark.parametrize("architecture", MODEL_CLASSES)
def test_a_family_is_one_short_file(architecture: str) -> None:
    find_model_class(architecture)
    module = importlib.import_module(MODEL_CLASSES[architecture].split(":")[0])
    assert module.__file__ is not None
    assert len(Path(module.__file__).read_text().splitlines()) < 120


def test_weights_that_ops_has_a_note_on_are_one_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    class NotingOps(TorchOps):
        def note_on(self, stored: StoredTensor, use: WeightUse) -> str | None:
            return "kept as floats" if use is WeightUse.LINEAR else None

    source = ShapeSource(collect_shapes(LLAMA))
    with caplog.at_level(logging.WARNING):
        build_model(LLAMA, source, NotingOps(), torch.device("cpu"), torch.float32)
    [line] = caplog.messages
    assert line.startswith("checkpoint: kept as floats: model.layers.0.self_attn.q_proj.weight, ")
    assert line.endswith(" and 11 more")  # of seven for each of two layers, three are named
