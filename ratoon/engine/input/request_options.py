"""Keywords of the methods of LLM and AsyncLLM that make requests, declared once for both.

Where noted, LLM also takes a list with one value for each prompt.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypedDict

from ratoon.core.adapters import Adapter, BaseModel, LoRARequest
from ratoon.core.params import SamplingParams
from ratoon.core.suggestions import unknown_keyword
from ratoon.engine.input.prompts import Prompt

AdapterName: TypeAlias = str | os.PathLike[str] | Adapter | BaseModel | Sequence[str | None] | None


class RequestOptions(TypedDict, total=False):
    """Options of any request beside its prompt and its params."""

    cache_salt: str | None  # blocks are shared only with requests of the same salt; a continuation has its parent's
    owner: str | None  # only the same owner can continue, list, forget and abort it; ids are an owner's own
    arrival_time: float | None  # on the clock of time.monotonic; None: now
    data_parallel_rank: int | None  # the engine that gets it; None: the best one, or the one where its parent ran
    trace_headers: Mapping[str, str] | None  # traceparent, tracestate: the span that it belongs to
    adapter: AdapterName  # name or path of an adapter; a continuation has its parent's; LLM: or one for each prompt
    lora_request: LoRARequest | Sequence[LoRARequest | None] | None  # vLLM's form of it


class PoolingOptions(RequestOptions, total=False):
    priority: int | Sequence[int] | None  # lower goes first, under the policy "priority"; LLM: or one for each


class GenerationOptions(PoolingOptions, total=False):
    retain_kv: float | None  # seconds that the memory is kept for continuations, once the answer has ended
    session: str | None  # a name; the newest texts of a session are kept longest. A continuation has its parent's
    retention: str | None  # "in_memory": blocks are not written to files; "24h": kept there for a day, if there is room
    # vLLM's: {"do_remote_decode": true}: another engine goes on with it, and the output has what that one is given
    kv_transfer_params: Mapping[str, Any] | None
    in_place_of: str | None  # the id of an unknown parent, reported in the output's `continuation`


class ContinuationOptions(GenerationOptions, total=False):
    choice: int  # one of several choices of the parent
    at: int | None  # number of the parent's tokens to keep, prompt and answer together
    wait: bool  # True: a parent that still runs is waited for; False: forked where it is
    prompt: Prompt | None  # the whole prompt, suffix included, if the parent is unknown


class ChatOptions(GenerationOptions, total=False):
    chat_template: str | None  # in the place of the model's own, or the name of one that it has
    add_generation_prompt: bool | None  # None: unless continue_final_message is set
    continue_final_message: bool  # continue the last message, which is the assistant's
    tools: list[dict[str, Any]] | None
    chat_template_kwargs: Mapping[str, Any] | None  # further variables for the template


class ExtractionOptions(RequestOptions, total=False):
    original_request_id: str | Sequence[str] | None  # in the place of a prompt; LLM: or a list
    choice: int | Sequence[int]  # of that request; LLM: or one for each


def verify_keywords(method: str, options: Mapping[str, Any], kind: type) -> None:
    """TypeError, with a suggestion, for a keyword that a method does not have. `kind` is the TypedDict of its
    options."""
    known = kind.__annotations__
    for name in options:
        if name in known:
            continue
        if name in SamplingParams.__struct_fields__:
            how = f"SamplingParams(…, {name}=…) as sampling_params"
            raise TypeError(f"{method} has no {name!r}; it is a field of the params: give {how}")
        raise unknown_keyword(method, name, known)


def split_chat_options(options: ChatOptions) -> tuple[dict[str, Any], Any]:
    """The variables of a chat template, and what is left: GenerationOptions."""
    left: dict[str, Any] = dict(options)
    template, further = left.pop("chat_template", None), left.pop("chat_template_kwargs", None)
    variables = {
        "add_generation_prompt": left.pop("add_generation_prompt", None),
        "continue_final_message": left.pop("continue_final_message", False),
        "tools": left.pop("tools", None),
        **({} if template is None else {"chat_template": template}),
        **(further or {}),
    }
    return variables, left
