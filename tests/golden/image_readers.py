"""Folders of small random models that read images, with a tokenizer that writes JSON and knows the placeholders; a
picture to show them; and what transformers answers about it with the same weights."""

from __future__ import annotations

import copy
import functools
import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import load_file
from tokenizers import AddedToken, Tokenizer

from ratoon import LLM
from ratoon.core.media import MediaFeature
from tests.golden.grammar_engines import END, json_tokenizer
from tests.golden.media_oracle import drawn
from tests.golden.tiny_media_models import FAMILIES, IMAGE_TOKEN, TinyMediaModel, normalised, published

Tensor = torch.Tensor

IMAGE_FAMILIES = ("qwen2_5_vl", "gemma3", "idefics3")
PLACEHOLDERS = {"qwen2_5_vl": "<image>", "gemma3": "<start_of_image>", "idefics3": "<image>"}
# Of the last ids of the vocabulary. The ids of the first are those of the models' configs.
SPECIAL = {
    "<image>": IMAGE_TOKEN, "<video>": 91, "<start_of_image>": 92, "<end_of_image>": 93,
    "<fake_token_around_image>": 94, "<global-img>": 95,
}  # fmt: skip
PREPARATION: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {"min_pixels": 64, "max_pixels": 1024},
    "gemma3": {},
    "idefics3": {"size": {"longest_edge": 48}, "max_image_size": {"longest_edge": 24}},  # two tiles, and the whole
}


def picture(number: int = 0) -> Image.Image:
    """Another one for each number, twice as wide as it is high."""
    pixels = drawn(48 + 2 * number, 24 + number)
    return Image.fromarray(255 - pixels // 4 if number % 2 else pixels // 4)


class ImageReader:
    """A model in transformers, and its folder."""

    def __init__(self, family: str, folder: Path) -> None:
        self.family = family
        self.folder = folder
        self.tiny: TinyMediaModel = FAMILIES[family]()
        _let_layers_decide(self.tiny.oracle)
        self.tiny.oracle.generation_config.eos_token_id = None  # the engine gets ignore_eos
        self.tiny.oracle.save_pretrained(folder)
        (folder / "preprocessor_config.json").write_text(json.dumps(PREPARATION[family]))
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
        _tokenizer().save(str(folder / "tokenizer.json"))

    def prompt(self, number: int = 0, before: str = "a", behind: str = "what is it") -> dict[str, Any]:
        text = f"{before}{PLACEHOLDERS[self.family]}{behind}"
        return {"prompt": text, "multi_modal_data": {"image": picture(number)}}

    def inputs_of(self, ids: Tensor, features: Sequence[MediaFeature]) -> dict[str, Tensor]:
        """What transformers' model takes besides tokens, of which those of images are expanded."""
        if hasattr(self.tiny.oracle.model, "rope_deltas"):
            self.tiny.oracle.model.rope_deltas = None  # those of an earlier prompt
        pixels = [normalised(self.tiny.config, feature.data) for feature in features]
        is_image = (ids == IMAGE_TOKEN).int()
        inputs = {"attention_mask": torch.ones_like(ids)}
        if self.family == "gemma3":
            return inputs | {"pixel_values": torch.stack(pixels), "token_type_ids": is_image}
        if self.family == "idefics3":
            return inputs | {"pixel_values": torch.stack(pixels)[None]}
        grids = torch.tensor([feature.data.grid for feature in features])
        return inputs | {"pixel_values": torch.cat(pixels), "image_grid_thw": grids, "mm_token_type_ids": is_image}

    @torch.inference_mode()
    def generate(
        self, token_ids: Sequence[int], features: Sequence[MediaFeature], count: int, num_beams: int = 1
    ) -> list[list[int]]:
        """The tokens of transformers behind these: greedy ones, or those of a beam search, the best first."""
        ids = torch.tensor([token_ids])
        found = self.tiny.oracle.generate(
            input_ids=ids, do_sample=False, num_beams=num_beams, num_return_sequences=num_beams, max_new_tokens=count,
            pad_token_id=0, **self.inputs_of(ids, features),
        )  # fmt: skip
        return [[int(token) for token in one[len(token_ids) :]] for one in found]

    @torch.inference_mode()
    def last_state(self, token_ids: Sequence[int], features: Sequence[MediaFeature]) -> Tensor:
        """The hidden state of the last token after the final norm."""
        ids = torch.tensor([token_ids])
        found = self.tiny.oracle.model(input_ids=ids, use_cache=False, **self.inputs_of(ids, features))
        state: Tensor = found.last_hidden_state[0, -1]
        return state

    @contextmanager
    def with_adapter(self, folder: Path) -> Iterator[None]:
        """The model of transformers has the matrices of an adapter added to its weights."""
        saved = copy.deepcopy(self.tiny.oracle.state_dict())
        weights, matrices = published(self.tiny.oracle.state_dict()), load_file(folder / "adapter_model.safetensors")
        config = json.loads((folder / "adapter_config.json").read_text())
        for name in [name for name in matrices if name.endswith("lora_A.weight")]:
            layer = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            change = matrices[name.replace("lora_A", "lora_B")] @ matrices[name]
            weights[f"{layer}.weight"] += config["lora_alpha"] / config["r"] * change
        try:
            yield
        finally:
            self.tiny.oracle.load_state_dict(saved)


@functools.cache
def image_reader(family: str) -> ImageReader:
    return ImageReader(family, Path(_saved_models().name) / family)


def num_encoder_runs(llm: LLM) -> int:
    """Inputs that the encoder has read, since the start."""
    return int(llm._client.core.executor._worker.runner.media.num_runs)


@torch.no_grad()
def _let_layers_decide(oracle: Any) -> None:
    """Changes weights so that answers depend on the picture, and do not just repeat the last token."""
    oracle.get_input_embeddings().weight *= 0.05
    for name, weight in oracle.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")) and "vision" not in name and "visual" not in name:
            weight *= 3


@functools.cache
def _saved_models() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="ratoon-images-")  # removed when the process ends


def _tokenizer() -> Tokenizer:
    """The last ids of a tokenizer of JSON are free for the tokens around images."""
    described = json.loads(json_tokenizer().to_str())
    vocabulary: dict[str, int] = described["model"]["vocab"]
    for filler in [text for text, index in vocabulary.items() if index in SPECIAL.values()]:
        del vocabulary[filler]
    vocabulary.update(SPECIAL)
    tokenizer = Tokenizer.from_str(json.dumps(described))
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    return tokenizer
