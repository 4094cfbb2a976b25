"""Reranking on a CPU: a cross-encoder over the passages of a query, against transformers in the same run.

    .venv/bin/python bench/rerank.py
    .venv/bin/python bench/rerank.py --passages 1000 --shape bge-reranker-base --parts float32

The models have the shape of cross-encoder/ms-marco-MiniLM-L-6-v2, or another, and random weights. Both read texts, so
that tokenising is a part of it. transformers is run as sentence-transformers' CrossEncoder runs it: pairs sorted by
their length, in batches of 32 with padding, and its fastest attention. Scores are compared in every round. "auto" has
the default settings, with which products of encoders have 16 bits on x86 with AMX (docs/rerank.md), "float32" never.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from export_hf import CACHE_FOLDER
from harness import OURS, Comparison, Program, Row, count, format_comparison, in_turn, say

from ratoon import LLM

SEED = 0
DEFAULT, FLOATS, QUANTISED = "auto", "float32", "int8"
QUANTIZATION = {DEFAULT: "auto", FLOATS: "none", QUANTISED: "int8"}
PEER = "transformers"
BATCH = 32  # pairs, as sentence-transformers has it
TOLERANCE = 1e-3  # of scores with weights in float32
ROWS = {"all": Row("all passages", "ms", {PEER: "at least 2×"}), "one": Row("one passage", "ms")}
SHAPES: dict[str, dict[str, Any]] = {
    "minilm-l6": {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 12},
    "bge-reranker-base": {
        "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12
    },
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
}  # fmt: skip
NUM_WORDS = 30000
MAX_POSITION = 512


def make_model(shape: str) -> Path:
    """A folder with a cross-encoder of random weights and a tokenizer of words, made once."""
    folder = CACHE_FOLDER / "rerankers" / shape
    if (folder / "done").exists():
        return folder
    import torch
    import transformers
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    folder.mkdir(parents=True, exist_ok=True)
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    pieces = [*special, *map(chr, range(97, 123)), *(f"##{chr(one)}" for one in range(97, 123))]
    pieces += [f"word{index}" for index in range(NUM_WORDS - len(pieces))]
    backend = Tokenizer(models.WordPiece({piece: index for index, piece in enumerate(pieces)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    backend.add_special_tokens(special)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"pad_token": "[PAD]"}))
    torch.manual_seed(SEED)
    config = transformers.BertConfig(
        vocab_size=len(pieces), max_position_embeddings=MAX_POSITION, num_labels=1, **SHAPES[shape]
    )
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    (folder / "done").write_text("")
    return folder


class Passages:
    """A query and passages of different lengths, which no engine has seen before."""

    def __init__(self, source: random.Random, num_passages: int, num_words: int) -> None:
        def text(length: int) -> str:
            return " ".join(f"word{source.randrange(NUM_WORDS - 100)}" for _ in range(length))

        self.query = text(8)
        self.documents = [text(source.randint(num_words // 2, num_words * 3 // 2)) for _ in range(num_passages)]


class Transformers:
    """The model of transformers, run as CrossEncoder.predict does."""

    def __init__(self, folder: Path, num_threads: int) -> None:
        import torch
        import transformers

        self._torch, self._num_threads = torch, num_threads
        self._tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_file=str(folder / "tokenizer.json"), pad_token="[PAD]"
        )
        self._model = transformers.BertForSequenceClassification.from_pretrained(folder, attn_implementation="sdpa")
        self._model.eval()

    def scores(self, passages: Passages) -> list[float]:
        torch, documents = self._torch, passages.documents
        before = torch.get_num_threads()
        torch.set_num_threads(self._num_threads)  # an engine in the same process needs none
        order = sorted(range(len(documents)), key=lambda index: -len(documents[index]))
        found = [0.0] * len(documents)
        with torch.inference_mode():
            for start in range(0, len(order), BATCH):
                chosen = order[start : start + BATCH]
                batch = self._tokenizer(
                    [passages.query] * len(chosen), [documents[index] for index in chosen], padding=True,
                    truncation="longest_first", max_length=MAX_POSITION, return_tensors="pt",
                    return_token_type_ids=True,
                )  # fmt: skip
                logits = self._model(**batch).logits[:, 0].sigmoid().tolist()
                for index, score in zip(chosen, logits, strict=True):
                    found[index] = score
        torch.set_num_threads(before)
        return found


class Rerank(Program):
    """A part is a format of our weights; transformers has float32."""

    doc = __doc__
    parts = (DEFAULT, FLOATS, QUANTISED)
    quick = True

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        count(parser, "--passages", 100)
        count(parser, "--words", 100, "in a passage, on average")
        parser.add_argument("--shape", choices=[*SHAPES], default="minilm-l6")

    def prepare(self) -> None:
        if self.args.quick:
            self.args.shape, self.args.passages, self.args.words = "tiny", 5, 10
        self.folder = make_model(self.args.shape)

    def measure(self) -> None:
        for part in self.args.parts:
            self.found[part] = self._measure(part)

    def _measure(self, part: str) -> dict[str, Any]:
        args, source, comparison = self.args, random.Random(SEED), Comparison()
        settings: dict[str, Any] = {"device": "cpu", "num_threads": args.threads, "max_num_seqs": 256}
        settings["quantization"] = QUANTIZATION[part]
        peer = Transformers(self.folder, args.threads)
        with LLM(str(self.folder), **settings) as llm:

            def ours(passages: Passages) -> list[float]:
                return [
                    output.score or 0.0
                    for output in llm.score(
                        passages.query, passages.documents, truncate_prompt_tokens=-1, progress=False
                    )
                ]

            ways = {OURS: ours, PEER: peer.scores}
            for index in range(args.rounds + 1):  # the first one warms up
                for row, num_passages in (("all", args.passages), ("one", 1)):
                    passages = Passages(source, num_passages, args.words)
                    results = {}
                    for name in in_turn(ways, index):
                        begin = time.perf_counter()
                        results[name] = ways[name](passages)
                        seconds = time.perf_counter() - begin
                        if index:
                            comparison.record(row, name, seconds)
                    most = max(abs(one - other) for one, other in zip(results[OURS], results[PEER], strict=True))
                    assert part == QUANTISED or most < TOLERANCE, f"scores differ by {most}"
                say(f"{part}, round {index}/{args.rounds}")
        return comparison.summary()

    def title(self) -> str:
        args = self.args
        return f"{args.shape}, {args.passages} passages of {args.words} words, {args.threads} threads"

    def report(self) -> Iterator[str]:
        for part, result in self.found.items():
            yield format_comparison(part, ROWS, result)


if __name__ == "__main__":
    sys.exit(Rerank().run())
