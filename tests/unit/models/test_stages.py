"""Stages of a pipeline, each with some of the layers, compute one after the other what the whole model computes."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from ratoon.core.config import EngineConfig, ModelConfig
from ratoon.core.errors import ModelError
from ratoon.execution.choices import choose_parts
from ratoon.layers.native_ops import NativeOps, native_ops_reasons
from ratoon.layers.ops import Ops
from ratoon.layers.shard import ModelPart, Shard, Stage
from ratoon.layers.torch_ops import TorchOps
from ratoon.models.base import LanguageModel, StreamObserver, StreamStates
from ratoon.models.build import build_model, collect_shapes, count_weights, declare_model
from ratoon.models.dummy_source import DummySource
from ratoon.models.encoder_decoder import EncoderBatch, EncoderDecoderLM
from tests.golden.dense_batch import DenseMemory, DensePass
from tests.unit.layers.ranks import Meeting, Rank, on_all_ranks
from tests.unit.models.test_build_model import BASES, GPT2, LLAMA

Tensor = torch.Tensor
CPU = torch.device("cpu")
NUM_LAYERS = 5
ALL_OPS: list[Ops] = [TorchOps()]
if not native_ops_reasons(CPU, torch.float32):
    ALL_OPS.append(NativeOps())
FAMILIES = {
    "LlamaForCausalLM": LLAMA,
    "Qwen3ForCausalLM": replace(LLAMA, tie_word_embeddings=True),
    "MistralForCausalLM": replace(LLAMA, sliding_window=3),
    "GPT2LMHeadModel": GPT2,
    "BertModel": BASES["BertModel"],
    "BartForConditionalGeneration": BASES["BartForConditionalGeneration"],
    "T5ForConditionalGeneration": BASES["T5ForConditionalGeneration"],
}


def config_of(architecture: str) -> ModelConfig:
    return replace(FAMILIES[architecture], architecture=architecture, num_layers=NUM_LAYERS)


class Seen(StreamObserver):
    """The layers at which the stream was seen, and what it was there."""

    num_layers_read = NUM_LAYERS

    def __init__(self) -> None:
        self.states: dict[int, Tensor] = {}

    def observe(self, layer: int, stream: Tensor, update: Tensor | None) -> None:
        self.states[layer] = stream.clone() if update is None else stream + update


def run(stages: list[LanguageModel], rows: Tensor | None, seen: Seen) -> Tensor:
    """Logits, or the states of a model without a head, after all stages. Each has its own memory."""
    config = stages[0].config
    ids = positions = torch.arange(config.vocab_size)
    steps = [DensePass(DenseMemory(1), [len(ids)]) for _ in stages]
    first, last = stages[0], stages[-1]
    if isinstance(first, EncoderDecoderLM):
        states = first.encode(EncoderBatch(ids, ids), DensePass(DenseMemory(1), [len(ids)])).normed
        for stage, step in zip(stages, steps, strict=True):
            assert isinstance(stage, EncoderDecoderLM)
            stage.store_cross(states, step)
    between = StreamStates(first.embed_tokens(ids, positions))
    for stage, step in zip(stages[:-1], steps[:-1], strict=True):
        between = stage.forward_stage(between, positions, step, [seen])
    final = last.forward_stream(between.stream, positions, steps[-1], rows, [seen], update=between.update)
    return final.normed if config.architecture == "BertModel" else last.compute_logits(final.normed)


def build(config: ModelConfig, part: ModelPart, ops: Ops) -> LanguageModel:
    return build_model(config, DummySource(collect_shapes(config), seed=5), ops, CPU, torch.float32, part=part)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("ops", ALL_OPS, ids=lambda ops: ops.name)
@pytest.mark.parametrize("num_stages", [2, *(pytest.param(count, marks=pytest.mark.slow) for count in (3, 5))])
@pytest.mark.parametrize("architecture", FAMILIES)
@torch.inference_mode()
def test_stages_one_after_the_other_are_the_model_to_the_bit(architecture: str, num_stages: int, ops: Ops) -> None:
    config = config_of(architecture)
    whole_seen, seen = Seen(), Seen()
    for rows in (None, torch.tensor([0, 5])):
        expected = run([build(config, ModelPart(), ops)], rows, whole_seen)
        stages = [build(config, ModelPart(stage=Stage(index, num_stages)), ops) for index in range(num_stages)]
        assert torch.equal(run(stages, rows, seen), expected)
    assert [len(stage.layers) for stage in stages] == [len(stage.attention_layers) for stage in stages]
    assert list(seen.states) == list(range(NUM_LAYERS)), "observers count the layers of the whole model"
    assert all(torch.equal(seen.states[layer], whole_seen.states[layer]) for layer in seen.states)


@torch.inference_mode()
def test_ranks_of_stages_are_the_model() -> None:
    config = replace(config_of("LlamaForCausalLM"), num_kv_heads=2)
    expected = run([build(config, ModelPart(), TorchOps())], None, Seen())

    def work(shard: Shard) -> Tensor:
        with torch.inference_mode():
            stages = [build(config, ModelPart(shard, Stage(index, 2)), TorchOps()) for index in range(2)]
            return run(stages, None, Seen())

    for found in on_all_ranks(2, work):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


class NamingSource(DummySource):
    """Keeps the names of what is read."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(collect_shapes(config))
        self.names: set[str] = set()

    def read(self, name, part=None, destination=None):  # type: ignore[no-untyped-def]
        self.names.add(name)
        return super().read(name, part, destination)


@pytest.mark.parametrize("tied", [False, True])
def test_a_stage_reads_its_layers_and_the_ends_that_it_has(tied: bool) -> None:
    config = replace(config_of("LlamaForCausalLM"), tie_word_embeddings=tied)
    embedding, norm, head = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
    ends = [{embedding}, set(), {embedding, norm} if tied else {norm, head}]
    sources = [NamingSource(config) for _ in ends]
    for index, (source, end) in enumerate(zip(sources, ends, strict=True)):
        part = ModelPart(stage=Stage(index, len(ends)))
        build_model(config, source, TorchOps(), CPU, torch.float32, part=part)
        layers = {name.split(".")[2] for name in source.names if name.startswith("model.layers.")}
        assert layers == {str(layer) for layer in part.stage.cut(NUM_LAYERS)}
        assert {name for name in source.names if "layers" not in name} == end
        shapes = source.shapes()
        num_read = sum(torch.Size(shapes[name]).numel() for name in source.names)
        assert count_weights(config, source, part) == num_read
    assert set().union(*(source.names for source in sources)) == set(sources[0].shapes())


def test_a_stage_is_refused_a_checkpoint_that_does_not_fit_another_stage() -> None:
    config = config_of("LlamaForCausalLM")
    shapes = collect_shapes(config)
    del shapes["model.layers.0.mlp.up_proj.weight"]
    with pytest.raises(ModelError, match=r"layers\.0\.mlp\.up_proj\.weight' is missing"):
        build_model(config, DummySource(shapes), TorchOps(), CPU, torch.float32, part=ModelPart(stage=Stage(1, 2)))


def test_layers_are_shared_out_in_order_and_the_last_stage_has_no_more_than_others() -> None:
    for count in range(1, 6):
        cuts = [Stage(index, count).cut(NUM_LAYERS) for index in range(count)]
        assert [layer for cut in cuts for layer in cut] == list(range(NUM_LAYERS))
        assert all(len(first) - len(second) in (0, 1) for first, second in pairwise(cuts))
    with pytest.raises(ModelError, match="5 layers can't be cut into 6 stages; at most 5"):
        Stage(0, 6).cut(NUM_LAYERS)
    with pytest.raises(ValueError, match="stage 2 of 2"):
        Stage(2, 2)


def test_a_worker_of_a_part_declares_the_memory_of_its_heads_and_layers() -> None:
    config = replace(config_of("MistralForCausalLM"), num_heads=4, head_dim=2, num_kv_heads=2)
    config = replace(config, sliding_layers=(False, False, False, True, True))
    part = ModelPart(Shard(1, 4, Rank(Meeting(4), 1)), Stage(1, 2))
    declared = declare_model(config, 8, part)
    assert [layer.index for layer in declared.attention_layers] == [0, 1], "an index into this stage's memory"
    chosen = choose_parts(EngineConfig("x", device="cpu"), config, DummySource(collect_shapes(config)), part)
    without_window, group = chosen.geometry.groups
    assert without_window.layers == (), "tables have the groups of all stages"
    assert (group.layers, group.spec.num_kv_heads, group.spec.window) == ((0, 1), 1, 3)  # type: ignore[attr-defined]
    assert chosen.num_weights < 0.2 * sum(torch.Size(shape).numel() for shape in collect_shapes(config).values())
