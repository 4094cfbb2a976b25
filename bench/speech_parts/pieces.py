"""Where the time goes: features, encoder, first token and decode steps, each alone, all clips at once.

Keys and values of cross-attention count to the first token, where the peers make them. A step is what many tokens take
beyond one, shared out; the end token is held back.
"""

from __future__ import annotations

from typing import Any

from comparison import Comparison, Row, format_comparison
from cpu_peers import OURS
from peers.process import EngineFailedError, EngineProcess
from program import in_turn

from speech_parts.clips import ClipSource, Task, verify_encoder_runs
from speech_parts.sizes import Engines, Say, Sizes

ROWS = {
    "features": Row("features", "ms"),
    "encoder": Row("encoder", "ms"),
    "first": Row("first token after it", "ms"),
    "step": Row("decode step", "ms"),
}


def measure(engines: Engines, source: ClipSource, task: Task, sizes: Sizes, rounds: int, say: Say) -> dict[str, Any]:
    comparison = Comparison()
    for name in engines:
        say(f"pieces, warm-up: {name}")
        _pieces(name, engines[name], source, source.cuts(), task, sizes)
    for index in range(rounds):
        say(f"pieces, round {index + 1}/{rounds}")
        cuts = source.cuts()
        for name in in_turn(engines, index):
            for row, seconds in _pieces(name, engines[name], source, cuts, task, sizes).items():
                comparison.record(row, name, seconds)
    return comparison.summary()


def _pieces(
    name: str, engine: EngineProcess, source: ClipSource, cuts: list[list[int]], task: Task, sizes: Sizes
) -> dict[str, float]:
    features = source.hand_over(engine, cuts)
    before = engine.call("num_encoder_runs").value if name == OURS else 0
    encoded = engine.call("encode").value
    arguments = {"prompt": task.prompt, "num_tokens": sizes.step_tokens, "end_token": task.end_token}
    decoded = engine.call("decode", **arguments).value
    if name == OURS:
        verify_encoder_runs(engine, before, sizes.clips)  # by encode(), and none by decode()
    lengths = {len(token_ids) for token_ids in decoded["token_ids"]}
    if lengths != {sizes.step_tokens}:
        raise EngineFailedError(f"{name} generated {sorted(lengths)} tokens, not {sizes.step_tokens} for each clip")
    return {
        "features": features,
        "encoder": encoded["encoder"],
        "first": encoded.get("cross", 0.0) + decoded["first"],
        "step": (decoded["all"] - decoded["first"]) / (sizes.step_tokens - 1),
    }


def format_table(result: dict[str, Any], sizes: Sizes) -> str:
    return format_comparison(f"Pieces, {sizes.clips} clips at once", ROWS, result)
