"""`ratoon generate MODEL PROMPT…`: answer prompts and print the answers."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from ratoon.api.adapter_options import add_adapter_option
from ratoon.api.beam_options import wants_beam_search
from ratoon.api.image_options import ImageFile, add_image_option, content_of, read_images
from ratoon.api.options import (
    Subparsers,
    add_answer_options,
    add_common_options,
    add_engine_options,
    check_generation_options,
    generation_params,
    open_llm,
)
from ratoon.api.structured_options import check_structured_output
from ratoon.api.terminal import print_error
from ratoon.core.errors import RequestError

if TYPE_CHECKING:
    from ratoon.api.llm import LLM
    from ratoon.core.outputs import CompletionOutput, RequestOutput
    from ratoon.core.params import GenerationParams

DESCRIPTION = """Answer prompts and print the answers.

If the model has a chat template, each prompt is rendered as a user message; --raw uses the text unchanged.
A single answer is streamed on a terminal. The prompt "-" is read from standard input."""


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("generate", help="answer prompts", description=DESCRIPTION)
    parser.add_argument("model", metavar="MODEL", help="a folder, a GGUF file, a hub id or an embedded name")
    parser.add_argument("prompts", metavar="PROMPT", nargs="*", help="text to answer; - reads standard input")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--chat", action="store_true", help="apply the chat template; an error if there is none")
    form.add_argument("--raw", action="store_true", help="do not apply the chat template")
    parser.add_argument("--system", metavar="TEXT", help="system message, for the chat template")
    add_image_option(parser, "that comes before each prompt; a raw prompt has its own placeholders")
    add_prefill_option(parser)
    add_decoder_prompt_option(parser)
    add_answer_options(parser)
    add_adapter_option(parser)
    add_engine_options(parser)
    add_common_options(parser)
    parser.set_defaults(run=run)


def add_prefill_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prefill", metavar="TEXT", help="beginning of the answer, which it continues")


def add_decoder_prompt_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--decoder-prompt",
        metavar="TEXT",
        help="start of the answers (encoder-decoder models)",
    )


def run(args: argparse.Namespace) -> int:
    from ratoon.core.params import SamplingParams

    check_generation_options(args)
    check_decoder_prompt(args)
    texts = read_prompts(args.prompts)
    stream = choose_streaming(args, len(texts))
    if args.logprobs is not None and not args.json:
        raise RequestError("--logprobs", "is only printed as JSON", "add --json")
    for option in ("system", "prefill"):
        if getattr(args, option) is not None and args.raw:
            raise RequestError(f"--{option}", "can't be used with a raw prompt", f"leave out --raw or --{option}")
    check_structured_output(args)
    args.images = read_images(args.images)
    with open_llm(args) as llm:
        refuse_audio_models(llm)
        refuse_images(llm, args.images)
        params = generation_params(args, llm, may_search=not args.stream)
        prompts = [make_prompt(llm, text, args) for text in texts]
        if stream and isinstance(params, SamplingParams):  # the text of a search is known at its end
            return stream_answer(llm, prompts[0], params, args.adapter)
        outputs = llm.generate(prompts if len(prompts) > 1 else prompts[0], params, adapter=args.adapter)
    failed = 0
    for index, output in enumerate(outputs):
        if args.json:
            print(json.dumps(output_as_dict(output, texts[index]), ensure_ascii=False))
        elif output.error is None:
            print_answer(output, texts[index], heading=len(outputs) > 1)
        if output.error is not None:
            failed += 1
            print_error(f"prompts[{index}]: {output.error}")
    return 1 if failed else 0


def refuse_audio_models(llm: LLM) -> None:
    encoder = llm.source.config.encoder
    if encoder is not None and encoder.num_mel_bins is not None:
        problem = f"{llm.source.name} reads recordings, not text"
        raise RequestError("MODEL", problem, "`ratoon transcribe MODEL FILE` transcribes them")


def refuse_images(llm: LLM, images: Sequence[ImageFile]) -> None:
    if images and llm.source.config.media is None:
        raise RequestError(images[0].option, f"{llm.source.name} reads text only", "a model that reads images")


def check_decoder_prompt(args: argparse.Namespace) -> None:
    for option in ("chat", "system", "prefill", "images"):
        if args.decoder_prompt is not None and getattr(args, option):
            name = option.removesuffix("s") if option == "images" else option
            raise RequestError("--decoder-prompt", f"can't be used with --{name}", "leave out one of them")


def read_prompts(arguments: list[str]) -> list[str]:
    """The prompts of the command line. Without any, standard input is one, if it is not a terminal."""
    if not arguments:
        if sys.stdin.isatty():
            raise RequestError("PROMPT", "is missing", "text to answer, or - to read standard input")
        arguments = ["-"]
    # The final line break of standard input is not part of the prompt.
    texts = [sys.stdin.read().removesuffix("\n") if argument == "-" else argument for argument in arguments]
    for index, text in enumerate(texts):
        if not text:
            raise RequestError(
                f"prompts[{index}]" if len(texts) > 1 else "prompt", "is empty", "at least one character"
            )
    return texts


def choose_streaming(args: argparse.Namespace, num_prompts: int) -> bool:
    searched = wants_beam_search(args)
    if args.stream and searched:
        raise RequestError("--stream", "the texts of a beam search are known at its end", "leave it out")
    possible = num_prompts == 1 and (args.n or 1) == 1 and not args.json and not searched
    if args.stream and not possible:
        raise RequestError("--stream", "works for one prompt with one choice, without --json", "leave it out")
    if args.stream is None:
        return possible and sys.stdout.isatty()
    return bool(args.stream)


def make_prompt(llm: LLM, text: str, args: argparse.Namespace) -> str | dict[str, Any]:
    if args.decoder_prompt is not None:
        if llm.source.config.encoder is None:
            raise RequestError("--decoder-prompt", "the model has no encoder", "append it to PROMPT")
        return {"encoder_prompt": text, "decoder_prompt": args.decoder_prompt}
    if args.raw or not (args.chat or llm.has_chat_template):
        for option in ("system", "prefill"):
            if getattr(args, option) is not None:
                problem = "needs a chat template, and this model has none"
                raise RequestError(f"--{option}", problem, "put it into the prompt")
        return with_images({"prompt": text}, args.images) if args.images else text
    prompt = llm.chat_prompt(messages_of(text, args), continue_final_message=args.prefill is not None)
    return with_images(prompt, args.images)


def with_images(prompt: dict[str, Any], images: Sequence[ImageFile]) -> dict[str, Any]:
    """The prompt with its images, which errors name by their paths."""
    if not images:
        return prompt
    from ratoon.media.items import NamedMedia

    media: dict[str, list[NamedMedia]] = {}
    for image in images:
        media.setdefault(image.kind, []).append(NamedMedia(image.data, f"{image.option} {image.path}"))
    return {**prompt, "multi_modal_data": media}


def messages_of(text: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A prompt as a conversation, preceded by the system message and followed by the beginning of the answer. Files of
    images have been read."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": content_of(text, args.images)}]
    if args.system is not None:
        messages.insert(0, {"role": "system", "content": args.system})
    if args.prefill is not None:
        messages.append({"role": "assistant", "content": args.prefill})
    return messages


def stream_answer(llm: LLM, prompt: str | dict[str, Any], params: GenerationParams, adapter: str | None = None) -> int:
    error = None
    with closing(llm.stream(prompt, params, adapter=adapter)) as outputs:
        for output in outputs:
            for choice in output.outputs:
                sys.stdout.write(choice.text)
            sys.stdout.flush()
            error = output.error
    print()
    if error is not None:
        print_error(error)
    return 0 if error is None else 1


def print_answer(output: RequestOutput, text: str, heading: bool) -> None:
    if heading:
        print(f"=== {shorten(text)}")
    for choice in output.outputs:
        if len(output.outputs) > 1:
            print(choice_heading(choice.index, choice.score))
        print(choice.text.strip("\n") if heading else choice.text)


def choice_heading(index: int, score: float | None) -> str:
    """The heading of a choice, with the score of a text that a beam search found."""
    return f"--- choice {index}" if score is None else f"--- choice {index}, score {score:.4f}"


def shorten(text: str, length: int = 70) -> str:
    line = " ".join(text.split())
    return line if len(line) <= length else line[: length - 1] + "…"


def output_as_dict(output: RequestOutput, text: str) -> dict[str, Any]:
    metrics = output.metrics
    encoder_ids = output.encoder_prompt_token_ids
    return {
        "prompt": text,
        "num_prompt_tokens": len(output.prompt_token_ids or ()),
        **({} if encoder_ids is None else {"num_encoder_tokens": len(encoder_ids)}),
        "num_cached_tokens": output.num_cached_tokens,
        "time_to_first_token": None if metrics is None else metrics.time_to_first_token,
        "outputs": [_choice_as_dict(choice) for choice in output.outputs],
        "error": output.error,
    }


def _choice_as_dict(choice: CompletionOutput) -> dict[str, Any]:
    result: dict[str, Any] = {
        "index": choice.index,
        "text": choice.text,
        "token_ids": list(choice.token_ids),
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
    }
    if choice.score is not None:
        result["score"] = choice.score
    if choice.cumulative_logprob is not None:
        result["cumulative_logprob"] = choice.cumulative_logprob
    if choice.logprobs is not None:
        result["logprobs"] = [
            [
                {"token_id": token, "text": entry.decoded_token, "logprob": entry.logprob, "rank": entry.rank}
                for token, entry in position.items()
            ]
            for position in choice.logprobs
        ]
    return result
