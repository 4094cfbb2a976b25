"""`ratoon hidden-states MODEL PROMPT`: read the hidden states of a prompt; with --url, of a server's answers, too.

They are printed, or written to a safetensors file. From a server to a file they are streamed.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ratoon.api.adapter_options import add_adapter_option
from ratoon.api.commands.generate import read_prompts
from ratoon.api.hidden_states import as_safetensors, facts, lens_entries, raw_bytes, read_head, to_numbers
from ratoon.api.options import Subparsers, add_common_options, add_engine_options, open_llm
from ratoon.api.remote.options import add_remote_options, choose_model, open_client, refuse_engine_options
from ratoon.core.errors import EngineError, RequestError
from ratoon.core.params import HIDDEN_STATES_DTYPES, HIDDEN_STATES_SCOPES, HIDDEN_STATES_SIDES, HiddenStatesParams

if TYPE_CHECKING:
    from ratoon.api.remote.client import RemoteClient

DESCRIPTION = """Read the hidden states of a prompt: the outputs of the model's layers at each token.

They are printed, one JSON object a line for each layer and position, or written to a safetensors file. No chat
template is applied to the prompt; - reads standard input. With --url a server is asked, and MODEL is left out."""
PATH = "/v1/hidden_states"
FILE_TYPE = "application/octet-stream"
FIELDS = ("positions", "scope", "layers", "dtype", "deadline", "side", "lens")


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("hidden-states", help="outputs of the model's layers", description=DESCRIPTION)
    parser.add_argument("model", metavar="MODEL", nargs="?", help="a folder, a GGUF file, a hub id or an embedded name")
    parser.add_argument("prompts", metavar="PROMPT", nargs="*", help="a text; - reads standard input")
    parser.add_argument(
        "--positions", default="-1", metavar="LIST", help="such as all, 0,5 or 3:10; default -1, the last token"
    )
    parser.add_argument(
        "--layers", metavar="LIST", help="all, or numbers as in transformers, norm, pre_norm; default -1, the last"
    )
    parser.add_argument(
        "--side", default="decoder", choices=HIDDEN_STATES_SIDES, help="of an encoder-decoder model; default decoder"
    )
    parser.add_argument("--states-dtype", default="float32", choices=HIDDEN_STATES_DTYPES, help="default float32")
    parser.add_argument(
        "--lens", type=int, metavar="K", help="print the K most probable tokens of each state instead of its numbers"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write a safetensors file")
    add_remote_options(parser, always=False)
    parser.add_argument("--original-request-id", metavar="ID", help="with --url: read this answer instead of a prompt")
    parser.add_argument("--choice", type=int, metavar="N", help="which of its choices; default 0")
    parser.add_argument("--scope", choices=HIDDEN_STATES_SCOPES, default="all", help="what positions refer to")
    add_adapter_option(parser)
    add_engine_options(parser)
    add_common_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    params = make_params(args)
    params.verify()  # before the model is loaded
    if args.output is not None and not args.output.absolute().parent.is_dir():
        raise RequestError("--output", f"there is no folder {args.output.parent}", "one that exists")
    if args.output is not None and params.lens is not None:
        raise RequestError("--lens", "is printed, not written to a file", "leave --output out")
    text = find_prompt(args)
    if args.url is None:
        assert text is not None, "answers can only be read from a server"
        read_here(args, text, params)
    else:
        refuse_engine_options(args)
        asyncio.run(read_there(open_client(args), args, text, params))
    return 0


def find_prompt(args: argparse.Namespace) -> str | None:
    """The one prompt. None: the states are those of an answer of the server."""
    words = ([] if args.model is None else [args.model]) + args.prompts
    if args.url is None:
        if args.original_request_id is not None or args.choice is not None:
            raise RequestError("--original-request-id and --choice", "belong to a server", "add --url")
        if not words:
            raise RequestError("MODEL", "is missing", "a model, or --url for a server")
        args.model, *words = words
    elif args.original_request_id is not None:
        if words:
            raise RequestError("PROMPT", "and --original-request-id exclude each other", "leave one of them out")
        return None
    elif args.choice is not None:
        raise RequestError("--choice", "has no meaning without --original-request-id", "leave it out")
    prompts = read_prompts(words)
    if len(prompts) > 1:
        raise RequestError("PROMPT", f"{len(prompts)} were given", "one")
    return prompts[0]


def read_here(args: argparse.Namespace, text: str, params: HiddenStatesParams) -> None:
    with open_llm(args) as llm:
        output = llm.extract_hidden_states(text, params, adapter=args.adapter)
        if output.error is not None:
            raise EngineError(output.error)
        if output.lens is not None:
            entries = lens_entries(output, llm.get_tokenizer().token_text)
            print_lens({**facts(output), "norms": output.norms, "lens": entries})
            return
        if args.output is None:
            print_states(facts(output), raw_bytes(output.tensor))
            return
        with writing(args.output) as write:
            for part in as_safetensors(output, model=llm.source.name):
                write(part)
    print(describe_file(args.output))


async def read_there(
    client: RemoteClient, args: argparse.Namespace, text: str | None, params: HiddenStatesParams
) -> None:
    fields = {name: getattr(params, name) for name in FIELDS if getattr(params, name) is not None}
    async with client:
        body = {"model": await choose_model(client, args.remote_model), **fields}
        if text is not None:
            body["prompt"] = text
        else:
            body |= {"original_request_id": args.original_request_id, "choice": args.choice or 0}
        if args.output is None:
            answer = await client.post(PATH, body)
            if params.lens is not None:
                print_lens(answer)
                return
            print_states(answer, memoryview(base64.b64decode(answer["data"])))
            return
        with writing(args.output) as write:
            await client.download(PATH, body, FILE_TYPE, write)
    print(describe_file(args.output))


def make_params(args: argparse.Namespace) -> HiddenStatesParams:
    return HiddenStatesParams(
        positions=parse_positions(args.positions),
        scope=args.scope,
        layers=None if args.layers is None else parse_layers(args.layers),
        dtype=args.states_dtype,
        side=args.side,
        lens=args.lens,
    )


def parse_positions(text: str) -> str | list[Any]:
    """all, or numbers and ranges with commas between them."""
    return text if text == "all" else [_position(part.strip()) for part in text.split(",")]


def parse_layers(text: str) -> str | list[Any]:
    if text == "all":
        return text
    return [
        part.strip() if part.strip() in ("norm", "pre_norm") else _number("--layers", part) for part in text.split(",")
    ]


def _position(text: str) -> int | list[int | None]:
    start, colon, stop = text.partition(":")
    if not colon:
        return _number("--positions", text)
    return [_number("--positions", start or "0"), _number("--positions", stop) if stop else None]


def _number(option: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        expected = (
            "all, or numbers and ranges such as 0,5,8:12" if option == "--positions" else "all, or as in 0,15,norm"
        )
        raise RequestError(option, f"{text!r} is no whole number", expected) from None


def print_states(told: dict[str, Any], data: memoryview) -> None:
    numbers = to_numbers(data, told["dtype"], told["shape"])
    for layer, rows in zip(told["layers"], numbers):
        for position, token_id, row in zip(told["positions"], told["token_ids"] or repeat(None), rows):
            # Converting through text keeps the digits of the type, not those of a float64.
            state = [float(str(number)) for number in row]
            print(json.dumps({"layer": layer, "position": position, "token_id": token_id, "hidden_state": state}))


def print_lens(told: dict[str, Any]) -> None:
    for layer, norms, rows in zip(told["layers"], told["norms"], told["lens"]):
        for position, token_id, norm, tokens in zip(told["positions"], told["token_ids"], norms, rows):
            line = {"layer": layer, "position": position, "token_id": token_id, "norm": norm, "lens": tokens}
            print(json.dumps(line, ensure_ascii=False))


@contextmanager
def writing(path: Path) -> Iterator[Callable[[bytes | memoryview], object]]:
    """Written to a temporary file, renamed when it is complete."""
    unfinished = path.with_name(f"{path.name}.part")
    try:
        with unfinished.open("wb") as file:
            yield file.write
        os.replace(unfinished, path)
    except OSError as error:
        raise RequestError("--output", f"can't write {path} ({error.strerror})", "another file") from None
    finally:
        unfinished.unlink(missing_ok=True)


def describe_file(path: Path) -> str:
    with path.open("rb") as file:
        dtype, shape, notes = read_head(file)
    return f"{path}: {dtype} {shape}, layers {notes['layers']}, {notes['computed_tokens']} tokens computed"
