"""A beam search in a stream: each output tells all of the best text anew, and the chunks of a stream add up.

So nothing of the text goes out before the end, but the best text so far beside it.
"""

from __future__ import annotations

from typing import Any

from ratoon.core.outputs import CompletionOutput, RequestOutput


class SearchProgress:
    def __init__(self) -> None:
        self._told: set[tuple[int, int]] = set()  # prompts and their choices that are out
        self._best: dict[int, str] = {}  # by prompt

    def take(self, index: int, output: RequestOutput) -> CompletionOutput | None:
        """Leave in an output of prompt `index` only the choices that have ended and were not told before. Returns the
        best text so far, if there is a new one."""
        best = next((choice for choice in output.outputs if not choice.finished), None)
        output.outputs = [
            choice for choice in output.outputs if choice.finished and (index, choice.index) not in self._told
        ]
        self._told.update((index, choice.index) for choice in output.outputs)
        if best is None or best.text == self._best.get(index):
            return None
        self._best[index] = best.text
        return best


def figures(choice: CompletionOutput) -> dict[str, Any]:
    """How good a text of a beam search is; nothing about others."""
    if choice.score is None:
        return {}
    return {"score": choice.score, "cumulative_logprob": choice.cumulative_logprob}
