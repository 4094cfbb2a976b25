"""Maps architectures to model classes. One line each; a module is imported when first used."""

from __future__ import annotations

import importlib

from ratoon.core.errors import ModelError
from ratoon.models.base import ModelClass

MODEL_CLASSES = {
    "LlamaForCausalLM": "ratoon.models.llama:LlamaForCausalLM",
    "MistralForCausalLM": "ratoon.models.llama:LlamaForCausalLM",
    "Qwen2ForCausalLM": "ratoon.models.qwen2:Qwen2ForCausalLM",
    "Qwen3ForCausalLM": "ratoon.models.qwen3:Qwen3ForCausalLM",
    "GPT2LMHeadModel": "ratoon.models.gpt2:GPT2LMHeadModel",
    "BartForConditionalGeneration": "ratoon.models.bart:BartForConditionalGeneration",
    "MBartForConditionalGeneration": "ratoon.models.mbart:MBartForConditionalGeneration",
    "MarianMTModel": "ratoon.models.marian:MarianMTModel",
    "T5ForConditionalGeneration": "ratoon.models.t5:T5ForConditionalGeneration",
    "WhisperForConditionalGeneration": "ratoon.models.whisper:WhisperForConditionalGeneration",
    "BertModel": "ratoon.models.bert:BertModel",
}


def find_model_class(architecture: str) -> ModelClass:
    if architecture not in MODEL_CLASSES:
        known = ", ".join(sorted(MODEL_CLASSES))
        raise ModelError(architecture, "this architecture is not supported", f"known: {known}")
    module_name, class_name = MODEL_CLASSES[architecture].split(":")
    model_class: ModelClass = getattr(importlib.import_module(module_name), class_name)
    return model_class
