"""What folders say about vectors and scores beside config.json: sentence-transformers' files, and what is known of
models whose files do not say what they are for.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ratoon.core.config import ModelConfig
from ratoon.core.errors import ModelError
from ratoon.models.damage import show
from ratoon.models.tokenizer import Tokenizer, read_json, read_json_list

logger = logging.getLogger(__name__)

# Flags of sentence-transformers, exactly one of which is set.
POOLING_MODES = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_cls_token": "first",
}
NEWER_POOLING = {"mean": "mean", "lasttoken": "last", "cls": "first"}  # values of `pooling_mode`
MAX_PROMPT = 2**16  # characters

# The text that Qwen3's rerankers were trained to answer with yes or no.
QWEN3_RERANKER = re.compile("qwen3-reranker", re.IGNORECASE)
QWEN3_TEMPLATE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: {instruction}\n'
    "<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)


def known_additions(raw: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Fields that the config of a model of this name leaves out, although it needs them: Qwen3's rerankers are files of
    a decoder that generates, or of one that classifies."""
    architectures = raw.get("architectures")
    first = architectures[0] if isinstance(architectures, list) and architectures else None
    is_original = raw.get("is_original_qwen3_reranker") is True
    if not is_original and not QWEN3_RERANKER.search(name):
        return {}
    if first == "Qwen3ForCausalLM":
        return {"classifier_from_token": ["no", "yes"], "score_template": QWEN3_TEMPLATE}
    return {"score_template": QWEN3_TEMPLATE} if first == "Qwen3ForSequenceClassification" else {}


def with_answer_ids(config: ModelConfig, tokenizer: Tokenizer, source: str) -> ModelConfig:
    """The config with the ids of the two tokens whose logits are compared."""
    head = config.classifier
    assert head is not None and head.tokens is not None
    found = []
    for token in head.tokens:
        token_id = tokenizer.backend.token_to_id(token)
        if token_id is None or token_id >= config.vocab_size:
            problem = f"config field classifier_from_token names {show(token)}"
            raise ModelError(source, problem, "expected tokens of the model's vocabulary")
        found.append(token_id)
    return replace(config, classifier=replace(head, token_ids=(found[0], found[1])))


@dataclass(frozen=True, slots=True)
class SentenceTransformer:
    """What a folder of sentence-transformers adds to a model."""

    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    has_dense: bool = False
    is_vector_model: bool = False  # modules.json names a pooling: the model was trained for its vectors

    def applied_to(self, config: ModelConfig) -> ModelConfig:
        """A decoder that was trained for its vectors needs no head over the vocabulary; its file may have none. Qwen3's
        were trained so that vectors can be cut."""
        if not self.is_vector_model or config.encoder is not None or config.classifier is not None:
            return config
        if config.causal and config.architecture in ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM",
                                                     "Qwen3ForCausalLM"):  # fmt: skip
            config = replace(config, has_lm_head=False)
        if config.architecture.startswith("Qwen3") and config.matryoshka is None:
            config = replace(config, matryoshka=())
        return config


def read_sentence_transformers(folder: Path) -> SentenceTransformer | None:
    """None: the folder has no such files."""
    modules = read_json_list(folder / "modules.json")
    raw = read_json(folder / "config_sentence_transformers.json")
    if not modules and not raw:
        return None
    kinds = [str(one.get("type", "")).rpartition(".")[2] for one in modules if isinstance(one, Mapping)]
    source = str(folder / "config_sentence_transformers.json")
    prompts = raw.get("prompts") or {}
    is_fine = isinstance(prompts, Mapping) and all(
        isinstance(name, str) and isinstance(text, str) and len(text) <= MAX_PROMPT for name, text in prompts.items()
    )
    if not is_fine:
        raise ModelError(source, f"prompts is {show(prompts)}", "an object of texts by name")
    default = raw.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise ModelError(source, f"default_prompt_name is {show(default)}", f"one of {', '.join(prompts) or 'none'}")
    return SentenceTransformer(dict(prompts), default, "Dense" in kinds, "Pooling" in kinds)


def read_pooling(folder: Path) -> str | None:
    """The pooling of a sentence-transformers folder, as in PoolingParams; None if unsupported."""
    raw = read_json(folder / "1_Pooling" / "config.json")
    ours = next((ours for theirs, ours in POOLING_MODES.items() if raw.get(theirs) is True), None)
    others = [mode for mode, is_set in raw.items() if mode.startswith("pooling_mode") and is_set is True]
    if ours is None and isinstance(mode := raw.get("pooling_mode"), str):
        ours = NEWER_POOLING.get(mode)
        others = [] if ours else [mode]
    if ours is None and others:
        logger.warning("%s asks for %s, which is not there: its vectors will differ", folder, ", ".join(others))
    if (folder / "2_Dense").exists():
        logger.warning("%s has a layer after the pooling, which is not applied: its vectors will differ", folder)
    return ours
