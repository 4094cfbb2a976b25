"""`ratoon demo`: a handful of prompts of different lengths, answered together, and what that cost."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ratoon.api.options import Subparsers, add_common_options, add_engine_options, open_llm

if TYPE_CHECKING:
    from ratoon.api.llm import LLM
    from ratoon.core.outputs import RequestOutput

DEFAULT_MODEL = "smollm2-135m"
SECONDS_BETWEEN_LINES = 5.0  # in a pipe


LIBRARY = """\
You are the assistant of a small public library. People of all ages write to you, and many of them are in a \
hurry. Answer politely and briefly, in plain words that a child can follow. Begin with the answer itself and \
leave out greetings. When a question asks for several things, give a numbered list with one short sentence for \
each. When a question asks how something works, explain it in two or three sentences and name one example from \
daily life. Do not invent titles of books, names of people or numbers. If you are not sure about something, say \
so and advise the reader to ask at the desk, where the librarians are glad to help. The library is open from \
Tuesday to Saturday, has a reading room for children, a quiet room for students and a garden with benches, and \
lends books, maps, films and board games for four weeks."""

HONEYBEES = """\
Summarize the following text in two sentences.

Honeybees live in colonies that may hold fifty thousand workers in early summer and fewer than ten thousand at \
the end of winter. Nearly all of them are sisters, daughters of a single queen who lays up to two thousand eggs \
a day when food is plentiful. A worker's tasks change with her age. For the first days after she leaves her cell \
she cleans the comb. Then she feeds larvae with a secretion from glands in her head, later she builds wax, \
receives nectar from returning bees, and guards the entrance. Only in the last two or three weeks of her life \
does she leave the hive to gather nectar, pollen, water and resin. This order is not fixed: if a beekeeper \
removes most of the foragers, younger bees begin to fly early, and if the nurses are lost, old foragers can take \
up nursing again, and their glands grow back.
A forager that finds a good patch of flowers tells others about it by dancing on the comb. She runs in a \
straight line while shaking her body, circles back, and repeats the run many times. The angle of the run to the \
vertical gives the direction of the flowers relative to the sun, and its duration gives the distance. Other bees \
follow her closely in the dark, feel the air move, smell the flowers on her, and then fly out to search. The \
better the source, the longer she dances, and so the colony shifts its workers to where they gain the most \
without any bee having to compare the sources.
In late spring a strong colony may divide. The old queen leaves with about half of the workers and hangs in a \
cluster from a branch while scouts look for a new home. Each scout that finds a hollow advertises it with the \
same dance. Over hours or days the dances for poor sites fade, the dances for the best site grow, and when \
enough scouts meet at one place the swarm takes off together and moves in. The daughters who stay behind raise a \
new queen from an egg by feeding the larva with royal jelly throughout its growth."""


@dataclass(frozen=True, slots=True)
class DemoPrompt:
    title: str
    text: str
    max_tokens: int
    system: str | None = None
    after: str | None = None  # title of the prompt that must have been read before this one is sent


DEMO_PROMPTS = (
    DemoPrompt("question", "What is gravity?", 72),
    DemoPrompt("story", "Write a two-sentence story about a lighthouse.", 64),
    DemoPrompt("library 1", "What are three good reasons to read books?", 72, system=LIBRARY),
    DemoPrompt("document", HONEYBEES, 96),
    DemoPrompt("code", "Write a Python function that returns the greatest number in a list.", 88),
    DemoPrompt("library 2", "How does a rainbow form?", 80, system=LIBRARY, after="library 1"),
)


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("demo", help="answer a handful of prompts together", description=__doc__)
    parser.add_argument("model", metavar="MODEL", nargs="?", default=DEFAULT_MODEL, help=f"default {DEFAULT_MODEL}")
    add_engine_options(parser)
    add_common_options(parser)
    parser.set_defaults(run=run)


@dataclass(slots=True)
class PromptProgress:
    """What is known of one prompt's answer so far."""

    prompt: DemoPrompt
    text: str = ""
    num_tokens: int = 0
    last: RequestOutput | None = None

    @property
    def finished(self) -> bool:
        return self.last is not None and self.last.finished

    def take(self, output: RequestOutput) -> None:
        choice = output.outputs[0]
        self.text += choice.text
        self.num_tokens += len(choice.token_ids)
        self.last = output


class Display(Protocol):
    def show(self, answers: list[PromptProgress], seconds: float) -> None: ...


def run(args: argparse.Namespace) -> int:
    begin = time.monotonic()
    with open_llm(args) as llm:
        print(
            f"{llm.source.name} is ready after {time.monotonic() - begin:.1f} s; {len(DEMO_PROMPTS)} prompts follow.\n"
        )
        sys.stdout.flush()
        rounding = describe_rounding(llm.describe().get("weight_formats", []))
        with choose_display() as display:
            answers, seconds = answer_all(llm, display)
    for answer in answers:
        print_answer(answer)
    print_table(answers, seconds)
    if rounding:
        print(rounding)
    failed = [answer for answer in answers if answer.last is None or answer.last.error is not None]
    return 1 if failed else 0


def describe_rounding(weight_formats: list[dict[str, Any]]) -> str:
    """What the answers may owe to weights that stay in few bits; empty where all products are those of floats."""
    few_bits = [one["format"] for one in weight_formats if "activations" in one["product"]]
    if not few_bits:
        return ""
    return (
        f"Weights are multiplied as the file has them ({', '.join(few_bits)}), with activations rounded to 8 bits. "
        "Where two tokens are almost equally probable, floats (--quantization none) may choose the other one."
    )


def answer_all(llm: LLM, display: Display) -> tuple[list[PromptProgress], float]:
    """Send every prompt, those with a shared beginning as soon as that was computed, and run to the end."""
    answers = {prompt.title: PromptProgress(prompt) for prompt in DEMO_PROMPTS}
    unsent = list(DEMO_PROMPTS)
    begin = time.monotonic()
    display.show(list(answers.values()), 0.0)  # the first step, which computes all prompts, is the longest
    while unsent or llm.engine.has_unfinished_requests():
        for prompt in [prompt for prompt in unsent if prompt.after is None or answers[prompt.after].num_tokens]:
            unsent.remove(prompt)
            submit(llm, prompt)
        for output in llm.engine.step():
            answers[output.request_id].take(output)  # type: ignore[arg-type]  # no vectors were requested
        display.show(list(answers.values()), time.monotonic() - begin)
    return list(answers.values()), time.monotonic() - begin


def submit(llm: LLM, prompt: DemoPrompt) -> None:
    from ratoon.core.params import RequestOutputKind, SamplingParams

    sent: Any = f"{prompt.system}\n\n{prompt.text}" if prompt.system else prompt.text
    if llm.has_chat_template:
        messages = [{"role": "system", "content": prompt.system}] if prompt.system else []
        sent = llm.chat_prompt([*messages, {"role": "user", "content": prompt.text}])
    params = SamplingParams(temperature=0.0, max_tokens=prompt.max_tokens, output_kind=RequestOutputKind.DELTA)
    llm.engine.add_request(prompt.title, sent, params)


@contextmanager
def choose_display() -> Iterator[Display]:
    if not sys.stdout.isatty():
        yield LineDisplay()
        return
    from rich.live import Live

    with Live(refresh_per_second=12, transient=True) as live:
        yield LiveDisplay(live)


class LineDisplay:
    """The display in a pipe: a line every few seconds."""

    def __init__(self) -> None:
        self._shown_at = 0.0

    def show(self, answers: list[PromptProgress], seconds: float) -> None:
        if seconds - self._shown_at >= SECONDS_BETWEEN_LINES:
            self._shown_at = seconds
            print(progress_line(answers, seconds), flush=True)


class LiveDisplay:
    """The display on a terminal: the end of every answer as it grows, and one line of progress."""

    def __init__(self, live: Any) -> None:
        self._live = live

    def show(self, answers: list[PromptProgress], seconds: float) -> None:
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 1))
        table.add_column(no_wrap=True, style="cyan")
        table.add_column(justify="right", no_wrap=True, style="dim")
        table.add_column(no_wrap=True, overflow="ellipsis")
        width = max(self._live.console.width - 22, 10)
        for answer in answers:
            tail = " ".join(answer.text.split())[-width:]
            table.add_row(
                answer.prompt.title, str(answer.num_tokens), Text(tail, style="" if answer.finished else "dim")
            )
        table.add_row("", "", Text(progress_line(answers, seconds), style="bold"))
        self._live.update(table)


def progress_line(answers: list[PromptProgress], seconds: float) -> str:
    num_done = sum(answer.finished for answer in answers)
    num_tokens = sum(answer.num_tokens for answer in answers)
    return (
        f"{num_done} of {len(answers)} answered, {num_tokens} tokens, "
        f"{num_tokens / max(seconds, 1e-9):.0f} tok/s, {seconds:.1f} s"
    )


def print_answer(answer: PromptProgress) -> None:
    from ratoon.api.commands.generate import shorten

    print(f"> {shorten(answer.prompt.text, 100)}")
    print(answer.text.strip())
    if answer.last is not None and answer.last.error is not None:
        print(f"error: {answer.last.error}", file=sys.stderr)
    print()


def print_table(answers: list[PromptProgress], seconds: float) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("request", no_wrap=True)
    for column in ("prompt tokens", "from cache", "output tokens", "first token"):
        table.add_column(column, justify="right")
    total_prompt = total_cached = 0
    for answer in answers:
        assert answer.last is not None and answer.last.metrics is not None
        num_prompt, num_cached = len(answer.last.prompt_token_ids or ()), answer.last.num_cached_tokens or 0
        total_prompt, total_cached = total_prompt + num_prompt, total_cached + num_cached
        wait = answer.last.metrics.time_to_first_token
        shown_wait = "-" if wait is None else f"{1e3 * wait:.0f} ms"
        table.add_row(answer.prompt.title, str(num_prompt), str(num_cached), str(answer.num_tokens), shown_wait)
    num_output = sum(answer.num_tokens for answer in answers)
    console = Console(highlight=False)
    console.print(table)
    console.print(
        f"\n{total_prompt} tokens read and {num_output} written in {seconds:.1f} s: {num_output / seconds:.1f} tok/s. "
        f"{total_cached / total_prompt:.0%} of the prompt tokens came from the prefix cache.",
        soft_wrap=True,
    )
