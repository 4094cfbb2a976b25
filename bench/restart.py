"""What files of the KV cache are worth after a restart: the time to the first token of a prompt, computed and found.

    .venv/bin/python bench/restart.py
    python3 bench/restart.py --tokens 8192 --shape llama3-8b --device cuda

Each round starts an engine over an empty folder, asks for one token of each of two prompts (computed), ends the engine,
starts another one over the same folder, and asks for the same (found). Both get one short request first, so that
neither counts what only a first request takes; --process and --idle give them a process of their own and so many
seconds, in which a server compiles and captures what the next requests need. What is left of that shows where the first
prompt takes longer than the second. The answers must be the same tokens; with random weights on a GPU, where the most
likely tokens are nearly as likely as each other, a difference is told.
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


def first_tokens(
    model: str, folder: str, prompts: list[list[int]], settings: dict[str, Any], idle: float
) -> list[tuple[float, int, int]]:
    """For each prompt seconds, the token, and the tokens that were found."""
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    found = []
    with LLM(model, kv_files=folder, **settings) as llm:
        llm.generate([prompts[0][-40:]], params, use_tqdm=False)
        time.sleep(idle)
        for prompt in prompts:
            begin = time.perf_counter()
            (output,) = llm.generate([prompt], params, use_tqdm=False)
            seconds = time.perf_counter() - begin
            found.append((seconds, output.outputs[0].token_ids[0], output.num_cached_tokens or 0))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--shape", help="a shape in gpu/models: random weights that the engine makes")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--swap-memory", default="2GiB")
    parser.add_argument("--settings", type=json.loads, default={}, metavar="JSON", help="further ones of the engine")
    parser.add_argument("--process", action="store_true", help="engines are in processes of their own")
    parser.add_argument("--idle", type=float, default=0.0, help="seconds before the prompts (default %(default)g)")
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
    settings |= {"process": True} if args.process else {}
    ratios = []
    for turn in range(args.rounds):
        prompts = [source.prompt(args.tokens) for _ in range(2)]
        with tempfile.TemporaryDirectory() as folder:
            computed = first_tokens(args.model, folder, prompts, settings, args.idle)
            found = first_tokens(args.model, folder, prompts, settings, args.idle)
        times = []
        for (slow, token, _), (fast, same, num_cached) in zip(computed, found, strict=True):
            assert token == same or args.shape is not None, "the answers differ"
            difference = "" if token == same else ", another token"
            times.append(f"computed {slow * 1e3:.0f} ms, {num_cached} tokens found {fast * 1e3:.0f} ms{difference}")
        ratios.append(found[0][0] / computed[0][0])
        second = found[1][0] / computed[1][0]
        print(f"round {turn + 1}: {times[0]}: {ratios[-1]:.3f}; second prompt: {times[1]}: {second:.3f}", flush=True)
    middle = statistics.median(ratios)
    spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
    print(f"median {middle:.3f} of the time to compute it ({spread}); {AIM} is asked on a CPU, {AIM_OF_GPU} on a GPU")


if __name__ == "__main__":
    main()
