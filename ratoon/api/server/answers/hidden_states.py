"""Hidden states in an answer: base64 in JSON, or the error that stands in their place."""

from __future__ import annotations

from typing import Any

from ratoon.api.hidden_states import facts, raw_bytes
from ratoon.api.server.errors import as_api_error, generation_failed
from ratoon.api.server.large_json import Base64
from ratoon.core.outputs import HiddenStatesOutput


def content(output: HiddenStatesOutput) -> dict[str, Any]:
    return {**facts(output), "data": Base64(raw_bytes(output.tensor))}


def content_or_error(output: HiddenStatesOutput) -> dict[str, Any]:
    """Beside a text, which is not to blame for states that could not be read out."""
    if output.refusal is not None:
        return as_api_error(output.refusal).as_dict()
    if output.error is not None:
        return generation_failed(output.error).as_dict()
    return content(output)
