"""Makes small model files for tests: GGUF files through the `gguf` package, Hugging Face folders by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog. The dog sleeps, the fox runs; they don't mind.",
    "In 2024, 1234567 people said 'hello' and 89 said 'goodbye'. It's 3.14159 or 2,71828?",
    "def main():\n    for index in range(10):\n        print(index)\n\n\nif __name__ == '__main__':\n\tmain()\n",
    "Grüße aus München! Çok güzel. 你好,世界。こんにちは世界。Привет, мир! 🙂🎉👨‍👩‍👧",
    "the the the and and of of to in is that it was for on are as with his they at be this have from",
] * 4

NASTY_TEXTS = [
    "",
    " ",
    "Hello world",
    "  leading and trailing  ",
    "tabs\tand\nnew\r\nlines\n\n\n   mixed \n\t x",
    "digits 1 12 123 1234 12345 3.14 1,000",
    "it's we're I'LL THEY'VE don't",
    "emoji 🙂🎉👨‍👩‍👧 flags 🇩🇪",
    "Grüße 你好世界 こんにちは Привет",
    "e\u0301 versus é, ﬁ ligature, \u00a0 nbsp, \u200b zero width",
    "<|special|>between<|special|> and <|end|>",
    "a<|special|> b",
    "symbols !@#$%^&*()_+-=[]{}|;:'\",.<>/?`~",
    "\x00\x01\x7f control",
    "x" * 50 + " " * 20 + "y",
]


def write_gguf(
    path: Path,
    architecture: str,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray | tuple[np.ndarray, gguf.GGMLQuantizationType]],
) -> Path:
    """A tensor that comes with a type is already quantised bytes."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        _add_metadata(writer, key, value)
    for name, tensor in tensors.items():
        if isinstance(tensor, tuple):
            writer.add_tensor(name, tensor[0], raw_dtype=tensor[1])
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_metadata(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


LLAMA_METADATA = {
    "context_length": 128,
    "embedding_length": 32,
    "block_count": 2,
    "feed_forward_length": 64,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 5000.0,
    "rope.dimension_count": 8,
}


def llama_metadata(architecture: str = "llama", **changes: Any) -> dict[str, Any]:
    """Keys of `changes` have _ for the dots; None leaves a key out."""
    values = {**LLAMA_METADATA, **changes}
    return {f"{architecture}.{key}": value for key, value in values.items() if value is not None}


def embedding_only(rows: int = 50, columns: int = 32) -> dict[str, np.ndarray]:
    return {"token_embd.weight": np.zeros((rows, columns), np.float32)}


LLAMA_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}


def write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


def write_folder(folder: Path, config: Mapping[str, Any] = LLAMA_CONFIG, shards: int = 1, index: bool = True) -> Path:
    """A Hugging Face folder with four tensors in one or more files."""
    folder.mkdir(exist_ok=True)
    write_json(folder / "config.json", config)
    tensors = {f"layer.{n}.weight": torch.full((2, n + 1), float(n), dtype=torch.bfloat16) for n in range(4)}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    weight_map = {}
    for shard in range(shards):
        name = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {key: tensor for n, (key, tensor) in enumerate(tensors.items()) if n % shards == shard}
        save_file(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
    if index:
        write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
    return folder


def train_byte_level(pre_tokenizer: Any = None, vocab_size: int = 500) -> Tokenizer:
    """A byte-level BPE tokenizer with two special tokens in front, as tokenizer.json files have it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer or pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|special|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def byte_level_metadata(tokenizer: Tokenizer, pre: str, **changes: Any) -> dict[str, Any]:
    """The same tokenizer as GGUF metadata."""
    description = json.loads(tokenizer.to_str())
    vocabulary = sorted(tokenizer.get_vocab(with_added_tokens=True).items(), key=lambda item: item[1])
    added = {entry["content"]: entry["special"] for entry in description["added_tokens"]}
    types = [(3 if added[token] else 4) if token in added else 1 for token, _ in vocabulary]
    metadata = {
        "model": "gpt2",
        "pre": pre,
        "tokens": [token for token, _ in vocabulary],
        "token_type": types,
        "merges": [" ".join(merge) for merge in description["model"]["merges"]],
        "bos_token_id": 0,
        "eos_token_id": 1,
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in metadata.items() if value is not None}


def sentencepiece_vocabulary(words: Sequence[str]) -> tuple[list[str], list[float], list[int]]:
    """Tokens, scores and types as Llama's: unknown, bos, eos, 256 bytes, pieces by falling score, single characters."""
    pieces: dict[str, None] = {}
    for word in words:
        pieces.update(
            dict.fromkeys(word[begin:end] for begin in range(len(word)) for end in range(begin + 2, len(word) + 1))
        )
    characters = sorted(set("".join(words)) | {"▁"})
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, *characters]
    types = [2, 3, 3] + [6] * 256 + [1] * (len(pieces) + len(characters))
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(pieces))] + [-1e4 - n for n in range(len(characters))]
    return tokens, scores, types
