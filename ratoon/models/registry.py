"""Maps architectures to model classes. One line each; a module is imported when first used."""

from __future__ import annotations

import importlib

from ratoon.core.config import ModelConfig
from ratoon.core.errors import ModelError
from ratoon.models.base import ModelClass
from ratoon.models.family import find_family, known_architectures

MODEL_CLASSES = {
    "LlamaForCausalLM": "ratoon.models.llama:LlamaForCausalLM",
    "MistralForCausalLM": "ratoon.models.llama:LlamaForCausalLM",
    "Ministral3ForCausalLM": "ratoon.models.mistral3:Ministral3ForCausalLM",
    "Mistral3ForConditionalGeneration": "ratoon.models.mistral3:Mistral3ForConditionalGeneration",
    "Qwen2ForCausalLM": "ratoon.models.qwen2:Qwen2ForCausalLM",
    "Qwen3ForCausalLM": "ratoon.models.qwen3:Qwen3ForCausalLM",
    "Phi3ForCausalLM": "ratoon.models.phi3:Phi3ForCausalLM",
    "Olmo2ForCausalLM": "ratoon.models.olmo2:Olmo2ForCausalLM",
    "GraniteForCausalLM": "ratoon.models.granite:GraniteForCausalLM",
    "Starcoder2ForCausalLM": "ratoon.models.starcoder2:Starcoder2ForCausalLM",
    "SmolLM3ForCausalLM": "ratoon.models.smollm3:SmolLM3ForCausalLM",
    "GlmForCausalLM": "ratoon.models.glm4:GlmForCausalLM",
    "Glm4ForCausalLM": "ratoon.models.glm4:Glm4ForCausalLM",
    "GPTNeoXForCausalLM": "ratoon.models.gpt_neox:GPTNeoXForCausalLM",
    "FalconForCausalLM": "ratoon.models.falcon:FalconForCausalLM",
    "Gemma2ForCausalLM": "ratoon.models.gemma2:Gemma2ForCausalLM",
    "Gemma3ForCausalLM": "ratoon.models.gemma3:Gemma3ForCausalLM",
    "Gemma3ForConditionalGeneration": "ratoon.models.gemma3:Gemma3ForConditionalGeneration",
    "MixtralForCausalLM": "ratoon.models.mixture:MixtralForCausalLM",
    "Qwen2MoeForCausalLM": "ratoon.models.mixture:Qwen2MoeForCausalLM",
    "Qwen3MoeForCausalLM": "ratoon.models.mixture:Qwen3MoeForCausalLM",
    "OlmoeForCausalLM": "ratoon.models.mixture:OlmoeForCausalLM",
    "Glm4MoeForCausalLM": "ratoon.models.mixture:Glm4MoeForCausalLM",
    "DeepseekV2ForCausalLM": "ratoon.models.deepseek:DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM": "ratoon.models.deepseek:DeepseekV3ForCausalLM",
    "GptOssForCausalLM": "ratoon.models.gpt_oss:GptOssForCausalLM",
    "Mamba2ForCausalLM": "ratoon.models.mamba2:Mamba2ForCausalLM",
    "GraniteMoeHybridForCausalLM": "ratoon.models.granite_hybrid:GraniteMoeHybridForCausalLM",
    "GPT2LMHeadModel": "ratoon.models.gpt2:GPT2LMHeadModel",
    "BartForConditionalGeneration": "ratoon.models.bart:BartForConditionalGeneration",
    "MBartForConditionalGeneration": "ratoon.models.mbart:MBartForConditionalGeneration",
    "MarianMTModel": "ratoon.models.marian:MarianMTModel",
    "M2M100ForConditionalGeneration": "ratoon.models.m2m100:M2M100ForConditionalGeneration",
    "PegasusForConditionalGeneration": "ratoon.models.marian:PegasusForConditionalGeneration",
    "T5ForConditionalGeneration": "ratoon.models.t5:T5ForConditionalGeneration",
    "MT5ForConditionalGeneration": "ratoon.models.t5:T5ForConditionalGeneration",
    "MoonshineForConditionalGeneration": "ratoon.models.moonshine:MoonshineForConditionalGeneration",
    "WhisperForConditionalGeneration": "ratoon.models.whisper:WhisperForConditionalGeneration",
    "Qwen2VLForConditionalGeneration": "ratoon.models.qwen2_vl:Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration": "ratoon.models.qwen2_vl:Qwen2_5_VLForConditionalGeneration",
    "Idefics3ForConditionalGeneration": "ratoon.models.idefics3:Idefics3ForConditionalGeneration",
    "SmolVLMForConditionalGeneration": "ratoon.models.idefics3:Idefics3ForConditionalGeneration",
    "LlamaModel": "ratoon.models.llama:LlamaForCausalLM",
    "LlamaForSequenceClassification": "ratoon.models.llama:LlamaForCausalLM",
    "MistralModel": "ratoon.models.llama:LlamaForCausalLM",
    "MistralForSequenceClassification": "ratoon.models.llama:LlamaForCausalLM",
    "Qwen2Model": "ratoon.models.qwen2:Qwen2ForCausalLM",
    "Qwen2ForSequenceClassification": "ratoon.models.qwen2:Qwen2ForCausalLM",
    "Qwen3Model": "ratoon.models.qwen3:Qwen3ForCausalLM",
    "Qwen3ForSequenceClassification": "ratoon.models.qwen3:Qwen3ForCausalLM",
    "BertModel": "ratoon.models.bert:BertModel",
    "BertForSequenceClassification": "ratoon.models.bert:BertModel",
    "RobertaModel": "ratoon.models.roberta:RobertaModel",
    "RobertaForSequenceClassification": "ratoon.models.roberta:RobertaModel",
    "XLMRobertaModel": "ratoon.models.roberta:RobertaModel",
    "XLMRobertaForSequenceClassification": "ratoon.models.roberta:RobertaModel",
    "DistilBertModel": "ratoon.models.roberta:DistilBertModel",
    "DistilBertForSequenceClassification": "ratoon.models.roberta:DistilBertModel",
    "ModernBertModel": "ratoon.models.modernbert:ModernBertModel",
    "ModernBertForSequenceClassification": "ratoon.models.modernbert:ModernBertModel",
}


LIBRARY_CLASS = "ratoon.models.transformers_model:TransformersModel"


def class_of(config: ModelConfig) -> ModelClass:
    """The class that a model of this config is built by."""
    return find_model_class(config.architecture) if config.library is None else _import_class(LIBRARY_CLASS)


def find_model_class(architecture: str) -> ModelClass:
    """The class of an architecture that is built in, or that a package registers."""
    if architecture in MODEL_CLASSES:
        return _import_class(MODEL_CLASSES[architecture])
    family = find_family(architecture)
    if family is None:
        known = known_architectures(list(MODEL_CLASSES))
        raise ModelError(architecture, "this architecture is not supported", known)
    try:
        return _import_class(family.model_class)
    except (ImportError, AttributeError, ValueError) as error:
        problem = f"its class {family.model_class} can't be imported ({error})"
        raise ModelError(architecture, problem, "another version of the package that registers it") from error


def _import_class(name: str) -> ModelClass:
    module_name, class_name = name.split(":")
    model_class: ModelClass = getattr(importlib.import_module(module_name), class_name)
    return model_class
