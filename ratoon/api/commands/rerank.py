"""`ratoon rerank MODEL QUERY DOCUMENT…`: sort texts by their use for a query."""

from __future__ import annotations

import argparse
import json

from ratoon.api.commands.embed import read_texts
from ratoon.api.commands.generate import shorten
from ratoon.api.options import Subparsers, add_common_options, add_engine_options, open_llm
from ratoon.core.errors import RequestError
from ratoon.engine.input.pairs import TO_MODEL_LENGTH
from ratoon.engine.scoring import verify_top_n

DESCRIPTION = """Sort texts by their use for a query, the best first: score, index and text of each.

A reranker reads the query with each text; of a model that gives vectors the score is their cosine. The text "-", or no
text in a pipe, means standard input: each line that is not empty is a text."""


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("rerank", help="sort texts by their use for a query", description=DESCRIPTION)
    parser.add_argument("model", metavar="MODEL", help="a folder or a hub id of a reranker or an embedding model")
    parser.add_argument("query", metavar="QUERY", help="what is asked for")
    parser.add_argument("prompts", metavar="DOCUMENT", nargs="*", help="a text; - reads standard input, a text a line")
    parser.add_argument("--top-n", type=int, metavar="N", help="print the best N; default: all")
    parser.add_argument("--instruction", metavar="TEXT", help="what makes a text useful, for models with a template")
    parser.add_argument(
        "--truncate",
        type=int,
        nargs="?",
        const=TO_MODEL_LENGTH,
        metavar="N",
        help="cut a query and a text that are too long to N tokens, or to the model's length; default: refuse them",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object a line")
    add_engine_options(parser)
    add_common_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    verify_top_n(args.top_n)  # before the model is loaded
    if not args.query.strip():
        raise RequestError("QUERY", "is empty", "at least one character")
    texts = read_texts(args.prompts)
    with open_llm(args) as llm:
        results = llm.rerank(
            args.query,
            texts,
            args.top_n,
            instruction=args.instruction,
            truncate_prompt_tokens=args.truncate,
        )
    width = len(str(len(texts) - 1))
    for one in results:
        if args.json:
            print(json.dumps({"index": one.index, "score": one.score, "document": one.document}, ensure_ascii=False))
        else:
            print(f"{one.score:8.4f}  {one.index:>{width}}  {shorten(one.document, 80)}")
    return 0
