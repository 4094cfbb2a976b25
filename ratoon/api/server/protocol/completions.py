"""/v1/completions: complete a prompt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from ratoon.api.server.protocol.base import (
    CONSTRAINTS,
    AnswerModel,
    ContinuationAnswer,
    Entries,
    FoundChunkChoice,
    Int,
    MediaUrls,
    Prompt,
    PromptLogprobs,
    Prompts,
    RequestModel,
    Size,
    Suffix,
    Usage,
)
from ratoon.api.server.protocol.hidden_states import ChoiceHiddenStates
from ratoon.api.server.protocol.sampling import SamplingFields

DEFAULT_MAX_TOKENS = 16  # OpenAI's


class PromptEmbeds(RequestModel):
    """Embeddings in the place of the tokens of a prompt, in the form in which /v1/hidden_states answers."""

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    shape: Annotated[Entries[Size], Field(min_length=2, max_length=3)] = Field(
        description="Tokens, the model's width; a 1 may come before them"
    )
    data: str = Field(description="base64: the numbers row by row, little-endian")


def _not_a_file(value: Any) -> Any:
    if isinstance(value, str):
        raise ValueError("is text: files of torch.save are pickles, which are not read; expected an object")
    return value


class CompletionRequest(SamplingFields):
    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        **{name: hint for name, hint in CONSTRAINTS.items() if name != "prompt_embeds"},
        "suffix": "write the model's own fill-in-the-middle markers into the prompt",
    }

    prompt: Prompts | None = Field(
        None,
        description="Text, token ids, or a list of either; needed unless there is encoder_prompt or continuation_of, "
        "beside which it is the whole prompt, used only if the earlier answer is unknown",
    )
    encoder_prompt: Prompt | None = Field(
        None, description="Of an encoder-decoder model: text or token ids, instead of prompt"
    )
    decoder_prompt: Prompt | None = Field(
        None, description="Of an encoder-decoder model: text or token ids that its decoder begins with"
    )
    prompt_embeds: Annotated[PromptEmbeds | None, BeforeValidator(_not_a_file)] = Field(
        None, description="Embeddings in the place of the tokens of a prompt, instead of prompt"
    )
    continuation_suffix: Suffix | None = Field(None, description="Text or token ids after the earlier answer")
    continuation_at: Int | None = Field(
        None, description="Continue after this many of its tokens, prompt and answer together; default: all"
    )
    multi_modal_data: MediaUrls | None = Field(
        None,
        description='{"image": [url, …], "video": [url, …]}: data URLs or addresses, of a prompt that is alone or of '
        "continuation_suffix, which has one placeholder for each",
    )
    mm_processor_kwargs: dict[str, Any] | None = Field(
        None, description="Options for the preprocessing of images and videos, such as max_pixels"
    )
    logprobs: Int | None = Field(None, description="Alternatives for each token of the answer")
    echo: bool | None = Field(None, description="Begin the answer with the prompt, the decoder's where there are two")
    best_of: Int | None = Field(None, description="Accepted if it equals n; for a beam search, the width")


class CompletionLogprobs(AnswerModel):
    """Four lists with an entry for each token."""

    tokens: list[str] = Field(description="The tokens' texts; part of a character is written as bytes:\\x…")
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int] = Field(description="Offset of the token in the choice's text, in characters")
    top_token_ids: list[dict[str, int] | None] | None = Field(
        None, description="With return_token_ids: the ids of the tokens that top_logprobs names"
    )


class CompletionChoice(FoundChunkChoice):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length", "abort"] | None
    stop_reason: int | str | None = Field(None, description="The stop token or text that ended it")
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    encoder_prompt_token_ids: list[int] | None = Field(
        None, description="Of an encoder-decoder model; prompt_token_ids are then its decoder's"
    )
    token_ids: list[int] | None = None
    hidden_states: ChoiceHiddenStates | None = Field(None, description="In a stream, in the choice's last chunk")


class Completion(AnswerModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    continuation: ContinuationAnswer | None = Field(None, description="In a stream, in the first chunk only")
    kv_transfer_params: dict[str, Any] | None = Field(
        None, description="Of a request with do_remote_decode: what the engine that goes on with it is given"
    )
