"""Adapters (LoRA) on a GPU: milliseconds a token with requests over several adapters, against the same without, by
Ratoon and by vLLM in one run.

    python3 bench/gpu/adapters.py [--vllm-python PYTHON] [--model llama3-8b] [--requests 32] [--adapters 8] [--rank 16]

The model has random weights of a shape in models/, and so have the adapters, for all linear layers. Every step has all
adapters: each request has one of them in turn; other rows have one adapter for all requests, or for one among plain
ones. The engine of the row "off" has no memory for adapters. A figure is (whole - the first token) / the other tokens.
Each engine is a process of its own, one after the other; with --engines, some of them.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SHAPES = Path(__file__).parent / "models"
sys.path.insert(0, str(Path(__file__).parents[1]))
OFF, BASE, AMONG, ONE, MANY = "off", "base", "one among plain", "one adapter", "several adapters"
KINDS = (BASE, AMONG, ONE, MANY)


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Of the linear layers that adapters are for, by the names of a checkpoint."""
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    layer = {
        "self_attn.q_proj": (q, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    numbers = range(config["num_hidden_layers"])
    return {f"model.layers.{number}.{name}.weight": shape for number in numbers for name, shape in layer.items()}


class Ratoon:
    def __init__(self, model: str, adapters: list[str], args: argparse.Namespace) -> None:
        import compare_parts  # noqa: F401  # by which the package of this repository is found

        from ratoon import LLM, SamplingParams

        self._params = SamplingParams
        settings: dict[str, Any] = {"max_num_seqs": 256}
        if adapters:
            settings |= {"max_loras": len(adapters), "max_lora_rank": args.rank}
        self._llm = LLM(
            model, load_format="dummy", device=args.device, max_model_len=2048, skip_tokenizer=True,
            enable_prefix_caching=False, disable_log_stats=True, **args.settings,
            adapters={str(index): path for index, path in enumerate(adapters)}, **settings,
        )  # fmt: skip

    def generate(self, prompts: list[list[int]], adapters: list[int | None], num_tokens: int) -> list[int]:
        params = self._params(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        named = [None if index is None else str(index) for index in adapters]
        outputs = self._llm.generate(prompts, params, adapter=named, progress=False)
        return [len(output.outputs[0].token_ids) for output in outputs]


class VLLM:
    def __init__(self, model: str, adapters: list[str], args: argparse.Namespace) -> None:
        from vllm import LLM, SamplingParams
        from vllm.lora.request import LoRARequest

        self._params = SamplingParams
        settings: dict[str, Any] = {}
        if adapters:
            settings = {"enable_lora": True, "max_loras": len(adapters), "max_lora_rank": max(args.rank, 8)}
        self._adapters = [LoRARequest(str(index), index + 1, path) for index, path in enumerate(adapters)]
        self._llm = LLM(
            model, load_format="dummy", max_model_len=2048, skip_tokenizer_init=True, max_num_seqs=256,
            enable_prefix_caching=False, disable_log_stats=True, **settings,
        )  # fmt: skip

    def generate(self, prompts: list[list[int]], adapters: list[int | None], num_tokens: int) -> list[int]:
        params = self._params(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        requests = [None if index is None else self._adapters[index] for index in adapters]
        texts = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self._llm.generate(texts, params, lora_request=requests, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]


def measure(engine: Ratoon | VLLM, kind: str, args: argparse.Namespace, number: int) -> float:
    """Seconds of a token behind the first."""
    choose = random.Random(f"{kind} {number}")
    numbers = range(args.requests)
    adapters: list[int | None] = [None for _ in numbers]
    if kind == AMONG:
        adapters[0] = 0
    elif kind in (ONE, MANY):
        adapters = [0 if kind == ONE else index % args.adapters for index in numbers]
    seconds = []
    for count in (1, args.tokens):
        prompts = [[choose.randrange(1000, 30_000) for _ in range(args.input)] for _ in range(args.requests)]
        begin = time.perf_counter()
        lengths = set(engine.generate(prompts, adapters, count))
        seconds.append(time.perf_counter() - begin)
        assert lengths == {count}, f"{kind}: answers of {sorted(lengths)} tokens, not {count}"
    return (seconds[1] - seconds[0]) / (args.tokens - 1)


def work(args: argparse.Namespace) -> None:
    """In the process of one engine."""
    kinds = (OFF,) if args.off else KINDS
    adapters = [] if args.off else sorted(str(path) for path in args.folder.glob("adapters/*"))
    engine = {"ratoon": Ratoon, "vllm": VLLM}[args.worker](str(args.folder / args.model), adapters, args)
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(args.rounds + 1):
        for kind in kinds if number % 2 else reversed(kinds):
            figure = measure(engine, kind, args, number)
            if number > 0:  # the first one warms up
                found[kind].append(figure)
    base = statistics.median(found[kinds[0]])
    for kind, steps in found.items():
        record = {
            "engine": args.worker, "kind": kind, "requests": args.requests, "rank": args.rank,
            "ms_a_token": round(1000 * statistics.median(steps), 3),
            "spread": [round(1000 * min(steps), 3), round(1000 * max(steps), 3)],
            f"share_of_{kinds[0]}": round(base / statistics.median(steps), 3),
        }  # fmt: skip
        print("RESULT", json.dumps(record), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", help="of an environment that has vLLM; without it, Ratoon alone")
    parser.add_argument("--model", default="llama3-8b", help="a shape in models/")
    parser.add_argument("--device", default="cuda")
    for name, default in {"requests": 32, "adapters": 8, "rank": 16, "input": 128, "tokens": 128, "rounds": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--engines", help="default: ratoon, and vllm with --vllm-python")
    parser.add_argument("--no-off", action="store_true", help='without the row "off", which has engines of its own')
    parser.add_argument("--settings", type=json.loads, default={}, metavar="JSON", help="further settings of Ratoon")
    parser.add_argument("--worker", choices=("ratoon", "vllm"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--off", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args)
        return
    from compare_parts.models import copy_model
    from random_adapters import make_adapters

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = copy_model(SHAPES / args.model, folder, None)
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        make_adapters(folder / "adapters", tensor_shapes(config), args.adapters, args.rank, "bfloat16")
        pythons = {"ratoon": sys.executable} | ({"vllm": args.vllm_python} if args.vllm_python else {})
        engines = list(pythons) if args.engines is None else args.engines.split(",")
        for engine in engines:
            python = pythons[engine]
            for more in [[]] if args.no_off else [["--off"], []]:
                command = [python, __file__, *sys.argv[1:], "--worker", engine, "--folder", scratch, *more]
                subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
