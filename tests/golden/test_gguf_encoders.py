"""Encoders and T5 out of GGUF files against transformers. The files are written as llama.cpp's converter writes them,
with names of the `gguf` package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from ratoon import LLM, PoolingParams
from ratoon.core.errors import ModelError
from ratoon.models.source import resolve_model
from tests.golden.engines import greedy
from tests.golden.tiny_classifiers import make_model
from tests.golden.tiny_encoder_models import tiny_t5
from tests.golden.tiny_models import MAX_POSITION, VOCAB_SIZE, TinyModel, random_token_ids
from tests.unit.models.model_files import write_gguf

# Around the borders of blocks, and wider than the windows of ModernBERT
PROMPTS = [
    [6 + token % (VOCAB_SIZE - 6) for token in random_token_ids(length, seed=length)] for length in (1, 2, 15, 17, 40)
]
MODELS = {"bert": gguf.MODEL_ARCH.BERT, "modern-bert": gguf.MODEL_ARCH.MODERN_BERT}
TOKENIZERS = {"Bert": "bert", "Roberta": "gpt2", "ModernBert": "gpt2"}
Q8 = gguf.GGMLQuantizationType.Q8_0


def convert(model: Any, path: Path, tokenizer: str = "bert", quantised: bool = False, **changed: Any) -> Path:
    """`changed`: further metadata of the architecture, or other values."""
    config = model.config
    architecture = "modern-bert" if config.model_type == "modernbert" else "bert"
    names = gguf.get_tensor_name_map(MODELS[architecture], config.num_hidden_layers)
    tensors: dict[str, Any] = {}
    for name, tensor in model.state_dict().items():
        name = name.removeprefix(f"{model.base_model_prefix}.")
        if "pooler" in name or name.endswith(("position_ids", "token_type_ids")):
            continue
        array = tensor.numpy()
        if name == "embeddings.position_embeddings.weight" and config.model_type == "roberta":
            array = array[config.pad_token_id + 1 :]
        if name.startswith("classifier.") and architecture == "modern-bert":
            name = name.replace("classifier.", "classifier.out_proj.")
        new_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert new_name is not None, name
        array = np.ascontiguousarray(array)
        is_product = new_name.endswith(("ffn_up.weight", "attn_output.weight"))
        tensors[new_name] = (gguf.quants.quantize(array, Q8), Q8) if quantised and is_product else array
    values: dict[str, Any] = {
        "context_length": MAX_POSITION,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "block_count": config.num_hidden_layers,
        "attention.head_count": config.num_attention_heads,
        "attention.layer_norm_epsilon": getattr(config, "layer_norm_eps", None) or config.norm_eps,
        "attention.causal": False,
        **changed,
    }
    if architecture == "modern-bert":
        ropes = config.rope_parameters
        values |= {
            "attention.sliding_window": config.local_attention,
            "rope.freq_base": float(ropes["full_attention"]["rope_theta"]),
            "rope.freq_base_swa": float(ropes["sliding_attention"]["rope_theta"]),
        }
    metadata = {f"{architecture}.{key}": value for key, value in values.items()}
    return write_gguf(path, architecture, metadata | {"tokenizer.ggml.model": tokenizer}, tensors)


def engine(path: Path, **settings: Any) -> LLM:
    return LLM(str(path), **({"device": "cpu", "num_blocks": 64, "num_threads": 1, "skip_tokenizer": True} | settings))


@torch.inference_mode()
def states_of(model: Any, prompt: list[int]) -> np.ndarray:
    return model(torch.tensor([prompt])).last_hidden_state[0].numpy()


@pytest.mark.parametrize("family", ["Bert", "Roberta", "ModernBert"])
def test_vectors_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    model = make_model(f"{family}Model")
    with engine(convert(model, tmp_path / "m.gguf", TOKENIZERS[family])) as llm:
        params = PoolingParams(pooling="mean", normalize=False)
        outputs = llm.embed([list(prompt) for prompt in PROMPTS], params, progress=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        np.testing.assert_allclose(output.embedding, states_of(model, prompt).mean(axis=0), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("kind", "row"), [(1, None), (2, 0), (3, -1)], ids=["mean", "first", "last"])
def test_the_pooling_of_the_file_is_used(kind: int, row: int | None, tmp_path: Path) -> None:
    model, prompt = make_model("BertModel"), PROMPTS[3]
    with engine(convert(model, tmp_path / "m.gguf", pooling_type=kind)) as llm:
        (output,) = llm.embed([list(prompt)], progress=False)
    states = states_of(model, prompt)
    expected = states.mean(axis=0) if row is None else states[row]
    np.testing.assert_allclose(output.embedding, expected / np.linalg.norm(expected), atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["Roberta", "ModernBert"])
def test_logits_of_heads_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    model = make_model(f"{family}ForSequenceClassification", num_labels=3)
    labels = {"classifier.output_labels": ["good", "bad", "odd"], "pooling_type": 4 if family == "Roberta" else 2}
    with engine(convert(model, tmp_path / "m.gguf", TOKENIZERS[family], **labels)) as llm:
        outputs = llm.classify([list(prompt) for prompt in PROMPTS], "none", progress=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        with torch.inference_mode():
            expected = model(torch.tensor([prompt])).logits[0].numpy()
        assert output.label == ("good", "bad", "odd")[expected.argmax()]
        np.testing.assert_allclose(output.probs, expected, atol=1e-4, rtol=1e-4)


def test_a_head_without_the_layer_before_it_is_refused(tmp_path: Path) -> None:
    """The converter leaves the pooler of BERT out, which its head reads."""
    model = make_model("RobertaForSequenceClassification")
    with pytest.raises(ModelError, match="has a head that classifies without the layer before it"):
        resolve_model(str(convert(model, tmp_path / "m.gguf", "bert")))


def test_quantised_products_give_nearly_the_same_vectors(tmp_path: Path) -> None:
    model = make_model("BertModel", gain=1.0)
    params = PoolingParams(pooling="mean", normalize=True)
    found = []
    for quantised in (False, True):
        with engine(convert(model, tmp_path / f"{quantised}.gguf", quantised=quantised)) as llm:
            found.append(np.stack([one.embedding for one in llm.embed(PROMPTS, params, progress=False)]))
    assert 0.999 < (found[0] * found[1]).sum(-1).min() < 1.0


T5_KINDS = {
    "the first": tiny_t5,
    "an own head": lambda: tiny_t5(own_head=True),
    "gated": lambda: tiny_t5("gated-gelu", own_head=True),
}


def convert_t5(tiny: TinyModel, path: Path) -> Path:
    config, encoder, relative = tiny.config, tiny.config.encoder, tiny.config.relative_positions
    assert encoder is not None and relative is not None
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.T5, config.num_layers)
    tensors = {}
    for name, tensor in tiny.oracle.state_dict().items():
        if name.endswith("embed_tokens.weight") or (name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        new_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert new_name is not None, name
        tensors[new_name] = np.ascontiguousarray(tensor.numpy())
    values = {
        "context_length": 512,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "block_count": encoder.num_layers,
        "decoder_block_count": config.num_layers,
        "attention.head_count": config.num_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.relative_buckets_count": relative.num_buckets,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "decoder_start_token_id": config.decoder_start_token_id,
    }
    metadata = {f"t5.{key}": value for key, value in values.items()} | {"tokenizer.ggml.eos_token_id": 2}
    return write_gguf(path, "t5", metadata, tensors)


@pytest.mark.parametrize("kind", T5_KINDS)
def test_t5_reads_as_the_model_it_was(kind: str, tmp_path: Path) -> None:
    tiny = T5_KINDS[kind]()
    found = resolve_model(str(convert_t5(tiny, tmp_path / "m.gguf")))
    different = {"relative_positions", "norm_eps"}  # files do not say the largest distance; 32 bits
    for field in set(tiny.config.__dataclass_fields__) - different:
        assert getattr(found.config, field) == getattr(tiny.config, field), field
    wanted = {name: tensor for name, tensor in tiny.oracle.state_dict().items() if "embed_tokens" not in name}
    if tiny.config.tie_word_embeddings:
        del wanted["lm_head.weight"]
    assert dict(found.tensors.shapes()) == {name: tuple(tensor.shape) for name, tensor in wanted.items()}
    for name, tensor in wanted.items():
        assert torch.equal(found.tensors.read(name).floats(), tensor), name


def test_t5_answers_from_a_file(tmp_path: Path) -> None:
    """With the largest distance that files leave out."""
    tiny = tiny_t5("gated-gelu", own_head=True)
    tiny.oracle.save_pretrained(tmp_path / "folder")
    found = []
    for model in (convert_t5(tiny, tmp_path / "m.gguf"), tmp_path / "folder"):
        largest = {"relative_attention_max_distance": 128}
        with engine(model, num_blocks=120, max_model_len=64, hf_overrides=largest) as llm:
            prompts: list[Any] = [{"encoder_prompt": {"prompt_token_ids": list(prompt)}} for prompt in PROMPTS]
            outputs = llm.generate(prompts, greedy(12), progress=False)
            found.append([list(output.outputs[0].token_ids) for output in outputs])
    assert found[0] == found[1] and len({tuple(tokens) for tokens in found[0]}) > 1
