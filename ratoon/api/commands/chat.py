"""`ratoon chat MODEL`: a conversation on the terminal. Ctrl-C stops the answer, Ctrl-D or /exit leaves."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from typing import TYPE_CHECKING

from ratoon.api.options import (
    Subparsers,
    add_common_options,
    add_engine_options,
    add_sampling_options,
    check_sampling_options,
    open_llm,
    sampling_params,
)
from ratoon.core.errors import RequestError

if TYPE_CHECKING:
    from ratoon.api.llm import LLM
    from ratoon.core.params import SamplingParams

HELP = """\
/reset   forget the conversation
/stats   tokens so far, and how full the cache is
/help    this
/exit    leave (Ctrl-D does too)
Ctrl-C stops an answer."""
PROMPT = "> "


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("chat", help="talk with a model", description=f"Talk with a model.\n\n{HELP}")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("model", metavar="MODEL", help="a folder, a GGUF file, a hub id or an embedded name")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    add_sampling_options(parser, max_tokens=512)
    add_engine_options(parser)
    add_common_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    check_sampling_options(args)
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # gives input() a history and line editing
    with open_llm(args) as llm:
        if not llm.has_chat_template:
            raise RequestError("MODEL", "has no chat template", "use `ratoon generate`, or a model for conversations")
        conversation = Conversation(llm, sampling_params(args, llm), args.system)
        if sys.stdout.isatty():
            print(f"{llm.source.name}. /help lists commands, Ctrl-C stops an answer, Ctrl-D leaves.")
        while (line := read_line()) is not None:
            if line == "/exit":
                break
            if line:
                conversation.handle(line)
    return 0


def read_line() -> str | None:
    """What the user typed; None at the end of input. Ctrl-C gives up the line, not the program."""
    try:
        return input(PROMPT if sys.stdin.isatty() else "").strip()
    except EOFError:
        if sys.stdin.isatty():
            print()
        return None
    except KeyboardInterrupt:
        print("\n(Ctrl-D or /exit leaves)")
        return ""


class Conversation:
    def __init__(self, llm: LLM, params: SamplingParams, system: str | None) -> None:
        self._llm = llm
        self._params = params
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._opening)
        self._num_prompt_tokens = self._num_cached_tokens = self._num_answer_tokens = 0

    def handle(self, line: str) -> None:
        if line == "/help":
            print(HELP)
        elif line == "/reset":
            self._messages = list(self._opening)
            print("(forgotten)")
        elif line == "/stats":
            self.print_stats()
        elif line.startswith("/"):
            print(f"{line.split()[0]} is no command; /help lists them")
        else:
            self.answer(line)

    def answer(self, line: str) -> None:
        self._messages.append({"role": "user", "content": line})
        try:
            text = self._stream_answer()
        except RequestError as error:  # too long by now, say: the message is taken back, the conversation stays
            self._messages.pop()
            print(f"error: {error}; /reset begins anew", file=sys.stderr)
            return
        self._messages.append({"role": "assistant", "content": text})

    def _stream_answer(self) -> str:
        """Print the answer as it comes; what there was when Ctrl-C stopped it is the answer then."""
        pieces: list[str] = []
        num_tokens = num_cached = num_prompt = 0
        begin = time.monotonic()
        note = ""
        stream = self._llm.stream(self._llm.chat_prompt(self._messages), self._params)
        try:
            with contextlib.closing(stream):
                for output in stream:
                    choice = output.outputs[0]
                    pieces.append(choice.text)
                    sys.stdout.write(choice.text)
                    sys.stdout.flush()
                    num_tokens += len(choice.token_ids)
                    num_cached = output.num_cached_tokens or 0
                    num_prompt = len(output.prompt_token_ids or ())
                    note = output.error or ""
        except KeyboardInterrupt:
            note = "stopped"
        print()
        self._num_prompt_tokens += num_prompt
        self._num_cached_tokens += num_cached
        self._num_answer_tokens += num_tokens
        speed = num_tokens / max(time.monotonic() - begin, 1e-9)
        print_dim(f"{num_tokens} tokens, {speed:.1f} tok/s, {num_cached} of {num_prompt} prompt tokens cached", note)
        return "".join(pieces)

    def print_stats(self) -> None:
        stats = self._llm.stats()
        print(f"messages       {len(self._messages)}")
        print(f"prompt tokens  {self._num_prompt_tokens}, of them from the cache {self._num_cached_tokens}")
        print(f"answer tokens  {self._num_answer_tokens}")
        print(f"cache          {stats.kv_usage:.1%} in use, hit rate {stats.prefix_cache.hit_rate:.1%}")


def print_dim(text: str, note: str) -> None:
    """A line beside the answer: on a terminal only, unless there is something that must be said."""
    line = f"({note}; {text})" if note else f"({text})"
    if sys.stdout.isatty():
        print(f"\x1b[2m{line}\x1b[0m")
    elif note:
        print(line, file=sys.stderr)
