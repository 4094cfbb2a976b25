"""Requests for hidden states, as the engine core gets them: of a prompt, or of a choice of an earlier request.

The sequence ends with the last position that is asked for: what lies behind it changes nothing before it.
"""

from __future__ import annotations

from ratoon.core.params import HiddenStatesParams, SamplingParams
from ratoon.core.request import EngineCoreRequest
from ratoon.engine.hidden_states import HiddenStatesSelector, Selection
from ratoon.engine.roots import Root


def extract_from_prompt(
    selector: HiddenStatesSelector, request_id: str, token_ids: list[int], params: HiddenStatesParams
) -> tuple[EngineCoreRequest, Selection]:
    selection = selector.select(params, len(token_ids), 0)
    return _request(request_id, token_ids, selection), selection


def extract_from_root(
    selector: HiddenStatesSelector,
    request_id: str,
    root: Root,
    choice: int,
    params: HiddenStatesParams,
    ends_lease: bool = False,
) -> tuple[EngineCoreRequest, Selection]:
    """It reads what is still there of the root. With `ends_lease` that is given back when it was read."""
    token_ids = root.tokens(choice, field="original_request_id")
    num_prompt_tokens = len(root.prompt_token_ids)
    selection = selector.select(params, num_prompt_tokens, len(token_ids) - num_prompt_tokens)
    selection.extraction.ends_lease = ends_lease
    request = _request(request_id, token_ids, selection)
    request.cache_salt = root.cache_salt
    request.adapter = root.adapter
    request.owner = root.owner
    request.continuation_of = root.branch_id(choice)
    request.continuation_token_ids = []
    request.preferred_rank = root.engine
    return request, selection


def _request(request_id: str, token_ids: list[int], selection: Selection) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=token_ids[: selection.extraction.positions[-1] + 1],
        sampling_params=SamplingParams(max_tokens=1, detokenize=False),  # the field is not optional
        extraction=selection.extraction,
    )
