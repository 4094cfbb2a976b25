"""Requests for hidden states, as the engine core gets them: of a prompt, or of a choice of an earlier request.

The sequence ends with the last position that is asked for: what lies after it changes nothing before it. Where every
token sees all others, the selector asks for the last one in any case.
"""

from __future__ import annotations

from ratoon.core.encoder import EncoderInput
from ratoon.core.media import cut_features, end_of_image
from ratoon.core.params import ENCODER, HiddenStatesParams
from ratoon.core.request import EngineCoreRequest
from ratoon.engine.input.hidden_states import HiddenStatesSelector, Selection
from ratoon.engine.input.prompt_processor import ModelInput
from ratoon.engine.output.roots import Root


def extract_from_prompt(
    selector: HiddenStatesSelector, request_id: str, model_input: ModelInput, params: HiddenStatesParams
) -> tuple[EngineCoreRequest, Selection]:
    token_ids, encoder_input = model_input.token_ids, model_input.encoder_input
    if params.side == ENCODER:
        return _of_encoder(selector, request_id, token_ids, encoder_input, params)
    selection = selector.select(params, len(token_ids), 0, model_input.mm_features, _num_positions(encoder_input))
    request = _request(request_id, token_ids, encoder_input, selection)
    request.mm_features = cut_features(model_input.mm_features, len(request.prompt_token_ids))
    request.rope = model_input.rope
    return request, selection


def extract_from_root(
    selector: HiddenStatesSelector,
    request_id: str,
    root: Root,
    choice: int,
    params: HiddenStatesParams,
) -> tuple[EngineCoreRequest, Selection]:
    """It reads what is still there of the root."""
    if params.side == ENCODER:  # of which nothing is kept: the encoder runs again
        root.verify_choice(choice)
        request, selection = _of_encoder(selector, request_id, root.prompt_token_ids, root.encoder_input, params)
    else:
        token_ids = root.tokens(choice, field="original_request_id")
        num_prompt_tokens = len(root.prompt_token_ids)
        selection = selector.select(
            params,
            num_prompt_tokens,
            len(token_ids) - num_prompt_tokens,
            num_encoder_positions=_num_positions(root.encoder_input),
        )
        request = _request(request_id, token_ids, root.encoder_input, selection)
        if root.mm_features:
            num_tokens = end_of_image(root.mm_features, len(request.prompt_token_ids))
            request.prompt_token_ids = token_ids[:num_tokens]
            request.mm_features = root.media_at(num_tokens, whole_images=False)
        request.rope = root.rope
        request.continuation_of = root.branch_id(choice)
        request.continuation_token_ids = []
    request.cache_salt = root.cache_salt
    request.owner = root.owner
    request.retention = root.retention
    request.preferred_rank = root.engine
    return request, selection


def _of_encoder(
    selector: HiddenStatesSelector,
    request_id: str,
    token_ids: list[int],
    encoder_input: EncoderInput | None,
    params: HiddenStatesParams,
) -> tuple[EngineCoreRequest, Selection]:
    """Positions are those of the encoder's input; the decoder's prompt stays as it is, and is not run."""
    assert encoder_input is not None, "params that were verified ask for it of encoder-decoder models alone"
    selection = selector.select(params, encoder_input.num_positions, 0)
    return _request(request_id, token_ids, encoder_input, selection), selection


def _num_positions(encoder_input: EncoderInput | None) -> int:
    return 0 if encoder_input is None else encoder_input.num_positions


def _request(
    request_id: str, token_ids: list[int], encoder_input: EncoderInput | None, selection: Selection
) -> EngineCoreRequest:
    extraction = selection.extraction
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=token_ids if extraction.of_encoder else token_ids[: extraction.positions[-1] + 1],
        params=extraction,
        encoder_input=encoder_input,
    )
