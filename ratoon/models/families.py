"""The families that are built in, as documents and `ratoon models --families` show them. Imports nothing else."""

from __future__ import annotations

from typing import NamedTuple


class FamilyNote(NamedTuple):
    """What users should know about architectures that are one family. Texts are Markdown."""

    architectures: tuple[str, ...]  # keys of the registry
    gguf: str  # the architecture in GGUF files, or empty
    notes: str


FAMILIES = (
    FamilyNote(
        ("LlamaForCausalLM",),
        "`llama`",
        "Llama 1 to 3, SmolLM, SmolLM2, TinyLlama …; attention and MLP biases by the config",
    ),
    FamilyNote(
        ("MistralForCausalLM",),
        "`llama` with a sliding window",
        "the window holds for all layers; Mistral 7B, Mistral Nemo, and Mistral Small up to 3.0",
    ),
    FamilyNote(("Ministral3ForCausalLM",), "`mistral3`", "Ministral 3; queries are scaled behind the original length"),
    FamilyNote(
        ("Mistral3ForConditionalGeneration",),
        "",
        "Mistral Small 3.1 and 3.2, Ministral 3: text only: pictures are not read, and their tensors are left out",
    ),
    FamilyNote(
        ("Qwen2ForCausalLM",),
        "`qwen2`",
        "Qwen2, Qwen2.5; layers with a window by `use_sliding_window`, `layer_types` or `max_window_layers`",
    ),
    FamilyNote(("Qwen3ForCausalLM",), "`qwen3`", "the dense ones"),
    FamilyNote(("Gemma3ForCausalLM",), "`gemma3`", "text; not those that attend both ways (EmbeddingGemma)"),
    FamilyNote(("Gemma2ForCausalLM",), "`gemma2`", "soft caps of scores and logits; not those that attend both ways"),
    FamilyNote(("Phi3ForCausalLM",), "`phi3`", "Phi-3, Phi-3.5-mini, Phi-4 and Phi-4-mini"),
    FamilyNote(("Olmo2ForCausalLM",), "`olmo2`", "on at most as many ranks as it has key-value heads"),
    FamilyNote(("GraniteForCausalLM",), "`granite`", "Granite 3 and later, the dense ones"),
    FamilyNote(("Starcoder2ForCausalLM",), "`starcoder2`", ""),
    FamilyNote(("SmolLM3ForCausalLM",), "`smollm3`", "layers without rotation by `no_rope_layers`"),
    FamilyNote(("GlmForCausalLM",), "", "GLM-4-9B"),
    FamilyNote(("Glm4ForCausalLM",), "`glm4`", "GLM-4-0414"),
    FamilyNote(
        ("GPTNeoXForCausalLM",), "`gptneox`", "GPT-NeoX, Pythia; halves of a layer side by side or one after the other"
    ),
    FamilyNote(("FalconForCausalLM",), "`falcon`", "without ALiBi"),
    FamilyNote(
        ("MixtralForCausalLM",), "`llama` with experts", "a [mixture of experts](experts.md); a window for all layers"
    ),
    FamilyNote(
        ("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"),
        "`qwen2moe`, `qwen3moe`",
        "[mixtures](experts.md), with dense layers between by the config; a shared expert with a gate in Qwen2's",
    ),
    FamilyNote(("OlmoeForCausalLM",), "`olmoe`", "a [mixture](experts.md); without `clip_qkv`"),
    FamilyNote(
        ("Glm4MoeForCausalLM",),
        "`glm4moe`",
        "GLM-4.5 and GLM-4.5-Air, [mixtures](experts.md); layers that predict further tokens are left out",
    ),
    FamilyNote(
        ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"),
        "`deepseek2`",
        "DeepSeek-V2, V2-Lite, V3 and R1, Moonlight: [mixtures](experts.md) with "
        "[latent attention](experts.md#latent-attention); layers that predict further tokens are left out",
    ),
    FamilyNote(
        ("GptOssForCausalLM",),
        "`gpt-oss`",
        "gpt-oss, a [mixture](experts.md) with attention sinks; experts in MXFP4 or floats",
    ),
    FamilyNote(
        ("Mamba2ForCausalLM",), "`mamba2`", "Mamba-2 and Codestral Mamba: [states](states.md) in the place of attention"
    ),
    FamilyNote(
        ("GraniteMoeHybridForCausalLM",),
        "`granitehybrid`",
        "Granite 4: layers with [states](states.md) and a few that attend, with and without [experts](experts.md)",
    ),
    FamilyNote(("GPT2LMHeadModel",), "`gpt2`", "also files saved without the head's prefix"),
    FamilyNote(
        ("BartForConditionalGeneration", "MBartForConditionalGeneration"),
        "",
        "BART files may be saved without the head's prefix",
    ),
    FamilyNote(("MarianMTModel",), "", "with one vocabulary for both sides, or two: those are given token ids"),
    FamilyNote(
        ("M2M100ForConditionalGeneration",), "", "M2M-100 and NLLB; the target language begins the decoder's prompt"
    ),
    FamilyNote(("PegasusForConditionalGeneration",), "", ""),
    FamilyNote(
        ("T5ForConditionalGeneration", "MT5ForConditionalGeneration"),
        "`t5`",
        "T5, T5 1.1, Flan-T5 and mT5: with and without gates; up to 4096 tokens on each side, or `n_positions` if more",
    ),
    FamilyNote(("WhisperForConditionalGeneration",), "", "all sizes"),
    FamilyNote(
        ("MoonshineForConditionalGeneration",), "", "tiny and base; [speech](speech.md#moonshine) without timestamps"
    ),
    FamilyNote(
        ("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"),
        "",
        "text, images and video; on several ranks each has the whole encoder",
    ),
    FamilyNote(
        ("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration"),
        "",
        "text, images in tiles, and frames of videos; the same on several ranks",
    ),
    FamilyNote(
        ("Gemma3ForConditionalGeneration",),
        "",
        "text and images, whose rows see each other in both directions; the same on several ranks",
    ),
    FamilyNote(
        ("BertModel", "RobertaModel", "XLMRobertaModel"),
        "`bert`",
        "for [vectors](python.md#vectors) only, all-MiniLM-L6-v2 for one; "
        "also `…ForMaskedLM` and `BertForPreTraining`, whose heads are left out",
    ),
    FamilyNote(("DistilBertModel",), "", "for vectors; also `DistilBertForMaskedLM`, without its head"),
    FamilyNote(
        ("ModernBertModel",),
        "`modern-bert`",
        "for vectors; layers with a window to both sides; also `ModernBertForMaskedLM`, without its head",
    ),
    FamilyNote(
        ("BertForSequenceClassification", "DistilBertForSequenceClassification"),
        "",
        "for [labels and scores](rerank.md), and for vectors: cross-encoders such as ms-marco-MiniLM-L-6-v2",
    ),
    FamilyNote(
        (
            "RobertaForSequenceClassification",
            "XLMRobertaForSequenceClassification",
            "ModernBertForSequenceClassification",
        ),
        "`bert`, `modern-bert`",
        "for [labels and scores](rerank.md), and for vectors: bge-reranker-v2-m3, gte-reranker-modernbert-base",
    ),
    FamilyNote(
        (
            "LlamaForSequenceClassification",
            "MistralForSequenceClassification",
            "Qwen2ForSequenceClassification",
            "Qwen3ForSequenceClassification",
        ),
        "",
        "for [labels and scores](rerank.md) by the state of the last token; rerankers and reward models",
    ),
    FamilyNote(
        ("LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model"),
        "",
        "for vectors only, Qwen3-Embedding for one; the same of `…ForCausalLM` beside files of sentence-transformers",
    ),
)

# Decoders that run through the Transformers library, and that tests compare with it. Others of the library are tried.
LIBRARY_FAMILIES = (
    "ArceeForCausalLM",
    "Cohere2ForCausalLM",
    "CohereForCausalLM",
    "Ernie4_5ForCausalLM",
    "Exaone4ForCausalLM",
    "GPTBigCodeForCausalLM",
    "GemmaForCausalLM",
    "GraniteMoeForCausalLM",
    "HeliumForCausalLM",
    "OPTForCausalLM",
    "PhiForCausalLM",
    "PhimoeForCausalLM",
    "StableLmForCausalLM",
    "VaultGemmaForCausalLM",
)

HEAD = ("`architectures`", "GGUF", "notes")


def markdown_table() -> str:
    """Returns the table of docs/models.md."""
    rows: list[tuple[str, ...]] = [HEAD, ("---",) * 3]
    rows += [(", ".join(f"`{name}`" for name in names), gguf, notes) for names, gguf, notes in FAMILIES]
    lines = ("| " + " | ".join(row) + " |" for row in rows)
    return "\n".join(line.replace("|  |", "| |").replace("|  |", "| |") for line in lines)
