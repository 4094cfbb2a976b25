"""Several clips at once, up to their end: from the samples to tokens, and the same with the features ready."""

from __future__ import annotations

from typing import Any

from comparison import Comparison, Row, format_comparison
from cpu_peers import OURS
from program import in_turn

from speech_parts.clips import ClipSource, Task, verify_encoder_runs
from speech_parts.sizes import Engines, Say, Sizes

AIMS = {"transformers": "above 1×", "ctranslate2": "at least 0.83×"}  # within 1.2 times its time
ROWS = {"whole": Row("samples to tokens", aims=AIMS), "ready": Row("features to tokens")}
WARM_UP_TOKENS = 2


def measure(engines: Engines, source: ClipSource, task: Task, sizes: Sizes, rounds: int, say: Say) -> dict[str, Any]:
    comparison = Comparison()
    cuts = source.cuts()
    for name in engines:
        say(f"transcription, warm-up: {name}")
        source.hand_over(engines[name], cuts)
        engines[name].call("transcribe", prompt=task.prompt, num_tokens=WARM_UP_TOKENS, ready=False)
    lengths: list[int] = []
    for index in range(rounds):
        say(f"transcription, round {index + 1}/{rounds}")
        for row in ROWS:
            cuts = source.cuts()
            answers = {}
            for name in in_turn(engines, index):
                source.hand_over(engines[name], cuts)
                before = engines[OURS].call("num_encoder_runs").value if name == OURS else 0
                arguments = {"prompt": task.prompt, "num_tokens": sizes.tokens, "ready": row == "ready"}
                result = engines[name].call("transcribe", **arguments)
                if name == OURS:
                    verify_encoder_runs(engines[OURS], before, sizes.clips)
                comparison.record(row, name, result.seconds)
                answers[name] = [task.answer(token_ids) for token_ids in result.value]
            lengths += map(len, answers[OURS])
            for name in answers:
                if name != OURS:
                    pairs = zip(answers[OURS], answers[name], strict=True)
                    comparison.record_same(name, [float(ours == theirs) for ours, theirs in pairs])
    return {**comparison.summary(), "answer_lengths": lengths}


def format_table(result: dict[str, Any], sizes: Sizes, rows: dict[str, Row] = ROWS) -> str:
    lengths = result["answer_lengths"]
    lines = [format_comparison(f"{sizes.clips} clips at once", rows, result)]
    lines.append(f"  Answers have {min(lengths)} to {max(lengths)} tokens.")
    for name, same in result["same"].items():
        lines.append(f"  Answers identical to Ratoon's, {name}: {sum(same):.0f} of {len(same)}")
    return "\n".join(lines)
