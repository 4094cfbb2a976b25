"""When a branch ends. Stop strings are not looked for here: they need text, which only the front end has."""

from __future__ import annotations

from ratoon.core.request import FinishReason
from ratoon.scheduling.branch import Branch


def check_stop(branch: Branch, token_ids: list[int]) -> tuple[int, FinishReason | None, int | None]:
    """How many of the sampled tokens count, why the branch ends there (None: it goes on), and the stop token to report.

    Called before the tokens are appended. The end-of-sequence tokens are stop tokens too, but only one that the caller
    named is reported. A stop token before `min_tokens` is an ordinary token; the sampler should not have chosen it. One
    that was forced because there is room for no other is the end of the room.
    """
    params = branch.request.params
    num_output_tokens = branch.num_output_tokens
    room = branch.max_total_tokens - branch.num_tokens
    for count, token in enumerate(token_ids, start=1):
        if count >= room and token in (params.forced_eos_token_id or ()):
            return count, FinishReason.LENGTH, None
        if token in branch.stop_token_ids and num_output_tokens + count > params.min_tokens:
            return count, FinishReason.STOP, token if token in (params.stop_token_ids or ()) else None
        if count >= room:
            return count, FinishReason.LENGTH, None
    return len(token_ids), None, None
