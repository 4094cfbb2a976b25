"""Models with an encoder compute what transformers computes: states of both sides behind every layer, and logits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.t5.modeling_t5 import T5Attention

from ratoon import LLM, RequestError, SamplingParams
from ratoon.core.config import RelativePositions
from ratoon.layers.native_ops import NativeOps, native_ops_reasons
from ratoon.layers.ops import Ops
from ratoon.layers.relative_positions import bucket_of_distance
from ratoon.layers.torch_ops import TorchOps
from ratoon.models.build import build_model
from ratoon.models.encoder_decoder import EncoderDecoderLM
from ratoon.models.hf_config import parse_hf_config
from ratoon.models.source import resolve_model
from tests.golden.dense_batch import DenseMemory, DensePass, decode, encode
from tests.golden.tiny_encoder_models import (
    random_features,
    tiny_bart,
    tiny_bert,
    tiny_m2m100,
    tiny_marian,
    tiny_marian_of_two_vocabularies,
    tiny_mbart,
    tiny_pegasus,
    tiny_t5,
    tiny_whisper,
)
from tests.golden.tiny_models import TinyModel, random_token_ids

Tensor = torch.Tensor

CPU = torch.device("cpu")
TOLERANCE = 2e-5
ENCODER_LENGTHS = (5, 1, 40, 17)
DECODER_LENGTHS = (1, 12, 3, 33)

FAMILIES: dict[str, Callable[[], TinyModel]] = {
    "bart": tiny_bart,
    "bart with scaled embeddings and relu": lambda: tiny_bart(scale_embedding=True, activation="relu"),
    "mbart": tiny_mbart,
    "marian": tiny_marian,
    "marian of two vocabularies": tiny_marian_of_two_vocabularies,
    "m2m100": tiny_m2m100,
    "pegasus": tiny_pegasus,
    "mt5": lambda: tiny_t5("gated-gelu", family="MT5"),
    "t5": tiny_t5,
    "t5 with gates and an own head": lambda: tiny_t5("gated-gelu", own_head=True),
    "t5 with silu gates": lambda: tiny_t5("gated-silu"),
    "whisper": tiny_whisper,
}


def encoder_inputs(tiny: TinyModel) -> list[Any]:
    if tiny.config.architecture == "WhisperForConditionalGeneration":
        return [random_features(seed) for seed in range(len(ENCODER_LENGTHS))]
    return [random_token_ids(length, seed=length) for length in ENCODER_LENGTHS]


def decoder_prompts() -> list[list[int]]:
    return [[3, *random_token_ids(length - 1, seed=100 + length)] for length in DECODER_LENGTHS]


ALL_OPS: list[Ops] = [TorchOps()]
if not native_ops_reasons(CPU, torch.float32):
    ALL_OPS.append(NativeOps())


def build(tiny: TinyModel, ops: Ops | None = None, dtype: torch.dtype = torch.float32) -> EncoderDecoderLM:
    model = build_model(tiny.config, tiny.source, ops or TorchOps(), CPU, dtype)
    assert isinstance(model, EncoderDecoderLM)
    return model


@torch.inference_mode()
def by_transformers(tiny: TinyModel, encoder_input: Any, prompt: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """States of the encoder and of the decoder, [L + 2, T, H] each as the engine numbers layers, and the logits."""
    oracle = tiny.oracle
    given = torch.as_tensor(encoder_input)[None]
    ends: dict[str, Tensor] = {}
    hooks = []
    for side, stack in (("encoder", oracle.get_encoder()), ("decoder", oracle.get_decoder())):
        norm = getattr(stack, "final_layer_norm", None) or getattr(stack, "layer_norm", None)
        if norm is not None:
            note = lambda _, inputs, side=side: ends.__setitem__(side, inputs[0])  # noqa: E731
            hooks.append(norm.register_forward_pre_hook(note))
    output = oracle(given, decoder_input_ids=torch.tensor([prompt]), output_hidden_states=True, use_cache=False)
    for hook in hooks:
        hook.remove()
    sides = []
    for side, states in (("encoder", output.encoder_hidden_states), ("decoder", output.decoder_hidden_states)):
        *earlier, last = states
        sides.append(torch.cat([*earlier, ends.get(side, last), last]))
    return sides[0], sides[1], output.logits[0]


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("ops", ALL_OPS, ids=lambda ops: ops.name)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.one_in(2)
def test_states_and_logits_of_a_mixed_batch_equal_those_of_transformers_one_by_one(family: str, ops: Ops) -> None:
    tiny = FAMILIES[family]()
    model = build(tiny, ops)
    inputs, prompts = encoder_inputs(tiny), decoder_prompts()
    memory, encoder_states = encode(model, inputs)
    decoder_states = decode(model, memory, prompts)
    for given, prompt, of_encoder, of_decoder in zip(inputs, prompts, encoder_states, decoder_states, strict=True):
        want_encoder, want_decoder, want_logits = by_transformers(tiny, given, prompt)
        assert_close(of_encoder, want_encoder)
        assert_close(of_decoder, want_decoder)
        assert_close(model.compute_logits(of_decoder[-1]), want_logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_decoding_in_chunks_with_few_rows_read_gives_the_logits_of_one_pass(family: str) -> None:
    tiny = FAMILIES[family]()
    model = build(tiny)
    (given, *_), prompt = encoder_inputs(tiny), decoder_prompts()[-1]
    memory, _ = encode(model, [given])
    found, start = [], 0
    with torch.inference_mode():
        for length in (9, 1, 1, 22):
            positions = torch.arange(start, start + length)
            ids = torch.tensor(prompt)[positions]
            last = torch.tensor([length - 1])
            found.append(model.compute_logits(model.forward(ids, positions, DensePass(memory, [length]), last).normed))
            start += length
    assert start == len(prompt)
    want = by_transformers(tiny, given, prompt)[2]
    assert_close(torch.cat(found), want[[8, 9, 10, 32]])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_parsed_config_of_transformers_is_the_one_written_by_hand(family: str) -> None:
    tiny = FAMILIES[family]()
    assert parse_hf_config(tiny.oracle.config.to_dict(), "config") == tiny.config


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_that_transformers_writes_is_the_model(family: str, tmp_path: Path) -> None:
    tiny = FAMILIES[family]()
    tiny.oracle.save_pretrained(tmp_path)
    source = resolve_model(str(tmp_path))
    assert source.config == tiny.config
    from_file = build_model(source.config, source.tensors, TorchOps(), CPU, torch.float32)
    assert isinstance(from_file, EncoderDecoderLM)
    given, prompt = encoder_inputs(tiny)[0], decoder_prompts()[1]
    found = []
    for model in (build(tiny), from_file):
        memory, _ = encode(model, [given])
        found.append(decode(model, memory, [prompt])[0])
    assert torch.equal(*found)


@pytest.mark.parametrize("family", ["bart", "t5 with gates and an own head", "whisper"])
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bfloat16 falls back to another product
def test_bfloat16_models_stay_near_those_in_float32(family: str) -> None:
    tiny = FAMILIES[family]()
    given, prompt = encoder_inputs(tiny)[0], decoder_prompts()[1]
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        model = build(tiny, dtype=dtype)
        memory, _ = encode(model, [given])
        states = decode(model, memory, [prompt])[0]
        assert states.dtype == dtype
        found.append(model.compute_logits(states[-1]))
    difference = (found[0] - found[1]).abs().mean() / found[0].abs().mean()
    assert difference < 0.05


@pytest.mark.parametrize("both_ways", [True, False])
@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (8, 20), (64, 1000)])
def test_buckets_of_distances_are_those_of_transformers(num_buckets: int, max_distance: int, both_ways: bool) -> None:
    distances = torch.arange(-5000, 5001 if both_ways else 1)
    want = T5Attention._relative_position_bucket(distances, both_ways, num_buckets, max_distance)
    assert torch.equal(bucket_of_distance(distances, RelativePositions(num_buckets, max_distance), both_ways), want)


def test_bert_has_the_states_of_transformers_in_a_mixed_batch() -> None:
    tiny = tiny_bert()
    prompts = [random_token_ids(length, seed=length) for length in ENCODER_LENGTHS]
    found = decode(tiny.build(), DenseMemory(len(prompts)), prompts)
    for prompt, states in zip(prompts, found, strict=True):
        with torch.inference_mode():
            output = tiny.oracle(torch.tensor([prompt]), output_hidden_states=True)
        assert_close(states, torch.cat([*output.hidden_states, output.last_hidden_state]))
    assert parse_hf_config(tiny.oracle.config.to_dict() | {"architectures": ["BertModel"]}, "config") == tiny.config


def test_bert_rows_that_nobody_reads_are_left_out() -> None:
    tiny = tiny_bert()
    prompt = random_token_ids(9)
    with torch.inference_mode():
        want = tiny.oracle(torch.tensor([prompt])).last_hidden_state[0]
        positions = torch.arange(9)
        step = DensePass(DenseMemory(1), [9])
        found = tiny.build().forward(torch.tensor(prompt), positions, step, torch.tensor([0, 8])).normed
    assert_close(found, want[[0, 8]])


def test_each_side_may_have_a_vocabulary_of_its_own(tmp_path: Path) -> None:
    tiny = tiny_marian_of_two_vocabularies()
    tiny.oracle.save_pretrained(tmp_path)
    assert tiny.config.encoder is not None and tiny.config.encoder.vocab_size is not None
    given = [*random_token_ids(9), tiny.config.encoder.vocab_size - 1]  # no token of the decoder's
    settings: dict[str, Any] = {"device": "cpu", "num_blocks": 32, "num_threads": 1, "skip_tokenizer": True}
    with LLM(str(tmp_path), **settings) as llm:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
        (output,) = llm.generate({"prompt_token_ids": given}, params, progress=False)
        with pytest.raises(RequestError, match="ids from 0 to 116"):
            llm.generate({"prompt_token_ids": [117]}, params, progress=False)
    ids = [3]
    for _ in range(8):
        with torch.inference_mode():
            logits = tiny.oracle(torch.tensor([given]), decoder_input_ids=torch.tensor([ids])).logits[0, -1]
        ids.append(int(logits.argmax()))
    assert list(output.outputs[0].token_ids) == ids[1:]
