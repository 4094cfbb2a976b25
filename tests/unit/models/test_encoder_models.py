"""Checkpoints of models with an encoder as one finds them: what may be there, what must, and what is made."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ratoon.core.config import ModelConfig
from ratoon.core.errors import ModelError
from ratoon.core.kv import CrossAttentionSpec
from ratoon.layers.torch_ops import TorchOps
from ratoon.models.build import build_model, collect_shapes
from ratoon.models.encoder_decoder import EncoderDecoderLM
from tests.unit.models.test_build_model import BASES, ShapeSource, assert_refused, build

TABLE = (11, 8)  # the token table's shape


def config_of(architecture: str) -> ModelConfig:
    return replace(BASES[architecture], architecture=architecture)


BART = config_of("BartForConditionalGeneration")
T5 = config_of("T5ForConditionalGeneration")
BERT = config_of("BertModel")


def build_with_encoder(config: ModelConfig, source: ShapeSource) -> EncoderDecoderLM:
    model = build(config, source)
    assert isinstance(model, EncoderDecoderLM)
    return model


@pytest.mark.parametrize("name", ["shared", "encoder.embed_tokens", "decoder.embed_tokens"])
def test_the_one_token_table_may_have_any_of_its_names(name: str) -> None:
    for config, prefix in ((BART, "model."), (T5, "")):
        shapes = collect_shapes(config)
        del shapes[f"{prefix}shared.weight"]
        source = ShapeSource(shapes | {f"{prefix}{name}.weight": TABLE})
        assert torch.equal(build(config, source).embed.weight.data, source.read(f"{prefix}{name}.weight").data)
        assert_refused(config, ShapeSource(shapes), rf"'{prefix}shared\.weight' is missing")


def test_copies_of_the_token_table_are_no_left_overs() -> None:
    copies = {f"model.{side}.embed_tokens.weight": TABLE for side in ("encoder", "decoder")}
    build(BART, ShapeSource(collect_shapes(BART) | copies | {"lm_head.weight": TABLE}))


def test_bart_may_come_without_its_prefix_and_without_a_bias_on_logits() -> None:
    shapes = {name.removeprefix("model."): shape for name, shape in collect_shapes(BART).items()}
    del shapes["final_logits_bias"]
    build(BART, ShapeSource(shapes))


def test_marian_makes_the_positions_that_other_files_store() -> None:
    marian = config_of("MarianMTModel")
    shapes = collect_shapes(marian)
    stored = {f"model.{side}.embed_positions.weight": (32, 8) for side in ("encoder", "decoder")}
    assert not stored.keys() & shapes.keys()
    model = build(marian, ShapeSource(shapes | stored))
    row = model.input.positions.table[5]  # type: ignore[attr-defined]
    angles = 5 * torch.tensor([1.0, 0.1, 0.01, 0.001])
    torch.testing.assert_close(row, torch.cat([angles.sin(), angles.cos()]))


def test_whisper_has_no_bias_on_keys() -> None:
    whisper = config_of("WhisperForConditionalGeneration")
    shapes = collect_shapes(whisper)
    assert "model.decoder.layers.0.self_attn.q_proj.bias" in shapes
    build(whisper, ShapeSource(shapes))
    extra = {"model.decoder.layers.0.self_attn.k_proj.bias": (8,)}
    assert_refused(whisper, ShapeSource(shapes | extra), r"no place for: .*k_proj\.bias")


def test_t5_shares_one_table_of_distances_between_the_layers_of_a_stack_and_does_not_scale() -> None:
    source = ShapeSource(collect_shapes(T5))
    model = build_model(T5, source, TorchOps(), torch.device("cpu"), torch.bfloat16, max_position=20)
    assert isinstance(model, EncoderDecoderLM)
    for layers, length in ((model.attention_layers, 20), (model.encoder.attention_layers, 16)):
        tables = {id(layer.bias): layer.bias for layer in layers}
        (table,) = tables.values()
        assert table is not None and (table.dtype, table.shape) == (torch.float32, (2, 2 * length - 1))
    assert model.encoder.attention_layers is model.encoder_attention_layers
    layers_of_all_kinds = (*model.attention_layers, *model.cross_layers, *model.encoder_attention_layers)
    assert {layer.scale for layer in layers_of_all_kinds} == {1.0}


def test_t5_may_hold_a_second_table_and_a_head_that_it_does_not_need() -> None:
    shapes = collect_shapes(T5)
    unused = {"decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight": (8, 2)}
    build(T5, ShapeSource(shapes | unused | {"lm_head.weight": TABLE}))


def test_the_later_t5_has_gates_and_a_head_of_its_own_unless_the_file_has_none() -> None:
    later = replace(T5, gated_mlp=True, tie_word_embeddings=False)
    shapes = collect_shapes(later)
    assert "encoder.block.0.layer.1.DenseReluDense.wi_1.weight" in shapes
    hidden = torch.randn(1, 8)
    source = ShapeSource(shapes)
    expected = hidden @ source.read("lm_head.weight").data.T
    torch.testing.assert_close(build(later, source).compute_logits(hidden), expected)
    del shapes["lm_head.weight"]
    expected = hidden @ source.read("shared.weight").data.T
    torch.testing.assert_close(build(later, ShapeSource(shapes)).compute_logits(hidden), expected)


def test_bert_files_may_have_a_prefix_heads_stored_positions_and_old_names_of_norms() -> None:
    bare = {name.removeprefix("bert."): shape for name, shape in collect_shapes(BERT).items()}
    pooler = {"pooler.dense.weight": (8, 8), "pooler.dense.bias": (8,), "embeddings.position_ids": (1, 32)}
    build(BERT, ShapeSource(bare | pooler))
    heads = {"cls.predictions.bias": (11,), "cls.seq_relationship.weight": (2, 8), "cls.seq_relationship.bias": (2,)}
    old = {f"bert.{name}".replace("LayerNorm.weight", "LayerNorm.gamma"): shape for name, shape in bare.items()}
    old = {name.replace("LayerNorm.bias", "LayerNorm.beta"): shape for name, shape in old.items()}
    build(BERT, ShapeSource(old | {f"bert.{name}": shape for name, shape in pooler.items()} | heads))
    assert_refused(BERT, ShapeSource(bare | {"encoder.layer.2.output.dense.bias": (8,)}), r"encoder\.layer\.2")


def test_what_attention_needs_is_declared_for_each_side() -> None:
    model = build_with_encoder(BART, ShapeSource(collect_shapes(BART)))
    assert {layer.kv_spec(16, "float16") for layer in model.cross_layers} == {CrossAttentionSpec(16, 2, 4, "float16")}
    assert [layer.index for layer in model.cross_layers] == [0, 1]
    assert all(layer.causal for layer in model.attention_layers)
    assert [(layer.index, layer.causal) for layer in model.encoder.attention_layers] == [(0, False)]
    bert = build(BERT, ShapeSource(collect_shapes(BERT)))
    assert not any(layer.causal for layer in bert.attention_layers)


def test_an_unknown_activation_is_named() -> None:
    with pytest.raises(ModelError, match="activation 'swoosh' is unknown; known: silu, relu"):
        collect_shapes(replace(T5, activation="swoosh"))
