"""A folder that both engines load: the config of a shape, and a tokenizer of words in the place of a real one.

It is byte-level, as the real ones of these models are: what tokens cost on their way to text is then the same.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

SPECIAL_WORDS = ("<unk>", "<s>", "</s>")
WEIGHTS, UNFINISHED = "model.safetensors", "model.unfinished"
SPACE = "Ġ"  # as byte-level vocabularies write it


def prepare_model(shape: Path, folder: Path) -> Path:
    """The folder `folder`/NAME. Weights are made by the engines (load_format dummy)."""
    target = folder / shape.name
    target.mkdir(parents=True, exist_ok=True)
    text = (shape / "config.json").read_text(encoding="utf-8")
    (target / "config.json").write_text(text, encoding="utf-8")
    write_tokenizer(target, json.loads(text)["vocab_size"])
    return target


def copy_model(shape: Path, folder: Path, tokenizer: Path | None) -> Path:
    """The folder `folder`/NAME with a real tokenizer: a `tokenizer.json`. None: it has none, and prompts are tokens."""
    target = Path(shutil.copytree(shape, folder / shape.name))
    if tokenizer is not None:
        shutil.copy(tokenizer, target / "tokenizer.json")
        (target / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return target


def write_random_model(shape: Path, folder: Path, device: str, num_layers: int | None) -> Path:
    """The folder `folder`/NAME-random with the first layers of a shape and weights that transformers has drawn, so that
    engines that read it route tokens to the same experts. Runs in a process of its own, which gives the device's memory
    back."""
    target = folder / f"{shape.name}-random"
    config = cut_config(json.loads((shape / "config.json").read_text(encoding="utf-8")), num_layers)
    text = json.dumps(config, indent=2) + "\n"
    if (target / "config.json").is_file() and (target / "config.json").read_text(encoding="utf-8") == text:
        return target
    shutil.rmtree(target, ignore_errors=True)
    unfinished = folder / f"{target.name}.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    (unfinished / "config.json").write_text(text, encoding="utf-8")
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        process.submit(_draw_weights, unfinished, device).result()
    (unfinished / "config.json").write_text(text, encoding="utf-8")  # in the place of that of transformers
    write_tokenizer(unfinished, config["vocab_size"])
    unfinished.rename(target)
    return target


def cut_config(config: dict[str, Any], num_layers: int | None) -> dict[str, Any]:
    """The config of a model that has the first layers alone. None: all of them."""
    if num_layers is None:
        return config
    cut = config | {"num_hidden_layers": min(num_layers, config["num_hidden_layers"])}
    return cut | ({"layer_types": config["layer_types"][:num_layers]} if "layer_types" in config else {})


def _draw_weights(folder: Path, device: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=config.dtype)
    model.save_pretrained(folder)


def write_counting_model(shape: Path, folder: Path, device: str) -> Path:
    """The folder `folder`/NAME-counting with weights of a shape without experts, whose greedy text counts: behind token
    t comes t + 1. Its layers cost what they always do and add nothing, because their last products are zero, so that a
    state is a token's row of the table. Row t of the last product is the table's row t - 1.
    """
    import torch
    from safetensors.torch import save_file

    target = folder / f"{shape.name}-counting"
    if (target / WEIGHTS).is_file():
        return target
    target.mkdir(parents=True, exist_ok=True)
    config = json.loads((shape / "config.json").read_text(encoding="utf-8")) | {"tie_word_embeddings": False}
    torch.manual_seed(0)
    tensors = {name: tensor.cpu() for name, tensor in _counting_tensors(config, device)}
    save_file(tensors, target / UNFINISHED, metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    write_tokenizer(target, config["vocab_size"])
    (target / UNFINISHED).rename(target / WEIGHTS)
    return target


def _counting_tensors(config: dict[str, Any], device: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The names are those of Llama and of Qwen 3."""
    import torch

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=device).mul_(0.02)

    def constant(value: float, *shape: int) -> torch.Tensor:
        return torch.full(shape, value, dtype=torch.bfloat16, device=device)

    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    table = torch.randn((config["vocab_size"], hidden), dtype=torch.bfloat16, device=device).sign_()
    yield "model.embed_tokens.weight", table
    yield "lm_head.weight", table.roll(1, 0)
    yield "model.norm.weight", constant(1.0, hidden)
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{layer}.{norm}.weight", constant(1.0, hidden)
        if config["model_type"] == "qwen3":
            for norm in ("q_norm", "k_norm"):
                yield f"{layer}.self_attn.{norm}.weight", constant(1.0, head)
        for name, rows in (("q", queries), ("k", keys), ("v", keys)):
            yield f"{layer}.self_attn.{name}_proj.weight", drawn(rows, hidden)
        yield f"{layer}.self_attn.o_proj.weight", constant(0.0, hidden, queries)
        for name in ("gate", "up"):
            yield f"{layer}.mlp.{name}_proj.weight", drawn(inner, hidden)
        yield f"{layer}.mlp.down_proj.weight", constant(0.0, hidden, inner)


def write_tokenizer(folder: Path, vocab_size: int, special: Mapping[str, int] | None = None) -> None:
    """Every id has a word. The first ones are those that `ratoon bench serve` makes its prompts of. `special`: further
    special tokens, and their ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    from ratoon.benchmarks.loadgen.datasets import WORDS

    words = [*SPECIAL_WORDS, *(SPACE + word for word in WORDS)][:vocab_size]
    words += [f"{SPACE}w{index}" for index in range(len(words), vocab_size)]
    for word, index in (special or {}).items():
        words[index] = word
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special or {}))
    tokenizer.save(str(folder / "tokenizer.json"))
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "bos_token": "<s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields | {"eos_token": "</s>"}), encoding="utf-8")
