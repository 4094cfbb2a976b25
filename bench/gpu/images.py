"""Images on one GPU: Ratoon and vLLM with the whole shape of Qwen2.5-VL-3B, the same pictures and questions, one engine
after the other.

    python3 bench/gpu/images.py --engines ratoon                          # where vLLM is not installed
    python3 bench/gpu/images.py --vllm-path /tmp/vllm --json images.json

Weights are random, pictures are new in every round and have 1,024 × 1,024 pixels. A figure is the wall time from the
pictures to the last token, in the engine's process, and is printed at once as a line `RESULT {json}`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from compare import add_options, ended_after, engine_settings, gpu_name, module_path, settle_options
from compare_parts.models import write_tokenizer
from compare_parts.records import ERROR_MARK, Record, format_tables, summarize
from harness import positive
from peers.images import Question
from peers.machine import describe_machine, usable_cores
from peers.process import EngineFailedError, EngineProcess
from workloads import PromptSource

MODEL, VARIANT = "qwen2.5-vl-3b", "bf16"
FIGURES = ONE, MANY, SHARED = "picture_ttft_ms", "pictures_32req_ms", "shared_picture_32req_ms"
SEED = 0
MAX_MODEL_LEN = 4096
# As vLLM's processor looks for them, by the fields of the config.
SPECIAL = {
    "<|vision_start|>": "vision_start_token_id", "<|vision_end|>": "vision_end_token_id",
    "<|image_pad|>": "image_token_id", "<|video_pad|>": "video_token_id",
}  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    side: int = 1024  # pixels
    question: int = 16  # tokens
    requests: int = 32  # at once
    output: int = 64  # tokens


QUICK = Sizes(side=100, question=4, requests=3, output=4)


class Asker:
    """Questions about new pictures, the same ones for every engine."""

    def __init__(self, config: dict[str, Any], sizes: Sizes) -> None:
        self._tokens = [config["vision_start_token_id"], config["vision_end_token_id"]]
        self._source = PromptSource(SEED, min(self._tokens))  # the special tokens are the last ones
        self._sizes = sizes
        self._num_pictures = 0

    def ask(self, what: str) -> tuple[list[Question], int]:
        """What is asked at once for a figure, and how many tokens are wanted."""
        requests = 1 if what == ONE else self._sizes.requests
        pictures = [self._picture()] * requests if what == SHARED else [self._picture() for _ in range(requests)]
        return [self._ask(picture) for picture in pictures], 1 if what == ONE else self._sizes.output

    def _picture(self) -> int:
        self._num_pictures += 1
        return self._num_pictures

    def _ask(self, picture: int) -> Question:
        start, end = self._tokens
        after = [end, *self._source.prompt(self._sizes.question)]
        return {"picture": picture, "side": self._sizes.side, "before": [start], "after": after}


def prepare_model(shape: Path, folder: Path) -> tuple[Path, dict[str, Any]]:
    """The folder `folder`/NAME, and its config. Weights are made by the engines (load_format dummy)."""
    target = Path(shutil.copytree(shape, folder / shape.name, dirs_exist_ok=True))
    config: dict[str, Any] = json.loads((target / "config.json").read_text(encoding="utf-8"))
    write_tokenizer(target, config["vocab_size"], {word: config[field] for word, field in SPECIAL.items()})
    return target, config


def measure(args: argparse.Namespace, shape: Path, name: str) -> Iterator[Record]:
    """The figures of one engine. The first round of each compiles and captures, and is not counted."""
    model, config = prepare_model(shape, args.work_folder)
    asker = Asker(config, QUICK if args.quick else Sizes())
    settings = engine_settings(args, VARIANT, name)
    log = args.work_folder / "logs" / f"{shape.name}-{name}-images.log"
    engine = EngineProcess(
        name,
        sys.executable,
        model,
        len(usable_cores()),
        log,
        args.max_model_len,
        worker=f"{name}_images_worker",
        settings=settings,
        environment={"PYTHONPATH": module_path(name, args.vllm_path)},
        pausing=False,
    )
    print(f"# start {shape.name} {name} {json.dumps(settings)}", flush=True)
    try:
        with ended_after(engine, args.limit_seconds):
            engine.start_with("take", asked=[])
            for what in FIGURES:
                values = [1e3 * run(engine, *asker.ask(what)) for _ in range(1 + args.rounds)]
                yield summarize(values, what=what, model=shape.name, variant=VARIANT, engine=name)
    finally:
        engine.close()


def run(engine: EngineProcess, asked: list[Question], num_tokens: int) -> float:
    """Seconds, without those in which the pictures are made."""
    engine.call("take", asked=asked)
    result = engine.call("answer", num_tokens=num_tokens)
    lengths = [len(tokens) for tokens in result.value]
    if lengths != [num_tokens] * len(asked):
        raise EngineFailedError(f"{engine.engine} generated {lengths} tokens, not {num_tokens} for each request")
    return result.seconds


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=" ".join(__doc__.split("\n\n")[0].split()))
    add_options(parser)
    parser.set_defaults(models=MODEL)
    parser.add_argument("--rounds", type=positive, default=5, metavar="N", help="counted rounds (default %(default)s)")
    parser.add_argument("--max-model-len", type=positive, default=MAX_MODEL_LEN, metavar="N", help="%(default)s")
    parser.add_argument("--quick", action="store_true", help="tiny sizes and one round: does it work at all?")
    args = settle_options(parser)
    if args.quick:
        args.rounds = 1
    return args


def main() -> int:
    args = parse_arguments()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that engines are ended
    records: list[Record] = []
    errors: list[dict[str, str]] = []
    for shape in args.shapes:
        for name in args.engines:
            try:
                for record in measure(args, shape, name):
                    records.append(record)
                    print(record.line(), flush=True)
            except EngineFailedError as error:
                errors.append({"model": shape.name, "engine": name, "error": str(error)[-3000:]})
                print(ERROR_MARK + json.dumps(errors[-1]), flush=True)
    print(f"\n{gpu_name()}\nMedian (min–max). Ratios: above 1, Ratoon is the faster one.\n\n{format_tables(records)}")
    if args.json:
        machine = describe_machine() | {"gpu": gpu_name()}
        result = {"machine": machine, "records": [asdict(record) for record in records], "errors": errors}
        args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 1 if errors and not records else 0


if __name__ == "__main__":
    sys.exit(main())
