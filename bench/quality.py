"""What a quantised file loses by staying in its own bits: perplexity of a text, and greedy answers that stay the same.

Both engines read the same file: once decoded to float32 (quantization="none"), once kept (quantization="auto").

    python bench/quality.py smollm2-135m --text docs/serving.md --tokens 4096
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import NamedTuple

from ratoon import LLM, SamplingParams

TEXT = Path(__file__).parents[1] / "docs" / "serving.md"
MODES = ("none", "auto")


class Quality(NamedTuple):
    mode: str
    weight_bytes: int
    perplexity: float
    answers: list[list[int]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, default=TEXT, help="a file of text")
    parser.add_argument("--tokens", type=int, default=4096, help="of the text")
    parser.add_argument("--window", type=int, default=1024, help="tokens that are scored together")
    parser.add_argument("--answers", type=int, default=16, help="greedy continuations of places in the text")
    parser.add_argument("--length", type=int, default=16, help="tokens of an answer")
    args = parser.parse_args()
    found = [measure(args, mode) for mode in MODES]
    print(format_table(found))


def measure(args: argparse.Namespace, mode: str) -> Quality:
    with LLM(args.model, device="cpu", quantization=mode) as llm:
        tokens = llm.get_tokenizer().encode(args.text.read_text())[: args.tokens]
        windows = [tokens[first : first + args.window] for first in range(0, len(tokens), args.window)]
        step = max(len(tokens) // args.answers, 1)
        prompts = [tokens[max(end - 64, 0) : end] for end in range(step, len(tokens) + 1, step)][: args.answers]
        greedy = SamplingParams(temperature=0, max_tokens=args.length, ignore_eos=True)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], greedy)
        answers = [list(output.outputs[0].token_ids) for output in outputs]
        return Quality(mode, llm.describe()["weight_bytes"], perplexity(llm, windows), answers)


def perplexity(llm: LLM, windows: list[list[int]]) -> float:
    """Over all tokens but the first of each window."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    losses = []
    for window in windows:
        [output] = llm.generate([{"prompt_token_ids": window}], params)
        entries = output.prompt_logprobs or []
        losses += [-entry[token].logprob for token, entry in zip(window, entries) if entry]
    return math.exp(sum(losses) / len(losses))


def format_table(found: list[Quality]) -> str:
    lines = [
        "| quantization | weights, MiB | perplexity | change | greedy answers unchanged |",
        "|---|---|---|---|---|",
    ]
    base = found[0]
    for one in found:
        change = f"{one.perplexity / base.perplexity - 1:+.2%}"
        same = sum(ours == theirs for ours, theirs in zip(one.answers, base.answers))
        size = f"{one.weight_bytes / 2**20:.0f}"
        lines.append(f"| {one.mode} | {size} | {one.perplexity:.3f} | {change} | {same} of {len(base.answers)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
