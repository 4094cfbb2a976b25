"""Preprocessing of one family of models in each file, and the registry of them."""

from __future__ import annotations

from ratoon.core.errors import ModelError
from ratoon.media.families.base import Family
from ratoon.media.families.gemma3 import Gemma3
from ratoon.media.families.idefics3 import Idefics3
from ratoon.media.families.qwen2_vl import Qwen2VL

# By `MediaConfig.family`. The two of Qwen differ in their encoders and in the time axis of rope positions.
FAMILIES: dict[str, Family] = {
    "qwen2_vl": Qwen2VL(),
    "qwen2_5_vl": Qwen2VL(),
    "gemma3": Gemma3(),
    "idefics3": Idefics3(),
}


def family_of(name: str) -> Family:
    try:
        return FAMILIES[name]
    except KeyError:
        raise ModelError(name, "is not a family whose images can be read", f"one of {', '.join(FAMILIES)}") from None
