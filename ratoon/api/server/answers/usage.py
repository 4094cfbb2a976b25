"""Counts tokens for the `usage` of an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ratoon.api.server.prompts import EncodedPrompt
from ratoon.core.outputs import RequestOutput


class UsageCounter:
    def __init__(self, prompts: Sequence[EncodedPrompt]) -> None:
        self._num_prompt_tokens = [len(prompt.token_ids) for prompt in prompts]
        self.num_completion_tokens = 0
        self._num_cached_tokens = [0] * len(prompts)

    def add(self, index: int, output: RequestOutput) -> None:
        """Count what an output brought that is new."""
        self._num_cached_tokens[index] = output.num_cached_tokens or 0
        # Of a continuation, and of what a decoder begins with, known only now.
        prompts = (output.prompt_token_ids, output.encoder_prompt_token_ids)
        self._num_prompt_tokens[index] = sum(len(token_ids or ()) for token_ids in prompts)
        for choice in output.outputs:
            self.num_completion_tokens += len(choice.token_ids)

    def as_dict(self) -> dict[str, Any]:
        num_prompt_tokens = sum(self._num_prompt_tokens)
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": self.num_completion_tokens,
            "total_tokens": num_prompt_tokens + self.num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._num_cached_tokens)},
        }
