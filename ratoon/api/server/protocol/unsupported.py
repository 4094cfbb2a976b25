"""Fields of other servers that constrain the answer. They are refused by name, on a lenient server too: an answer that
was not constrained as it was asked to be would look as if it had been."""

from __future__ import annotations

from collections.abc import Mapping

STRUCTURED = "structured output does not exist yet; leave it out"
LENGTH = "use max_tokens"
LOGITS = "use logit_bias, allowed_token_ids or bad_words"

# A * at the end stands for any further characters.
CONSTRAINTS: Mapping[str, str] = {
    "guided_*": STRUCTURED,  # vLLM
    "structured_outputs": STRUCTURED,
    "structural_tag": STRUCTURED,
    "grammar": STRUCTURED,  # llama.cpp
    "json_schema": STRUCTURED,
    "regex": STRUCTURED,  # SGLang
    "ebnf": STRUCTURED,
    "format": STRUCTURED,  # Ollama
    "logits_processors": LOGITS,
    "custom_logit_processor": LOGITS,
    "stop_regex": "use stop",
    "max_new_tokens": LENGTH,
    "max_output_tokens": LENGTH,
    "n_predict": LENGTH,
    "num_predict": LENGTH,
    "truncate_prompt_tokens": "a prompt is never cut: shorten it",
    "prompt_embeds": "send text or token ids",
    "documents": "use chat_template_kwargs, if the model's chat template knows such a thing",
}


def find_hint(table: Mapping[str, str], name: str) -> str | None:
    """What a table says about a field; None: it is not in there."""
    if name in table:
        return table[name]
    return next((hint for key, hint in table.items() if key[-1] == "*" and name.startswith(key[:-1])), None)
