"""Ratoon: an inference engine for language models in which a finished generation is a root, not garbage.

Importing this package loads neither torch nor anything else that is slow; a name below loads what it needs when it is
first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ratoon.version import __version__

if TYPE_CHECKING:
    from ratoon.api.answer_parts.parts import ToolCall, WholeAnswer
    from ratoon.api.chat_turn import ChatTurn
    from ratoon.api.llm import LLM
    from ratoon.core.adapters import LoRARequest
    from ratoon.core.errors import (
        ConfigError,
        DeadlineError,
        EngineAwayError,
        EngineDeadError,
        EngineError,
        ModelError,
        QueueFullError,
        RatoonError,
        RequestError,
        TooLargeError,
        UnknownParentError,
    )
    from ratoon.core.outputs import (
        ClassificationOutput,
        CompletionOutput,
        Continuation,
        EmbeddingOutput,
        HiddenStatesOutput,
        RequestOutput,
        RerankOutput,
        ScoringOutput,
    )
    from ratoon.core.params import (
        BeamSearchParams,
        HiddenStatesParams,
        PoolingParams,
        RequestOutputKind,
        SamplingParams,
        TimestampRules,
    )
    from ratoon.core.structured import StructuredOutput
    from ratoon.engine.async_llm import AsyncLLM
    from ratoon.engine.input.prompts import AudioPrompt, ExplicitEncoderDecoderPrompt, TextPrompt, TokensPrompt
    from ratoon.transcription.options import TranscriptionOptions
    from ratoon.transcription.results import Transcription
    from ratoon.transcription.transcriber import async_transcriber

__all__ = [
    "LLM",
    "AsyncLLM",
    "TextPrompt",
    "TokensPrompt",
    "AudioPrompt",
    "ExplicitEncoderDecoderPrompt",
    "SamplingParams",
    "BeamSearchParams",
    "PoolingParams",
    "HiddenStatesParams",
    "LoRARequest",
    "StructuredOutput",
    "TimestampRules",
    "ChatTurn",
    "WholeAnswer",
    "ToolCall",
    "TranscriptionOptions",
    "Transcription",
    "async_transcriber",
    "RequestOutputKind",
    "RequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "ClassificationOutput",
    "ScoringOutput",
    "RerankOutput",
    "HiddenStatesOutput",
    "RatoonError",
    "RequestError",
    "ConfigError",
    "ModelError",
    "EngineError",
    "EngineAwayError",
    "EngineDeadError",
    "UnknownParentError",
    "QueueFullError",
    "TooLargeError",
    "DeadlineError",
    "Continuation",
    "__version__",
]

_HOMES = {
    "LLM": "ratoon.api.llm",
    "AsyncLLM": "ratoon.engine.async_llm",
    "TextPrompt": "ratoon.engine.input.prompts",
    "TokensPrompt": "ratoon.engine.input.prompts",
    "AudioPrompt": "ratoon.engine.input.prompts",
    "ExplicitEncoderDecoderPrompt": "ratoon.engine.input.prompts",
    "SamplingParams": "ratoon.core.params",
    "BeamSearchParams": "ratoon.core.params",
    "PoolingParams": "ratoon.core.params",
    "HiddenStatesParams": "ratoon.core.params",
    "LoRARequest": "ratoon.core.adapters",
    "StructuredOutput": "ratoon.core.structured",
    "TimestampRules": "ratoon.core.params",
    "ChatTurn": "ratoon.api.chat_turn",
    "WholeAnswer": "ratoon.api.answer_parts.parts",
    "ToolCall": "ratoon.api.answer_parts.parts",
    "TranscriptionOptions": "ratoon.transcription.options",
    "Transcription": "ratoon.transcription.results",
    "async_transcriber": "ratoon.transcription.transcriber",
    "RequestOutputKind": "ratoon.core.params",
    "RequestOutput": "ratoon.core.outputs",
    "CompletionOutput": "ratoon.core.outputs",
    "EmbeddingOutput": "ratoon.core.outputs",
    "ClassificationOutput": "ratoon.core.outputs",
    "ScoringOutput": "ratoon.core.outputs",
    "RerankOutput": "ratoon.core.outputs",
    "HiddenStatesOutput": "ratoon.core.outputs",
    "RatoonError": "ratoon.core.errors",
    "RequestError": "ratoon.core.errors",
    "ConfigError": "ratoon.core.errors",
    "ModelError": "ratoon.core.errors",
    "EngineError": "ratoon.core.errors",
    "EngineAwayError": "ratoon.core.errors",
    "EngineDeadError": "ratoon.core.errors",
    "UnknownParentError": "ratoon.core.errors",
    "QueueFullError": "ratoon.core.errors",
    "TooLargeError": "ratoon.core.errors",
    "DeadlineError": "ratoon.core.errors",
    "Continuation": "ratoon.core.outputs",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'ratoon' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(home), name)
