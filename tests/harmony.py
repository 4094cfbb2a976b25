"""The format of gpt-oss for tests: a chat template that writes it, a tokenizer of bytes with its special tokens, and a
tiny model of that family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from ratoon.models.token_bound import byte_level_alphabet
from ratoon.models.tokenizer import Tokenizer

END_OF_TEXT = "<|endoftext|>"
MARKS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>")
# Functions are shown as JSON, and not as TypeScript as the model's own template does; messages have its form.
TEMPLATE = """<|start|>system<|message|>Reasoning: {{ reasoning_effort | default('medium') }}
# Valid channels: analysis, commentary, final.<|end|>
{%- if tools %}<|start|>developer<|message|>namespace functions {{ tools | tojson }}<|end|>{% endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{%- for call in message.tool_calls or [] %}<|start|>assistant<|channel|>commentary \
to=functions.{{ call.function.name }} <|constrain|>json<|message|>{{ call.function.arguments \
if call.function.arguments is string else call.function.arguments | tojson }}<|call|>{% endfor %}
{%- if message.content %}<|start|>assistant<|channel|>final<|message|>{{ message.content }}<|end|>{% endif %}
{%- elif message.role == 'tool' %}<|start|>functions to=assistant<|channel|>commentary<|message|>\
{{ message.content }}<|end|>
{%- else %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""


def harmony_backend() -> Backend:
    """A token for each byte, and special ones behind them. The first of those ends the texts of scripted engines."""
    backend = Backend(models.BPE(vocab=byte_level_alphabet(), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([END_OF_TEXT, "<|reserved|>", *MARKS])
    return backend


def harmony_tokenizer() -> Tokenizer:
    backend = harmony_backend()
    return Tokenizer(backend, {"eos_token": "<|return|>"}, {"default": TEMPLATE})


def harmony_ids(text: str) -> list[int]:
    return harmony_tokenizer().encode(text, False)


def write_tiny_gpt_oss(folder: Path) -> Path:
    """A mixture of gpt-oss's family with weights that the engine makes up."""
    folder.mkdir(parents=True, exist_ok=True)
    backend = harmony_backend()
    ends = [backend.token_to_id(mark) for mark in ("<|return|>", "<|call|>")]
    config: dict[str, Any] = {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "vocab_size": backend.get_vocab_size(),
        "hidden_size": 32,
        "intermediate_size": 32,
        "head_dim": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"],
        "max_position_embeddings": 2048,
        "rope_theta": 150000.0,
        "rms_norm_eps": 1e-5,
        "attention_bias": True,
        "eos_token_id": ends[0],
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|return|>", "chat_template": TEMPLATE}))
    backend.save(str(folder / "tokenizer.json"))
    return folder
