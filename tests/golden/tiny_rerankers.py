"""Folders of small random models that score and label texts, with a tokenizer of words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from tests.golden.tiny_classifiers import make_model, save_model
from tests.golden.tiny_models import VOCAB_SIZE

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
WORDS = ["no", "yes", "query", "document", ":", *(f"w{index}" for index in range(VOCAB_SIZE - len(SPECIAL) - 5))]


def text_of(*numbers: int) -> str:
    return " ".join(f"w{number}" for number in numbers)


def write_tokenizer(folder: Path, special: bool = True) -> Any:
    """A tokenizer of words; with `special`, it marks texts and pairs as BERT's does. Returns transformers' reading."""
    words = {word: index for index, word in enumerate([*SPECIAL, *WORDS])}
    backend = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(SPECIAL)
    if special:
        backend.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[("[CLS]", words["[CLS]"]), ("[SEP]", words["[SEP]"])],
        )  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"pad_token": "[PAD]", "unk_token": "[UNK]"}))
    return transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), pad_token="[PAD]")


def save_cross_encoder(
    folder: Path, architecture: str = "BertForSequenceClassification", **more: Any
) -> tuple[Any, Any]:
    """A cross-encoder, and transformers' model and tokenizer of it."""
    tokenizer = write_tokenizer(folder)
    return save_model(folder, architecture, **({"num_labels": 1} | more)), tokenizer


@torch.inference_mode()
def oracle_logits(model: Any, tokenizer: Any, pairs: list[tuple[str, str]], **options: Any) -> torch.Tensor:
    """[pairs]: by transformers, all in one batch with padding."""
    firsts, seconds = ([pair[side] for pair in pairs] for side in (0, 1))
    batch = tokenizer(firsts, seconds, padding=True, return_tensors="pt", return_token_type_ids=True, **options)
    wanted = {name: batch[name] for name in ("input_ids", "attention_mask", "token_type_ids")}
    if getattr(model.config, "type_vocab_size", 1) == 1:
        del wanted["token_type_ids"]
    return model(**wanted).logits[:, 0]


def save_yes_or_no(folder: Path) -> Any:
    """A decoder that generates, as Qwen3's rerankers are stored."""
    write_tokenizer(folder, special=False)
    return save_model(folder, "Qwen3ForCausalLM", tie_word_embeddings=True, gain=3.0)


def save_converted(folder: Path, original: Any) -> None:
    """The same as a decoder that classifies: its weight is the difference of two rows of the vocabulary's."""
    write_tokenizer(folder, special=False)
    model = make_model("Qwen3ForSequenceClassification", num_labels=1)
    model.model.load_state_dict(original.model.state_dict())
    table = original.lm_head.weight.data
    yes, no = (len(SPECIAL) + WORDS.index(word) for word in ("yes", "no"))
    model.score.weight.data = (table[yes] - table[no])[None]
    model.save_pretrained(folder)
