"""What people pass to an LLM, one or many, brought into one form. Nothing here knows a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from ratoon.core.errors import RequestError
from ratoon.core.outputs import RequestOutput

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


def ids_for_each(request_id: Any, count: int, first: int) -> list[str]:
    """The ids that were asked for, or numbers that go on from the first."""
    if isinstance(request_id, str) and count > 1:
        raise RequestError("request_id", f"{request_id!r} is one for {count} prompts", "a list, with one for each")
    given = one_for_each("request_id", request_id, count, None)
    ids = [str(first + index) if one is None else one for index, one in enumerate(given)]
    if len({*map(str, ids)}) < count:
        raise RequestError("request_id", "names two prompts", "an id of its own for each")
    return ids


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


def wants_progress(progress: bool, use_tqdm: UseTqdm) -> bool:
    """`use_tqdm` is the same in vLLM's words; a class of bars in its place asks for one."""
    return progress if use_tqdm is None else bool(use_tqdm)
