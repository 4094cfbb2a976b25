"""Turns Hugging Face configs of models that read images into what they add to the config of their text model: Qwen2-VL,
Qwen2.5-VL, Idefics3, SmolVLM and Gemma 3.

Pure, like hf_config.py, which reads the text model. Files have its fields below `text_config`, or beside those of the
whole. Preprocessing of pictures reads its own fields from `MediaConfig.processor`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ratoon.core.config import ModelConfig
from ratoon.core.errors import ModelError
from ratoon.core.media import MediaConfig, VisionConfig
from ratoon.models.config_fields import ConfigFields
from ratoon.models.damage import show

MODEL_TYPES = {
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "idefics3": "Idefics3ForConditionalGeneration",
    "smolvlm": "SmolVLMForConditionalGeneration",
    "gemma3": "Gemma3ForConditionalGeneration",
}
# The architecture that the text model is read as
TEXT_MODELS = {
    "Qwen2VLForConditionalGeneration": "Qwen2ForCausalLM",
    "Qwen2_5_VLForConditionalGeneration": "Qwen2ForCausalLM",
    "Idefics3ForConditionalGeneration": "LlamaForCausalLM",
    "SmolVLMForConditionalGeneration": "LlamaForCausalLM",
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
}
# What transformers takes for fields that `text_config` leaves out: files have only those that differ.
TEXT_DEFAULTS: dict[str, dict[str, Any]] = {
    "Qwen2ForCausalLM": {
        "vocab_size": 152064, "hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80,
        "num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5,
        "max_window_layers": 80,
    },
    "LlamaForCausalLM": {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
    },
    "Gemma3ForCausalLM": {},  # the family's own
}  # fmt: skip
QWEN_ROPE_THETA = 1e6
ROPE_FIELDS = ("rope_scaling", "rope_parameters")
OF_THE_WHOLE = (*ROPE_FIELDS, "dtype", "torch_dtype")  # a value beside `text_config` takes precedence
OF_EITHER = ("bos_token_id", "eos_token_id")  # a value in `text_config` takes precedence
NUM_AXES = 3  # of Qwen2-VL's rotation: time, height, width
VISION_THETA = 10000.0
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def text_fields(fields: ConfigFields, architecture: str) -> ConfigFields:
    """The fields of the text model, as one of its family has them."""
    whole = fields.raw
    text = fields.below("text_config") if whole.get("text_config") else fields
    raw = {**TEXT_DEFAULTS[TEXT_MODELS[architecture]], **text.raw}
    if text is not fields:
        raw |= {name: whole[name] for name in OF_THE_WHOLE if whole.get(name) is not None}
        raw |= {name: whole[name] for name in OF_EITHER if raw.get(name) is None and whole.get(name) is not None}
    tied = fields.flag("tie_word_embeddings", TEXT_MODELS[architecture] == "Gemma3ForCausalLM")
    raw["tie_word_embeddings"] = tied or (_is_qwen(architecture) and text.flag("tie_word_embeddings", False))
    if _is_qwen(architecture):
        rope = _rope_fields(ConfigFields(raw, fields.source, text.prefix)).raw
        kinds = {name: "default" for name in ("rope_type", "type") if rope.get(name) == "mrope"}
        raw.pop("rope_scaling", None)
        raw["rope_parameters"] = {"rope_theta": raw.get("rope_theta", QWEN_ROPE_THETA), **rope, **kinds}
    return ConfigFields(raw, fields.source, text.prefix)


def with_media(config: ModelConfig, fields: ConfigFields, architecture: str) -> ModelConfig:
    """The config of the text model as that of the whole."""
    media = _PARSERS[architecture](fields, config)
    for name in ("image_token_id", "video_token_id"):
        token = getattr(media, name)
        if token is not None and token >= config.vocab_size:
            raise fields.wrong(name, f"is {token}", f"a token of the vocabulary: 0 to {config.vocab_size - 1}")
    if _is_qwen(architecture):
        sections = _sections(text_fields(fields, architecture), config.head_dim // 2)
        config = replace(config, rope_scaling=replace(config.rope_scaling, sections=sections))
    return replace(config, architecture=architecture, media=media)


def _is_qwen(architecture: str) -> bool:
    return TEXT_MODELS[architecture] == "Qwen2ForCausalLM"


def _rope_fields(text: ConfigFields) -> ConfigFields:
    return text.below("rope_scaling" if text.raw.get("rope_scaling") else "rope_parameters")


def _sections(text: ConfigFields, num_pairs: int) -> tuple[int, ...]:
    rope = _rope_fields(text)
    found = rope.raw.get("mrope_section")
    items = found if isinstance(found, list) else []
    fits = all(isinstance(item, int) and not isinstance(item, bool) and item > 0 for item in items)
    if len(items) != NUM_AXES or not fits or sum(items) != num_pairs:
        problem = "is missing" if found is None else f"is {show(found)}"
        raise rope.wrong("mrope_section", problem, f"{NUM_AXES} whole numbers above 0 that add up to {num_pairs}")
    return tuple(items)


def _token(fields: ConfigFields, name: str, default: int) -> int:
    found = fields.token_id(name)
    return default if found is None else found


def _qwen_vision(vision: ConfigFields, hidden_size: int, inner: int, activation: str) -> VisionConfig:
    """Fields that both versions have."""
    heads = vision.count("num_heads", 16)
    head_dim = vision.divisible("hidden_size", hidden_size, "num_heads", heads)
    if head_dim % 4:
        raise vision.wrong("num_heads", f"is {heads}", f"heads of a multiple of 4 numbers, not of {head_dim}")
    rope = vision.below("rope_parameters")
    if (theta := rope.number("rope_theta", VISION_THETA)) != VISION_THETA:
        raise rope.wrong("rope_theta", f"is {theta:g}", f"{VISION_THETA:g}")
    return VisionConfig(
        hidden_size=hidden_size,
        intermediate_size=inner,
        num_layers=vision.layers("depth", 32),
        num_heads=heads,
        patch_size=vision.count("patch_size", 14),
        num_channels=vision.count("in_channels", vision.count("in_chans", 3)),
        activation=vision.text("hidden_act", activation),
        temporal_patch_size=vision.count("temporal_patch_size", 2),
        merge_size=vision.count("spatial_merge_size", 2),
    )


def _qwen_media(family: str, fields: ConfigFields, vision: VisionConfig) -> MediaConfig:
    return MediaConfig(
        family=family,
        vision=vision,
        image_token_id=_token(fields, "image_token_id", 151655),
        video_token_id=_token(fields, "video_token_id", 151656),
        mean=CLIP_MEAN,
        std=CLIP_STD,
    )


def _check_out_size(vision: ConfigFields, name: str, config: ModelConfig) -> None:
    out_size = vision.count(name, 3584)
    if out_size != config.hidden_size:
        raise vision.wrong(name, f"is {out_size}", f"the hidden size of the text model, {config.hidden_size}")


def _parse_qwen2_vl(fields: ConfigFields, config: ModelConfig) -> MediaConfig:
    vision = fields.below("vision_config")
    _check_out_size(vision, "hidden_size", config)
    hidden_size, ratio = vision.count("embed_dim", 1280), vision.number("mlp_ratio", 4)
    return _qwen_media("qwen2_vl", fields, _qwen_vision(vision, hidden_size, int(hidden_size * ratio), "quick_gelu"))


def _parse_qwen2_5_vl(fields: ConfigFields, config: ModelConfig) -> MediaConfig:
    vision = fields.below("vision_config")
    _check_out_size(vision, "out_hidden_size", config)
    inner = vision.count("intermediate_size", 3420)
    parsed = _qwen_vision(vision, vision.count("hidden_size", 3584), inner, "silu")
    window, smallest = vision.count("window_size", 112), parsed.patch_size * parsed.merge_size
    if window < smallest:
        raise vision.wrong("window_size", f"is {window}", f"at least {smallest}, the side of what becomes one row")
    full = vision.raw.get("fullatt_block_indexes", [7, 15, 23, 31])
    if not isinstance(full, list) or not all(type(layer) is int and layer >= 0 for layer in full):
        raise vision.wrong("fullatt_block_indexes", f"is {show(full)}", "a list of layers")
    parsed = replace(
        parsed,
        window_size=window,
        full_attention_layers=tuple(full),
        tokens_per_second=vision.number("tokens_per_second", 4),
    )
    return _qwen_media("qwen2_5_vl", fields, parsed)


def _parse_idefics3(fields: ConfigFields, config: ModelConfig) -> MediaConfig:
    vision = fields.below("vision_config")
    hidden_size, heads = vision.count("hidden_size", 1152), vision.count("num_attention_heads", 16)
    vision.divisible("hidden_size", hidden_size, "num_attention_heads", heads)
    parsed = VisionConfig(
        hidden_size=hidden_size,
        intermediate_size=vision.count("intermediate_size", 3072),
        num_layers=vision.layers("num_hidden_layers", 12),
        num_heads=heads,
        patch_size=vision.count("patch_size", 32),
        image_size=vision.count("image_size", 224),
        num_channels=vision.count("num_channels", 3),
        activation=vision.text("hidden_act", "gelu_pytorch_tanh"),
        norm_eps=vision.number("layer_norm_eps", 1e-6),
        merge_size=fields.count("scale_factor", 2),
    )
    side = parsed.image_size // parsed.patch_size
    num_rows = fields.divisible("vision_config: patches on a side", side, "scale_factor", parsed.merge_size) ** 2
    token = _token(fields, "image_token_id", 128257)
    return MediaConfig(family="idefics3", vision=parsed, image_token_id=token, num_rows=num_rows)


def _parse_gemma3(fields: ConfigFields, config: ModelConfig) -> MediaConfig:
    vision = fields.below("vision_config")
    hidden_size, heads = vision.count("hidden_size", 768), vision.count("num_attention_heads", 12)
    vision.divisible("hidden_size", hidden_size, "num_attention_heads", heads)
    parsed = VisionConfig(
        hidden_size=hidden_size,
        intermediate_size=vision.count("intermediate_size", 3072),
        num_layers=vision.layers("num_hidden_layers", 12),
        num_heads=heads,
        patch_size=vision.count("patch_size", 16),
        image_size=vision.count("image_size", 224),
        num_channels=vision.count("num_channels", 3),
        activation=vision.text("hidden_act", "gelu_pytorch_tanh"),
        norm_eps=vision.number("layer_norm_eps", 1e-6),
    )
    num_rows, side = fields.count("mm_tokens_per_image", 256), parsed.image_size // parsed.patch_size
    if math.isqrt(num_rows) ** 2 != num_rows or side % math.isqrt(num_rows):
        expected = f"the square of a number that divides {side}, the patches on a side of an image"
        raise fields.wrong("mm_tokens_per_image", f"is {num_rows}", expected)
    token = _token(fields, "image_token_index", _token(fields, "image_token_id", 262144))
    return MediaConfig(family="gemma3", vision=parsed, image_token_id=token, num_rows=num_rows, attends_both_ways=True)


_PARSERS: dict[str, Callable[[ConfigFields, ModelConfig], MediaConfig]] = {
    "Qwen2VLForConditionalGeneration": _parse_qwen2_vl,
    "Qwen2_5_VLForConditionalGeneration": _parse_qwen2_5_vl,
    "Idefics3ForConditionalGeneration": _parse_idefics3,
    "SmolVLMForConditionalGeneration": _parse_idefics3,
    "Gemma3ForConditionalGeneration": _parse_gemma3,
}


def with_processor(media: MediaConfig, processor: Mapping[str, Any], source: str) -> MediaConfig:
    """The config with the fields of the file that preprocessing has (preprocessor_config.json). Mean and deviation are
    made those of pixels from 0 to 1, whatever the file rescales them by."""
    fields = ConfigFields(processor, source)
    scale = 1.0  # of pixels from 0 to 1, as the file normalises them
    if not fields.flag("do_rescale", True):
        scale = 255.0
    elif (factor := fields.optional_number("rescale_factor")) is not None:
        scale = 255.0 * factor if abs(255.0 * factor - 1) > 1e-6 else 1.0
    mean, std = _by_channel(fields, "image_mean", media.mean), _by_channel(fields, "image_std", media.std)
    if not fields.flag("do_normalize", True):
        mean, std = (0.0,) * len(mean), (1.0,) * len(std)
    if len(mean) != media.vision.num_channels or len(std) != media.vision.num_channels:
        raise fields.wrong("image_mean", f"has {len(mean)} numbers", f"{media.vision.num_channels}, one for a channel")
    _check_patches(fields, media.vision)
    return replace(
        media,
        mean=tuple(value / scale for value in mean),
        std=tuple(value / scale for value in std),
        processor=dict(processor),
    )


def _by_channel(fields: ConfigFields, name: str, default: tuple[float, ...]) -> tuple[float, ...]:
    found = fields.raw.get(name)
    if found is None:
        return default
    if not isinstance(found, list) or not all(type(item) in (int, float) and 0 <= item <= 1e6 for item in found):
        raise fields.wrong(name, f"is {show(found)}", "a list of numbers, one for each channel")
    if name == "image_std" and not all(found):
        raise fields.wrong(name, f"is {show(found)}", "numbers above 0")
    return tuple(float(item) for item in found)


def _check_patches(fields: ConfigFields, vision: VisionConfig) -> None:
    """Raises ModelError where preprocessing would cut pictures into other patches than the encoder reads."""
    for name in ("patch_size", "merge_size", "temporal_patch_size"):
        found, own = fields.raw.get(name), getattr(vision, name)
        if found is not None and found != own:
            raise ModelError(fields.source, f"{name} is {show(found)}", f"{own}, as in its config.json")
