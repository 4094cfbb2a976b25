"""The extraction that a choice turns into when its text has ended and `return_hidden_states` asked for it.

The scheduler opens it, and the client's ledger records it, both by `reading_of`; the front end expects its outputs
under its id. Pure; an error names the field and the numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

from ratoon.core.errors import RequestError
from ratoon.core.media import cut_features, end_of_image
from ratoon.core.params import SamplingParams
from ratoon.core.request import EngineCoreRequest, Extraction, RequestParams, branch_id_of

Piece: TypeAlias = int | Sequence[int | None]  # one position, or a run of them: from, up to but not including

SCOPE_NAMES = {"all": "sequence", "prompt": "prompt", "output": "output"}


def reading_id(branch_id: str) -> str:
    """The request id of the reading of a branch."""
    return f"{branch_id}.states"


def asks_for_states(request: EngineCoreRequest) -> bool:
    params = request.generation_params
    return params is not None and params.return_hidden_states is not None


def awaits_count(params: RequestParams | None) -> bool:
    """Whether a stop string may cut a text that ended in the engine. Only the front end knows, and always tells, how
    many tokens count."""
    return isinstance(params, SamplingParams) and bool(params.stop)


def reading_of(request: EngineCoreRequest, choice: int, token_ids: list[int]) -> EngineCoreRequest | None:
    """The extraction for a choice that generated these tokens. None: it does not have the requested positions."""
    params = request.generation_params
    assert params is not None and params.return_hidden_states is not None
    asked = params.return_hidden_states
    assert asked.layers_passed is not None, "params that were completed"
    num_prompt_tokens = len(request.prompt_token_ids)
    try:
        runs = place_in_scope(asked.positions, asked.scope, num_prompt_tokens, len(token_ids))
    except RequestError:
        return None  # the front end finds the same, and reports it
    positions = sorted(set().union(*runs))
    branch_id = branch_id_of(request.request_id, choice)
    num_tokens = end_of_image(request.mm_features, positions[-1] + 1)
    return EngineCoreRequest(
        request_id=reading_id(branch_id),
        prompt_token_ids=(request.prompt_token_ids + token_ids)[:num_tokens],
        params=Extraction(positions, asked.layers_passed, asked.dtype, asked.deadline),
        arrival_time=request.arrival_time,
        cache_salt=request.cache_salt,
        adapter=request.adapter,
        encoder_input=request.encoder_input,
        mm_features=cut_features(request.mm_features, num_tokens),
        rope=request.rope,
        continuation_of=branch_id,
        continuation_token_ids=[],
        owner=request.owner,
        retention=request.retention,
    )


def place_in_scope(
    pieces: Iterable[Piece], scope: str, num_prompt_tokens: int, num_output_tokens: int, name: str | None = None
) -> list[range]:
    """The runs in the whole sequence, where the pieces count in a part of it."""
    first = num_prompt_tokens if scope == "output" else 0
    last = num_prompt_tokens if scope == "prompt" else num_prompt_tokens + num_output_tokens
    runs = place_positions(pieces, last - first, SCOPE_NAMES[scope] if name is None else name)
    return [range(run.start + first, run.stop + first) for run in runs]


def place_positions(pieces: Iterable[Piece], length: int, name: str) -> list[range]:
    """The runs in a part of a sequence of this length and name. Negative numbers count from its end."""
    if length == 0:
        raise RequestError("positions", f"the {name} has no tokens", "a scope that has some")
    runs = []
    for piece in pieces:
        if isinstance(piece, int):
            start = _place(piece, length, name, highest=length - 1)
            runs.append(range(start, start + 1))
            continue
        first, last = piece
        assert first is not None
        start = _place(first, length, name, highest=length)
        stop = length if last is None else _place(last, length, name, highest=length)
        if stop < start:
            raise RequestError(
                "positions",
                f"{list(piece)} goes from {start} to {stop} in a {name} of {length} tokens",
                "a stop that is not before the start",
            )
        runs.append(range(start, stop))
    if not any(runs):
        raise RequestError("positions", f"name none of the {length} tokens of the {name}", "at least one position")
    return runs


def _place(position: int, length: int, name: str, highest: int) -> int:
    if not -length <= position <= highest:
        raise RequestError(
            "positions",
            f"{position} is out of range: the {name} has {length} tokens",
            f"from {-length} to {highest}",
        )
    return position + length if position < 0 else position
