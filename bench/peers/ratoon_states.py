"""Ratoon's calls that have to do with hidden states. Times are taken here, around what is compared."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from peers.protocol import Calls, TokenIds


@dataclass
class Known:
    """What was prepared for the calls that go on from it."""

    parent: Any = None  # a RequestOutput


def state_calls(llm: Any, known: Known) -> Calls:
    def read_last(repeats: int) -> dict[str, Any]:
        """Of what was prepared, again and again."""
        from ratoon import HiddenStatesParams

        params = HiddenStatesParams(positions=-1, layers="norm")
        times, rows, states = [], [], []
        for _ in range(repeats):
            begin = time.perf_counter()
            output = llm.extract_hidden_states(known.parent, params, progress=False)
            times.append(time.perf_counter() - begin)
            rows.append(output.computed_tokens)
            states = output.tensor[0, 0].tolist()
        return {"times": times, "computed_tokens": rows, "last": states}

    def read_prompt(prompt: list[int], positions: int | str, layers: str = "norm") -> dict[str, Any]:
        """Nothing of the prompt is known."""
        from ratoon import HiddenStatesParams

        llm.reset_prefix_cache()
        begin = time.perf_counter()
        output = llm.extract_hidden_states(
            prompt, HiddenStatesParams(positions=positions, layers=layers), progress=False
        )
        seconds = time.perf_counter() - begin
        states = output.tensor[-1]  # [positions, hidden], after the final norm
        return {
            "seconds": seconds,
            "computed_tokens": output.computed_tokens,
            "last": states[-1].tolist(),
            "mean": states.mean(0).tolist(),
        }

    def prefill(prompt: list[int]) -> dict[str, Any]:
        """Nothing of the prompt is known, and one token is generated."""
        llm.reset_prefix_cache()
        begin = time.perf_counter()
        llm.generate(prompt, _greedy(1), progress=False)
        return {"seconds": time.perf_counter() - begin}

    def generate_with_states(prompts: TokenIds, lengths: list[int], asking: list[int]) -> dict[str, Any]:
        """Answers of these lengths; the requests `asking` want the states of their last token with it."""
        from ratoon import HiddenStatesParams

        states = HiddenStatesParams(positions=-1, layers="norm")
        params = [
            _greedy(length, **({"return_hidden_states": states} if index in asking else {}))
            for index, length in enumerate(lengths)
        ]
        llm.reset_prefix_cache()
        begin = time.perf_counter()
        outputs = llm.generate(prompts, params, progress=False)
        seconds = time.perf_counter() - begin
        return {
            "seconds": seconds,
            "token_ids": [list(output.outputs[0].token_ids) for output in outputs],
            "rows": [outputs[index].hidden_states[0].computed_tokens for index in asking],
        }

    calls: list[Callable[..., Any]] = [read_last, read_prompt, prefill, generate_with_states]
    return {call.__name__: call for call in calls}


def _greedy(num_tokens: int, **others: Any) -> Any:
    from ratoon import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False, **others)
