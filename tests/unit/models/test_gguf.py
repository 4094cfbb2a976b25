"""GGUF files: header, dequantisation, names and shapes, config, and what happens to damaged ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize, quantize
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ratoon.core.errors import ModelError
from ratoon.models.gguf_config import llama3_frequency_factors
from ratoon.models.gguf_file import GGUFFile
from ratoon.models.gguf_quants import LAYOUTS
from ratoon.models.gguf_source import GGUFSource
from ratoon.models.hf_config import parse_hf_config
from tests.unit.models.model_files import (
    byte_level_metadata,
    embedding_only,
    llama_metadata,
    train_byte_level,
    write_gguf,
)

COLUMNS = 512  # two blocks of the widest types


def stored_bytes(type: Type, rows: int = 6) -> np.ndarray:
    """Quantised numbers where the package can quantise; otherwise random bytes with small scales."""
    random = np.random.default_rng(int(type))
    try:
        return quantize(random.standard_normal((rows, COLUMNS)).astype(np.float32), type).view(np.uint8)
    except NotImplementedError:
        block_length, block_bytes = gguf.GGML_QUANT_SIZES[type]
        return random.integers(0, 60, (rows, COLUMNS // block_length * block_bytes), dtype=np.uint8)


@pytest.mark.parametrize("type", [Type(type_id) for type_id in LAYOUTS], ids=lambda type: type.name)
def test_every_quantised_type_reads_as_the_gguf_package_dequantises_it(type: Type, tmp_path: Path) -> None:
    stored = stored_bytes(type)
    path = write_gguf(
        tmp_path / "m.gguf", "llama", llama_metadata(), {**embedding_only(), "output_norm.weight": (stored, type)}
    )
    stored_tensor = GGUFSource(path).read("model.norm.weight")
    assert (stored_tensor.shape, stored_tensor.format) == ((6, COLUMNS), type.name)
    found = stored_tensor.floats()
    assert found.shape == (6, COLUMNS)
    np.testing.assert_array_equal(found.float().numpy(), dequantize(stored, type).reshape(6, COLUMNS))


def test_header_reads_like_the_gguf_packages_own_reader(tmp_path: Path) -> None:
    metadata = llama_metadata() | {
        "a.string": "grüße 🙂",
        "a.bool": True,
        "a.float": 0.1,
        "some.strings": ["", "x", "äöü", "y" * 300],
        "some.numbers": [1, -2, 3],
        "some.floats": [0.5, 1e-9],
        "some.flags": [True, False],
    }
    path = write_gguf(tmp_path / "m.gguf", "llama", metadata, embedding_only())
    reader = gguf.GGUFReader(path)
    wanted = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    found = GGUFFile(path)
    assert found.metadata == wanted
    for tensor in reader.tensors:
        info = found.tensors[tensor.name]
        assert (info.offset, info.num_bytes) == (tensor.data_offset, tensor.n_bytes)


def test_unknown_tensors_keep_their_name_so_that_loading_can_complain(tmp_path: Path) -> None:
    strange = {"blk.0.strange.weight": np.zeros(4, np.float32), "blk.0.output.weight": np.zeros(4, np.float32)}
    path = write_gguf(tmp_path / "m.gguf", "llama", llama_metadata(), embedding_only() | strange)
    assert set(GGUFSource(path).shapes()) == {"model.embed_tokens.weight", *strange}


def test_tied_embeddings_are_a_file_without_output(tmp_path: Path) -> None:
    tied = write_gguf(tmp_path / "a.gguf", "llama", llama_metadata(), embedding_only())
    output = {"output.weight": np.zeros((50, 32), np.float32)}
    untied = write_gguf(tmp_path / "b.gguf", "llama", llama_metadata(), embedding_only() | output)
    assert GGUFSource(tied).raw_config["tie_word_embeddings"] is True
    assert GGUFSource(untied).raw_config["tie_word_embeddings"] is False


def config_of(path: Path) -> Any:
    source = GGUFSource(path)
    return parse_hf_config(source.raw_config, source.name)


def test_metadata_becomes_a_config(tmp_path: Path) -> None:
    changes = {"attention.key_length": 16, "rope.dimension_count": 16, "attention.sliding_window": 64}
    tokens = {"tokenizer.ggml.eos_token_id": 7, "tokenizer.ggml.eot_token_id": 9, "tokenizer.ggml.bos_token_id": 3}
    path = write_gguf(tmp_path / "m.gguf", "llama", llama_metadata(**changes) | tokens, embedding_only(77))
    config = config_of(path)
    assert (config.architecture, config.sliding_window) == ("MistralForCausalLM", 64)
    assert (config.vocab_size, config.hidden_size, config.intermediate_size, config.num_layers) == (77, 32, 64, 2)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.max_position) == (4, 2, 16, 128)
    assert config.norm_eps == pytest.approx(1e-5)
    assert (config.rope_theta, config.rope_scaling.kind, config.rotary_dim) == (5000.0, "default", None)
    assert (config.bos_token_id, config.eos_token_ids) == (3, (7, 9))


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {"kind": "linear", "factor": 4.0}),
        ({"rope.scale_linear": 2.0}, {"kind": "linear", "factor": 2.0}),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 8.0, "rope.scaling.original_context_length": 64},
            {"kind": "yarn", "factor": 8.0, "original_max_position": 64, "attention_factor": None},
        ),
        ({"rope.scaling.type": "none"}, {"kind": "default"}),
    ],
)
def test_rope_scaling_is_read_from_metadata(changes: dict[str, Any], wanted: dict[str, Any], tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", llama_metadata(**changes), embedding_only())
    scaling = config_of(path).rope_scaling
    assert {name: getattr(scaling, name) for name in wanted} == wanted


def test_llama3_factors_are_recognised_and_others_refused(tmp_path: Path) -> None:
    factors = np.array(llama3_frequency_factors(500000.0, 128, 32.0, 8192), np.float32)
    metadata = llama_metadata(**{"attention.key_length": 128, "rope.dimension_count": 128, "rope.freq_base": 500000.0})
    path = write_gguf(tmp_path / "a.gguf", "llama", metadata, embedding_only() | {"rope_freqs.weight": factors})
    scaling = config_of(path).rope_scaling
    assert (scaling.kind, scaling.factor, scaling.original_max_position) == ("llama3", 32.0, 8192)
    assert (scaling.low_freq_factor, scaling.high_freq_factor) == (1.0, 4.0)
    assert "rope_freqs.weight" not in GGUFSource(path).shapes()
    other = embedding_only() | {"rope_freqs.weight": factors[::-1].copy()}
    with pytest.raises(ModelError, match=r"rope_freqs.weight are not Llama 3's"):
        GGUFSource(write_gguf(tmp_path / "b.gguf", "llama", metadata, other))


@pytest.mark.parametrize(
    ("architecture", "metadata", "message"),
    [
        ("mamba", {}, r"unknown architecture 'mamba'; known in GGUF: .*gemma3, .*gpt2, .*llama"),
        ("clip", {}, r"of a model that reads images \(clip\); the model's Hugging Face folder"),
        ("qwen2vl", {}, r"of a model that reads images \(qwen2vl\)"),
        ("llama", llama_metadata(block_count=None), r"lacks the metadata key llama.block_count"),
        ("llama", llama_metadata(block_count="two"), r"'two' as the metadata key llama.block_count"),
        ("llama", llama_metadata(expert_count=8), r"lacks the metadata key llama.expert_used_count"),
        ("llama", llama_metadata(expert_count=8, expert_used_count=2), r"has the experts of a layer apart"),
        ("llama", llama_metadata(**{"attention.head_count": [4, 8]}), r"head_count differs between layers"),
        ("llama", llama_metadata(**{"rope.scaling.type": "longrope"}), r"unknown rope scaling 'longrope'"),
        ("llama", llama_metadata() | {"split.count": 3}, r"one part of a split model; join the parts"),
    ],
)
def test_what_is_not_supported_is_named(architecture: str, metadata: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        GGUFSource(write_gguf(tmp_path / "m.gguf", architecture, metadata, embedding_only()))


@pytest.fixture(scope="module")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    metadata = llama_metadata() | byte_level_metadata(train_byte_level(vocab_size=280), "gpt-2")
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    return write_gguf(path, "llama", metadata, embedding_only()).read_bytes()


def test_a_file_cut_short_anywhere_is_refused_with_sizes(small_file: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    for size in [*range(1, len(small_file), 101), len(small_file) - 1]:
        path.write_bytes(small_file[:size])
        with pytest.raises(ModelError, match=r"fetch the file again") as raised:
            GGUFSource(path)
        assert f"{size:,}" in str(raised.value)


def test_other_files_are_not_taken_for_gguf(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK\x03\x04 a zip file of some sort")
    with pytest.raises(ModelError, match=r"not a GGUF file: it begins with b'PK"):
        GGUFSource(path)
    path.write_bytes(b"")
    with pytest.raises(ModelError, match="is empty"):
        GGUFSource(path)
    path.write_bytes(b"GGUF" + (1).to_bytes(4, "little") + bytes(64))
    with pytest.raises(ModelError, match=r"GGUF version 1; expected version 2 or 3"):
        GGUFSource(path)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.floats(0, 1), damage=st.binary(min_size=1, max_size=12))
def test_a_damaged_file_is_a_model_error_or_still_readable(
    small_file: bytes, tmp_path: Path, place: float, damage: bytes
) -> None:
    from ratoon.models.source import resolve_model

    offset = int(place * (len(small_file) - len(damage)))
    path = tmp_path / "m.gguf"
    path.write_bytes(small_file[:offset] + damage + small_file[offset + len(damage) :])
    try:
        source = resolve_model(str(path))
        source.load_tokenizer()
    except ModelError:
        return
    assert all(source.tensors.read(name).floats().shape == shape for name, shape in source.tensors.shapes().items())


def test_reading_does_not_change_the_file(small_file: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(small_file)
    tensor = GGUFSource(path).read("model.embed_tokens.weight").floats()
    tensor.fill_(7.0)
    assert path.read_bytes() == small_file
    assert torch.equal(GGUFSource(path).read("model.embed_tokens.weight").floats(), torch.zeros(50, 32))
