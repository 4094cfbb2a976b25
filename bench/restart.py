"""What files of the KV cache are worth after a restart: the time to the first token of a prompt, computed and found.

    .venv/bin/python bench/restart.py
    python3 bench/restart.py --tokens 8192 --shape llama3-8b --device cuda

Each round starts an engine over an empty folder, asks for one token of a prompt (computed), ends the engine, starts
another one over the same folder, and asks for the same (found). Both get one short request first, so that neither
counts what only a first request takes. The answers must be the same token; with random weights on a GPU, where the
most likely tokens are nearly as likely as each other, a difference is told.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from workloads import PromptSource

from ratoon import LLM, SamplingParams

GPU_SHAPES = Path(__file__).parent / "gpu" / "models"
AIM, AIM_OF_GPU = 0.1, 0.5  # of the time to compute: 2,000 tokens on a CPU; 8,192 tokens of an 8B model on a GPU


def first_token(model: str, folder: str, prompt: list[int], settings: dict[str, Any]) -> tuple[float, int, int]:
    """Seconds, the token, and the tokens that were found."""
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    with LLM(model, kv_files=folder, **settings) as llm:
        llm.generate([prompt[-40:]], params, use_tqdm=False)
        begin = time.perf_counter()
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        return seconds, output.outputs[0].token_ids[0], output.num_cached_tokens or 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--shape", help="a shape in gpu/models: random weights that the engine makes")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--swap-memory", default="2GiB")
    parser.add_argument("--settings", type=json.loads, default={}, metavar="JSON", help="further ones of the engine")
    args = parser.parse_args()
    source = PromptSource(0)
    settings: dict[str, Any] = {
        "device": args.device,
        "swap_memory": args.swap_memory,
        "max_model_len": args.tokens + 64,
    }
    if args.shape is not None:
        args.model = str(GPU_SHAPES / args.shape)
        settings |= {"load_format": "dummy", "skip_tokenizer": True}
    settings |= args.settings
    ratios = []
    for turn in range(args.rounds):
        prompt = source.prompt(args.tokens)
        with tempfile.TemporaryDirectory() as folder:
            computed, token, _ = first_token(args.model, folder, prompt, settings)
            found, same, num_cached = first_token(args.model, folder, prompt, settings)
        assert token == same or args.shape is not None, "the answers differ"
        ratios.append(found / computed)
        times = f"computed {computed * 1e3:.0f} ms, {num_cached} tokens found {found * 1e3:.0f} ms"
        times += "" if token == same else ", another token"
        print(f"round {turn + 1}: {times}: {ratios[-1]:.3f}")
    middle = statistics.median(ratios)
    spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
    print(f"median {middle:.3f} of the time to compute it ({spread}); {AIM} is asked on a CPU, {AIM_OF_GPU} on a GPU")


if __name__ == "__main__":
    main()
