"""`ratoon embed MODEL TEXT…`: print the vectors of texts, or their similarity."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from ratoon.api.adapter_options import add_adapter_option
from ratoon.api.commands.generate import shorten
from ratoon.api.options import Subparsers, add_common_options, add_engine_options, open_llm
from ratoon.core.errors import RequestError
from ratoon.core.params import POOLING_KINDS, PoolingParams

if TYPE_CHECKING:
    from ratoon.core.outputs import EmbeddingOutput

DESCRIPTION = """Print the vectors of texts: one JSON object a line, {"index": …, "embedding": […]}.

A vector is pooled from the hidden states after the model's final norm. The text "-", or no text in a pipe, means
standard input: each line that is not empty is a text."""


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("embed", help="vectors of texts", description=DESCRIPTION)
    parser.add_argument("model", metavar="MODEL", help="a folder, a GGUF file, a hub id or an embedded name")
    parser.add_argument("prompts", metavar="TEXT", nargs="*", help="a text; - reads standard input, a text a line")
    parser.add_argument(
        "--pooling",
        choices=POOLING_KINDS,
        help="the last token's state, the mean over all tokens, or the first's; default: the model's own",
    )
    parser.add_argument("--dimensions", type=int, metavar="N", help="keep the first N numbers of a vector")
    parser.add_argument("--no-normalize", action="store_true", help="do not normalise vectors to length 1")
    parser.add_argument("--similarity", action="store_true", help="print the cosine of every pair in a table")
    add_adapter_option(parser)
    add_engine_options(parser)
    add_common_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    params = PoolingParams(pooling=args.pooling, dimensions=args.dimensions, normalize=not args.no_normalize)
    params.verify()  # before the model is loaded
    texts = read_texts(args.prompts)
    with open_llm(args) as llm:
        outputs = llm.embed(texts if len(texts) > 1 else texts[0], params, adapter=args.adapter)
    failed = [(index, output.error) for index, output in enumerate(outputs) if output.error is not None]
    if not args.similarity:
        for index, output in enumerate(outputs):
            print(json.dumps(output_as_dict(index, output), ensure_ascii=False))
    elif not failed:
        print_table(cosines([output.embedding for output in outputs]), texts)
    for index, error in failed:
        print(f"error: prompts[{index}]: {error}", file=sys.stderr)
    return 1 if failed else 0


def read_texts(arguments: list[str]) -> list[str]:
    """The texts of the command line. Without any, the lines of standard input, if it is not a terminal."""
    if not arguments and not sys.stdin.isatty():
        arguments = ["-"]
    texts: list[str] = []
    for argument in arguments:
        if argument == "-":
            texts += [line for line in sys.stdin.read().splitlines() if line.strip()]
        elif argument:
            texts.append(argument)
        else:
            raise RequestError("TEXT", "is empty", "at least one character")
    if not texts:
        raise RequestError("TEXT", "is missing", "texts, or - to read them from standard input, one a line")
    return texts


def output_as_dict(index: int, output: EmbeddingOutput) -> dict[str, Any]:
    if output.error is not None:
        return {"index": index, "embedding": None, "error": output.error}
    # Converting through text keeps the digits of float32, not those of a float64.
    return {"index": index, "embedding": [float(str(number)) for number in output.embedding]}


def cosines(vectors: list[Any]) -> Any:
    """[N, N] for N vectors. For a vector of length 0 they are 0."""
    import numpy

    matrix = numpy.stack(vectors).astype(numpy.float64)
    lengths = numpy.linalg.norm(matrix, axis=1, keepdims=True)
    matrix = matrix / numpy.where(lengths > 0, lengths, 1)
    return matrix @ matrix.T


def print_table(table: Any, texts: list[str]) -> None:
    width = len(str(len(texts) - 1))
    print(" " * width + "".join(f"  {index:>6}" for index in range(len(texts))))
    for index, (row, text) in enumerate(zip(table, texts)):
        print(f"{index:>{width}}" + "".join(f"  {cosine:>6.3f}" for cosine in row) + f"  {shorten(text, 40)}")
