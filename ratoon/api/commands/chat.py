"""`ratoon chat MODEL` or `ratoon chat --url URL`: a conversation on the terminal. Without both, with the server that
`ratoon serve` starts on this machine.

Ctrl-C stops the answer, Ctrl-D or /exit leaves. The models are in chat_answerers.py.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ratoon.api.adapter_options import add_adapter_option
from ratoon.api.answer_parts.parser import AUTO, check_parser_names
from ratoon.api.answer_parts.reasoning_formats import EFFORTS, effort_variables
from ratoon.api.chat_tree import ConversationTree, line_of
from ratoon.api.commands.chat_answerers import Answerer, LocalAnswerer, Message, PrintedAnswer, RemoteAnswerer
from ratoon.api.commands.generate import refuse_images
from ratoon.api.image_options import (
    ImageFile,
    add_image_option,
    begins_with_image,
    content_of,
    read_image,
    read_images,
    split_paths,
)
from ratoon.api.options import (
    PROMPTS,
    Subparsers,
    add_common_options,
    add_engine_options,
    add_sampling_options,
    check_generation_options,
    generation_params,
    in_options,
    open_llm,
    status,
)
from ratoon.api.remote.client import RemoteError
from ratoon.api.remote.options import (
    DEFAULT_URL,
    add_remote_options,
    generation_fields,
    open_client,
    refuse_engine_options,
)
from ratoon.api.structured_options import check_structured_output
from ratoon.api.terminal import DIM, PLAIN, is_coloured, print_error
from ratoon.core.errors import RequestError
from ratoon.core.suggestions import did_you_mean

if TYPE_CHECKING:
    from prompt_toolkit.key_binding import KeyBindings

COMMANDS = (
    "/continue", "/branch", "/tree", "/alternatives", "/save", "/image", "/reset", "/stats", "/help", "/exit",
)  # fmt: skip
MAX_ALTERNATIVES = 16
HELP = """\
/continue        continue the last answer
/branch [N]      go on from message N of /tree; without N, write the last message anew
/tree            show all messages, with their numbers; * is the way to the current one, ▶
/alternatives N  write N further answers to the last message, each a branch; default 1
/save FILE       write the tree and the current conversation to a file, as JSON
/image PATH      add an image to the next message; so does a path in the message itself
/reset           forget the conversation
/stats           tokens so far, and how full the cache is
/help            this
/exit            leave (Ctrl-D does too)
Enter sends, Alt-Enter begins a new line; so does Enter between \"\"\" and \"\"\". Ctrl-C stops an answer."""

DESCRIPTION = """Talk with a model.

In the conversation, /help lists its commands: /continue, /branch, /tree, /alternatives, /save, /image,
/reset, /stats and /exit. Enter sends, Alt-Enter begins a new line; so does Enter between \"\"\" and \"\"\". Ctrl-C
stops an answer, Ctrl-D leaves."""


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("chat", help="talk with a model", description=DESCRIPTION)
    model = "a folder, a GGUF file, a hub id or an embedded name; left out: that of a server"
    parser.add_argument("model", metavar="MODEL", nargs="?", help=model)
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--reasoning-effort", metavar="LEVEL", help=f"for the template: {', '.join(EFFORTS)}")
    parser.add_argument(
        "--reasoning-parser",
        metavar="NAME",
        default=AUTO,
        help="marks around the model's reasoning; see `ratoon serve`",
    )
    add_image_option(parser, "for the first message")
    add_remote_options(parser, always=False)
    add_sampling_options(parser, max_tokens=512)
    add_adapter_option(parser)
    add_engine_options(parser)
    add_common_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    check_generation_options(args)
    check_where(args)
    check_reasoning(args)
    args.images = read_images(args.images)
    with open_answerer(args) as answerer:
        conversation = Conversation(answerer, args.system, args.images)
        if sys.stdout.isatty():
            print(f"{answerer.name}. /help lists commands, Ctrl-C stops an answer, Ctrl-D leaves.")
        read_text = terminal_reader() if sys.stdin.isatty() and sys.stdout.isatty() else read_lines
        while (entry := read_entry(read_text)) is not None:
            if entry.is_command and entry.text == "/exit":
                break
            conversation.handle(entry)
    return 0


def check_where(args: argparse.Namespace) -> None:
    """Either a local model or a server, and only its options. Without both, the usual server is asked."""
    if args.model is None and args.url is None:
        args.url = DEFAULT_URL
    if args.url is None:
        if args.remote_model is not None or args.api_key is not None:
            raise RequestError("--model and --api-key", "belong to a server", "add --url in the place of MODEL")
    elif args.model is not None:
        raise RequestError("MODEL", "and --url exclude each other", f"--model {args.model} names one of the server's")
    else:
        refuse_engine_options(args)
        if args.adapter is not None:
            raise RequestError("--adapter", "belongs to a local model", "--model NAME: a server's adapters are models")


def check_reasoning(args: argparse.Namespace) -> None:
    """Checks the options about reasoning, before a model is loaded."""
    if args.reasoning_effort not in (None, *EFFORTS):
        expected = did_you_mean(args.reasoning_effort, EFFORTS, f"one of {', '.join(EFFORTS)}")
        raise RequestError("--reasoning-effort", f"{args.reasoning_effort!r} is unknown", expected)
    check_parser_names(AUTO, args.reasoning_parser)
    if args.url is not None and args.reasoning_parser != AUTO:
        raise RequestError("--reasoning-parser", "belongs to a local model", "the server has an option of this name")


@contextlib.contextmanager
def open_answerer(args: argparse.Namespace) -> Iterator[Answerer]:
    if args.url is not None:
        with status(f"asking {args.url}"):
            fields = generation_fields(args, chat=True)
            if args.reasoning_effort is not None:
                fields["reasoning_effort"] = args.reasoning_effort
            answerer = open_remote(args, fields)
        yield answerer
        return
    check_structured_output(args)
    with open_llm(args) as llm:
        if not llm.has_chat_template:
            raise RequestError("MODEL", "has no chat template", "use `ratoon generate`, or a model for conversations")
        refuse_images(llm, args.images)
        params, variables = generation_params(args, llm, may_search=False), effort_variables(args.reasoning_effort)
        yield LocalAnswerer(llm, params, args.reasoning_parser, variables, args.adapter)


def open_remote(args: argparse.Namespace, fields: dict[str, Any]) -> RemoteAnswerer:
    try:
        return RemoteAnswerer(open_client(args), args.remote_model, fields)
    except RemoteError as error:
        if args.url != DEFAULT_URL:
            raise
        problem = f"is missing, and {error.subject} {error.problem}"
        raise RequestError("MODEL", problem, "name a model, or start a server: ratoon serve MODEL") from None


class Conversation:
    def __init__(self, answerer: Answerer, system: str | None, images: Sequence[ImageFile] = ()) -> None:
        """`images` belong to the first message."""
        self._answerer = answerer
        self._images = list(images)  # of the next message
        self._opening: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self._tree = ConversationTree(self._opening)
        self._num_prompt_tokens = self._num_answer_tokens = 0
        self._num_cached_tokens: int | None = None  # None: not reported

    def handle(self, entry: Entry) -> None:
        if entry.is_command:
            command, _, rest = entry.text.partition(" ")
            self.obey(command, rest.strip())
        elif entry.text:
            self.take(entry.text)

    def take(self, typed: str) -> None:
        """Answers a message. Paths of images in it become images; without any text, they belong to the next message."""
        text, paths = split_paths(typed)
        try:
            self._images += [read_image(path, "the message") for path in paths]
        except RequestError as error:
            print_error(str(error))
            return
        if text:
            self.answer(text)
        else:
            self._print_images()

    def add_images(self, typed: str) -> None:
        found = split_paths(typed).paths or ([Path(typed).expanduser()] if typed else [])
        try:
            self._images += [read_image(path, "/image") for path in found]
        except RequestError as error:
            print_error(str(error))
            return
        self._print_images()

    def _print_images(self) -> None:
        names = ", ".join(image.path.name for image in self._images)
        print(f"(with the next message: {names})" if names else "/image PATH adds an image to the next message")

    def obey(self, command: str, rest: str = "") -> None:
        if command == "/help":
            print(HELP)
        elif command == "/reset":
            self._tree = ConversationTree(self._opening)
            self._images.clear()
            print("(forgotten)")
        elif command == "/image":
            self.add_images(rest)
        elif command == "/stats":
            self.print_stats()
        elif command == "/continue":
            self.go_on()
        elif command == "/tree":
            print("\n".join(self._tree.draw()) or "there is no message yet")
        elif command == "/branch":
            self.branch(rest)
        elif command == "/alternatives":
            self.write_alternatives(rest)
        elif command == "/save":
            self.save(rest)
        else:
            print(f"{command} is no command; {did_you_mean(command, COMMANDS, '/help lists them')}")

    def answer(self, text: str) -> None:
        """Print the answer as it comes. If it is stopped or fails, the text so far is the answer; without any text, the
        conversation stays as it was before the message."""
        self._tree.add({"role": "user", "content": content_of(text, self._images)})
        new_text = self._ask("the message is removed")
        self._images.clear()
        if new_text is None:
            self._tree.drop_current()
        else:
            self._tree.add({"role": "assistant", "content": new_text})

    def go_on(self) -> None:
        """Continue the last answer, which was stopped or cut off."""
        node = self._tree.current
        if node is None or node.message["role"] != "assistant":
            print("there is no answer to continue")
            return
        new_text = self._ask("the answer stays as it was")
        if new_text is not None:
            node.message = {**node.message, "content": node.message["content"] + new_text}

    def branch(self, typed: str) -> None:
        """Go to another message, from which the conversation continues."""
        tree = self._tree
        if not typed:
            left = tree.step_back()
            if left is None:
                print("there is no message to go back from")
            else:
                where = "the beginning" if tree.current is None else f"message {tree.current.number}"
                print(f"(from {where}, before: {line_of(left.message)})")
            return
        node = tree.find(int(typed)) if typed.isascii() and typed.isdigit() else None
        if node is None:
            print(f"there is no message {typed}; /tree shows their numbers")
            return
        tree.current = node
        if node.message["role"] == "user":
            # Where it has been answered, here is another answer, which must not be the same.
            self._add_answer("the message stays without a further answer", varies=bool(node.children))
        else:
            print(f"(from message {node.number}: {line_of(node.message)})")

    def write_alternatives(self, typed: str) -> None:
        """Write further answers to the last message. They are sampled, since others would be the same."""
        tree = self._tree
        asked = tree.current
        if asked is not None and asked.message["role"] == "assistant":
            asked = asked.parent
        count = 1 if not typed else int(typed) if typed.isascii() and typed.isdigit() else 0
        if asked is None or not 1 <= count <= MAX_ALTERNATIVES:
            problem = "there is no message to answer" if asked is None else f"/alternatives N: 1 to {MAX_ALTERNATIVES}"
            print(problem)
            return
        for _ in range(count):
            before, tree.current = tree.current, asked
            if not self._add_answer("no further answer", varies=True):
                tree.current = before
                return

    def _add_answer(self, nothing_came: str, varies: bool = False) -> bool:
        """Answer the current message, which is the user's, and add the answer to the tree."""
        new_text = self._ask(nothing_came, varies)
        if new_text is None:
            return False
        node = self._tree.add({"role": "assistant", "content": new_text})
        print_dim(f"message {node.number}", "")
        return True

    def save(self, typed: str) -> None:
        if not typed:
            print("/save FILE")
            return
        path = Path(typed).expanduser()
        content = {"model": self._answerer.name, "messages": self._tree.messages, "tree": self._tree.as_data()}
        try:
            path.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            print_error(f"{path} can't be written: {error.strerror}")
            return
        print(f"({len(self._tree)} messages are in {path})")

    def _ask(self, nothing_came: str, varies: bool = False) -> str | None:
        """Print new text as it comes. None: it was stopped or failed before any text."""
        begin = time.monotonic()
        with ExitStack() as waiting:
            if sys.stdout.isatty():
                waiting.enter_context(status("waiting for the first token"))
            answer = PrintedAnswer(on_first=waiting.close)
            try:
                self._answerer.answer(self._tree.messages, answer, varies)
                answer.finish()
            except KeyboardInterrupt:
                answer.note = "stopped"
                if not answer.text:
                    waiting.close()
                    print_dim(nothing_came, "stopped before the first token")
                    return None
            except (RequestError, RemoteError) as error:
                if not answer.text:
                    waiting.close()
                    hint = "; /reset starts a new conversation" if isinstance(error, RequestError) else ""
                    print_error(f"{as_conversation(error)}{hint}")
                    return None
                answer.note = str(error)
        print()
        self._count(answer, time.monotonic() - begin)
        return answer.text

    def _count(self, answer: PrintedAnswer, seconds: float) -> None:
        self._num_prompt_tokens += answer.num_prompt_tokens or 0
        self._num_answer_tokens += answer.num_tokens
        text = f"{answer.num_tokens} tokens, {answer.num_tokens / max(seconds, 1e-9):.1f} tok/s"
        if answer.num_cached_tokens is not None:
            self._num_cached_tokens = (self._num_cached_tokens or 0) + answer.num_cached_tokens
            text += f", {answer.num_cached_tokens} of {answer.num_prompt_tokens} prompt tokens cached"
        elif answer.num_prompt_tokens is not None:
            text += f", {answer.num_prompt_tokens} prompt tokens"
        print_dim(text, answer.note)

    def print_stats(self) -> None:
        cached = "" if self._num_cached_tokens is None else f", of them from the cache {self._num_cached_tokens}"
        print(f"messages       {len(self._tree.messages)}")
        print(f"prompt tokens  {self._num_prompt_tokens}{cached}")
        print(f"answer tokens  {self._num_answer_tokens}")
        print(self._answerer.describe_state())


def as_conversation(error: Exception) -> Exception:
    """An error about the prompt, which is all messages so far, or about one of their images."""
    if isinstance(error, RequestError) and error.field.startswith("messages[") and "image" in error.field:
        return RequestError("the image", error.problem, error.expected)
    if isinstance(error, RequestError) and error.field in PROMPTS:
        return RequestError("the conversation", error.problem, in_options(error.expected))
    return error


def print_dim(text: str, note: str) -> None:
    """A line after the answer: on a terminal only, unless it has a note."""
    line = f"({note}; {text})" if note else f"({text})"
    if sys.stdout.isatty():
        print(f"{DIM}{line}{PLAIN}" if is_coloured(sys.stdout) else line)
    elif note:
        print(line, file=sys.stderr)


# ---- input ----

PROMPT = "> "
CONTINUATION = ". "
QUOTES = '"""'


class Entry(NamedTuple):
    text: str
    is_command: bool = False  # such as /help


def read_entry(read_text: Callable[[], str]) -> Entry | None:
    """What comes next; None at the end of input. Ctrl-C discards the input; the program goes on."""
    try:
        return parse_entry(read_text())
    except EOFError:
        if sys.stdin.isatty():
            print()
        return None
    except KeyboardInterrupt:
        print("\n(Ctrl-D or /exit leaves)")
        return Entry("")


def parse_entry(typed: str) -> Entry:
    """A text in quotes, of several lines, or with the path of an image in front is never a command."""
    text = typed.strip()
    if text.startswith(QUOTES):
        return Entry(text.removeprefix(QUOTES).removesuffix(QUOTES).strip("\n"))
    is_command = text.startswith("/") and "\n" not in text
    return Entry(text, is_command=is_command and not begins_with_image(text))


def is_open(typed: str) -> bool:
    """Quotes were opened, and not closed yet."""
    text = typed.strip()
    return text.startswith(QUOTES) and (len(text) < 2 * len(QUOTES) or not text.endswith(QUOTES))


def read_lines() -> str:
    """A line of standard input, or the lines up to closing quotes. EOFError at its end."""
    text = input()
    while is_open(text):
        try:
            text += "\n" + input()
        except EOFError:
            break
    return text


def terminal_reader() -> Callable[[], str]:
    """Reads from the terminal, with line editing and a history."""
    from prompt_toolkit import PromptSession

    session: PromptSession[str] = PromptSession(
        PROMPT, multiline=True, prompt_continuation=CONTINUATION, key_bindings=_key_bindings()
    )
    return session.prompt


def _key_bindings() -> KeyBindings:
    """Enter sends, unless quotes are open; Alt-Enter does not. Pasted line breaks are text, as they are by default."""
    from prompt_toolkit.key_binding import KeyBindings

    bindings = KeyBindings()

    @bindings.add("enter")
    def send(event: Any) -> None:
        buffer = event.current_buffer
        if is_open(buffer.text):
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @bindings.add("escape", "enter")  # what terminals send for Alt-Enter
    def begin_line(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    return bindings
