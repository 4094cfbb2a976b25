"""Models that read images, with random weights: Qwen2.5-VL with the sizes of the 3B model's encoder and two layers of
its decoder, and one whose decoder alone is a model of text as well. Only their speed means something.

transformers makes and saves them, so nothing is downloaded. The pictures are made by peers/images.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from export_hf import CACHE_FOLDER, write_json
from random_models import LAST_NORM_STD, SEED, _random_name, whole_folder

TOKENS: dict[str, Any] = {
    "vision_start_token_id": 4,
    "vision_end_token_id": 5,
    "image_token_id": 6,
    "video_token_id": 7,
}
FIRST_ORDINARY_TOKEN = 17
FULL_EVERY = (
    8  # of the published models: layers 7, 15, 23 and 31 attend to the whole picture, the others inside windows
)
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2,
    "min_pixels": 3136, "max_pixels": 12845056, "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}  # fmt: skip


class ImageShape(NamedTuple):
    """What transformers' config calls the sizes."""

    name: str
    text: dict[str, Any]
    vision: dict[str, Any]
    sections: list[int]  # pairs of a head that turn by time, height and width


VISION_3B = {
    "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "patch_size": 14, "window_size": 112,
    "out_hidden_size": 2048,
}  # fmt: skip
# The published vocabulary has 151,936 tokens: a part of it leaves memory for three engines at once.
TWO_LAYERS_3B = {
    "vocab_size": 32768, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 2,
    "num_attention_heads": 16, "num_key_value_heads": 2, "max_position_embeddings": 32768,
}  # fmt: skip
TINY_VISION = {
    "depth": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 2, "patch_size": 14, "window_size": 56,
    "out_hidden_size": 64, "fullatt_block_indexes": [1],
}  # fmt: skip
TINY_TEXT = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 2048,
}  # fmt: skip
# The decoder has the sizes of SmolLM2-135M, whose steps are short: what is done beside them would be seen.
SMALL_TEXT = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192,
}  # fmt: skip
TINY = ImageShape("tiny-vl", TINY_TEXT, TINY_VISION, [4, 2, 2])
SMALL = ImageShape("smollm2-135m-vl", SMALL_TEXT, TINY_VISION | {"out_hidden_size": 576}, [8, 12, 12])


def shape_of_3b(num_vision_layers: int) -> ImageShape:
    full = [layer for layer in range(num_vision_layers) if layer % FULL_EVERY == FULL_EVERY - 1]
    vision = VISION_3B | {"depth": num_vision_layers, "fullatt_block_indexes": full}
    return ImageShape(f"qwen2.5-vl-3b-{num_vision_layers}-2", TWO_LAYERS_3B, vision, [16, 24, 24])


def make_image_model(shape: ImageShape) -> Path:
    """The folder, made if it is not there. It appears in one moment and complete, or not at all."""
    folder = CACHE_FOLDER / _random_name(shape.name, [shape, TOKENS, PROCESSOR, SEED, LAST_NORM_STD])
    if not (folder / "config.json").is_file():
        with whole_folder(folder) as partial:
            _random_image_model(shape).save_pretrained(partial)
            write_json(partial / "preprocessor_config.json", PROCESSOR)
    return folder


def make_text_model(shape: ImageShape) -> Path:
    """The decoder of `make_image_model` as a model of text, with the same weights."""
    folder = CACHE_FOLDER / _random_name(f"{shape.name}-text", [shape, TOKENS, SEED, LAST_NORM_STD])
    if not (folder / "config.json").is_file():
        import transformers

        whole = _random_image_model(shape)
        kind: Any = transformers.Qwen2ForCausalLM
        rope = {"rope_type": "default", "rope_theta": 1e6}
        text = kind(transformers.Qwen2Config(**_text_fields(shape), tie_word_embeddings=True, rope_parameters=rope))
        text.model.load_state_dict(whole.model.language_model.state_dict())
        with whole_folder(folder) as partial:
            text.save_pretrained(partial)
    return folder


def _text_fields(shape: ImageShape) -> dict[str, Any]:
    return {**shape.text, "rms_norm_eps": 1e-6, "bos_token_id": 1, "eos_token_id": 2}


def _random_image_model(shape: ImageShape) -> Any:
    import torch
    import transformers

    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": shape.sections}
    config = transformers.Qwen2_5_VLConfig(
        text_config=_text_fields(shape) | {"rope_parameters": rope}, vision_config=shape.vision,
        tie_word_embeddings=True, **TOKENS,
    )  # fmt: skip
    torch.manual_seed(SEED)
    model: Any = transformers.Qwen2_5_VLForConditionalGeneration(config)
    # Head and embedding are one: with a norm of ones, every token would be followed by itself.
    torch.nn.init.normal_(model.model.language_model.norm.weight, std=LAST_NORM_STD)
    return model
