"""`ratoon complete PROMPT…`: have a server answer prompts, and print the answers.

The counterpart of `ratoon generate` without a model in this process. Defaults are the server's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from typing import TYPE_CHECKING, Any

from ratoon.api.commands.generate import (
    add_decoder_prompt_option,
    add_prefill_option,
    check_decoder_prompt,
    choice_heading,
    choose_streaming,
    messages_of,
    read_prompts,
    shorten,
)
from ratoon.api.image_options import add_image_option, read_images
from ratoon.api.options import (
    Subparsers,
    add_answer_options,
    add_common_options,
    check_generation_options,
    in_terms_of_options,
)
from ratoon.api.remote.client import RemoteError
from ratoon.api.remote.options import add_remote_options, choose_model, generation_fields, open_client
from ratoon.api.terminal import print_error
from ratoon.core.errors import RequestError

if TYPE_CHECKING:
    from ratoon.api.remote.client import Chunk, RemoteClient

DESCRIPTION = """Have a server answer prompts, and print the answers.

The text is completed unchanged; --chat sends it as a user message. A single answer is streamed on a terminal.
The prompt "-" is read from standard input."""
AT_ONCE = 32  # concurrent requests

Completion = dict[str, Any]  # what a server sent back


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("complete", help="have a server answer prompts", description=DESCRIPTION)
    parser.add_argument("prompts", metavar="PROMPT", nargs="*", help="text to answer; - reads standard input")
    add_remote_options(parser, always=True)
    parser.add_argument("--chat", action="store_true", help="send each prompt as a user's message")
    parser.add_argument("--system", metavar="TEXT", help="system message, with --chat")
    add_image_option(parser, "that comes before each prompt, with --chat")
    add_prefill_option(parser)
    add_decoder_prompt_option(parser)
    add_answer_options(parser)
    add_common_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    check_generation_options(args)
    check_decoder_prompt(args)
    texts = read_prompts(args.prompts)
    if args.logprobs is not None and not args.json:
        raise RequestError("--logprobs", "is only printed as JSON", "add --json")
    for option in ("system", "prefill"):
        if getattr(args, option) is not None and not args.chat:
            raise RequestError(f"--{option}", "can't be used with a plain prompt", "add --chat")
    args.images = read_images(args.images)
    if args.images and not args.chat:
        raise RequestError(args.images[0].option, "can't be used with a plain prompt", "add --chat")
    client = open_client(args)
    if choose_streaming(args, len(texts)):
        asyncio.run(stream_answer(client, texts[0], args))
        return 0
    answers = asyncio.run(collect_answers(client, texts, args))
    if len(answers) == 1 and isinstance(answers[0], RemoteError):
        raise answers[0]
    return print_answers(texts, answers, args)


async def stream_answer(client: RemoteClient, text: str, args: argparse.Namespace) -> None:
    printed = False

    def receive(chunks: list[Chunk]) -> None:
        nonlocal printed
        new_text = "".join(choice.new_text for chunk in chunks for choice in chunk.choices)
        sys.stdout.write(new_text)
        sys.stdout.flush()
        printed = printed or bool(new_text)

    async with client:
        path, body = make_request(await choose_model(client, args.remote_model), text, args)
        try:
            await client.stream(path, {**body, "stream": True}, receive)
        except RemoteError:
            if printed:
                print()  # the error gets a line of its own
            raise
    print()


async def collect_answers(
    client: RemoteClient, texts: list[str], args: argparse.Namespace
) -> list[Completion | RemoteError]:
    """An answer or an error for each prompt. They are separate requests: one failure does not affect others."""
    places = asyncio.Semaphore(AT_ONCE)

    async def answer(text: str) -> Completion | RemoteError:
        path, body = make_request(model, text, args)
        try:
            async with places:
                return await client.post(path, body)
        except RemoteError as error:
            return error

    async with client:
        model = await choose_model(client, args.remote_model)
        return await asyncio.gather(*(answer(text) for text in texts))


def make_request(model: str, text: str, args: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """The path and the body."""
    from ratoon.api.remote.client import CHAT, COMPLETIONS, CONTINUE

    fields = {"model": model, **generation_fields(args, args.chat)}
    if not args.chat:
        if args.decoder_prompt is not None:
            fields["decoder_prompt"] = args.decoder_prompt
        return COMPLETIONS, {**fields, "prompt": text}
    if args.prefill is not None:
        fields.update(CONTINUE)
    return CHAT, {**fields, "messages": messages_of(text, args)}


def print_answers(texts: list[str], answers: list[Completion | RemoteError], args: argparse.Namespace) -> int:
    failed = 0
    for index, (text, answer) in enumerate(zip(texts, answers)):
        if args.json:
            print(json.dumps(answer_as_dict(text, answer), ensure_ascii=False))
        elif not isinstance(answer, RemoteError):
            print_answer(text, answer, heading=len(texts) > 1)
        if isinstance(answer, RemoteError):
            failed += 1
            print_error(f"prompts[{index}]: {in_terms_of_options(answer, args)}")
    return 1 if failed else 0


def print_answer(text: str, answer: Completion, heading: bool) -> None:
    if heading:
        print(f"=== {shorten(text)}")
    choices = answer.get("choices") or []
    for choice in choices:
        if len(choices) > 1:
            print(choice_heading(choice.get("index", 0), choice.get("score")))
        print(text_of(choice).strip("\n") if heading else text_of(choice))


def text_of(choice: dict[str, Any]) -> str:
    text = choice["message"].get("content") if "message" in choice else choice.get("text")
    return text or ""


def answer_as_dict(text: str, answer: Completion | RemoteError) -> dict[str, Any]:
    """The form of `ratoon generate --json`, with the fields that a server returns."""
    if isinstance(answer, RemoteError):
        return {"prompt": text, "outputs": [], "error": str(answer)}
    usage = answer.get("usage") or {}
    return {
        "prompt": text,
        "model": answer.get("model"),
        "num_prompt_tokens": usage.get("prompt_tokens"),
        "num_cached_tokens": (usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
        "num_output_tokens": usage.get("completion_tokens"),
        "outputs": [_choice_as_dict(choice) for choice in answer.get("choices") or []],
        "error": None,
    }


def _choice_as_dict(choice: dict[str, Any]) -> dict[str, Any]:
    result = {
        "index": choice.get("index", 0),
        "text": text_of(choice),
        "finish_reason": choice.get("finish_reason"),
        "stop_reason": choice.get("stop_reason"),
    }
    for name in ("score", "cumulative_logprob", "logprobs"):  # in the server's own form
        if choice.get(name) is not None:
            result[name] = choice[name]
    return result
