"""Small random models that read images: the transformers model, our config for it, and its weights as a TensorSource;
and pictures of random pixels, as preprocessing hands them over, with what transformers reads in their place."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
import transformers

from ratoon.core.config import ModelConfig
from ratoon.core.media import IMAGE, VIDEO, MediaInput
from ratoon.core.wire import WireTensor
from ratoon.layers.ops import Ops
from ratoon.layers.torch_ops import TorchOps
from ratoon.models.base import LanguageModel
from ratoon.models.build import build_model
from ratoon.models.hf_config import parse_hf_config
from tests.golden.tiny_models import DictSource

Tensor = torch.Tensor

IMAGE_TOKEN, VIDEO_TOKEN, START_TOKEN, END_TOKEN = 90, 91, 92, 93
SECTIONS = [4, 2, 2]
TEXT: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": SECTIONS}
TOKENS: dict[str, Any] = {
    "image_token_id": IMAGE_TOKEN, "video_token_id": VIDEO_TOKEN, "vision_start_token_id": START_TOKEN,
    "vision_end_token_id": END_TOKEN,
}  # fmt: skip


class TinyMediaModel(NamedTuple):
    oracle: Any  # the transformers model
    config: ModelConfig
    source: DictSource

    def build(self, ops: Ops | None = None, dtype: torch.dtype = torch.float32, device: str = "cpu") -> LanguageModel:
        return build_model(self.config, self.source, ops or TorchOps(), torch.device(device), dtype)


def tiny_qwen2_vl(hidden_size: int = 64, num_heads: int = 4) -> TinyMediaModel:
    vision = {
        "depth": 2, "embed_dim": hidden_size, "hidden_size": TEXT["hidden_size"], "num_heads": num_heads,
        "mlp_ratio": 2, "patch_size": 4,
    }  # fmt: skip
    config = transformers.Qwen2VLConfig(text_config=TEXT | {"rope_parameters": ROPE}, vision_config=vision, **TOKENS)
    return _make(transformers.Qwen2VLForConditionalGeneration, config)


def tiny_qwen2_5_vl(hidden_size: int = 64, num_heads: int = 4, inner_size: int = 100) -> TinyMediaModel:
    """Windows of 2 × 2 squares of 2 × 2 patches, in all layers but the second."""
    vision = {
        "depth": 3, "hidden_size": hidden_size, "out_hidden_size": TEXT["hidden_size"], "num_heads": num_heads,
        "intermediate_size": inner_size, "patch_size": 4, "window_size": 16, "fullatt_block_indexes": [1],
    }  # fmt: skip
    config = transformers.Qwen2_5_VLConfig(text_config=TEXT | {"rope_parameters": ROPE}, vision_config=vision, **TOKENS)
    return _make(transformers.Qwen2_5_VLForConditionalGeneration, config)


def tiny_idefics3(smolvlm: bool = False, num_heads: int = 4) -> TinyMediaModel:
    """Tiles of 24 × 24 pixels, 6 × 6 patches, 3 × 3 rows of embeddings."""
    vision = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": num_heads,
        "image_size": 24, "patch_size": 4,
    }  # fmt: skip
    names = "SmolVLM" if smolvlm else "Idefics3"
    config = getattr(transformers, f"{names}Config")(
        text_config=TEXT | {"model_type": "llama", "pad_token_id": 0}, vision_config=vision, image_token_id=IMAGE_TOKEN
    )
    return _make(getattr(transformers, f"{names}ForConditionalGeneration"), config)


def tiny_gemma3_with_images(num_heads: int = 4) -> TinyMediaModel:
    """Pictures of 24 × 24 pixels, 6 × 6 patches, 3 × 3 rows of embeddings; windows are narrower than these."""
    vision = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": num_heads,
        "image_size": 24, "patch_size": 4, "vision_use_head": False,
    }  # fmt: skip
    text = TEXT | {
        "num_hidden_layers": 4, "head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 20,
        "max_position_embeddings": 128,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 50000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 700.0},
        },
    }  # fmt: skip
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=9, image_token_index=IMAGE_TOKEN
    )
    return _make(transformers.Gemma3ForConditionalGeneration, config)


def _make(model_class: Any, config: Any) -> TinyMediaModel:
    torch.manual_seed(0)
    oracle = model_class(config).eval()
    with torch.no_grad():
        for name, parameter in oracle.named_parameters():
            # Norms around 1, everything else so large that each part changes the result
            parameter.normal_(std=0.15)
            if ("norm" in name or "ln_q" in name) and not is_offset(name, model_class):
                parameter += 0 if name.endswith("bias") else 1
    parsed = parse_hf_config({"architectures": [model_class.__name__], **config.to_dict()}, "config")
    return TinyMediaModel(oracle, parsed, DictSource(published(oracle.state_dict())))


def is_offset(name: str, model_class: Any) -> bool:
    """Whether the factors of a norm are 1 plus its weight."""
    return "Gemma3" in model_class.__name__ and "vision_tower" not in name


def published(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The names of published files, from those of modules."""
    if "model.multi_modal_projector.mm_input_projection_weight" in state:
        names = {"model.language_model.": "language_model.model.", "model.vision_tower.": "vision_tower.vision_model."}
        names["model.multi_modal_projector."] = "multi_modal_projector."
        return {
            new + name.removeprefix(old): tensor
            for name, tensor in state.items()
            for old, new in names.items()
            if name.startswith(old)  # the head is the table of tokens
        }
    return {
        name.replace("model.visual.", "visual.").replace("model.language_model.", "model."): tensor
        for name, tensor in state.items()
    }


FAMILIES = {
    "qwen2_vl": tiny_qwen2_vl,
    "qwen2_5_vl": tiny_qwen2_5_vl,
    "idefics3": tiny_idefics3,
    "smolvlm": lambda: tiny_idefics3(smolvlm=True),
    "gemma3": tiny_gemma3_with_images,
}


# ---- pictures ----


def qwen_input(config: ModelConfig, grid: tuple[int, int, int], seed: int = 0, video: bool = False) -> MediaInput:
    """A picture (time 1), or a video, of so many patches."""
    assert config.media is not None
    vision = config.media.vision
    frames = vision.temporal_patch_size if video else 1
    pixels = _random((int(np.prod(grid)), vision.num_channels * frames * vision.patch_size**2), seed)
    return MediaInput(VIDEO if video else IMAGE, len(pixels) // vision.merge_size**2, _wire(pixels), grid)


def tile_input(config: ModelConfig, height: int, width: int, seed: int = 0) -> MediaInput:
    """A tile of so many pixels."""
    assert config.media is not None
    vision = config.media.vision
    rows = height // vision.patch_size * (width // vision.patch_size) // vision.merge_size**2
    if config.media.family == "gemma3":
        rows = config.media.num_rows
    return MediaInput(IMAGE, rows, _wire(_random((vision.num_channels, height, width), seed)))


def normalised(config: ModelConfig, media: MediaInput) -> Tensor:
    """What transformers' preprocessing hands to its model: floats, and the one frame of a picture repeated."""
    assert config.media is not None
    vision = config.media.vision
    pixels = torch.from_numpy(np.array(media.features.view())).view(media.features.shape).double()
    if config.media.family in ("idefics3", "gemma3"):
        mean, std = (torch.tensor(values)[:, None, None] for values in (config.media.mean, config.media.std))
        return ((pixels / 255 - mean) / std).float()
    mean, std = (torch.tensor(values)[:, None, None] for values in (config.media.mean, config.media.std))
    pixels = pixels.view(len(pixels), vision.num_channels, -1, vision.patch_size**2)  # [patches, channels, frames, …]
    frames = ((pixels / 255 - mean) / std).float()
    return frames.expand(-1, -1, vision.temporal_patch_size, -1).flatten(1)


def _random(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def _wire(array: np.ndarray) -> WireTensor:
    return WireTensor("uint8", array.shape, array.tobytes())
