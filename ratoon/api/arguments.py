"""What people pass to an LLM, brought into one form: one or many, params of either kind. Nothing here knows a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from ratoon.core.errors import RequestError
from ratoon.core.outputs import RequestOutput
from ratoon.core.params import BeamSearchParams, GenerationParams, RequestOutputKind, SamplingParams

UseTqdm: TypeAlias = bool | Callable[..., Any] | None


def is_sequence(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))


def is_many(prompts: Any) -> bool:
    """A list of prompts, or of outputs, and not one prompt that is a list of token ids. An empty list is no prompts."""
    if not is_sequence(prompts):
        return False
    return not prompts or isinstance(prompts[0], (str, Mapping, RequestOutput)) or is_sequence(prompts[0])


def one_for_each(field: str, value: Any, count: int, default: Any) -> list[Any]:
    if value is None:
        return [default] * count
    if not is_sequence(value):
        return [value] * count
    if len(value) != count:
        raise RequestError(field, f"has {len(value)} entries for {count} prompts", "one for all, or one for each")
    return [default if entry is None else entry for entry in value]


def with_index(error: RequestError, index: int, field: str = "prompts") -> RequestError:
    """The same error, of one of many."""
    if error.field == field:
        return type(error)(f"{field}[{index}]", error.problem, error.expected)
    return error.inside(f"{field}[{index}]")


def in_conversation(error: RequestError, index: int) -> RequestError:
    """The same error, of one of many conversations: `messages[2][0].role`."""
    if not error.field.startswith("messages"):
        return error
    field = f"messages[{index}]" + error.field.removeprefix("messages")
    return type(error)(field, error.problem, error.expected)


def with_output_kind(params: Any, kind: RequestOutputKind) -> GenerationParams:
    """A copy that asks for outputs of this kind. A beam search tells the best text anew where others tell what is new.
    RequestError: these are no params."""
    if isinstance(params, BeamSearchParams):
        kind = RequestOutputKind.CUMULATIVE if kind == RequestOutputKind.DELTA else kind
    elif not isinstance(params, SamplingParams):
        problem = f"{params!r} is not SamplingParams"
        raise RequestError("sampling_params", problem, "a SamplingParams or a BeamSearchParams")
    return msgspec.structs.replace(params, output_kind=kind)


def verify_beam_search_params(params: Any) -> None:
    """RequestError for anything but BeamSearchParams, or a list of them."""
    for one in params if is_sequence(params) else [params]:
        if not isinstance(one, BeamSearchParams):
            raise RequestError("params", f"{one!r} is not BeamSearchParams", "BeamSearchParams(beam_width=…)")


def wants_progress(progress: bool, use_tqdm: UseTqdm) -> bool:
    """`use_tqdm` is the same in vLLM's words; a class of bars in its place asks for one."""
    return progress if use_tqdm is None else bool(use_tqdm)


def refuse_lora(lora_request: Any) -> None:
    if lora_request is not None:
        raise RequestError("lora_request", "adapters are not supported", "leave it out")
