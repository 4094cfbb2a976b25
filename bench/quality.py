"""What weights in few bits lose: perplexity of a text, and greedy answers that stay the same, against the same file's
weights in float32.

    python bench/quality.py smollm2-135m                        # a file as it is: quantization none and auto
    python bench/quality.py folder-of-floats --modes int8 int4
    python bench/quality.py smollm2-135m --formats              # the embedded model in every format, made for this

Each row is a file once decoded (quantization="none") and once in a mode. Files of formats are kept in .cache/bench.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import NamedTuple

from export_hf import CACHE_FOLDER

from ratoon import LLM, SamplingParams
from ratoon.models.embedded import find_embedded_model

DOCS = Path(__file__).parents[1] / "docs"
TEXTS = [DOCS / name for name in ("serving.md", "python.md", "sampling.md")]
DECODED = "none"
COLUMNS = ("format", "quantization", "MiB", "perplexity, decoded", "perplexity", "change", "answers unchanged")


class Quality(NamedTuple):
    weight_bytes: int
    perplexity: float
    answers: list[list[int]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--modes", nargs="+", default=["auto"], help="values of quantization")
    parser.add_argument(
        "--formats", nargs="*", help="make files of an embedded GGUF model in these formats; default: all"
    )
    parser.add_argument("--text", type=Path, nargs="+", default=TEXTS, help="files of text")
    parser.add_argument("--tokens", type=int, default=10240, help="of the text")
    parser.add_argument("--window", type=int, default=1024, help="tokens that are scored together")
    parser.add_argument("--answers", type=int, default=32, help="greedy continuations of places in the text")
    parser.add_argument("--length", type=int, default=16, help="tokens of an answer")
    parser.add_argument("--num-threads", type=int)
    args = parser.parse_args()
    text = "\n".join(path.read_text() for path in args.text)  # once: files may change during an hour of measuring
    print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|", flush=True)
    for label, model in find_models(args):
        decoded = measure(args, text, model, DECODED)
        for mode in args.modes:
            print(format_row(label, mode, decoded, measure(args, text, model, mode)), flush=True)


def find_models(args: argparse.Namespace) -> list[tuple[str, str]]:
    """What the rows are called, and the models."""
    if args.formats is None:
        return [(args.model, args.model)]
    from quality_parts.formats import FORMATS, make_file

    source = find_embedded_model(args.model)
    names = args.formats or FORMATS
    return [(name, str(make_file(source, name, CACHE_FOLDER / "formats"))) for name in names]


def measure(args: argparse.Namespace, text: str, model: str, mode: str) -> Quality:
    with LLM(model, device="cpu", quantization=mode, num_threads=args.num_threads) as llm:
        tokens = llm.get_tokenizer().encode(text)[: args.tokens]
        windows = [tokens[first : first + args.window] for first in range(0, len(tokens), args.window)]
        step = max(len(tokens) // args.answers, 1)
        prompts = [tokens[max(end - 64, 0) : end] for end in range(step, len(tokens) + 1, step)][: args.answers]
        greedy = SamplingParams(temperature=0, max_tokens=args.length, ignore_eos=True)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], greedy)
        answers = [list(output.outputs[0].token_ids) for output in outputs]
        return Quality(llm.describe()["weight_bytes"], perplexity(llm, windows), answers)


def perplexity(llm: LLM, windows: list[list[int]]) -> float:
    """Over all tokens but the first of each window."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    losses = []
    for window in windows:
        [output] = llm.generate([{"prompt_token_ids": window}], params)
        entries = output.prompt_logprobs or []
        losses += [-entry[token].logprob for token, entry in zip(window, entries) if entry]
    return math.exp(sum(losses) / len(losses))


def format_row(label: str, mode: str, decoded: Quality, found: Quality) -> str:
    same = sum(ours == theirs for ours, theirs in zip(found.answers, decoded.answers, strict=True))
    cells = [
        label,
        mode,
        f"{found.weight_bytes / 2**20:.0f}",
        f"{decoded.perplexity:.3f}",
        f"{found.perplexity:.3f}",
        f"{found.perplexity / decoded.perplexity - 1:+.2%}",
        f"{same} of {len(found.answers)}",
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
